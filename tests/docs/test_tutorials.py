"""docs/tutorials.md: the commands of each tutorial, word by word, in an empty directory, and what they print."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.test_new import PRETRAIN
from tests.cluster.launch.conftest import NUMBERS, SETTINGS, _install, _lock
from tests.docs.pages import DOCS, section
from tests.packaging.conftest import ROOT
from tests.release import release

pytestmark = pytest.mark.process
QUICK = Path(__file__).parent / "quick"
#: seconds until a tutorial counts as one that hangs.
PATIENCE = 1500


@pytest.fixture
def directory() -> Iterator[Path]:
    """An empty one with a short name, as a Unix socket of Slurm's lies below it."""
    with tempfile.TemporaryDirectory(prefix="mr-", ignore_cleanup_errors=True) as name:
        yield Path(name)


def run(title: str, directory: Path, **variables: str) -> None:
    """All ```bash blocks of a section as one script; then the lines of its ```text blocks, in their order."""
    text = section("tutorials.md", title)
    programs = directory / "bin"
    programs.mkdir()
    (programs / "megaresume").write_text(f'#!/bin/sh\nexec {sys.executable} -m megaresume "$@"\n')
    (programs / "megaresume").chmod(0o755)
    env = os.environ | {
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{QUICK}:{ROOT}",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        **variables,
    }
    home, log = directory / "home", directory / "log"
    home.mkdir()
    script = "set -eu\n" + "".join(re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    with open(log, "w") as file:  # not a pipe, which killed programs' workers would hold open
        process = subprocess.Popen(
            ["bash", "-c", script], cwd=home, env=env, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
    said = log.read_text(errors="replace")
    others = "\n".join(path.read_text(errors="replace")[-2000:] for path in home.rglob("*.log"))
    assert status == 0, f"{status}\n{said[-4000:]}\n{others}"
    lines = iter(said.splitlines())
    for line in "".join(re.findall(r"^```text\n(.*?)^```", text, re.DOTALL | re.MULTILINE)).splitlines():
        pattern = ".*".join(map(re.escape, line.split("…")))
        assert any(re.fullmatch(pattern, found.strip()) for found in lines), f"{line}\n{said[-4000:]}"


def needs(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"{package} is not installed")


def test_every_tutorial_has_a_test() -> None:
    titles = re.findall(r"^## (.+)$", (DOCS / "tutorials.md").read_text(), re.MULTILINE)
    assert titles == [TRAINER, DEEPSPEED, MEGATRON, PICTURES, SLURM]


TRAINER = "Fine-tune with Hugging Face's Trainer"
DEEPSPEED = "Pretrain under DeepSpeed on text and conversations"
MEGATRON = "Adopt a running Megatron job"
PICTURES = "Train a vision-language model from shards"
SLURM = "A chain of Slurm jobs"


@release("minutes of training", "`tests/cli/test_new.py::test_it_runs_and_goes_on_exactly_after_a_kill`")
def test_trainer(directory: Path) -> None:
    needs("transformers", "accelerate")
    run(TRAINER, directory)


@release(
    "minutes of training",
    "`tests/cli/test_new.py`, `tests/docs/test_conversations_document.py`",
)
def test_deepspeed_with_conversations(directory: Path) -> None:
    needs("deepspeed", "tokenizers", "jinja2")
    run(DEEPSPEED, directory)


@release(
    "minutes of training",
    "`tests/cli/test_new.py::test_megatrons_script_starts_and_goes_on`, `tests/hosts/megatron/test_launcher.py`",
)
def test_a_running_megatron_job(directory: Path) -> None:
    needs("torch", "megatron")
    clone = directory / "Megatron-LM"  # the stand-in of these tests, which trains on CPUs
    clone.mkdir()
    (clone / "pretrain_gpt.py").write_text(PRETRAIN)
    run(MEGATRON, directory, MEGATRON=str(clone))


@release(
    "minutes of training",
    "`tests/cli/test_new.py::test_it_runs_and_goes_on_exactly_after_a_kill`, `tests/docs/test_shards_document.py`",
)
def test_pictures(directory: Path) -> None:
    needs("torch", "PIL")
    run(PICTURES, directory)


@release(
    "three jobs of a Slurm",
    "`tests/cluster/launch/test_slurm_coming_back.py::test_a_chain_whose_length_stands_in_the_script_comes_to_an_end`",
)
def test_a_chain_of_slurm_jobs(directory: Path) -> None:
    needs("deepspeed", "megatron")
    _install()
    number, lock = next((number, lock) for number in NUMBERS if (lock := _lock(number)) is not None)
    with lock:
        try:
            run(SLURM, directory, **SETTINGS, CLUSTER_ID=str(number))
        finally:
            stop = [ROOT / "launch" / "slurm" / "local-cluster" / "cluster.sh", "stop"]
            subprocess.run(stop, env=os.environ | {"CLUSTER_ROOT": str(directory / "home" / "cluster")})
