"""A run that is killed at every file operation of its saves, and damaged in every other way, loses nothing.

A failure names the seed, the ZeRO stage, the rank and the operation; `python -m tests.reliability --seed N` makes the
same random choices again.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.reliability.command import FLIP, MOMENT, SAVE, START, WRITE
from tests.reliability.faults import FAULTS

# All of them wait for one command. The whole one takes three minutes on two idle cores; nobody says that they are idle.
pytestmark = pytest.mark.timeout(2400)

#: fewer would mean that saves have become shorter, or that the shim has gone blind.
AT_LEAST = {SAVE: 240, WRITE: 25, START: 30, MOMENT: 10}
AT_LEAST_QUICK = {SAVE: 25, WRITE: 10, START: 30, MOMENT: 4}


@pytest.mark.parametrize("kind", AT_LEAST)
def test_killed_jobs_go_on_exactly(results: dict[str, Any], kind: str) -> None:
    assert [line for line in results["lost"] if line.startswith(kind)] == [], results["output"][-3000:]
    assert results["counts"][kind]["resumed exactly"] >= (AT_LEAST_QUICK if results["quick"] else AT_LEAST)[kind]


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_passed_over_or_refused(results: dict[str, Any], fault: str) -> None:
    assert [line for line in results["lost"] if line.startswith(fault)] == [], results["output"][-3000:]
    counts = results["counts"][fault]
    trials = 1 if results["quick"] else 4
    assert sum(counts.values()) == trials
    if fault == "all records removed":
        assert counts == {"refused correctly": trials}


def test_nothing_is_lost(results: dict[str, Any]) -> None:
    kills = sum(results["counts"][kind]["resumed exactly"] for kind in AT_LEAST)
    assert kills >= (70 if results["quick"] else 300)
    assert results["lost"] == [] and results["status"] == 0, results["output"][-3000:]
    assert sum(results["counts"][FLIP].values()) == (1 if results["quick"] else 4)
