"""Launches as jobs of a Slurm cluster.

    sbatch --nodes=2 SCRIPT FLAGS       attempt 0   RUNNING
      stopped in some way               ->          PENDING, queued again by Slurm or by its script: held
      scontrol update NumNodes=3-3      ->          released
                                        attempt 1   RUNNING on other nodes, same flags
    a job that ended instead            ->          a new sbatch with the flags of the next launch

Everything is asked by polling: `sbatch --wait` looks only now and then.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from megaresume.cluster.job import Kind, Launch, RunningLaunch
from megaresume.cluster.launching.slurm_commands import (
    Partition,
    ask,
    nodes_of,
    option,
    script_options,
    try_to,
    usable,
    version,
)
from megaresume.cluster.smoke import slurm_check as checks
from megaresume.cluster.smoke.slurm_check import check_nodes
from megaresume.cluster.smoke.slurm_job import SlurmAttempt, end, undo
from megaresume.shipped import launch_script

#: seconds between a stop and the end of the attempt: saves, and whatever waits for the ranks.
GRACE = 300.0
#: seconds in the queue.
QUEUE = 1800.0
_OWN = "slurm/train.sbatch"


class SlurmLauncher:
    """Starts a batch script on the cluster that ``sinfo`` shows.

    Args:
        script: for sbatch; it passes its arguments on, as ``launch/slurm/train.sbatch`` does. None: ours.
        launch: the launcher of ours.
        partition: None: that of the script or of the options, else the default one.
        urgent_partition: whose jobs preempt; None: found by its priority.
        options: words for sbatch, as ``--account=x``.
        grace: seconds, see `GRACE`.
        queue: seconds, see `QUEUE`.
    """

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
        self.script = launch_script(_OWN) if script is None else script.resolve()
        # No node is left out for a rank that the test has killed.
        self._settings = {"LAUNCHER": launch, "EXCLUDE_NODES": "0"} if script is None else {}
        self.options = tuple(options)
        self.grace, self.queue = grace, queue
        self._partition_name, self._urgent_name = partition, urgent_partition
        self.description = "Slurm"

    @cached_property
    def partition(self) -> Partition:
        """Where the jobs run.

        Raises:
            UsageError: see `checks.choose_partition`.
        """
        words = [*script_options(self.script), *self.options]
        return checks.choose_partition(self._partition_name or option(words, "partition", "p"))

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
        # One more than a launch has, if there is one: the job of a lost node continues there.
        count = min(len(working), most + ("node-down" in kinds), self.partition.max_nodes or len(working))
        for directory in sorted({launch.run_dir.parent for launch in launches}):
            directory.mkdir(parents=True, exist_ok=True)
            asked = check_nodes(self.partition, count, directory, words, timeout=self.queue)
        self.description = f"Slurm {release}, partition {self.partition.name}: {len(nodes)} nodes, {len(asked)} asked"

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """See `Launcher`.

        Raises:
            SetupError: it is never started, or not in time.
        """
        job = self._again(after, launch) if isinstance(after, SlurmAttempt) and after.waits() else None
        job = job or self._submit(launch)
        try:
            job.wait_for_start(self.queue)
        except BaseException:
            job.close()
            raise
        if isinstance(after, SlurmAttempt):
            undo(after.lost)
        return job

    def _submit(self, launch: Launch) -> SlurmAttempt:
        logs = launch.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        # Ours come last, and win.
        words = ["sbatch", *self.options, "--parsable", f"--nodes={launch.nodes}"]
        words += [f"--job-name=megaresume-smoke-{launch.name}"]
        words += ["--open-mode=append", f"--output={logs / 'slurm-%j.log'}", "--export=ALL"]
        words += [f"--partition={self.partition.name}", str(self.script), *launch.flags]
        answer = ask(*words, env=os.environ | self._settings | dict(launch.env), failing="sbatch refuses the job")
        return self._job(launch, answer.strip().split(";")[0], restarts=0)

    def _again(self, after: SlurmAttempt, launch: Launch) -> SlurmAttempt | None:
        """The requeued job, with the nodes of the next launch; None if it may not be changed, and was cancelled."""
        info = after.info
        assert info is not None  # it is pending
        tasks = launch.nodes * max(1, after.tasks_per_node)
        changes = [f"NumNodes={launch.nodes}-{launch.nodes}", f"NumTasks={tasks}"]
        changes.append(f"NumCPUs={tasks * info.cpus_per_task}")  # else those of the old nodes are waited for
        if info.time_limit != after.time_limit:
            changes.append(f"TimeLimit={'UNLIMITED' if after.time_limit is None else after.time_limit}")
        if after.lost.node and launch.nodes > sum(map(usable, nodes_of(self.partition.name).values())):
            undo(after.lost)  # there are no others
        done = try_to("scontrol", "update", f"JobId={after.id}", *changes)
        if done.returncode == 0:
            done = try_to("scontrol", "release", after.id)
        if done.returncode:
            end(after.id)
            return None
        after.handed_over = True
        return self._job(launch, after.id, restarts=info.restarts)

    def _job(self, launch: Launch, job: str, *, restarts: int) -> SlurmAttempt:
        return SlurmAttempt(
            launch, job, restarts=restarts, partition=self.partition, urgent=lambda: self.urgent, grace=self.grace
        )
