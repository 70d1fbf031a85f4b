"""A launcher starts a launch of a training, stops it in a given way, and lets it resume:

    launcher.check(...)            refuses before anything runs
    job = launcher.start(launch)   the first launch
    job.stop(kind)                 stopped; all of its processes are gone
    job = launcher.start(next, after=job)   a requeued job resumes by itself, on other nodes; any other is launched

A launch is what changes between starts of a run: nodes, ranks, flags.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, get_args

#: how a job is stopped. ``sigkill``: SIGKILL to one rank. ``sigterm``: SIGTERM to the launch script. ``requeue``: like
#: ``scontrol requeue``. ``node-down``: the job loses a node. ``walltime``: the time limit. ``preempt``: a job of higher
#: priority takes the nodes.
Kind = Literal["sigkill", "sigterm", "requeue", "node-down", "walltime", "preempt"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One launch of the training."""

    #: number of nodes, and ranks on each.
    nodes: int
    ranks_per_node: int
    #: additional flags for the launch script.
    flags: tuple[str, ...]
    #: additional environment variables for the launch script.
    env: tuple[tuple[str, str], ...]
    #: the directory for checkpoints, logs and records, below that of the smoke test.
    run_dir: Path
    #: the name in jobs and logs: ``reference``, ``run``.
    name: str


class RunningLaunch(Protocol):
    """A running launch."""

    def running(self) -> bool:
        """Whether it runs, waits for its nodes, or will resume."""

    def stop(self, kind: Kind) -> float:
        """Stop it in this way, and wait until all processes of this attempt are gone.

        Returns:
            when it was stopped: seconds of `time.time`.

        Raises:
            SetupError: it cannot be stopped in this way, or cannot be continued.
        """

    def wait(self, timeout: float) -> int:
        """Wait for its end; returns the exit status.

        Raises:
            SetupError: not within ``timeout`` seconds; it is ended first.
        """

    def text(self) -> str:
        """Its output so far, on all nodes."""

    def close(self) -> None:
        """End everything that still runs, and undo what `stop` did to the cluster."""


class Launcher(Protocol):
    """Starts the jobs of a scenario."""

    #: where the jobs run, in words; for a cluster, known after `check`.
    description: str

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """Check that everything can run here.

        Raises:
            UsageError: a partition that does not exist, too few nodes.
            SetupError: no Slurm here, no permission, nodes whose clocks differ, a directory that a node does not see.
        """

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """Start a launch; ``after``: a stopped job to be continued."""
