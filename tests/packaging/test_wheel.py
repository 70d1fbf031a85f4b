"""What is built and shipped: the archive of the source, the wheel, and the wheel in an environment of its own."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import megaresume
from megaresume.program import COMMANDS
from tests.packaging.conftest import ROOT, SAVE, Run, make_environment
from tests.release import release

pytestmark = pytest.mark.process


def test_the_archive_holds_what_a_developer_needs(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[0]) as file:
        members = {member.name.partition("/")[2]: member for member in file.getmembers()}
    names, files = set(members), {name: member.size for name, member in members.items() if member.isfile()}
    assert {"LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "constraints.txt", "tests/README.md"} <= names
    for folder in ("benchmarks", "docs", "launch", "megaresume", "patches", "tests"):
        tracked = subprocess.run(["git", "ls-files", folder], cwd=ROOT, capture_output=True, text=True).stdout.split(
            "\n"
        )
        assert [name for name in tracked[:-1] if name not in names and (ROOT / name).exists()] == []
    # Nothing else, but what setuptools writes; nothing large, as data of a test would be.
    listed = ["git", "ls-files", "-co", "--exclude-standard"]
    known = set(subprocess.run(listed, cwd=ROOT, capture_output=True, text=True).stdout.split("\n"))
    written = {"PKG-INFO", "setup.cfg", *(name for name in files if name.startswith("megaresume.egg-info/"))}
    links = ("megaresume/hosts/megatron/patching/recipes/", "megaresume/cluster/launch/")
    assert [name for name in files if name not in known | written and not name.startswith(links)] == []
    assert {name: size for name, size in files.items() if size > 300_000} == {}


def test_the_wheel(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as file:
        names = file.namelist()
        metadata = next(file.read(name).decode() for name in names if name.endswith("METADATA"))
        marker = next(name for name in names if name.endswith("py.typed"))
    assert marker == "megaresume/py.typed"
    assert {name.partition("/")[0] for name in names} == {
        "megaresume",
        f"megaresume-{megaresume.__version__}.dist-info",
    }
    links = ("megaresume/hosts/megatron/patching/recipes/", "megaresume/cluster/launch/")
    others = [name for name in names if name.startswith("megaresume/") and not name.endswith(".py")]
    assert sorted(name for name in others if not name.startswith(links)) == [
        "megaresume/cluster/starts/megatron.sh",
        "megaresume/py.typed",
        "megaresume/runs/known.yaml",
    ]
    copied = [name for name in names if name.startswith(links)]
    assert len(copied) == sum(path.is_file() for folder in ("patches", "launch") for path in (ROOT / folder).rglob("*"))
    assert "License-Expression: Apache-2.0" in metadata and "Typing :: Typed" in metadata
    # Links to files lead nowhere on the package index.
    targets = re.findall(r"\]\(([^)]+)\)", metadata)
    assert [target for target in targets if not target.startswith("https://")] == []
    assert "`docs/peers.md`" in metadata


@pytest.fixture(scope="module")
def installed(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The program in an environment that has the base dependencies alone, with a save of one step."""
    run = make_environment(tmp_path_factory.mktemp("base"), built[1])
    assert run("-c", SAVE, program="python") == (0, "")
    return run


@release(
    "downloads the base dependencies",
    "`::test_the_wheel`, `tests/cli/test_main.py::test_the_cheap_commands_import_nothing_heavy`",
)
def test_the_base_installation(installed: Run) -> None:
    for command in ("", *COMMANDS):
        assert installed(*command.split(), "--help")[0] == 0, command
    for words, found in (
        ("stream data.yaml --samples 0:1", "best_fit"),
        ("inspect save", "global_step1"),
        ("plan save --data data.yaml", "OK: resumes from global_step1"),
        ("trace save --steps 1 --data data.yaml", "step 1"),
        ("verify save --data data.yaml", "proved"),
        ("latest save", "save/global_step1"),
        ("doctor save", "nothing is wrong"),
    ):
        status, text = installed(*words.split())
        assert status == 0 and found in text, text


@release(
    "the same downloads",
    "`::test_the_wheel`, `tests/cli/test_main.py::test_the_cheap_commands_import_nothing_heavy`; nothing "
    "else runs without torch",
)
@pytest.mark.parametrize(
    ("words", "extra"),
    [
        ("demo", "demo"),
        ("demo --trainer", "hugging-face,report"),
        ("smoke --out out", "demo"),
        ("prepare text.txt --output other --tokenizer .", "text"),
        ("prepare text.tar --output shards --processor patches", "vlm"),
        ("patch pretrain.py", "patch"),
        ("report save", "report"),
    ],
)
def test_what_is_missing_is_named(installed: Run, words: str, extra: str) -> None:
    code = "from pathlib import Path as P; P('pretrain.py').write_text('from megatron.training import pretrain\\n')"
    code += "; P('tokenizer.json').write_text('{}'); P('text.tar').touch()"
    assert installed("-c", code, program="python") == (0, "")
    status, text = installed(*words.split())
    assert status != 0 and "Traceback" not in text and f"pip install 'megaresume[{extra}]'" in text, text


@pytest.mark.parametrize(
    ("program", "words", "status", "found"),
    [
        ("megaresume", "--help", 0, "prepare"),
        ("megaresume", "plan --help", 0, "--save-time"),
        ("megaresume", "verify --help", 0, "--log-samples"),
        ("megaresume", "run --help", 0, "usage: megaresume run"),
        ("megaresume.cluster.training", "--help", 0, "--num-layers"),
        (
            "megaresume.cluster.training",
            "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --micro-batch-size 1 "
            "--global-batch-size 1 --train-iters 1 --lr 0.1 --megaresume-data data.yaml",
            1,
            "pip install 'megaresume[deepspeed,megatron]'",
        ),
    ],
)
def test_without_torch(program: str, words: str, status: int, found: str) -> None:
    code = "import runpy, sys; sys.modules['torch'] = None; runpy.run_module(sys.argv.pop(1), run_name='__main__')"
    command = [sys.executable, "-c", code, program, *words.split()]
    done = subprocess.run(command, capture_output=True, text=True)
    text = done.stdout + done.stderr
    assert done.returncode == status and found in text and "Traceback" not in text, text
