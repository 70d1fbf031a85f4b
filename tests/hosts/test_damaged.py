"""Damage of the newest checkpoints: all ranks go back to the one before together, and train the same steps again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

# Cold: two saves have files of one size only if both share the same strings, which a forked program's may not.
pytestmark = [pytest.mark.process, pytest.mark.cold]


@pytest.fixture(scope="module")
def damaged(launch: Any, data_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    program = Path(__file__).with_name("damaged.py")
    # Less than a rank waits for one of which it hears nothing.
    status, output = launch(str(program), data_yaml, tmp_path_factory.mktemp("damaged"), num_processes=2, timeout=240)
    assert status == 0, output[-4000:]
    found = {}
    for line in output.splitlines():
        if line.startswith("RESULT "):
            name, value = line.removeprefix("RESULT ").split(" [", 1)
            found[name] = json.loads("[" + value)
    return output, found


@pytest.mark.parametrize(
    "case", ["torch cannot read it", "torch's older reader takes it for a number", "ZeRO 3", "a zeroed page"]
)
def test_all_ranks_go_back_together(damaged: tuple[str, dict[str, Any]], case: str) -> None:
    output, found = damaged
    for rank in found[case]:
        assert "repeated 0 skipped 0 | step 2 from global_step2" in rank["line"] and rank["same"]
    assert "passed over global_step6" in output and "passed over global_step4" in output


def test_a_whole_file_of_another_save_is_told_without_checksums(damaged: tuple[str, dict[str, Any]]) -> None:
    output, found = damaged
    for rank in found["a file of the save before"]:
        assert rank["same size"] and rank["same"]
        assert "repeated 0 skipped 0 | step 4 from global_step4" in rank["line"]
    assert "zero_pp_rank_1_mp_rank_00_optim_states.pt was written by save" in output


def test_what_one_rank_alone_cannot_load_all_ranks_raise(damaged: tuple[str, dict[str, Any]]) -> None:
    """At once, and no older checkpoint: the files may be what was saved."""
    _, found = damaged
    for rank, (kind, headline, _, what) in enumerate(found["a class that is not there"]):
        assert kind == "CheckpointError" and headline.startswith("the checkpoint global_step6 cannot be read")
        assert what == ("" if rank else "rank 1: ") + "ModuleNotFoundError: No module named 'no_such'"


def test_a_damaged_copy_on_the_disk_of_another_rank(damaged: tuple[str, dict[str, Any]]) -> None:
    """Rank 0's own files are whole; all ranks pass over what rank 1 could not load."""
    output, found = damaged
    assert all("step 2 from global_step2" in line for line in found["copies"])
    for step, name in ((6, "mp_rank_00_model"), (4, "zero_pp_rank_1_mp_rank_00_optim")):
        words = (
            f"passed over global_step{step}: as rank 1 sees it, on {os.uname().nodename}: {name}_states.pt: checksum"
        )
        assert words in output


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_anew(damaged: tuple[str, dict[str, Any]]) -> None:
    """Neither if the program catches the error of its load, nor if it never loads."""
    _, found = damaged
    for rank in found["all damaged, loaded"]:
        load, train, steps = rank
        assert load[0] == "CheckpointError" and "is complete" in load[1]
        assert "global_step4 is damaged" in load[3] and "global_step2 is damaged" in load[3]
        assert load[2] == "restore a checkpoint from a copy; to start over, save into an empty directory"
        assert train[0] == "UsageError" and "did not load a checkpoint of this directory" in train[1] and steps == 0
    for rank in found["all damaged, not loaded"]:
        train, steps = rank
        assert train[0] == "CheckpointError" and "is complete" in train[1] and steps == 0
        assert "global_step4 is damaged" in train[3] and "restore a checkpoint" in train[2]
