"""Weights that a program leaves out of its checkpoints, on two ranks; frozen_toy.py trains, this looks.

Hugging Face's Trainer, and the sums themselves: tests/hosts/hugging_face/test_frozen.py.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.frozen_toy import AFTER, BEFORE

PROGRAM = Path(__file__).with_name("frozen_toy.py")
REFUSED = "the weights that no checkpoint holds are not those that the run was trained with"
REFUSED_AT_SAVE = "the checkpoint lacks weights that are trained"
CHANGED = "WARNING: weights that no checkpoint holds have changed since the last save or load: 1 float32[4, 4]. "


def results(launch: Any, *arguments: object, num_processes: int = 2, said: str = "") -> dict[str, Any]:
    env = {"ACCELERATE_USE_CPU": "1"}
    status, output = launch(str(PROGRAM), *arguments, num_processes=num_processes, env=env)
    assert status == 0, output[-6000:]
    assert said in output
    lines = [line.split(" ", 2)[1:] for line in output.splitlines() if line.startswith("RESULT ")]
    return {way: json.loads(found) for way, found in lines}


def check(found: dict[str, Any]) -> None:
    """Others are refused, and the run goes on with the same ones; nothing is summed up of what is saved.

    Trained ones are refused in the save; at the latest, unless the program restores them, in the first load.
    """
    assert [life[0] for life in found.pop("trained")] == [REFUSED_AT_SAVE] * 3
    first, *others = found.pop("trained-unseen")
    assert len(first[0]) == BEFORE
    assert [life[0] for life in others] == [REFUSED] * 2
    whole = found.pop("whole")
    assert [(len(losses), sums) for losses, sums in whole[:2]] == [(BEFORE, 0), (AFTER - BEFORE, 0)]
    for way, (first, other, same) in found.items():
        assert (len(first[0]), first[1]) == (BEFORE, 2), way
        assert other[0] == REFUSED, way
        assert len(same[0]) == AFTER - BEFORE, way


def test_a_loop(launch: Any, tmp_path: Path) -> None:
    """On two ranks, then on one."""
    found = results(launch, "loop", tmp_path, said=CHANGED)
    assert results(launch, "loop", tmp_path, "again", num_processes=1)["fsdp2"][0][0] == REFUSED
    # Who does not compare goes on with others.
    assert [len(losses) for losses, _ in found.pop("off")[:2]] == [BEFORE, AFTER - BEFORE]
    # A teacher that has changed is not made again by a start.
    teacher = found.pop("teacher")
    assert [one[0] for one in teacher[1:]] == [REFUSED, REFUSED]
    check(found)


@pytest.mark.parametrize("host", ["deepspeed", "accelerate", "lightning"])
def test_a_trainer(host: str, launch: Any, tmp_path: Path) -> None:
    check(results(launch, host, tmp_path))
