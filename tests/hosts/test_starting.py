"""What a start looks at first, on two real ranks: the lock, a directory that all see, clocks that agree."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.lock.claim import this_process
from megaresume.checkpoint.stopping import MOST_SECONDS_APART
from tests.hosts.conftest import Launch, Results, _results

HOST = os.uname().nodename


@pytest.fixture(scope="module")
def outcome(launch: Launch, data_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, str, Path]:
    """Results of starting.py, what it printed, and where it saved."""
    root = tmp_path_factory.mktemp("starting")
    printed: list[str] = []

    def as_slurm_job(*arguments: Any, **options: Any) -> tuple[int, str]:
        status, text = launch(*arguments, **options, env={"SLURM_JOB_ID": "7"})
        printed.append(text)
        return status, text

    found = Results(_results(as_slurm_job, "starting.py", 2, data_yaml, root))
    return found, printed[0], root


def test_another_job_holds_the_directory(outcome: tuple[Results, str, Path]) -> None:
    """Refused on every rank, with the name, when it is attached and when it is first saved to; then it is free."""
    results, _, root = outcome
    me = this_process(token="")
    for refused, first_save, there, latest in results["held"]:
        for kind, headline, action, found in (refused, first_save):
            assert (kind, headline) == ("CheckpointError", "another job writes to this directory of checkpoints")
            assert action.startswith("scancel 6 and start again; or save to another directory")
            name = rf"{root}/held is held by {me.user}'s Slurm job 6, process \d+ on {HOST} \(-c\), since 20\S+Z; it is"
            assert re.match(name, found), found
        assert there == ["megaresume"] and latest == "global_step1"


def test_a_job_that_lost_the_directory_commits_nothing(outcome: tuple[Results, str, Path]) -> None:
    results, _, root = outcome
    for lost, unchanged, records, saved in results["lost"]:
        kind, headline, action, found = lost
        assert kind == "CheckpointError" and headline.startswith("this job has lost its directory of checkpoints")
        assert f"{root}/lost is held by" in found and "Slurm job 7, restart 1" in found and "end this job" in action
        assert unchanged and saved == "global_step1"
        assert records == ["step_0000001.json", "step_0000001.manifest.json", "step_0000001.random"]


def test_a_directory_that_is_not_shared(outcome: tuple[Results, str, Path]) -> None:
    """Noticed before the first step, or at the first save to a directory that nobody named before."""
    results, _, root = outcome
    for rank, (named, unknown, tags) in enumerate(results["not_shared"]):
        for kind, headline, action, found in (named, unknown):
            assert (kind, headline) == (
                "SetupError",
                "the save directory is not the same on every node",
            ), rank
            assert f"what rank 0 wrote into {root}/disk_of_rank_0 on {HOST} is not seen after 0.3 s by {HOST} (rank 1; "
            assert f"{HOST} (rank 1; {root}/disk_of_rank_1 is on " in found and ", mounted at /" in found
            assert action.startswith(f"mount on {HOST} what findmnt -T {root}/disk_of_rank_0 shows on {HOST}")
            assert "stage_to (--megaresume-stage-to), the URL of an object store" in action
        assert tags == []


def test_a_cache_that_lags_is_waited_for(outcome: tuple[Results, str, Path]) -> None:
    results, _, _ = outcome
    assert all(1.0 <= took < 25.0 for took in results["lagging"])


def test_clocks_that_differ(outcome: tuple[Results, str, Path]) -> None:
    """Refused where the run is to stop at a time of day; else a line; a rank that was held up once is neither."""
    results, printed, _ = outcome
    for needed, passed in results["clocks"]:
        kind, headline, action, found = needed
        assert (kind, headline) == (
            "SetupError",
            "the clocks of the nodes differ, and this run is to stop at a time of day",
        )
        assert re.fullmatch(rf"{HOST} is (89|90|91)\.\d s ahead \(\+- \d+\.\d s\) of rank 0's", found), found
        assert "--exit-duration-in-mins" in action
        assert passed[0] == "no error"
    warnings = [line for line in printed.splitlines() if "the clocks of the nodes differ" in line and "WARNING" in line]
    assert len(warnings) == 1 and "s ahead" in warnings[0]
    assert MOST_SECONDS_APART < 7.0
