"""Two jobs with one ``--save`` under Megatron-LM: a node thought dead comes back, and a job is submitted twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megaresume.checkpoint.lock.lock import holder_of, release, take
from tests.hosts.megatron.guard.conftest import Corpora

pytest.importorskip("megatron.core")


@pytest.fixture
def save(tmp_path: Path) -> Iterator[Path]:
    """What ``--save`` names; nobody's at the end."""
    yield tmp_path / "save"
    release(tmp_path / "save")


def stopped_owner(save: Path) -> int:
    """The process that holds the directory, once it stands still."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        holder = holder_of(save)
        if holder is not None and holder.owner is not None:
            state = Path(f"/proc/{holder.owner.pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state == "T":
                return holder.owner.pid
        time.sleep(0.1)
    pytest.fail("no owner, or none that stands still")


@pytest.mark.parametrize("mode", ["stream", "guard"])
def test_lost_and_refused(
    mini: Any, data_yaml: Path, tmp_path: Path, save: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is stopped in step 3; Slurm begins its job anew elsewhere (here: in this process); it comes back."""
    if mode == "stream":
        data: list[object] = ["--megaresume-data", data_yaml]
    else:
        (tmp_path / "corpora").mkdir()
        words = [word for path in Corpora(tmp_path / "corpora").paths for word in (1, path)]
        data = ["--data-path", *words, "--split", "80,10,10", "--data-cache-path", tmp_path / "cache"]
    flags = [*data, "--seed", 7, "--seq-length", 32, "--vocab-size", 1000, "--train-iters", 6, "--save-interval", 2]
    flags += ["--micro-batch-size", 2, "--global-batch-size", 8, "--save", save, "--load", save]
    stop = {"MINI_KILL": "step:3", "MINI_KILL_RANK": "0", "MINI_SIGNAL": "SIGSTOP", "SLURM_JOB_ID": "7"}
    with ThreadPoolExecutor() as pool:
        running = pool.submit(lambda: mini(*flags, env=stop))
        owner = stopped_owner(save)
        monkeypatch.setenv("SLURM_JOB_ID", "7")
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        take(save)
        os.kill(owner, signal.SIGCONT)
        lost = running.result()
    assert lost.status not in (0, -9), lost.output[-3000:]
    assert "this job has lost its directory of checkpoints to another one" in lost.output
    assert f"{save} is held by" in lost.output and f"Slurm job 7, restart 1, process {os.getpid()} on" in lost.output
    assert [path.name for path in save.glob("iter_*")] == ["iter_0000002"]
    assert (save / "latest_checkpointed_iteration.txt").read_text() == "2"
    if mode == "stream":
        refused = mini(*flags, env={"SLURM_JOB_ID": "8"})
        assert refused.status == 1 and refused.steps() == {}, refused.output[-3000:]
        assert "another job writes to this directory of checkpoints" in refused.output
        assert f"restart 1, process {os.getpid()} on" in refused.output and "scancel 7" in refused.output
