"""Starts the training program with torchrun, and kills it with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.stream.errors import SetupError

__all__ = ["Ended", "run_job"]

#: Seconds without any sign of life before the demo gives up.
PATIENCE = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """How a job ended."""

    killed: bool
    seconds: float


def run_job(
    flags: Sequence[str],
    *,
    processes: int,
    output: Path,
    kill_when: Callable[[], bool] | None = None,
    watch: Callable[[], None] = lambda: None,
) -> Ended:
    """Train until the end, or until ``kill_when`` says that everything must die.

    Args:
        flags: of the training program.
        processes: ranks on this machine.
        output: where standard output and error go.
        kill_when: asked all the time; True: SIGKILL to every process of the job, at once.
        watch: called all the time, for progress.

    Raises:
        SetupError: the job ended with an error, or shows no sign of life.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    start = last_sign = time.monotonic()
    size = -1
    with open(output, "w") as log:
        process = subprocess.Popen(
            [*launcher, "-m", "megaresume.training", *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                watch()
                if kill_when is not None and kill_when():
                    _kill_tree(process.pid)
                    process.wait()
                    return Ended(killed=True, seconds=time.monotonic() - start)
                if output.stat().st_size != size:
                    size, last_sign = output.stat().st_size, time.monotonic()
                if time.monotonic() - last_sign > PATIENCE:
                    raise _failed(output, f"no output for {PATIENCE:.0f} seconds")
                time.sleep(0.01)
        finally:
            _kill_tree(process.pid)
            process.wait()
    watch()
    if process.returncode:
        raise _failed(output, f"exit status {process.returncode}")
    return Ended(killed=False, seconds=time.monotonic() - start)


def _kill_tree(pid: int) -> None:
    """SIGKILL a process and all of its descendants, which torchrun puts into sessions of their own."""
    import psutil

    try:
        root = psutil.Process(pid)
        family = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.send_signal(signal.SIGKILL)
    psutil.wait_procs(family[1:], timeout=30)


def _failed(output: Path, what: str) -> SetupError:
    tail = "\n".join(output.read_text(errors="replace").splitlines()[-25:])
    return SetupError(
        "a training job of the demo failed",
        found=f"{what}; the end of {output}:\n{tail}",
        expected="a job that trains to its end",
        action=f"read {output}",
    )
