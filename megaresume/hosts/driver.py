"""A run of the host contract (`Job`), what starts it (`Driver`), and what it has trained (`write_down`, `trained`).

Also for programs without pytest: see `megaresume.hosts.contract`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any, Literal

from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

#: items in the data set, and samples per step.
ITEMS, STEP = 100, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A run for a driver to start."""

    #: for the checkpoints; what is trained is recorded beside it.
    directory: Path
    #: the number of this process in the run, from 1; passed to `write_down`.
    attempt: int = 1
    #: data-parallel ranks.
    ranks: int = 1
    #: number of items in the data set.
    items: int = ITEMS
    #: samples in a micro-batch of a rank, and micro-batches per step.
    batch: int = 4
    accumulation: int = 2
    #: after which the run ends. It also saves at its end.
    epochs: int = 3
    #: the same for a trainer that counts steps: the number of the last one, since the start of the run.
    steps: int = 3 * ITEMS // STEP
    #: steps between two saves.
    save_every: int = 50
    #: SIGKILL a rank here: during the ``save`` of a step, with files half written, or after a ``step``.
    kill: tuple[Literal["", "save", "step"], int] = ("", 0)
    #: for `Checkpoints`, if not empty: the URL of an object store. Then the program calls `wait_for_copies`.
    stage_to: str = ""
    #: a file named in `StopConditions`, which the program creates after this many steps; 0: none.
    stop_after: int = 0
    #: option of the data, if it has grown.
    append: Literal["next_epoch", "now"] | None = None
    #: the program's mistake: to ``look`` at a batch before it trains; to forget to ``load``; or its data resumes at
    #: another ``place``, by `misplaced`.
    mistake: Literal["", "look", "load", "place"] = ""


@dataclass(frozen=True, slots=True)
class Ran:
    """A finished run."""

    #: 0; not 0 if the program was refused or killed.
    status: int
    #: standard output and standard error.
    said: str


class Driver(ABC):
    """Starts the runs of one trainer. A run with one rank that is not killed may train in the tests' process."""

    @abstractmethod
    def run(self, job: Job) -> Ran:
        """Train to the end, or as far as the job says."""


class ProgramDriver(Driver):
    """A driver for a program that gets the job as JSON, and starts a process for each run.

    Args:
        command: for one rank; the JSON is its last argument, with ``directory`` as a string.
        launcher: words before the command, for several ranks: ``{ranks}`` in them is replaced by their number.
    """

    def __init__(self, command: Sequence[str], launcher: Sequence[str] = ()) -> None:
        self.command, self.launcher = command, launcher

    def run(self, job: Job) -> Ran:
        """See `Driver`."""
        words = [word.format(ranks=job.ranks) for word in self.launcher] if job.ranks > 1 else []
        asked = json.dumps(asdict(job) | {"directory": str(job.directory)})
        done = subprocess.run([*words, *self.command, asked], capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout + done.stderr)


# What was trained


def write_down(directory: Path, rank: int, **line: Any) -> None:
    """Write a line to the record of a rank, beside the directory.

    Args:
        directory: of the job.
        rank: the rank that writes.
        line: ``attempt``; the current ``step``, from 1; the ``items`` of a micro-batch; its ``loss``.
    """
    with directory.with_name(f"{directory.name}.record.{rank}").open("a") as file:
        file.write(json.dumps({"rank": rank, **line}) + "\n")


def wait_for_copies(job: Job, step: int, seconds: float = 120.0) -> None:
    """Call after each step: the last one before a kill waits until something saved has been copied.

    Args:
        job: one that has saved something by then.
        step: the step that was done.
        seconds: most seconds to wait.

    Raises:
        TimeoutError: nothing was copied.
    """
    if not job.stage_to or job.kill != ("step", step + 1):
        return
    deadline = time.monotonic() + seconds
    while not any(json.loads(note.read_bytes()).get("copied") for note in job.directory.rglob("staging.json")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"no checkpoint was copied to {job.stage_to} in {seconds:.0f} s")
        time.sleep(0.02)


@contextmanager
def misplaced(job: Job) -> Iterator[None]:
    """Wrap a program: if its mistake is ``place``, its data resumes a step after the position in its state."""
    restore = Stream.restore

    def restore_later(self: Stream, state: StreamState | None) -> None:
        restore(self, None if state is None else state.replace(samples=state.samples + STEP))

    if job.mistake == "place":
        Stream.restore = restore_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        Stream.restore = restore  # type: ignore[method-assign]


def lines(directory: Path) -> list[dict[str, Any]]:
    """The lines that all ranks have written beside a directory, in all attempts."""
    paths = sorted(directory.parent.glob(f"{directory.name}.record.*"))
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def trained(directory: Path) -> list[list[int]]:
    """The items of each step, in stream order; a step that a later process repeated counts once."""
    steps: dict[int, dict[int, list[list[int]]]] = {}
    written = lines(directory)
    for attempt in sorted({line["attempt"] for line in written}):
        mine = [line for line in written if line["attempt"] == attempt]
        first = min(line["step"] for line in mine)
        steps = {step: of_ranks for step, of_ranks in steps.items() if step < first}
        for line in mine:
            steps.setdefault(line["step"], {}).setdefault(line["rank"], []).append(line["items"])
    assert sorted(steps) == list(range(1, len(steps) + 1))
    return [
        [item for of_ranks in zip_longest(*steps[step].values(), fillvalue=[]) for items in of_ranks for item in items]
        for step in sorted(steps)
    ]


def items(steps: list[list[int]]) -> list[int]:
    """The items of all steps, in order."""
    return list(chain.from_iterable(steps))


def losses(directory: Path) -> dict[int, list[float]]:
    """The losses of each step, as it was last trained."""
    found: dict[tuple[int, int], list[float]] = {}
    for line in lines(directory):
        found.setdefault((line["step"], line["attempt"]), []).append(line["loss"])
    return {step: found[step, attempt] for step, attempt in sorted(found)}


def copied(directory: Path, to: Path) -> Path:
    """Copy a run, with the records beside it."""
    for path in directory.parent.iterdir():
        (shutil.copytree if path.is_dir() else shutil.copy)(path, to / path.name)
    return to / directory.name
