"""One attempt of a Slurm job: whether it runs, its stop, its end.

RUNNING  --stop-->  COMPLETING  -->  PENDING, held: queued again, for the next attempt to take over
                                -->  COMPLETED, FAILED, TIMEOUT, CANCELLED ...: over
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress

from megaresume.cluster.launching.slurm_commands import JobInfo, Partition, find_job, kill_wait, try_to
from megaresume.cluster.smoke.job import Kind, Launch
from megaresume.cluster.smoke.slurm_stops import STOPS, Lost, undo
from megaresume.stream.errors import SetupError

#: seconds that a cancelled job may take: Slurm kills it after its KillWait.
_CANCEL = 300.0
#: seconds between two looks at a job that something is expected of, and at one that trains.
_POLL, _LOOK = 0.25, 1.0
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


class SlurmJob:
    """One attempt of a job; the next attempt of a requeued job is another object with the same id.

    Args:
        launch: what runs.
        job: Slurm's number.
        restarts: how often it had been queued again when this attempt began.
        partition: where it runs.
        urgent: finds the partition whose jobs preempt it.
        grace: seconds between a stop and the end of the attempt.
    """

    def __init__(
        self,
        launch: Launch,
        job: str,
        *,
        restarts: int,
        partition: Partition,
        urgent: Callable[[], Partition],
        grace: float,
    ) -> None:
        self._launch, self._urgent, self._grace = launch, urgent, grace
        self.id, self.restarts = job, restarts
        self.partition = partition
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
        return self._urgent()

    def running(self) -> bool:
        """See `Job`. An attempt that ended although nobody stopped it does not run, even where its job came back."""
        # Asked often, and every answer costs the controller something.
        if time.monotonic() < self._looked + _LOOK:
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
            if not _until(self._stopped, self._grace):
                try_to("scancel", "--batch", "--signal=KILL", self.id)  # else it has its KillWait as well
                end(self.id)
                self._refuse_going_on(kind)
            if kind == "node-down" and len(info.nodes) == 1:
                # Slurm waits for the ranks on all nodes but this one, where they save, or are killed.
                time.sleep(max(0.0, at + kill_wait() + 1 - time.time()))
        finally:
            if self.lost.urgent_job:
                end(self.lost.urgent_job)
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
            found=f"job {self.id} still runs {self._grace:.0f} seconds later; it was cancelled",
            expected="a script that lets all ranks save, and ends",
            cause="a batch script that waits for srun in the foreground runs its trap when srun is over",
            action="let launch/slurm/train.sbatch start it, or trap the signal, with srun in the background and `wait`",
        )

    def wait(self, timeout: float) -> int:
        """See `Job`. An attempt that failed and was queued again by its script counts as failed."""
        if not _until(lambda: not self.running(), timeout):
            text = self.text()[-2000:]
            self.close()
            raise SetupError(
                f"job {self.id} did not end within {timeout:.0f} seconds, and was cancelled",
                found=text,
                action=f"look at {self._batch_log}",
            )
        info = self.info
        if info is not None and not info.over:
            end(self.id)
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
        """See `Job`. A node that was set down is given back at once, not only when the job has ended."""
        try:
            if not self.handed_over:
                _cancel(self.id)
        finally:
            undo(self.lost)
        if not self.handed_over:
            end(self.id)


def end(job: str) -> None:
    """End a job, and wait until Slurm has.

    Raises:
        SetupError: it does not end.
    """
    _cancel(job)
    if not _until(lambda: _over(job), _CANCEL):
        raise SetupError(
            f"job {job} does not end",
            found=f"still there {_CANCEL:.0f} seconds after scancel",
            action=f"scontrol show job {job}",
        )


def _cancel(job: str) -> None:
    if not _over(job):
        try_to("scancel", job)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL)
    return True


def _over(job: str) -> bool:
    info = find_job(job)
    return info is None or info.over
