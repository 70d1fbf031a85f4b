"""A launcher starts a launch of a training, stops it in a given way, and lets it come back:

    launcher.check(...)            refused before anything runs
    job = launcher.start(launch)   the first launch
    job.stop(kind)                 stopped, and every process of it gone
    job = launcher.start(next, after=job)   a requeued job comes back by itself, with other nodes; any other is launched

A launch is what changes between the starts of a run: nodes, ranks, flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

#: how a job is stopped. ``sigkill``: SIGKILL to one rank. ``sigterm``: SIGTERM to the launch script. ``requeue``: as
#: ``scontrol requeue`` does. ``node-down``: a node of the job is lost. ``walltime``: the time limit. ``preempt``: a job
#: of higher priority takes the nodes.
Kind = Literal["sigkill", "sigterm", "requeue", "node-down", "walltime", "preempt"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch of the training."""

    #: nodes, and ranks on each.
    nodes: int
    ranks_per_node: int
    #: flags of the launch script, after its own.
    flags: tuple[str, ...]
    #: set for the launch script, on top of the environment.
    env: tuple[tuple[str, str], ...]
    #: the directory for checkpoints, logs, records; below the directory of the smoke test.
    run_dir: Path
    #: the name for jobs and logs: ``reference``, ``run``.
    name: str


class RunningLaunch(Protocol):
    """A launch that was started."""

    def running(self) -> bool:
        """Whether it runs, waits for its nodes, or will come back."""

    def stop(self, kind: Kind) -> float:
        """Stop it in that way, and wait until every process of this attempt is gone.

        Returns:
            when it was stopped: seconds of `time.time`.

        Raises:
            SetupError: it cannot be stopped so, or continued.
        """

    def wait(self, timeout: float) -> int:
        """Wait for its end; the exit status.

        Raises:
            SetupError: not within ``timeout`` seconds; it is ended first.
        """

    def text(self) -> str:
        """What it has printed so far, on all nodes."""

    def close(self) -> None:
        """End whatever still runs, and undo what `stop` did to the cluster."""


class Launcher(Protocol):
    """Starts the jobs of a scenario."""

    #: where the jobs run, in words; for a cluster once `check` has asked it.
    description: str

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """Find out whether all of it can run here.

        Raises:
            UsageError: a partition that does not exist, more nodes than there are.
            SetupError: no Slurm here, no permission, clocks of nodes that differ, a directory that not every node sees.
        """

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """Start it; ``after``: it continues where this stopped job was."""
