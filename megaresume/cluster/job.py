"""What a launcher is: it starts a launch of a training, stops it in a given way, and lets it come back.

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
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal, Protocol, get_args

from megaresume.cluster.records import RunRecords, read_records
from megaresume.stream.errors import UsageError

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
    """Starts jobs."""

    #: where the jobs run, in words; of a cluster when `check` has asked it.
    description: str

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """Find out whether all of it can run here.

        Raises:
            UsageError: a partition that does not exist, more nodes than there are.
            SetupError: no Slurm here, no permission, clocks of nodes that differ, a directory that not every node sees.
        """

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """Start it; ``after``: it continues where this stopped job was."""


class Watch:
    """Looks at the records again and again.

    Args:
        records: file or directory.
        steps: of the whole run.
        what: in front of the bar.
        read: what is there -> its records.
    """

    def __init__(
        self, records: Path, steps: int, what: str, *, read: Callable[[Path], RunRecords | None] = read_records
    ) -> None:
        from tqdm import tqdm

        self._path, self._read = records, read
        self._size = -1
        self._times: list[float] = []
        #: the last step done, and where the last start began.
        self.step = 0
        #: as read last; None: nothing yet.
        self.records: RunRecords | None = None
        #: seconds of `time.monotonic` when there was something new.
        self.changed = time.monotonic()
        self._bar = tqdm(total=steps, desc=what, unit="step", disable=None, leave=False, file=sys.stderr)
        self.reached(None)

    @property
    def starts(self) -> int:
        """How many there have been."""
        return 0 if self.records is None else len(self.records.starts)

    @property
    def start(self) -> int:
        """The step that the last one began with; 0: there is none."""
        return int(self.records.starts[-1]["step"]) if self.records is not None and self.records.starts else 0

    @property
    def step_seconds(self) -> float:
        """Of the last steps, on average."""
        last = self._times[-4:]
        return (last[-1] - last[0]) / max(len(last) - 1, 1) if last else 0.0

    def reached(self, step: int | None) -> bool:
        """Look again; say whether this step is done (None: no)."""
        size = _size(self._path)
        if size != self._size:
            self._size = size
            self.changed = time.monotonic()
            self.records = self._read(self._path) if size else None
            done = 0 if self.records is None else max([self.start, *self.records.steps])
            if done > self.step:
                self._times.append(time.monotonic())
            self.step = done
            self._bar.update(done - self._bar.n)
        return step is not None and self.step >= step

    def close(self) -> None:
        """Remove the bar."""
        self.reached(None)
        self._bar.close()


def _size(path: Path) -> int:
    """Bytes, in all files."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size if path.exists() else 0


def own_directory(out: Path, *, mark: str, what: str, overwrite: bool) -> None:
    """Make it, empty but for the mark.

    Args:
        out: the directory.
        mark: name of the file that says whose it is.
        what: what fills it, in a word.
        overwrite: remove what an earlier one has left.

    Raises:
        UsageError: it is not empty, and not to be removed; it is not a directory, or cannot be made.
    """
    try:
        _make(out, mark, what, overwrite)
    except OSError as error:
        raise UsageError(
            f"cannot make --out {out}",
            found=f"{error.filename or out}: {error.strerror or error}",
            expected="a directory, or a place to make one",
            action="--out ANOTHER",
        ) from error


def _make(out: Path, mark: str, what: str, overwrite: bool) -> None:
    if out.exists() and any(out.iterdir()):
        if not (out / mark).exists():
            raise UsageError(
                "the directory holds something else",
                found=f"{out}, not empty",
                expected=f"an empty directory, or one of an earlier {what}",
                action="--out ANOTHER",
            )
        if not overwrite:
            raise UsageError(
                f"an earlier {what} is there",
                found=f"{out}",
                expected="an empty directory",
                action=f"--overwrite, or --out ANOTHER; its report: {out / 'report.html'}",
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / mark).touch()
