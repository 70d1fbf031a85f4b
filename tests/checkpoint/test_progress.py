"""Starts that lead to no save: counted from the ledger, and stopped in the end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.save.commit import Commit
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN, check_progress, record_start
from megaresume.stream.errors import CheckpointError
from megaresume.stream.state import StreamState

Save = Callable[..., Commit]
MakeState = Callable[..., StreamState]


def start(root: Path, iteration: int, state: MakeState) -> None:
    record_start(root, iteration=iteration, state=state(iteration * 8), choice=choose(root))


def test_starts_without_a_save_are_counted(tmp_path: Path, save: Save, state: MakeState) -> None:
    save(tmp_path, 10)
    for _ in range(3):
        start(tmp_path, 10, state)
        check_progress(tmp_path, iteration=10, max_starts=3)
    start(tmp_path, 10, state)
    with pytest.raises(CheckpointError, match="no progress: 3 starts from iteration 10") as error:
        check_progress(tmp_path, iteration=10, save_interval=500, max_starts=3)
    assert "iteration 500" in str(error.value.expected)
    assert error.value.action is not None
    assert (
        "save more often than every 500 steps" in error.value.action
        and "--megaresume-max-starts 6" in error.value.action
    )
    check_progress(tmp_path, iteration=10, max_starts=6)  # as it says
    check_progress(tmp_path, iteration=10, max_starts=0)


def test_a_finished_run_that_is_launched_again_does_not_count(tmp_path: Path, save: Save, state: MakeState) -> None:
    save(tmp_path, 10)
    start(tmp_path, 10, state)
    for _ in range(9):
        record_start(tmp_path, iteration=10, state=state(80), choice=choose(tmp_path), details={NOTHING_TO_TRAIN: True})
    start(tmp_path, 10, state)  # with a larger --train-iters
    check_progress(tmp_path, iteration=10, max_starts=2)
    with pytest.raises(CheckpointError, match="no progress: 1 start from"):
        check_progress(tmp_path, iteration=10, max_starts=1)


def test_a_save_begins_the_count_anew(tmp_path: Path, save: Save, state: MakeState) -> None:
    save(tmp_path, 10)
    for _ in range(3):
        start(tmp_path, 10, state)
    save(tmp_path, 20)
    start(tmp_path, 20, state)
    check_progress(tmp_path, iteration=20, max_starts=1)


def test_starts_from_elsewhere_do_not_count(tmp_path: Path, save: Save, state: MakeState) -> None:
    """Somebody went back, and forward again: not the same failure twice."""
    save(tmp_path, 10)
    save(tmp_path, 20)
    for iteration in (20, 10, 20):
        start(tmp_path, iteration, state)
    check_progress(tmp_path, iteration=20, max_starts=1)


def test_a_run_that_never_saved(tmp_path: Path, state: MakeState) -> None:
    for _ in range(3):
        start(tmp_path, 0, state)
    with pytest.raises(CheckpointError, match="2 starts from iteration 0") as error:
        check_progress(tmp_path, iteration=0, max_starts=2)
    assert "each lived at most" in str(error.value.found)
