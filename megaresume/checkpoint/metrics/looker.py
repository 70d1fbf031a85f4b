"""`Looker`: the work of a meter's thread: it counts, writes the record of the run, and makes the readings.

It reads one number from the training, its samples; the step follows from its schedule. `Shared` is everything that
both threads use.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.metrics.figures import Reading, Value
from megaresume.checkpoint.metrics.record import (
    EVENTS,
    MAX_LINES,
    Lines,
    Mark,
    RunRecord,
    Tails,
    counts_at,
    marks_of,
    meter_dir,
    rank_path,
)
from megaresume.checkpoint.metrics.segments import Documents
from megaresume.checkpoint.metrics.sinks import Function, Outlet, close_all, outlet_of
from megaresume.checkpoint.metrics.sources import SourceFigures
from megaresume.checkpoint.metrics.steps import Made, StepNumbers
from megaresume.checkpoint.metrics.words import MeterOptions
from megaresume.data.store_counts import KINDS, store_counts
from megaresume.stream.errors import MegaresumeError
from megaresume.stream.stream import Stream

if TYPE_CHECKING:
    from megaresume.checkpoint.metrics.losses import Averages, SegmentSums

#: seconds after which a count that has not fallen is complete.
SETTLED = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a meter knows about its run when training begins."""

    #: the data being trained on; None if it is not a stream: then there are no figures by source.
    stream: Stream | None
    #: return the current number of samples trained, and of optimizer steps.
    samples: Callable[[], int]
    step: Callable[[], int]
    #: returns the samples of this process that were handed out last; None: unknown.
    numbers: Callable[[], Sequence[int]] | None
    #: where it saves; None: nowhere.
    root: Path | None
    #: id of the run: 16 hex digits, the same after a resume.
    run: str
    #: number of starts of the run, including this one; when this process was started, in seconds since 1970.
    attempt: int
    born: float
    #: returns figures of checkpoints, and of the time since the run's first start, from its marks. On rank 0.
    of_run: Callable[[Sequence[Mark]], Mapping[str, Value]] = lambda marks: {}


@dataclass(slots=True)
class Shared:
    """What the training thread (`Meter`) and the measuring thread (`Looker`) both use."""

    options: MeterOptions
    #: written by the training thread.
    clocks: Clocks
    #: rank of this process in the job; rank 0 feeds the sinks.
    rank: int
    #: (step, samples) at which training began; written by the training thread before the other one starts.
    first: tuple[int, int] = (0, 0)
    #: losses: the training thread adds, the other one takes. None until there are any.
    sums: SegmentSums | None = None
    #: losses and gradient norms of steps: likewise.
    steps: StepNumbers = field(default_factory=StepNumbers)
    #: the newest reading; written by the measuring thread.
    latest: Reading | None = None
    #: the newest reading, until the trainer's loggers have it: taken by the training thread.
    pending: Reading | None = None

    def mark(self, event: str, step: int, samples: int) -> Mark:
        """A mark of the current moment."""
        return Mark(
            event=event,
            time=time.time(),
            step=step,
            samples=samples,
            waited=round(self.clocks.waited, 6),
            saving=round(self.clocks.saving, 6),
        )


class Looker:
    """The work of a meter's thread.

    Args:
        shared: with the meter.
        watched: the run.
    """

    def __init__(self, shared: Shared, watched: Watched) -> None:
        self._shared, self._watched = shared, watched
        self._options, self._clocks, self._rank = shared.options, shared.clocks, shared.rank
        self._step, self._samples = shared.first
        self._last = time.time(), self._step
        self._directory = None if watched.root is None else meter_dir(watched.root)
        self._record: RunRecord | None = None
        self._figures: Lines | None = None
        self._own: Lines | None = None
        self._tails: Tails | None = None
        self._marks: list[Mark] = []
        #: an error of a file of the run; raised once the sinks have their reading.
        self._error: OSError | None = None
        self._sources: SourceFigures | None = None
        self._averages: Averages | None = None
        #: file of a process -> its newest line.
        self._newest: dict[str, Mapping[str, Any]] = {}
        self._outlets: list[Outlet] = []
        self._is_open = False

    def _open(self) -> None:
        """Open files and the stream: in the thread, as it may take a while."""
        if self._is_open:
            return
        self._is_open = True
        watched, directory = self._watched, self._directory
        lines: list[dict[str, Any]] = []
        if self._rank == 0:
            if directory is not None:
                self._record = RunRecord(directory)
                self._figures = Lines(directory / "figures.jsonl", keep=MAX_LINES)
                self._tails = Tails(directory)
                lines = self._record.before
                self._marks = marks_of(lines)
            if watched.stream is not None:
                self._sources = SourceFigures(watched.stream, self._samples, counts_at(lines, self._samples))
            self._outlets = [Outlet("a function", partial(Function, f)) for f in self._options.functions]
            self._outlets += [
                outlet_of(word, where, directory, watched.run)
                for word, where in self._options.sinks
                if (word, where) != ("jsonl", "")  # already written by `_figures`
            ]
        if directory is not None:
            self._own = Lines(rank_path(directory, self._rank), keep=MAX_LINES)

    def position(self) -> tuple[int, int]:
        """(step, samples) trained."""
        step, samples = self._settled()
        watched = self._watched
        if watched.stream is not None and watched.stream.schedule is not None:
            first_step, first = self._shared.first
            try:
                schedule = watched.stream.schedule
                step = first_step + schedule.steps_before(samples) - schedule.steps_before(first)
            except MegaresumeError:  # within a step, or after a short one
                pass
        self._step, self._samples = max(step, self._step), max(samples, self._samples)
        return self._step, self._samples

    def _settled(self) -> tuple[int, int]:
        """(step, samples) between two updates by the training.

        It counts in another thread, without a lock, and maybe in two parts: read in between, the number of samples may
        be too high. The true number never falls, so one that has not fallen after `SETTLED` seconds was right.
        """
        while True:
            samples, step = self._watched.samples(), self._watched.step()
            time.sleep(SETTLED)
            if samples <= self._watched.samples():
                return step, samples

    def note(self, mark: Mark) -> None:
        """Write a mark, with the counts so far. Raises OSError; then the next call tries to write both."""
        self._open()
        if mark.event in EVENTS:
            self._marks.append(mark)
        if self._rank:
            return
        more: dict[str, Any] = {}
        if self._sources is not None and mark.samples >= self._sources.sample:
            self._sources.count_to(mark.samples)
            more = {"counts": self._sources.counts}
        if self._record is not None:
            self._record.note(mark, more)

    def pulse(self) -> None:
        """Write the current position to the pulse."""
        if self._rank == 0 and self._record is not None:
            self._record.pulse(self._shared.mark("now", *self.position()))

    def look(self, *, is_last: bool = False) -> None:
        """Make a reading, and give it to the sinks.

        Raises:
            OSError: it could not be written to the run's directory; the next call tries again. The sinks have it.
        """
        self._open()
        self._error = None
        step, samples = self.position()
        own = self._write_own(step, is_last)
        if self._rank == 0:
            self._look(step, samples, own)
        if self._error is not None:
            raise self._error

    def _look(self, step: int, samples: int, own: Mapping[str, Any]) -> None:
        now = self._shared.mark("now", step, samples)
        figures: dict[str, Value] = {"megaresume.step": step, "megaresume.samples": samples}
        before, before_step = self._last
        if step > before_step:
            figures["megaresume.step.duration"] = (now.time - before) / (step - before_step)
            self._last = now.time, step
        if self._sources is not None:
            figures |= self._sources.advance(samples)
        figures["megaresume.data.wait"] = self._clocks.waited
        figures["megaresume.data.wait.longest"] = self._clocks.take_longest()
        figures["megaresume.checkpoint.wait"] = self._clocks.saving
        if "ahead" in own:
            figures["megaresume.data.ahead"] = own["ahead"]
        lines = [("", own)] if self._tails is None else self._tails.new()
        figures |= self._of_all(lines, step - before_step)
        figures |= self._watched.of_run([*self._marks, now])
        if self._watched.root is not None:
            figures["megaresume.disk.free"] = shutil.disk_usage(self._watched.root).free
        self._give(Reading(time=now.time, step=step, samples=samples, figures=figures))

    def _write_own(self, step: int, is_last: bool) -> dict[str, Any]:
        """The waits, store requests, steps and losses of this process; also written to its file."""
        sums = self._shared.sums
        done = [] if sums is None else sums.take(wait=is_last)
        line: dict[str, Any] = {"time": time.time(), "step": step, "waited": round(self._clocks.waited, 6)}
        line["attempt"] = self._watched.attempt
        if (workers := sys.modules.get("megaresume.batches.workers")) is not None:
            line["ahead"] = workers.num_ready()
        if "megaresume.data.remote" in sys.modules:
            line["store"] = {kind: store_counts.total(kind) for kind in KINDS}
        if made := self._shared.steps.take(wait=is_last):
            line["steps"] = [self._with_digest(one).to_dict() for one in made]
        if done:
            line |= {"losses": [one.to_dict() for one in done], "by_source": self._by_source(done)}
        self._append(self._own, line)
        return line

    def _append(self, file: Lines | None, line: Mapping[str, Any]) -> None:
        try:
            if file is not None:
                file.append(line)
        except OSError as error:
            self._error = error

    def _with_digest(self, made: Made) -> Made:
        """Add the digest of all samples up to and with this step. On rank 0, for a stream."""
        stream = self._watched.stream
        if self._rank or stream is None or not made.samples:
            return made
        return replace(made, digest=f"{int(stream.plan(made.samples - 1, made.samples).digests[-1]):016x}")

    def _by_source(self, done: Sequence[Any]) -> dict[str, list[float]]:
        from megaresume.checkpoint.metrics.losses import segments_of

        stream = self._watched.stream
        assert stream is not None
        documents = Documents([source.label for source in stream.config.sources])
        for one in done:
            documents.add(segments_of(stream, one.samples)[1], one)
        return {name: [total, tokens] for name, (total, tokens) in documents.by_source().items()}

    def _of_all(self, lines: Iterable[tuple[str, Mapping[str, Any]]], steps: int) -> dict[str, Value]:
        """Figures from what the run's processes have recorded since the last reading."""
        found: dict[str, Value] = {}
        sums: dict[str, list[float]] = {}
        for name, line in lines:
            self._newest[name] = line
            for source, (total, tokens) in line.get("by_source", {}).items():
                both = sums.setdefault(source, [0.0, 0.0])
                both[0], both[1] = both[0] + total, both[1] + tokens
        if newest := self._newest.values():
            found["megaresume.data.wait.slowest_rank"] = max(float(line.get("waited", 0.0)) for line in newest)
        if counts := [line["store"] for line in newest if "store" in line]:
            found["megaresume.store.retries"] = sum(one["retries"] for one in counts)
            found["megaresume.store.retries.worst_rank"] = max(one["retries"] for one in counts)
            if any(one["hits"] or one["misses"] for one in counts):
                found["megaresume.cache.hits"] = sum(one["hits"] for one in counts)
                found["megaresume.cache.misses"] = sum(one["misses"] for one in counts)
        if sums or self._averages is not None:
            from megaresume.checkpoint.metrics.losses import Averages

            self._averages = self._averages or Averages()
            self._averages.add(sums, steps)
            found["megaresume.source.loss"] = dict(self._averages)
        return found

    def _give(self, reading: Reading) -> None:
        self._append(self._figures, reading.to_dict())
        self._shared.latest = reading
        if self._options.trainer:
            self._shared.pending = reading
        for outlet in self._outlets:
            outlet.write(reading)

    def close(self) -> None:
        """Close the sinks and files."""
        close_all(self._outlets)
        for file in (self._record, self._figures, self._own):
            if file is not None:
                file.close()
