"""A run that is killed at every file operation of its saves, and damaged in every other way, loses nothing.

A failure names the seed, the ZeRO stage, the rank and the operation; `python -m tests.reliability --seed N` makes the
same random choices again.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.reliability.command import FLIP, MOMENT, SAVE, START, WRITE
from tests.reliability.faults import FAULTS

# All of them wait for one command. It takes three minutes on two cores that are idle, and nobody says that they are.
pytestmark = pytest.mark.timeout(2400)

#: fewer would mean that saves have become shorter, or that the shim has gone blind.
AT_LEAST = {SAVE: 240, WRITE: 25, START: 30, MOMENT: 10}


@pytest.mark.parametrize("kind", AT_LEAST)
def test_killed_jobs_go_on_exactly(results: dict[str, Any], kind: str) -> None:
    assert [line for line in results["lost"] if line.startswith(kind)] == [], results["output"][-3000:]
    assert results["counts"][kind]["resumed exactly"] >= AT_LEAST[kind]


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_passed_over_or_refused(results: dict[str, Any], fault: str) -> None:
    assert [line for line in results["lost"] if line.startswith(fault)] == [], results["output"][-3000:]
    counts = results["counts"][fault]
    assert sum(counts.values()) == 4
    if fault == "all records removed":
        assert counts == {"refused correctly": 4}


def test_at_least_300_kills_and_nothing_lost(results: dict[str, Any]) -> None:
    assert sum(results["counts"][kind]["resumed exactly"] for kind in AT_LEAST) >= 300
    assert results["lost"] == [] and results["status"] == 0, results["output"][-3000:]
    assert sum(results["counts"][FLIP].values()) == 4
