"""launch/slurm/train.sbatch on a real Slurm: every way in which a job ends, and whether it comes back.

Every test is told what the script decided (the lines of ``RUN_DIR/logs/batch.log``), and that the record of the run has
every step once.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from megaresume.cluster.records import read_records
from megaresume.shipped import launch_script
from tests.cluster.launch.conftest import ENDLESS, FLAGS
from tests.release import release

if TYPE_CHECKING:
    from tests.cluster.launch.conftest import Cluster

PATIENCE = 300


@dataclass
class Run:
    """Jobs of one run directory."""

    name: str
    directory: Path
    slurm: Cluster

    @property
    def path(self) -> Path:
        return self.directory / "runs" / self.name

    def submit(self, script: str, flags: str, *options: str, **settings: object) -> str:
        """The job's id."""
        env = {name: value for name, value in self.slurm.env.items() if not name.startswith("SLURM_JOB")}
        env |= {"PYTHON": sys.executable, "DS_ACCELERATOR": "cpu", "MEGARESUME_CACHE": str(self.directory / "cache")}
        env |= {"PROCS_PER_NODE": "1"} | {name: str(value) for name, value in settings.items()}
        words = ["sbatch", "--parsable", f"--job-name={self.name}", *options, launch_script(f"slurm/{script}")]
        done = subprocess.run(
            [*words, *FLAGS.split(), *flags.split()], cwd=self.directory, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def decisions(self, job: str, attempt: int = 0) -> list[str]:
        """What the script said, without the time."""
        log = self.path / "logs" / "batch.log"
        mark = f"[job {job}, attempt {attempt}] "
        return [line.split(mark, 1)[1] for line in log.read_text().splitlines() if mark in line] if log.exists() else []

    def output(self, job: str, attempt: int = 0) -> str:
        """What the ranks of all nodes printed."""
        logs = sorted((self.path / "logs" / f"{job}.{attempt}").glob("*.log"))
        return "".join(log.read_text(errors="replace") for log in logs)

    def steps(self) -> list[int]:
        """That were trained, in their order."""
        log = self.path / "samples.jsonl"
        return [*read_records(log).steps] if log.exists() else []

    def is_whole(self, last: int) -> bool:
        """Whether every step up to ``last`` was trained, and none twice."""
        return self.steps() == [*range(1, last + 1)] and not read_records(self.path / "samples.jsonl").lost

    def until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > deadline:
                logs = [*self.directory.glob(f"{self.name}-*.log"), *self.path.glob("logs/*/*.log")]
                tails = "\n".join(f"== {log}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
                pytest.fail(f"{what}: not within {PATIENCE} s\n{self.slurm.slurm('squeue')}\n{tails}", pytrace=False)
            time.sleep(0.1)

    def until_steps(self, number: int = 2) -> None:
        goal = len(self.steps()) + number
        self.until(lambda: len(self.steps()) >= goal, f"{number} more steps")

    def until_said(self, job: str, words: str, attempt: int = 0) -> None:
        self.until(lambda: any(words in line for line in self.decisions(job, attempt)), f"{job}.{attempt}: {words}")

    def until_gone(self, job: str) -> None:
        self.until(lambda: not self.slurm.slurm("squeue", "-h", "-j", job, check=False).strip(), f"end of {job}")

    def resumed(self, job: str, attempt: int, step: int) -> None:
        """Wait for it."""
        line = f"repeated 0 skipped 0 | step {step} from global_step{step}"
        self.until(lambda: line in self.output(job, attempt), line)


def test_a_signal_a_requeue_a_cancel_and_the_end(slurm: Cluster, directory: Path) -> None:
    run = Run("signals", directory, slurm)
    (run.path / "logs").mkdir(parents=True)
    (run.path / "stop").touch()  # left behind: it stops nothing
    job = run.submit("train.sbatch", ENDLESS, "--nodes=2")
    run.until_steps()
    slurm.slurm("scancel", "--batch", "--signal=USR1", job)
    run.until_said(job, "queued again")
    said = run.decisions(job)
    assert said[0].startswith("start: restart count 0; 2 node(s) n[1-2], 1 rank(s) on each, meeting at ")
    assert said[1:] == [
        "USR1 came: all ranks save at the end of their step",
        f"queued again: stopped by USR1, new checkpoint at step {run.steps()[-1]}",
    ]
    saved = run.steps()[-1]
    logs = sorted((run.path / "logs" / f"{job}.0").glob("*.log"))
    assert len(logs) == (2 if slurm.mode == "ns" else 1), logs  # in flat mode all nodes have one name

    # It comes back; somebody cancels it: it saves in the time that Slurm gives, and does not come back.
    run.resumed(job, 1, saved)
    run.until_steps()
    slurm.slurm("scancel", job)
    run.until_gone(job)
    said = run.decisions(job, 1)
    assert said[0].startswith("start: restart count 1; 2 node(s)")
    assert said[1] == "TERM came: the job was cancelled, so it is not queued again; the same sbatch command continues"
    assert not any("queued again:" in line for line in said)
    batch_log = (directory / f"signals-{job}.log").read_text()
    assert all(line in batch_log for line in [*run.decisions(job), *said])

    # One task a rank, to the end; what was to follow is not needed any more.
    last = run.steps()[-1] + 2
    job = run.submit("train.sbatch", f"--train-iters {last}", "--nodes=2", LAUNCHER="srun", REQUEUE="no", CHAIN=1)
    run.until_gone(job)
    said = run.decisions(job)
    follower = said[1].split()[2]
    assert said[1] == f"chain: job {follower} follows, whatever becomes of this one; 0 more may follow it"
    assert said[2:] == [
        f"the run is over: it has said so after step {last}; not queued again",
        f"chain: job {follower} is cancelled: the run is over",
    ]
    assert "dp 2->2" in run.output(job) and "repeated 0 skipped 0" in run.output(job)
    assert run.is_whole(last)


@release(
    "a minute until the limit, the least that Slurm knows",
    "`::test_a_signal_a_requeue_a_cancel_and_the_end`, "
    "`tests/cluster/launch/test_slurm_coming_back.py::test_a_chain_whose_length_stands_in_the_script_comes_to_an_end`",
)
def test_the_time_limit_where_requeue_is_not_allowed(slurm: Cluster, directory: Path) -> None:
    run = Run("chain", directory, slurm)
    options = ("--nodes=1", "--no-requeue", "--time=30", "--signal=B:USR1@40")
    first = run.submit(
        "train.sbatch", ENDLESS, *options, REQUEUE="no", CHAIN=1, CHAIN_OPTIONS="--no-requeue --comment=second"
    )
    run.until_steps()
    # From here on as if this had been the limit all the time: Slurm itself sends the signal.
    slurm.slurm("scontrol", "update", f"jobid={first}", "timelimit=1")
    run.until_said(first, "not queued again")
    said = run.decisions(first)
    second = said[1].split()[2]
    assert said[1] == f"chain: job {second} follows, whatever becomes of this one; 0 more may follow it"
    assert said[2:] == [
        "USR1 came: all ranks save at the end of their step",
        f"not queued again, REQUEUE=no, but job {second} follows: stopped by USR1, "
        f"new checkpoint at step {run.steps()[-1]}",
    ]
    run.resumed(second, 0, run.steps()[-1])
    told = slurm.slurm("scontrol", "show", "job", second)
    assert "Comment=second" in told and "TimeLimit=00:30:00" in told and "NumNodes=1" in told
    slurm.slurm("scancel", "--batch", "--signal=TERM", second)
    run.until_said(second, "NOT queued again: stopped by TERM, new checkpoint at step")
    assert run.decisions(second)[-1].endswith("; REQUEUE=no, and no job follows: the same sbatch command continues")
    run.until_gone(second)
    assert run.is_whole(run.steps()[-1])


@release(
    "the same script with another stop",
    "`tests/cluster/launch/test_smoke_slurm.py::test_a_killed_rank_with_zero_1`, and DeepSpeed's launcher in "
    "`tests/cluster/launch/test_scripts.py::test_deepspeed_is_started_again_after_a_failure_and_stopped`",
)
def test_a_killed_rank_under_deepspeed(slurm: Cluster, directory: Path) -> None:
    run = Run("killed", directory, slurm)
    flags = f"{ENDLESS} --save-interval 5 --megaresume-keep-last 2"
    job = run.submit("train.sbatch", flags, "--nodes=2", LAUNCHER="deepspeed", MAX_RESTARTS=0, EXCLUDE_NODES=0)
    run.until((run.path / "checkpoints" / "latest").exists, "a checkpoint")
    _rank(run, "1").send_signal(signal.SIGKILL)
    run.until_said(job, "queued again")
    assert re.match(r"queued again: failed with status \d+.*, new checkpoint at step \d+", run.decisions(job)[-1])
    assert " failed first: " in run.decisions(job)[-2]
    run.until(lambda: "repeated 0 skipped 0" in run.output(job, 1), "resumed")
    run.until_steps(1)
    slurm.slurm("scancel", job)
    run.until_gone(job)


def _rank(run: Run, number: str) -> psutil.Process:
    for process in psutil.process_iter():
        try:
            words, env = process.cmdline(), process.environ()
        except (psutil.Error, OSError):
            continue
        mine = {str(run.path / "checkpoints"), "megaresume.cluster.training"} <= {*words}
        if mine and env.get("RANK") == number:
            return process
    raise AssertionError(f"no rank {number} of {run.name}")


def test_failures_without_progress_come_to_an_end(slurm: Cluster, directory: Path) -> None:
    run = Run("failing", directory, slurm)
    python = directory / "python"
    python.write_text("#!/bin/sh\necho no luck\nexit 3\n")
    python.chmod(0o755)
    settings = {"DRIVER": sys.executable, "NODE_CHECK": "no", "MAX_RESTARTS": 1, "EXCLUDE_NODES": 0}
    job = run.submit("train.sbatch", "", "--nodes=1", PYTHON=python, LAUNCHER="srun", **settings)
    run.until_said(job, "NOT queued again", attempt=1)
    assert run.decisions(job)[-1] == (
        "queued again: failed with status 3, attempt 1 in a row without a new checkpoint, MAX_RESTARTS=1"
    )
    assert run.decisions(job, 1)[-1] == (
        "NOT queued again: failed with status 3, attempt 2 in a row without a new checkpoint, MAX_RESTARTS=1"
    )
    run.until_gone(job)
    assert (directory / f"failing-{job}.log").read_text().count("no luck") == 2


def test_refusals(slurm: Cluster, directory: Path) -> None:
    run = Run("refused", directory, slurm)
    wrong: list[tuple[tuple[str, ...], dict[str, str], str]] = [
        (("--array=0-1",), {}, f"the jobs of this array would all write to RUN_DIR={run.path}"),
        ((), {"DATA": "nothing.yaml"}, "there is no DATA=nothing.yaml"),
        ((), {"DRIVER": sys.executable, "PYTHON": "/nowhere/python"}, "there is no PYTHON=/nowhere/python on "),
        ((), {"REQUEUE": "maybe"}, "REQUEUE=maybe is not known"),
        ((), {"LAUNCHER": "mpirun"}, "LAUNCHER=mpirun is not known"),
        ((), {"CHAIN": "some"}, "CHAIN=some is not a number"),
    ]
    jobs = [
        (run.submit("train.sbatch", ENDLESS, "--nodes=1", "--output=refused-%J.log", *options, **settings), words)
        for options, settings, words in wrong
    ]
    for job, words in jobs:
        run.until_gone(job)
        logs = "".join(log.read_text() for log in directory.glob(f"refused-{job}*.log"))
        assert f"refused, and not queued again: {words}" in logs, logs
    assert not run.steps()


@release(
    "two minutes of waiting for limits",
    "`::test_a_signal_a_requeue_a_cancel_and_the_end`",
)
def test_a_time_limit_without_a_signal_before_it(slurm: Cluster, directory: Path) -> None:
    run = Run("limit", directory, slurm)
    # 28 is WINCH, which means nothing to a batch script.
    job = run.submit("train.sbatch", ENDLESS, "--nodes=1", "--time=1", "--signal=B:28@1")
    run.until_said(job, "queued again")
    assert run.decisions(job)[1] == "TERM came: Slurm ends this attempt (time limit)"
    assert run.decisions(job)[2].startswith("queued again: ended by Slurm (time limit), ")
    run.resumed(job, 1, run.steps()[-1])
    # The limit that it knows is moved, and comes: a scancel behind that is a scancel.
    began = time.monotonic()
    slurm.slurm("scontrol", "update", f"jobid={job}", "timelimit=60")
    time.sleep(max(0.0, 65 - (time.monotonic() - began)))
    slurm.slurm("scancel", job)
    run.until_said(job, "TERM came: the job was cancelled, so it is not queued again", attempt=1)
    run.until_gone(job)


def test_without_slurm(tmp_path: Path) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env["DRIVER"] = sys.executable
    done = subprocess.run(
        ["bash", launch_script("slurm/train.sbatch")], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 2 and "is a Slurm batch script: sbatch train.sbatch" in done.stderr
