"""Drivers of megaresume's own hosts: `ForkingDriver` forks what is killed, or has several ranks, and trains the rest in
this process; `LaunchingDriver` starts all of it, by torchrun of another interpreter.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megaresume import StopConditions
from megaresume.cluster.processes import LocalJob
from megaresume.hosts.driver import Driver, Job, Ran, misplaced, wait_for_copies
from tests.hosts.torch.record import ENVIRONMENT, torchrun_environment

Train = Callable[[Job], None]


class ForkingDriver(Driver):
    """Of a program that calls `main` if it is run.

    Args:
        program: its file.
        train: its function, which trains as a job says.
        in_process: whether it leaves nothing behind, so that it can train in this process.
        launcher: the module that runs the program; empty: none.
        words: for the program, after the job.
    """

    def __init__(
        self, program: str, train: Train, *, in_process: bool = True, launcher: str = "", words: Sequence[str] = ()
    ) -> None:
        self.program, self.train, self.in_process, self.launcher = program, train, in_process, launcher
        self.words = words

    def run(self, job: Job) -> Ran:
        """See `Driver`."""
        if self.in_process and job.ranks == 1 and not job.kill[0]:
            return self._here(job)
        words = [json.dumps(asdict(job), default=str), *self.words]
        output = job.directory.with_name(f"{job.directory.name}.output")
        env = ENVIRONMENT | torchrun_environment(job.ranks)
        program, *words = [*filter(None, [self.launcher]), self.program, *words]
        with LocalJob(program, words, num_processes=job.ranks, output=output, launcher="env", env=env) as started:
            return Ran(started.wait(), started.text())

    def _here(self, job: Job) -> Ran:
        said, status = io.StringIO(), 0
        with contextlib.redirect_stdout(said):
            try:
                with misplaced(job):
                    self.train(job)
            except SystemExit as stopped:
                status = int(stopped.code or 0)
            except Exception:  # noqa: BLE001  a refusal, or a mistake of the program: the test looks at what was said
                status = 1
                said.write(traceback.format_exc())
        return Ran(status, said.getvalue())


class LaunchingDriver(Driver):
    """Of a program that calls `main` if it is run.

    Args:
        program: its file.
        python: the interpreter that has the trainer.
    """

    def __init__(self, program: str, python: str) -> None:
        self.program, self.python = program, python

    def run(self, job: Job) -> Ran:
        """See `Driver`."""
        words = [self.python, "-m", "torch.distributed.run", f"--nproc-per-node={job.ranks}"]
        words += [
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=localhost:0",
            self.program,
            json.dumps(asdict(job), default=str),
        ]
        done = subprocess.run(words, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout + done.stderr)


def main(train: Train) -> None:
    """Train as the job says that this program was given."""
    asked = json.loads(sys.argv[1])
    job = Job(**asked | {"directory": Path(asked["directory"]), "kill": tuple(asked["kill"])})
    with misplaced(job):
        train(job)


def settings_of(job: Job) -> dict[str, Any]:
    """What `run` of the programs in `tests.hosts` is given by those names."""
    grown = {} if job.append is None else {"append": job.append}
    names = ("attempt", "kill", "batch", "accumulation", "epochs", "save_every")
    return {name: getattr(job, name) for name in names} | {"stop": stop_of(job), "checkpoints": staged(job)} | grown


def staged(job: Job) -> dict[str, Any]:
    """Of `Checkpoints`: where its copies go."""
    return {"stage_to": job.stage_to} if job.stage_to else {}


def stop_of(job: Job) -> StopConditions | None:
    """When it is to stop; see `ask_to_stop`."""
    return StopConditions(file=str(_file(job))) if job.stop_after else None


def ask_to_stop(job: Job, step: int) -> None:
    """After each step that was made."""
    wait_for_copies(job, step)
    if step == job.stop_after:
        _file(job).touch()


def die_if_asked(job: Job, step: int) -> None:
    """After each step."""
    if job.kill == ("step", step):
        os.kill(os.getpid(), signal.SIGKILL)


def _file(job: Job) -> Path:
    return job.directory.with_name("stop")
