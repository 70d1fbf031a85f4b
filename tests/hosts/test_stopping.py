"""All ranks stop at one step boundary with a checkpoint, whoever was asked and however."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.load.choose import choose
from megaresume.checkpoint.stopping import StopConditions, Stopper, job_end
from megaresume.stream.errors import UsageError


@pytest.mark.parametrize(
    ("name", "reason", "status", "step"),
    [
        ("usr1", "SIGUSR1 received on rank 1", 0, 3),
        ("term_workers", "SIGTERM received", 0, 3),
        ("file", "stop-now is there", 7, 4),
        ("near_the_end", "s are left of the job", 0, 0),
        ("unmeasured_save", "s are left of the job", 0, 0),
        ("far_from_the_end", None, None, 3),
        ("minutes", "0.01 minutes are up", 0, 2),
    ],
)
def test_ways_to_stop(
    stopped: Any, stop_root: Path, name: str, reason: str | None, status: int | None, step: int
) -> None:
    first, second = stopped[name]
    assert first == second  # on both ranks the same
    assert first["step"] == step and first["micro_batches"] == 2 * step  # whole steps
    assert first["status"] == status
    assert first["reason"] is None if reason is None else first["reason"].endswith(reason)
    saved = [f"global_step{step}"] if step and reason is not None else []
    assert first["saved"] == saved and first["latest"] == (saved[0] if saved else None)
    assert first["given_back"] == [True, True]
    choice = choose(stop_root / name)
    assert choice is None if not saved else choice is not None and choice.state.samples == 8 * step


def test_the_trigger_file_is_used_up(stopped: Any) -> None:
    assert stopped["file_gone"] == [True, True]


@pytest.mark.parametrize(
    "wrong",
    [
        {"signals": ("SIGKILL",)},
        {"signals": ("TERM",)},
        {"after_minutes": -1},
        {"after_minutes": float("nan")},
        {"after_minutes": float("inf")},
        {"status": 256},
    ],
)
def test_impossible_conditions(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        StopConditions(**wrong)


def test_an_end_that_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    with pytest.raises(UsageError, match="end of the job is not known"):
        StopConditions(before_end="auto")
    monkeypatch.setenv("MEGARESUME_JOB_END_TIME", "tomorrow")
    with pytest.raises(UsageError) as caught:
        StopConditions(before_end="auto")
    assert caught.value.found == "$MEGARESUME_JOB_END_TIME is 'tomorrow' and no $SLURM_JOB_END_TIME"
    assert str(caught.value.action).startswith("after_minutes= (Megatron: --exit-duration-in-mins)")
    assert job_end({"SLURM_JOB_END_TIME": "soon"}) is None
    assert job_end({"SLURM_JOB_END_TIME": "9", "MEGARESUME_JOB_END_TIME": "7"}) == 7


def test_what_asks_to_stop_cannot_break_a_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    # A file of which the system says more than that it is not there: rank 0 alone would end there.
    assert Stopper(StopConditions(signals=(), file="x" * 300), save_seconds=lambda: None).reason() is None
    (tmp_path / "stop").mkdir()
    stopper = Stopper(StopConditions(signals=("SIGUSR1",), file=str(tmp_path / "stop")), save_seconds=lambda: None)
    stopper.install()
    stderr = os.dup(2)
    try:
        os.close(2)  # `2>&1 | tee log`, and tee got the signal too
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        stopper.uninstall()
    assert stopper.reason() == "SIGUSR1 received"
    stopper.saved()
    assert "cannot be removed" in caplog.text and "every start stops" in caplog.text
