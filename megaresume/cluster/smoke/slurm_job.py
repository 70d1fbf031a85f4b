"""One attempt of a Slurm job: its state, its stop, its end.

RUNNING  --stop-->  COMPLETING  -->  PENDING, held: requeued, for the next attempt to take over
                                -->  COMPLETED, FAILED, TIMEOUT, CANCELLED ...: over

The ways to stop it, all of them real: Slurm's own timer, its own preemption.

    sigkill     srun --overlap on the last node: SIGKILL for one rank
    sigterm     scancel --batch --signal=TERM
    requeue     scontrol requeue
    node-down   scontrol update state=down, for a node without the batch script if there is one
    walltime    scontrol update TimeLimit, to the minute after the next: the timer sends the --signal, or kills
    preempt     a job in the urgent partition on the same nodes
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from megaresume.cluster.drivers.slurm_commands import JobInfo, Partition, ask, find_job, kill_wait, try_to
from megaresume.cluster.launcher import Kind, Launch
from megaresume.stream.errors import SetupError

#: seconds that a cancelled job may take to end: Slurm kills it after its KillWait.
_CANCEL = 300.0
#: seconds between two looks at a job that should be changing, and at one that trains.
_POLL, _LOOK = 0.25, 1.0
#: reasons why a job will never start.
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


@dataclass(slots=True)
class Lost:
    """Changes to the cluster that must be undone; empty: none."""

    node: str = ""
    urgent_job: str = ""


class SlurmAttempt:
    """One attempt of a job; the next attempt of a requeued job is another object with the same id.

    Args:
        launch: what runs.
        job: Slurm's number.
        restarts: how often it had been requeued when this attempt began.
        partition: of the job.
        urgent: finds a partition whose jobs preempt it.
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
        #: the resources that a stop took from the cluster.
        self.lost = Lost()
        #: minutes; shortened for a stop by wall time.
        self.time_limit: int | None = None
        self.tasks_per_node = 1
        self._batch_log = launch.run_dir / "logs" / f"slurm-{job}.log"
        # Each attempt appends to it.
        self._log_begin = self._batch_log.stat().st_size if self._batch_log.exists() else 0
        #: whether the next attempt has taken over the job, so that this one must not end it.
        self.handed_over = False
        self._looked = -math.inf

    @property
    def info(self) -> JobInfo | None:
        """Slurm's record of the job; None if it has forgotten it."""
        return find_job(self.id)

    @property
    def urgent(self) -> Partition:
        """The partition whose jobs preempt this one."""
        return self._urgent()

    def running(self) -> bool:
        """See `RunningLaunch`. An attempt that ended by itself is not running, even if its job was requeued."""
        # Called often, while every answer costs the controller time.
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
        """See `RunningLaunch`."""
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
                try_to("scancel", "--batch", "--signal=KILL", self.id)  # otherwise it also gets its KillWait
                end(self.id)
                self._refuse_going_on(kind)
            if kind == "node-down" and len(info.nodes) == 1:
                # Slurm waits for the ranks on all nodes but this one, which save or are killed.
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
            # It was requeued before this look at it.
            try_to("scontrol", "requeuehold", self.id)
        return False

    def _refuse_going_on(self, kind: Kind) -> None:
        if kind in ("sigkill", "node-down"):
            return  # its ranks wait for a lost one: cancelled, as their user would do
        raise SetupError(
            f"the job continued after {kind}",
            found=f"job {self.id} still runs {self._grace:.0f} seconds later; it was cancelled",
            expected="a script that lets all ranks save, and ends",
            cause="a batch script that waits for srun in the foreground runs its trap when srun is over",
            action="let launch/slurm/train.sbatch start it, or trap the signal, with srun in the background and `wait`",
        )

    def wait(self, timeout: float) -> int:
        """See `RunningLaunch`. An attempt that failed and was requeued by its script counts as failed."""
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
        """Whether the stopped job was requeued."""
        info = self.info
        return info is not None and not info.over

    def text(self) -> str:
        """See `RunningLaunch`: the batch log, and the nodes' logs of this attempt below the run directory."""
        texts = []
        with suppress(FileNotFoundError), open(self._batch_log, "rb") as file:
            file.seek(self._log_begin)
            texts.append(file.read().decode("utf-8", errors="replace"))
        nodes = sorted((self._launch.run_dir / "logs").glob(f"{self.id}.{self.restarts}/*.log"))
        return "".join([*texts, *(log.read_text(encoding="utf-8", errors="replace") for log in nodes)])

    def close(self) -> None:
        """See `RunningLaunch`. A node that was set down is returned at once, not only when the job has ended."""
        try:
            if not self.handed_over:
                _cancel(self.id)
        finally:
            undo(self.lost)
        if not self.handed_over:
            end(self.id)


def end(job: str) -> None:
    """End a job, and wait until Slurm has ended it.

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


# On the node, kills the last rank: a process of this job and node that has a RANK and whose parent has none, unlike a
# rank's workers. Nodes of a test cluster may share one process table, so the node's name is checked.
_KILL_A_RANK = """
cd /proc || exit
ranks=$(grep -lszx "SLURM_JOB_ID=$1" [0-9]*/environ | xargs -r grep -lszx "SLURMD_NODENAME=$SLURMD_NODENAME" |
  xargs -r grep -lsz '^RANK=[0-9]' | cut -d / -f 1 | sort -n)
for pid in $ranks; do
  parent=$(sed -n 's/^PPid:[[:space:]]*//p' "$pid/status" 2>/dev/null)
  case " $(echo $ranks) " in *" $parent "*) ;; *) last=$pid ;; esac
done
if [ -n "$last" ]; then kill -KILL "$last" && echo "killed $last"; fi
"""


def undo(lost: Lost) -> None:
    """Undo what a stop did to the cluster.

    Raises:
        SetupError: Slurm refuses.
    """
    if lost.urgent_job:
        try_to("scancel", lost.urgent_job)
        lost.urgent_job = ""
    if lost.node:
        node, lost.node = lost.node, ""
        ask("scontrol", "update", f"nodename={node}", "state=resume", failing=f"node {node} cannot be resumed")


def _sigkill(job: SlurmAttempt, info: JobInfo) -> None:
    # The last node: the first one hosts the rendezvous, so its loss would be noticed at once.
    node = info.nodes[-1]
    words = ["srun", "--overlap", "--quiet", f"--jobid={job.id}", f"--nodelist={node}", "--nodes=1", "--ntasks=1"]
    done = try_to(*words, "--chdir=/", "bash", "-c", _KILL_A_RANK, "kill-a-rank", job.id)
    if "killed" not in done.stdout:
        raise SetupError(
            "there was nothing to stop with sigkill",
            found=f"no rank of job {job.id} on {node}" + (f": {done.stderr.strip()}" if done.stderr.strip() else ""),
            expected="processes with RANK in their environment, as torchrun, deepspeed and launch/slurm start them",
            action="leave sigkill out of --kill, or export RANK before the training is started",
        )


def _sigterm(job: SlurmAttempt, info: JobInfo) -> None:
    ask("scancel", "--batch", "--signal=TERM", job.id)


def _requeue(job: SlurmAttempt, info: JobInfo) -> None:
    ask("scontrol", "requeue", job.id, failing="the job cannot be queued again")


def _node_down(job: SlurmAttempt, info: JobInfo) -> None:
    nodes = info.nodes
    node = next((name for name in reversed(nodes) if name != info.batch_host), nodes[0])
    others = [
        other for other in ask("squeue", "--noheader", f"--nodelist={node}", "--format=%A").split() if other != job.id
    ]
    if others:
        raise SetupError(
            f"node {node} is not set down: other jobs run on it",
            found=f"jobs {', '.join(others)}",
            expected="a node that this job has to itself",
            action="--sbatch-options --exclusive, or leave node-down out of --kill",
        )
    job.lost.node = node
    ask("scontrol", "update", f"nodename={node}", "state=down", "reason=megaresume-smoke")


def _walltime(job: SlurmAttempt, info: JobInfo) -> None:
    # At least a minute: Slurm checks limits twice a minute, and a job already over its limit ends without its signal.
    minutes = int(info.run_time // 60) + 2
    ask("scontrol", "update", f"JobId={job.id}", f"TimeLimit={minutes}", failing="its time limit cannot be changed")


def _preempt(job: SlurmAttempt, info: JobInfo) -> None:
    nodes = info.nodes
    words = ["sbatch", "--parsable", "--job-name=megaresume-smoke-urgent", f"--partition={job.urgent.name}"]
    words += [f"--nodes={len(nodes)}", f"--nodelist={','.join(nodes)}", "--exclusive", "--no-requeue"]
    # It only holds the nodes until the preempted job has left them.
    words += ["--time=60", "--output=/dev/null", "--wrap=sleep 3600"]
    job.lost.urgent_job = ask(*words, failing="the job that is to preempt is refused").strip().split(";")[0]


STOPS: dict[Kind, Callable[[SlurmAttempt, JobInfo], None]] = {
    "sigkill": _sigkill,
    "sigterm": _sigterm,
    "requeue": _requeue,
    "node-down": _node_down,
    "walltime": _walltime,
    "preempt": _preempt,
}
