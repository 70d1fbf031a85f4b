"""Launches as jobs of a Slurm cluster.

    sbatch --nodes=2 SCRIPT FLAGS       attempt 0   RUNNING
      stopped in some way               ->          PENDING, queued again by Slurm or by its script: held
      scontrol update NumNodes=3-3      ->          released
                                        attempt 1   RUNNING on other nodes, same flags
    a job that ended instead            ->          a new sbatch with the flags of the next launch

Everything is asked by polling: `sbatch --wait` looks only now and then.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from megaresume.smoke import slurm_check as checks
from megaresume.smoke.job import KINDS, Job, Kind, Launch
from megaresume.smoke.slurm_commands import (
    JobInfo,
    Partition,
    ask,
    find_job,
    nodes_of,
    option,
    script_options,
    try_to,
    usable,
    version,
)
from megaresume.smoke.slurm_stops import STOPS, Lost, undo
from megaresume.stream.errors import SetupError

__all__ = ["SlurmJob", "SlurmLauncher"]

#: seconds between a stop and the end of the attempt: saves, and whatever waits for the ranks.
GRACE = 300.0
#: seconds in the queue.
QUEUE = 1800.0
#: seconds that a cancelled job may take: Slurm kills it after its KillWait.
_CANCEL = 300.0
#: seconds between two looks at a job.
_POLL = 0.25
#: reasons for which a job never starts, however long one waits.
_HOPELESS = {
    "PartitionNodeLimit",
    "PartitionTimeLimit",
    "PartitionDown",
    "PartitionInactive",
    "BadConstraints",
    "AccountNotAllowed",
    "NoAccount",
    "InvalidAccount",
    "InvalidQOS",
    "QOSNotAllowed",
    "QOSJobLimit",
    "DependencyNeverSatisfied",
    "JobHeldAdmin",
    "JobHoldMaxRequeue",
    "launch_failed_requeued_held",
    "AssocMaxNodePerJobLimit",
    "QOSMaxNodePerJobLimit",
    "QOSMaxWallDurationPerJobLimit",
    "AssocMaxWallDurationPerJobLimit",
    "FrontEndDown",
}


class SlurmLauncher:
    """Starts a batch script on the cluster that ``sinfo`` shows.

    Args:
        script: for sbatch; it passes its arguments on, as ``launch/slurm/train.sbatch`` does. None: ours.
        launch: which of ours.
        partition: None: that of the script or of the options, else the default one.
        urgent_partition: whose jobs preempt; None: found by its priority.
        options: words for sbatch, as ``--account=x``.
        grace: seconds, see `GRACE`.
        queue: seconds, see `QUEUE`.
    """

    kinds: Sequence[Kind] = KINDS

    def __init__(
        self,
        script: Path | None = None,
        *,
        launch: Literal["torchrun", "deepspeed"] = "torchrun",
        partition: str | None = None,
        urgent_partition: str | None = None,
        options: Sequence[str] = (),
        grace: float = GRACE,
        queue: float = QUEUE,
    ) -> None:
        self.script = _own_script(launch) if script is None else script.resolve()
        self.options = tuple(options)
        self.grace, self.queue = grace, queue
        self._partition_name, self._urgent_name = partition, urgent_partition
        self._partition: Partition | None = None
        #: one line about the cluster, once `check` has asked.
        self.description = ""

    @property
    def partition(self) -> Partition:
        """Where the jobs run.

        Raises:
            UsageError: see `checks.choose_partition`.
        """
        if self._partition is None:
            words = [*script_options(self.script), *self.options]
            self._partition = checks.choose_partition(self._partition_name or option(words, "partition", "p"))
        return self._partition

    @property
    def urgent(self) -> Partition:
        """Whose jobs preempt.

        Raises:
            UsageError, SetupError: see `checks.choose_urgent`.
        """
        return checks.choose_urgent(self.partition, self._urgent_name)

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """See `Launcher`."""
        words = [*script_options(self.script), *self.options]
        checks.refuse_array(words)
        release = version()
        most = max(launch.nodes for launch in launches)
        nodes = checks.enough_nodes(self.partition, most)
        working = [node for node, state in nodes.items() if usable(state)]
        if "preempt" in kinds:
            _ = self.urgent
        if "node-down" in kinds:
            checks.may_set_nodes_down(working[0])
        # One more than a launch has, where there is one: the job of a lost node goes on there.
        count = min(len(working), most + ("node-down" in kinds), self.partition.max_nodes or len(working))
        for directory in sorted({launch.run_dir.parent for launch in launches}):
            directory.mkdir(parents=True, exist_ok=True)
            asked = checks.check_nodes(self.partition, count, directory, words, timeout=self.queue)
        self.description = f"Slurm {release}, partition {self.partition.name}: {len(nodes)} nodes, {len(asked)} asked"

    def start(self, launch: Launch, *, after: Job | None = None) -> Job:
        """See `Launcher`.

        Raises:
            SetupError: it is never started, or not in time.
        """
        job = self._again(after, launch) if isinstance(after, SlurmJob) and after.waits() else None
        job = job or self._submit(launch)
        try:
            job.wait_for_start(self.queue)
        except BaseException:
            job.close()
            raise
        if isinstance(after, SlurmJob):
            undo(after.lost)
        return job

    def _submit(self, launch: Launch) -> SlurmJob:
        logs = launch.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # Ours come last, and win.
        words = [
            "sbatch",
            *self.options,
            "--parsable",
            f"--job-name=megaresume-smoke-{launch.name}",
            f"--nodes={launch.nodes}",
        ]
        words += ["--open-mode=append", f"--output={logs / 'slurm-%j.log'}", "--export=ALL"]
        words += [f"--partition={self.partition.name}", str(self.script), *launch.flags]
        answer = ask(*words, env=os.environ | dict(launch.env), failing="sbatch refuses the job")
        return SlurmJob(self, launch, answer.strip().split(";")[0], restarts=0)

    def _again(self, after: SlurmJob, launch: Launch) -> SlurmJob | None:
        """The requeued job, with the nodes of the next launch; None: it may not be changed, and was cancelled."""
        info = after.info
        assert info is not None  # it is pending
        tasks = launch.nodes * max(1, after.tasks_per_node)
        changes = [f"NumNodes={launch.nodes}-{launch.nodes}", f"NumTasks={tasks}", f"NumCPUs={tasks}"]
        if info.time_limit != after.time_limit:
            changes.append(f"TimeLimit={'UNLIMITED' if after.time_limit is None else after.time_limit}")
        needed = launch.nodes
        if after.lost.node and needed > sum(map(usable, nodes_of(self.partition.name).values())):
            undo(after.lost)  # there are no others
        done = try_to("scontrol", "update", f"JobId={after.id}", *changes)
        if done.returncode == 0:
            done = try_to("scontrol", "release", after.id)
        if done.returncode:
            after.cancel()
            return None
        after.handed_over = True
        return SlurmJob(self, launch, after.id, restarts=info.restarts)


def _own_script(launch: str) -> Path:
    name = {"torchrun": "train.sbatch", "deepspeed": "train-deepspeed.sbatch"}[launch]
    return Path(__file__).parents[2] / "launch" / "slurm" / name


class SlurmJob:
    """One attempt of a job; the next attempt of a requeued job is another object with the same id."""

    def __init__(self, launcher: SlurmLauncher, launch: Launch, job: str, *, restarts: int) -> None:
        self._launcher, self._launch = launcher, launch
        #: Slurm's, and how often it had been queued again when this attempt began.
        self.id, self.restarts = job, restarts
        self.partition = launcher.partition
        #: what a stop has done to the cluster.
        self.lost = Lost()
        #: minutes; shortened to stop it by the wall time.
        self.time_limit: int | None = None
        self.tasks_per_node = 1
        self._batch_log = launch.run_dir / "logs" / f"slurm-{job}.log"
        # Each attempt appends to it.
        self._log_begin = self._batch_log.stat().st_size if self._batch_log.exists() else 0
        #: whether the next attempt has the job, and it is no longer this one's to end.
        self.handed_over = False
        self._looked = -math.inf

    @property
    def info(self) -> JobInfo | None:
        """What Slurm says; None: it has forgotten the job."""
        return find_job(self.id)

    @property
    def urgent(self) -> Partition:
        """Whose jobs preempt this one."""
        return self._launcher.urgent

    def running(self) -> bool:
        """See `Job`. An attempt that ended although nobody stopped it does not run, even where its job came back."""
        # Asked often, and every answer costs the controller something.
        if time.monotonic() < self._looked + _POLL:
            return True
        info = self.info
        running = info is not None and not info.over and info.restarts == self.restarts
        self._looked = time.monotonic() if running else -math.inf
        return running

    def wait_for_start(self, timeout: float) -> None:
        """Wait in the queue.

        Raises:
            SetupError: it never starts, or not within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            info = self.info
            if info is None or info.over or info.state not in ("PENDING", "CONFIGURING", "REQUEUED", "COMPLETING"):
                break
            hopeless = info.state == "PENDING" and info.reason in _HOPELESS
            if hopeless or time.monotonic() > deadline:
                raise SetupError(
                    f"job {self.id} is never started" if hopeless else f"job {self.id} is not started",
                    found=f"pending, Reason={info.reason}, {info.num_nodes} nodes of partition {self.partition.name}"
                    + ("" if hopeless else f", for {timeout:.0f} seconds"),
                    expected="a job that runs",
                    action="other --nodes, --partition or --sbatch-options; it was cancelled"
                    if hopeless
                    else "squeue --start shows what it waits for; it was cancelled",
                )
            time.sleep(_POLL)
        if info is not None:
            self.time_limit, self.tasks_per_node = info.time_limit, max(1, info.num_tasks // max(1, info.num_nodes))

    def stop(self, kind: Kind) -> float:
        """See `Job`."""
        info = self.info
        if info is None or info.state != "RUNNING" or info.restarts != self.restarts:
            raise SetupError(
                f"there was nothing to stop with {kind}",
                found=f"job {self.id}: " + ("forgotten by Slurm" if info is None else f"{info.state} ({info.reason})"),
                expected="a job that runs",
                action=f"look at {self._batch_log}",
            )
        at = time.time()
        STOPS[kind](self, info)
        try:
            if not self._until(self._stopped, self._launcher.grace):
                try_to("scancel", "--batch", "--signal=KILL", self.id)  # else it has its KillWait as well
                self.cancel()
                self._refuse_going_on(kind)
        finally:
            if self.lost.urgent_job:
                self._end(self.lost.urgent_job)
                self.lost.urgent_job = ""
        return at

    def _stopped(self) -> bool:
        info = self.info
        if info is None or info.over:
            return True
        if info.state == "PENDING":
            # Held before it can start again, so that it can be given other nodes; stock clusters leave two minutes.
            try_to("scontrol", "uhold", self.id)
            info = self.info
            return info is None or info.state == "PENDING"
        if info.state == "RUNNING" and info.restarts > self.restarts:
            # It was quicker than this look at it.
            try_to("scontrol", "requeuehold", self.id)
        return False

    def _refuse_going_on(self, kind: Kind) -> None:
        if kind in ("sigkill", "node-down"):
            return  # ranks that wait for a lost one: cancelled, as their user would do
        raise SetupError(
            f"the job went on after {kind}",
            found=f"job {self.id} still runs {self._launcher.grace:.0f} seconds later; it was cancelled",
            expected="a script that lets all ranks save, and ends",
            cause="a batch script that waits for srun in the foreground runs its trap when srun is over",
            action="trap the signal as launch/slurm/train.sbatch does, with srun in the background and `wait`",
        )

    def wait(self, timeout: float) -> int:
        """See `Job`. An attempt that failed and was queued again by its script counts as failed."""
        if not self._until(lambda: not self.running(), timeout):
            text = self.text()[-2000:]
            self.close()
            raise SetupError(
                f"job {self.id} did not end within {timeout:.0f} seconds, and was cancelled",
                found=text,
                action=f"look at {self._batch_log}",
            )
        info = self.info
        if info is not None and not info.over:
            self.cancel()
            return 1
        return 0 if info is None else info.exit_status

    def waits(self) -> bool:
        """Whether the stopped job was queued again."""
        info = self.info
        return info is not None and not info.over

    def text(self) -> str:
        """See `Job`: the batch log, and below the run directory the logs of the nodes in this attempt."""
        texts = []
        with suppress(FileNotFoundError), open(self._batch_log, "rb") as file:
            file.seek(self._log_begin)
            texts.append(file.read().decode("utf-8", errors="replace"))
        nodes = sorted((self._launch.run_dir / "logs").glob(f"{self.id}.{self.restarts}/*.log"))
        return "".join([*texts, *(log.read_text(encoding="utf-8", errors="replace") for log in nodes)])

    def close(self) -> None:
        """See `Job`."""
        try:
            if not self.handed_over:
                self.cancel()
        finally:
            undo(self.lost)

    def cancel(self) -> None:
        """End the job, and wait until Slurm has.

        Raises:
            SetupError: it does not end.
        """
        self._end(self.id)

    def _end(self, job: str) -> None:
        def over() -> bool:
            info = find_job(job)
            return info is None or info.over

        if over():
            return
        try_to("scancel", job)
        if not self._until(over, _CANCEL):
            raise SetupError(
                f"job {job} does not end",
                found=f"still there {_CANCEL:.0f} seconds after scancel",
                action=f"scontrol show job {job}",
            )

    def _until(self, condition: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL)
        return True
