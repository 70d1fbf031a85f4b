"""The archive and the wheel of this checkout, and environments of their own that the wheel is installed in."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = "import setuptools.build_meta as b, sys; print(getattr(b, f'build_{sys.argv[1]}')(sys.argv[2]))"
DATA = "seed: 1\nseq_length: 8\npacking: best_fit\nsources:\n  web: {path: web}\n"
#: A run of one step in save/.
SAVE = """
from pathlib import Path
from megaresume import open_stream
from megaresume.checkpoint.save.commit import begin_save, commit_save
from megaresume.checkpoint.starts import record_start
from megaresume.checkpoint.system import Topology
stream, root, topology = open_stream("data.yaml"), Path("save"), Topology(dp=1, world_size=1, global_batch_size=1)
record_start(root, iteration=0, state=stream.state_at(0), choice=None, topology=topology)
state = stream.state_at(1, batches=[(0, 1)])
pending = begin_save(root, tag="global_step1", iteration=1, state=state, topology=topology)
pending.tag_dir.mkdir()
(pending.tag_dir / "mp_rank_00_model_states.pt").write_bytes(b"weights")
commit_save(pending, expected_files=["mp_rank_00_model_states.pt"])
"""
#: (status, output) of a program of an environment.
Run = Callable[..., tuple[int, str]]


def build(source: Path, directory: Path) -> tuple[Path, Path]:
    """The archive of a checkout, and the wheel that is built from what the archive holds; in a directory."""

    def name_of(kind: str, at: Path) -> str:
        done = subprocess.run([sys.executable, "-c", BUILD, kind, directory], cwd=at, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.split()[-1]

    archive = name_of("sdist", source)
    with tempfile.TemporaryDirectory() as scratch, tarfile.open(directory / archive) as file:
        file.extractall(scratch, filter="data")
        wheel = name_of("wheel", Path(scratch, archive.removesuffix(".tar.gz")))
    return directory / archive, directory / wheel


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The archive, and the wheel that is built from what the archive holds."""
    directory, source = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("source")
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    assert listed.returncode == 0, listed.stderr
    for name in listed.stdout.splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_symlink():
            (source / name).symlink_to((ROOT / name).readlink())
        elif (ROOT / name).is_file():
            (source / name).write_bytes((ROOT / name).read_bytes())

    return build(source, directory)


@pytest.fixture(scope="session")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The packages of an environment of that Python that has torch alone, which is gigabytes: made once."""

    @cache
    def make(python: str) -> Path:
        directory = tmp_path_factory.mktemp("torch")
        subprocess.run([python, "-m", "venv", directory], check=True)
        install(directory, "torch")
        return next(directory.glob("lib/python*/site-packages"))

    return make


def install(environment: Path, *packages: str | Path) -> None:
    """With pip, in the versions that CI has."""
    pip = [environment / "bin/python", "-m", "pip", "install", "-q", "-c", ROOT / "constraints.txt", *packages]
    done = subprocess.run(pip, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def make_environment(
    directory: Path, wheel: Path, extra: str = "", *, python: str = sys.executable, layer: Path | None = None
) -> Run:
    """The programs of an environment that has the wheel and what the extra installs, run in a directory with a corpus.

    Args:
        directory: for all of it.
        wheel: see `built`.
        extra: of the wheel.
        python: the interpreter.
        layer: packages that are there already, see `with_torch`.
    """
    subprocess.run([python, "-m", "venv", directory / "venv"], check=True)
    if layer is not None:
        own = next(directory.glob("venv/lib/python*/site-packages"))
        (own / "layer.pth").write_text(f"{layer}\n")
    install(directory / "venv", f"{wheel}[{extra}]" if extra else wheel)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"NUMBA_CACHE_DIR": str(directory), "CUDA_VISIBLE_DEVICES": ""}

    def run(*words: object, program: str = "megaresume") -> tuple[int, str]:
        command = [directory / "venv/bin" / program, *words]
        done = subprocess.run([*map(str, command)], cwd=directory, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    (directory / "text.txt").write_text("one\n\ntwo\n\nthree\n")
    (directory / "data.yaml").write_text("seed: 1\nseq_length: 8\npacking: best_fit\nsources:\n  web: {path: web}\n")
    status, text = run("prepare", "text.txt", "--output", "web")
    assert status == 0 and "tokenizer bytes" in text, text
    return run
