"""`megaresume.attach` in the functions of VeRL's own trainers: killed, and gone on with by other batches.

What they hand out they write down themselves: `prompts.py`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.hosts.torch.record import ENVIRONMENT
from tests.release import release

PROGRAM = Path(__file__).with_name("prompts.py")
TRAINERS = ("new", "old")


def run(python: str, *runs: dict[str, Any]) -> int:
    """The exit status of a process that does these runs, one after the other."""
    words = [python, str(PROGRAM), json.dumps([one | {"directory": str(one["directory"])} for one in runs])]
    done = subprocess.run(words, env=ENVIRONMENT | {"HOME": str(Path.home())}, capture_output=True, text=True)
    assert done.returncode in (0, -9), done.stdout[-2000:] + done.stderr[-4000:]
    return done.returncode


def handed(directory: Path) -> list[list[int]]:
    """The prompts of each step; what was done again counts once."""
    steps: dict[int, list[int]] = {}
    for line in directory.with_name("handed.jsonl").read_text().splitlines():
        found = json.loads(line)
        steps = {step: items for step, items in steps.items() if step < found["step"]} | {found["step"]: found["items"]}
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return list(steps.values())


def copied(directory: Path, to: Path) -> Path:
    """A copy of a run, with what it has handed out."""
    shutil.copytree(directory.parent, to)
    return to / directory.name


@pytest.fixture(scope="module")
def order(python: str, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """The prompts of a run that nobody stops, three times each but for the four that are no whole step."""
    directory = tmp_path_factory.mktemp("whole") / "run"
    assert run(python, {"directory": directory}) == 0
    steps = handed(directory)
    assert [len(step) for step in steps] == [8] * 37
    found = list(chain.from_iterable(steps))
    assert sorted(found[:100]) == sorted(found[100:200]) == list(range(100))
    assert found[:100] != found[100:200] and len(set(found[200:])) == 96
    return found


@pytest.fixture(scope="module")
def killed(python: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run of each trainer: killed at step 20, after the save of step 18, in the second epoch."""
    found = {}
    for trainer in TRAINERS:
        found[trainer] = tmp_path_factory.mktemp("killed") / "run"
        assert run(python, {"directory": found[trainer], "trainer": trainer, "kill": 20}) == -9
    return found


@release(
    "VeRL: four processes",
    "`tests/hosts/verl/test_parts.py::test_prompts_go_on`",
)
def test_killed_and_gone_on(python: str, killed: dict[str, Path], order: list[int], tmp_path: Path) -> None:
    changes = [{"step": 8}, {"step": 4, "workers": 2}, {"step": 16}, {"step": 8, "gen": 4}]
    runs = [
        {"directory": copied(killed[trainer], tmp_path / f"{trainer}{number}"), "trainer": trainer} | change
        for trainer in TRAINERS
        for number, change in enumerate(changes)
        if "gen" not in change or trainer == "new"  # the older trainer takes what its loader gives for a step
    ]
    assert run(python, *runs) == 0
    for one in runs:
        found = list(chain.from_iterable(handed(one["directory"])))
        assert found[:296] == order[: len(found)], one
        assert len(found) == 144 + (300 - 144) // one["step"] * one["step"], one


@release(
    "VeRL: three processes",
    "`tests/hosts/verl/test_parts.py::test_prompts_that_are_refused`",
)
def test_what_is_refused(python: str, killed: dict[str, Path], tmp_path: Path) -> None:
    foreign = tmp_path / "foreign" / "run"
    foreign.parent.mkdir()
    runs = [{"directory": foreign, "attached": False, "epochs": 1}]
    words = {"foreign": "written without megaresume"}
    for trainer in TRAINERS:
        cases = {name: copied(killed[trainer], tmp_path / f"{trainer}-{name}") for name in ("none", "mixed", "other")}
        (cases["none"] / "global_step_18" / "data.pt").unlink()
        shutil.copy(cases["mixed"] / "global_step_12" / "data.pt", cases["mixed"] / "global_step_18" / "data.pt")
        runs += [
            {"directory": path, "trainer": trainer, "items": 90 if name == "other" else 100}
            for name, path in cases.items()
        ]
        words |= {f"{trainer}-none": "no data.pt in global_step_18", f"{trainer}-mixed": "from different steps"}
        words[f"{trainer}-other"] = "documents"
    assert run(python, *runs, {"directory": foreign}) == 0
    for name, found in words.items():
        assert found in (tmp_path / name / "error").read_text(), name
    assert [len(handed(killed[trainer])) for trainer in TRAINERS] == [20, 20]
    assert isinstance(torch.load(killed["new"] / "global_step_18" / "data.pt", weights_only=True), dict)
