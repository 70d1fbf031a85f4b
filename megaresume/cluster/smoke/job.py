"""What a launcher is to the smoke test: it starts a launch, stops it in a given way, and lets it come back.

    launcher.check(...)            refused before anything runs
    job = launcher.start(launch)   the first launch
    job.stop(kind)                 stopped, and every process of it gone
    job = launcher.start(next, after=job)   a requeued job comes back by itself, with other nodes; any other is launched

A launch is what changes between the starts of a run: nodes, ranks, flags.

Ctrl-C, a kill, a terminal that is closed: what was started is ended, and a node that was set down comes back.

    first     -> KeyboardInterrupt: whoever started something ends it on the way out
    second    -> a line: that is still going on
    third     -> KeyboardInterrupt, wherever it comes
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, get_args

#: by default the last two end a program at once, with all that it has started left behind.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def cleaned_up() -> Iterator[None]:
    """Within it these signals are a KeyboardInterrupt, see above. One that is ignored, as by nohup, stays so."""
    told = 0

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal told
        told += 1
        if told != 2:
            raise KeyboardInterrupt
        with contextlib.suppress(OSError):  # the terminal may be gone
            os.write(2, b"megaresume: still ending the jobs and giving back nodes; once more leaves them as they are\n")

    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        for number, old in before.items():
            if old != signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


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
    #: of the launch script, after its own.
    flags: tuple[str, ...]
    #: set for the launch script, on top of the environment.
    env: tuple[tuple[str, str], ...]
    #: for checkpoints, logs, records; below the directory of the smoke test.
    run_dir: Path
    #: for names of jobs and logs: ``reference``, ``run``.
    name: str


class Job(Protocol):
    """A launch that was started."""

    def running(self) -> bool:
        """Whether it runs, waits for its nodes, or will come back."""

    def stop(self, kind: Kind) -> float:
        """Stop it in that way, and wait until every process of this attempt is gone.

        Returns:
            when it was stopped: seconds of `time.time`.

        Raises:
            SetupError: it cannot be stopped so, or went on.
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
    """Starts jobs."""

    #: where the jobs run, in words; of a cluster when `check` has asked it.
    description: str

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """Find out whether all of it can run here.

        Raises:
            UsageError: a partition that does not exist, more nodes than there are.
            SetupError: no Slurm here, no permission, clocks of nodes that differ, a directory that not every node sees.
        """

    def start(self, launch: Launch, *, after: Job | None = None) -> Job:
        """Start it; ``after``: it goes on where this stopped job was."""
