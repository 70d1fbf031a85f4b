"""Saves that fail: on one rank alone, or because a real disk is full. All ranks know, and the next save works."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.hosts.conftest import Launch, Results, _results

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def results(launch: Launch, data_yaml: Path, small_disk: Path) -> Results:
    """Results of full_disk.py."""
    return Results(_results(launch, "full_disk.py", 2, data_yaml, small_disk))


@pytest.mark.parametrize("alone", [0, 1])
def test_one_rank_fails_alone(results: Results, alone: int) -> None:
    """Both ranks raise, the other one with whose rank it was; the same step and the next one are saved."""
    ranks = results[f"alone{alone}"]
    words = "the files of the checkpoint global_step4 could not be written; the pointers stay as they were"
    assert ranks[alone]["raised"][:2] == ["CheckpointError", words]
    assert ranks[1 - alone]["raised"][:2] == ["CheckpointError", f"rank {alone}: {words}"]
    first, second = (rank["said"] for rank in ranks)
    assert len(first) == 2 and "try 1 of 1 in 0.01 s" in first[0] and first[1].endswith("; the run ends")
    assert second == []
    for rank in ranks:
        assert rank["newest"] == "global_step2"
        assert rank["again"] == [True, "global_step4"] and rank["next"] == [True, "global_step6"]


def test_a_disk_that_is_cleaned(results: Results) -> None:
    """Wherever the disk becomes full in a save: it is tried again until there is room, on both ranks."""
    for rank in results["cleaned"]:
        assert [saved for saved, _, _ in rank] == [True] * 5
        assert [tag for _, _, tag in rank] == [f"global_step{number}" for number in range(1, 6)]
    said = [lines for _, lines, _ in results["cleaned"][0]]
    assert [len(lines) for lines in said[:3]] == [2, 3, 1]
    waits = [line.rsplit("; ", 1)[1] for line in said[1]]
    assert waits == ["try 1 of 3 in 0.01 s", "try 2 of 3 in 0.02 s", "try 3 of 3 in 0.04 s"]


def test_a_disk_that_is_cleaned_for_a_loader(results: Results) -> None:
    """The states of the ranks' loaders are written again as well, of the same batches."""
    for rank, (saves, after) in enumerate(results["loader"]):
        assert [[saved, tag] for saved, _, tag in saves] == [[True, f"global_step{number}"] for number in range(1, 5)]
        assert after == [2 * batch + rank for batch in (9, 10)]
    said = [lines for _, lines, _ in results["loader"][0][0]]
    assert [len(lines) for lines in said[:3]] == [2, 2, 2]
    assert all("No space left on device" in line for lines in said[:3] for line in lines[:1])


def test_a_disk_that_stays_full_ends_the_run(results: Results) -> None:
    """With an error on every rank; a program that catches it goes on, and saves when there is room."""
    twin = results["twin"]
    for rank, found in enumerate(results["end"]):
        assert found["saved"][0] == "CheckpointError" and found["same step"][1] == "global_step2"
        assert found["newest"] == "global_step2" and not found["there"]
        assert found["next"] == [True, "global_step4"]
        assert found["resumed"] == [4, twin[rank][-len(found["resumed"][1]) :]]
    assert [line.rsplit("; ", 1)[1] for line in results["end"][0]["said"]] == [
        "try 1 of 2 in 0.01 s",
        "try 2 of 2 in 0.02 s",
        "the run ends",
    ]


def test_a_run_that_goes_on_without_a_checkpoint(results: Results) -> None:
    """``save_checkpoint`` gives False, what was written is removed, and the next save and resume are exact."""
    twin: Any = results["twin"]
    for rank, found in enumerate(results["continue"]):
        assert found["saved"] is False and found["same step"] == [False, "global_step2"]
        assert found["newest"] == "global_step2" and not found["there"]
        assert found["next"] == [True, "global_step4"]
        assert found["resumed"] == [4, twin[rank][-len(found["resumed"][1]) :]]
    assert results["continue"][0]["said"][-1].endswith("the run continues without this checkpoint")
