"""Saves that DeepSpeed's decoupled writer makes in the background, on two ranks; background_toy.py does, this looks."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("background")


def run(launch: Any, name: str, data_yaml: Path, root: Path) -> Any:
    status, output = launch(str(HERE / "background_toy.py"), data_yaml, root, name, num_processes=2)
    lines = [line for line in output.splitlines() if line.startswith(f"RESULT {name} ")]
    assert lines, output[-6000:]
    return json.loads(lines[0].split(" ", 2)[2]), status, output


@pytest.fixture(scope="module")
def saves(launch: Any, data_yaml: Path, root: Path) -> Any:
    return run(launch, "saves", data_yaml, root)


@pytest.fixture(scope="module")
def kill(launch: Any, data_yaml: Path, root: Path, saves: Any) -> Any:
    choice = choose(root / "saves")
    assert choice is not None and choice.tag == "global_step7"
    return run(launch, "kill", data_yaml, root)


def test_pointers_move_behind_the_last_byte(saves: Any) -> None:
    for found in saves[0]:
        assert found["saved"] == found["in the middle of the step"] == [None, None]
        assert found["behind the step"] == ["global_step2", "2"]
        assert found["behind the next save"] == ["global_step3", "3"]
        assert found["loaded in flight"] == ["again", 3, 5, ["again", "3"]]
        assert found["destroyed"] == ["global_step5", "5"]


def test_refused_at_the_start_if_each_node_has_a_disk(saves: Any) -> None:
    for found in saves[0]:
        assert found["on nodes"][0] == "UsageError" and "needs a directory that all nodes see" in found["on nodes"][1]


def test_training_is_as_without_it(saves: Any) -> None:
    for found in saves[0]:
        assert [loss for _, _, loss in found["seen"]] == [loss for _, _, loss in found["whole"]][:10]


def test_the_values_are_those_of_the_save(saves: Any, root: Path) -> None:
    choice = choose(root / "saves", tag="global_step2")
    assert choice is not None and choice.state is not None
    assert (choice.iteration, choice.state.samples) == (2, 16)


def test_one_rank_writes_the_model(saves: Any) -> None:
    files = [found["expected"] for found in saves[0]]
    assert files[0] == ["mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_optim_states.pt"]
    assert files[1] == ["zero_pp_rank_1_mp_rank_00_optim_states.pt"]


def test_a_dead_writer_is_raised_on_all_ranks(saves: Any) -> None:
    for rank, found in enumerate(saves[0]):
        kind, headline, _, why = found["dead writer"]
        assert kind == "CheckpointError" and "not written in the background" in headline
        assert ("rank 1: " in headline) == (rank == 0) and "by signal 9" in why
        assert found["dies"][0] == "CheckpointError" and "lost was not written" in found["dies"][1]
        assert found["at step"] == 5  # before the weights changed
        assert found["pointers stay"] == found["still"] == ["global_step5", "5"]


def test_what_a_stop_says_is_saved_is_committed(saves: Any) -> None:
    for found in saves[0]:
        assert found["stopped"] == [0, 1, ["global_step1", "1"], False]
        assert found["measured"]  # the whole of it, and not how long training was held up


def test_the_end_of_a_program_that_cannot_commit(saves: Any) -> None:
    found, _, output = saves
    assert [one["ends"] for one in found] == [[True, False]] * 2
    for rank in (0, 1):
        assert f"megaresume: error: rank {rank}: cannot write" in output


def test_the_end_of_the_program_waits(saves: Any, root: Path) -> None:
    found, status, output = saves
    assert status == 0, output[-3000:]
    assert found[0]["at the end"] == ["global_step5", "5"]
    assert output.count("the program ends while global_step7 is being written") == 1
    choice = choose(root / "saves", tag="global_step7")
    assert choice is not None and choice.manifest is not None
    assert not list((root / "saves" / "megaresume").glob(".*"))


def test_a_kill_with_a_save_in_flight_is_safe(kill: Any, saves: Any, root: Path) -> None:
    found, status, _ = kill
    assert status == -signal.SIGKILL
    for before, after in zip(saves[0], found, strict=True):
        assert "step 7 from global_step7" in after["line"] and "repeated 0 skipped 0" in after["line"]
        assert after["seen"] == before["whole"][-2:]
        # The buffer is that of the moment of the save, on rank 0, whose file it is.
        assert after["calls"] == 14
    choice = choose(root / "saves")
    assert choice is not None and choice.tag == "global_step7"
    assert [rejected.tag for rejected in choice.rejected] == ["global_step8"]
    deadline = time.monotonic() + 120
    for one in found:
        while _runs(one["writer"]):
            assert time.monotonic() < deadline, "a writer outlived its rank"
            time.sleep(0.05)


def test_an_error_with_a_save_in_flight_waits(kill: Any, launch: Any, data_yaml: Path, root: Path) -> None:
    """It counts: ranks that end with an error first commit what they have begun, as at any other end."""
    found, status, output = run(launch, "refused", data_yaml, root)
    assert status != 0 and output.count("something is refused") == 1, output[-3000:]
    assert [one["pointers"] for one in found] == [["global_step7", "7"]] * 2
    choice = choose(root / "saves")
    assert choice is not None and choice.tag == "global_step8" and choice.manifest is not None


def _runs(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
