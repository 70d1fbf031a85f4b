"""A run that is killed at every file operation of its saves, and damaged in every other way, loses nothing.

A failure names the seed, the ZeRO stage, the rank and the operation; `python -m tests.reliability --seed N` makes the
same random choices again.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.command import (
    COPIES,
    CUT_OF,
    FLIP,
    KILL_OF,
    KINDS,
    MEGATRON_CUTS,
    MEGATRON_ROWS,
    MEGATRON_WRITES,
    MOMENT,
    SAVE,
    START,
    WRITE,
    WRITER,
)
from tests.reliability.damage import EXCHANGED, ROWS
from tests.reliability.faults import FAULTS
from tests.reliability.staging import Kind

# All of them wait for one command. The whole one takes three minutes on two idle cores; nobody says that they are idle.
pytestmark = pytest.mark.timeout(2400)

#: fewer would mean that saves have become shorter, or that the shim has gone blind.
AT_LEAST = {SAVE: 240, WRITE: 25, START: 30, MOMENT: 10}
AT_LEAST_QUICK = {SAVE: 10, WRITE: 10, START: 30, MOMENT: 4}


@pytest.mark.parametrize("kind", AT_LEAST)
def test_killed_jobs_go_on_exactly(results: dict[str, Any], kind: str) -> None:
    assert [line for line in results["lost"] if line.startswith(kind)] == [], results["output"][-3000:]
    assert results["counts"][kind]["resumed exactly"] >= (AT_LEAST_QUICK if results["quick"] else AT_LEAST)[kind]


@pytest.mark.parametrize("kind", COPIES)
def test_killed_copies(results: dict[str, Any], kind: Kind) -> None:
    """Nothing that was copied is lost, and what was saved and not copied is not begun anew in silence."""
    name = COPIES[kind]
    assert [line for line in results["lost"] if line.startswith(name)] == [], results["output"][-3000:]
    assert results["counts"][name]["resumed exactly"] >= (2 if results["quick"] else 25)
    if kind == "first copy, lost":
        assert results["counts"][name]["refused correctly"] >= (1 if results["quick"] else 20)


@pytest.mark.parametrize("fault", FAULTS)
def test_damage_is_passed_over_or_refused(results: dict[str, Any], fault: str) -> None:
    assert [line for line in results["lost"] if line.startswith(fault)] == [], results["output"][-3000:]
    counts = results["counts"][fault]
    trials = 1 if results["quick"] else 4
    assert sum(counts.values()) == trials
    if fault == "all records removed":
        assert counts == {"refused correctly": trials}


@pytest.mark.parametrize("name", KINDS.values())
def test_other_kinds_of_jobs(results: dict[str, Any], name: str) -> None:
    """Loaders that are attached, and the pipeline engine: kills, and power cuts on every file system."""
    for row, least, least_quick in ((KILL_OF.format(name), 25, 2), (CUT_OF.format(name), 500, 30)):
        assert [line for line in results["lost"] if line.startswith(row)] == [], results["output"][-3000:]
        assert sum(results["counts"][row].values()) >= (least_quick if results["quick"] else least)


def test_saves_of_megatron(results: dict[str, Any]) -> None:
    """Kills between and in the middle of writes, and power cuts. The quick command knows one format, whose writes are
    so few that every 64th may be none.
    """
    for rows, least, least_quick in ((MEGATRON_ROWS, 10, 1), (MEGATRON_WRITES, 20, 0), (MEGATRON_CUTS, 500, 13)):
        for kind, row in rows.items():
            if results["quick"] and kind != "torch":
                continue
            assert [line for line in results["lost"] if line.startswith(row)] == [], results["output"][-3000:]
            found = sum(results["counts"].get(row, {}).values())
            assert found >= (least_quick if results["quick"] else least)


def test_saves_in_the_background(results: dict[str, Any]) -> None:
    assert [line for line in results["lost"] if line.startswith(WRITER)] == [], results["output"][-3000:]
    assert results["counts"][WRITER] == {"resumed exactly": 1 if results["quick"] else 10}
    row = CUT_OF.format("decoupled writer")
    assert [line for line in results["lost"] if line.startswith(row)] == [], results["output"][-3000:]
    assert sum(results["counts"][row].values()) >= (20 if results["quick"] else 400)


@pytest.mark.parametrize("row", [*ROWS, EXCHANGED])
def test_damage_in_default_settings(results: dict[str, Any], row: str) -> None:
    """In every kind of file; nothing is loaded that was not saved, and no more than one checkpoint is lost."""
    assert [line for line in results["lost"] if line.startswith(row)] == [], results["output"][-3000:]
    parts = 8 if row == EXCHANGED else len(ROWS)
    assert results["counts"][row] == {"resumed exactly": (40 if results["quick"] else 400) // parts}


def test_nothing_is_lost(results: dict[str, Any]) -> None:
    kills = sum(results["counts"][kind]["resumed exactly"] for kind in AT_LEAST)
    assert kills >= (50 if results["quick"] else 300)
    assert results["lost"] == [] and results["status"] == 0, results["output"][-3000:]
    assert sum(results["counts"][FLIP].values()) == (1 if results["quick"] else 4)


def test_a_command_that_is_stopped_leaves_no_ranks_behind() -> None:
    command = [sys.executable, "-m", "tests.reliability", "--quick", "--kills", "1", "--trials", "0"]
    process = subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        while len(ranks := children.read_text().split()) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        process.terminate()
        assert process.wait() == 143
    finally:
        process.kill()
        process.wait()
    while any(Path("/proc", rank).exists() for rank in ranks):
        time.sleep(0.01)
