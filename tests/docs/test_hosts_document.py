"""docs/hosts.md: its trainer, its host and its program, killed in a save and elsewhere, and started again."""

from __future__ import annotations

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from tests.warm import run_program

pytest.importorskip("torch")
pytestmark = pytest.mark.process

DOCUMENT = Path(__file__).parents[2] / "docs" / "hosts.md"
KILLED_IN_A_SAVE = """
import os, signal, torch
write = torch.save
def save(state, file, **more):
    if {step} == state["optimizer"]["state"][0]["step"]:
        open(file, "wb").write(b"half a file")
        os.kill(os.getpid(), signal.SIGKILL)
    write(state, file, **more)
torch.save = save
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of the page."""
    directory = tmp_path_factory.mktemp("page")
    blocks = re.findall(r"```python\n# (\S+)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["tiny.py", "tiny_host.py", "train.py", "test_tiny.py"]
    for name, text in blocks[:3]:
        (directory / name).write_text(text)
    return directory


def run(page: Path, folder: Path, *, first: str = "", at: str = "") -> tuple[int, list[str], str]:
    """Exit status, the lines of its steps, all that it said. ``first``: run before; ``at``: killed at this line."""
    program = page / f"train{'_killed' * bool(first)}.py"
    program.write_text(first + (page / "train.py").read_text())
    env = os.environ | {"PYTHONPATH": str(DOCUMENT.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    output = folder.with_name(f"{folder.name}-output-{time.monotonic_ns()}")
    status, lines = run_program([str(program), str(folder)], env, page, output, kill_at=at)
    return status, [line for line in lines if line.startswith("step ")], "\n".join(lines)


@pytest.fixture(scope="module")
def whole(page: Path) -> list[str]:
    """The steps of a run that nobody kills."""
    status, steps, said = run(page, page / "whole")
    assert status == 0 and [line.split()[1] for line in steps] == [str(step) for step in range(1, 21)], said
    assert "finished" in [entry.kind for entry in read_ledger(ledger_path(page / "whole")).entries]
    return steps


def test_killed_in_a_save(page: Path, whole: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, steps, said = run(page, folder, first=KILLED_IN_A_SAVE.format(step=12))
    assert status < 0 and steps == whole[:12], said
    assert (folder / "global_step12" / "parts.pt").read_bytes() == b"half a file"
    choice = choose(folder)
    assert choice is not None and choice.tag == "global_step8"
    status, steps, said = run(page, folder)
    assert status == 0 and steps == whole[8:], said
    assert "resumed at sample 32" in said and "repeated 0 skipped 0" in said


def test_killed_between_two_saves(page: Path, whole: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "run"
    status, *_ = run(page, folder, at="step 7 ")
    assert status < 0
    status, steps, said = run(page, folder)
    # The kill comes a moment after the line: the save of step 8 may be complete by then.
    assert status == 0 and steps in (whole[4:], whole[8:]), said


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("trainer.fit()", "next(iter(trainer.loader)); trainer.fit()", "a micro-batch was taken and not trained"),
        ("trainer.fit()", "trainer.step = 1; trainer.fit()", "tiny's Trainer and the data count different steps"),
        (
            "tiny_host.attach(trainer)",
            "trainer.save_every = 0; tiny_host.attach(trainer)",
            "megaresume.attach needs save_every",
        ),
        ("tiny_host.attach(trainer)", "tiny_host.attach(trainer); tiny_host.attach(trainer)", "is attached already"),
    ],
    ids=["a look at a batch", "another count", "a setting", "attached twice"],
)
def test_refused(page: Path, tmp_path: Path, old: str, new: str, words: str) -> None:
    copy = shutil.copytree(page, tmp_path / "page")
    text = (copy / "train.py").read_text()
    assert old in text
    (copy / "train.py").write_text(text.replace(old, new))
    status, _, said = run(copy, tmp_path / "run")
    assert status == 1 and words in said, said


def test_a_forgotten_load(page: Path, whole: list[str], tmp_path: Path) -> None:
    copy = shutil.copytree(page, tmp_path / "page")
    trainer = (copy / "tiny.py").read_text()
    assert "self.load(max(" in trainer
    (copy / "tiny.py").write_text(trainer.replace("self.load(max(", "str(max("))
    assert run(copy, tmp_path / "run", at="step 5 ")[0] < 0
    status, steps, said = run(copy, tmp_path / "run")
    assert status == 1 and steps == [] and "this start did not load a checkpoint" in said, said
