"""`Meter`: the figures of one process, measured in a thread of its own.

    Session       began, saved, ended             -> a mark, written at once
    every second  how far is it?                  -> the pulse
    every 10 s    how many samples are trained?   -> a `Reading`, on rank 0 -> the sinks
                  the losses and waits of this process -> its file, which rank 0 reads

The thread reads one number of the training, its samples; the step is what its schedule makes of them. `Shared` is all
that both threads use. Nothing that fails here reaches the training.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.checkpoint.meter.clocks import Clocks
from megaresume.checkpoint.meter.figures import Reading, Value
from megaresume.checkpoint.meter.record import (
    Lines,
    Mark,
    RunRecord,
    Tails,
    counts_at,
    marks_of,
    meter_dir,
    rank_path,
    read_lines,
)
from megaresume.checkpoint.meter.segments import Documents
from megaresume.checkpoint.meter.sinks import Function, Outlet, check, close_all, outlet_of
from megaresume.checkpoint.meter.sources import SourceFigures
from megaresume.checkpoint.meter.steps import Made, StepNumbers
from megaresume.checkpoint.meter.words import MeterOptions
from megaresume.stream.errors import MegaresumeError, UsageError
from megaresume.stream.stream import Stream

if TYPE_CHECKING:
    from megaresume.checkpoint.meter.losses import Averages, SegmentSums

log = logging.getLogger(__name__)

#: seconds between two pulses; after which a count that has not fallen is complete; that the end of a run waits for all.
PULSE, SETTLED, JOIN_SECONDS = 1.0, 0.002, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a meter knows of its run, as training begins."""

    #: what is trained; None if it is no stream: there are no figures by source then.
    stream: Stream | None
    #: how many samples are trained, now; and optimizer steps.
    samples: Callable[[], int]
    step: Callable[[], int]
    #: the samples of this process that were handed out last; None: not known.
    numbers: Callable[[], Sequence[int]] | None
    #: where it saves; None if nowhere.
    root: Path | None
    #: of the run: 16 hex digits, the same after a resume.
    run: str
    #: starts of the run, this one included; when this process was started, in seconds since 1970.
    attempt: int
    born: float
    #: figures of checkpoints, and of the time since the run's first start, from its marks. On rank 0.
    of_run: Callable[[Sequence[Mark]], Mapping[str, Value]] = lambda marks: {}


@dataclass(slots=True)
class Shared:
    """What the thread that trains (`Meter`) and the thread that measures (`Looker`) both use."""

    options: MeterOptions
    #: written by the training.
    clocks: Clocks
    #: of this process in the job; rank 0 feeds the sinks.
    rank: int
    #: (step, samples) at which training began; written by the training, before the other thread starts.
    first: tuple[int, int] = (0, 0)
    #: losses: the training adds, the other thread takes. None until there are any.
    sums: SegmentSums | None = None
    #: losses and gradient norms of steps: likewise.
    steps: StepNumbers = field(default_factory=StepNumbers)
    #: the newest reading; written by the thread that measures.
    latest: Reading | None = None
    #: the same, until the loggers of the trainer have it: the training takes it.
    pending: Reading | None = None

    def mark(self, event: str, step: int, samples: int) -> Mark:
        """A mark of now."""
        return Mark(
            event=event,
            time=time.time(),
            step=step,
            samples=samples,
            waited=round(self.clocks.waited, 6),
            saving=round(self.clocks.saving, 6),
        )


class Meter:
    """See above.

    Args:
        options: which sinks, and how often.
        clocks: of this process.
        rank: of this process in the job; rank 0 feeds the sinks.

    Raises:
        SetupError: the package of a sink is missing.
        UsageError: a sink with a value that it cannot use.
    """

    def __init__(self, options: MeterOptions, clocks: Clocks, rank: int) -> None:
        if rank == 0:
            for word, where in options.sinks:
                check(word, where)
        self._shared = Shared(options, clocks, rank)
        #: what hosts tell of each step: see `StepNumbers`.
        self.steps = self._shared.steps
        self._watched: Watched | None = None
        self._events: list[Mark] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()

    @property
    def latest(self) -> Reading | None:
        """The newest reading."""
        return self._shared.latest

    @property
    def pending(self) -> Reading | None:
        """The newest reading, if the loggers of the trainer do not have it yet."""
        return self._shared.pending

    # Called by the training

    def begin(self, watched: Watched) -> None:
        """Training begins, or begins again after a load in one process."""
        if self._watched is not None:
            self.close()
        self._watched, self._closing = watched, False
        shared = self._shared
        shared.first, shared.sums = (watched.step(), watched.samples()), None
        self.steps.begin()
        mark = replace(shared.mark("start", *shared.first), born=watched.born, attempt=watched.attempt)
        self._events = [mark]

    def start(self) -> None:
        """Begin to look; the processes that read data are started by now: a fork is safest if there is one thread."""
        if self._thread is None and self._watched is not None:
            self._thread = threading.Thread(target=self._run, name="megaresume-meter", daemon=True)
            self._thread.start()

    def saved(self, step: int, samples: int) -> None:
        """The training continues after a save."""
        if self._watched is None:
            return
        with self._changed:
            self._events.append(self._shared.mark("save", step, samples))
            self._changed.notify()
        self.start()

    def losses(self, batch: Any, token_loss: Any, mask: Any = None) -> None:
        """Take the losses of a micro-batch, for figures by source and by document. Does not wait for the device.

        Args:
            batch: as it was handed out: its ``samples`` say which documents it has, else it must be the last one; or
                their numbers.
            token_loss: float[m, S], any device: the loss of each label, without reduction. Or [1, tokens], of samples
                one after the other.
            mask: bool or float[m, S]: which of them count; None: ``loss_mask`` of the batch, or what is not 0.

        Raises:
            UsageError: a batch that does not say its samples, or losses of another shape.
        """
        watched = self._watched
        if watched is None or watched.stream is None:
            return
        sums = self._shared.sums
        if sums is None:
            from megaresume.checkpoint.meter.losses import SegmentSums

            sums = self._shared.sums = SegmentSums(watched.stream)
        is_batch = isinstance(batch, Mapping)
        samples = batch.get("samples") if is_batch else batch
        if samples is None and watched.numbers is not None:
            samples = watched.numbers()
        if samples is None:
            raise UsageError(
                "this batch does not say which samples it has",
                found=f"a batch of {', '.join(map(str, batch))}" if is_batch else "no batch",
                expected="'samples' in it, as megaresume hands it out; or their numbers",
                cause="a collate_fn of your own, or a transform, which keeps other things",
                action="meter.losses(numbers, token_loss) with the numbers of the samples",
            )
        if mask is None and is_batch:
            mask = batch.get("loss_mask")
        sums.add([int(sample) for sample in samples], token_loss, mask)

    def give(self, write: Callable[[Mapping[str, float], int], Any]) -> None:
        """Pass a new reading to the loggers of the trainer, in its own thread; nothing if they have the newest.

        Args:
            write: called with numbers by name, and the step.
        """
        reading, self._shared.pending = self._shared.pending, None
        if reading is None:
            return
        try:
            write(reading.flat(), reading.step)
        except Exception as error:  # noqa: BLE001  a logger of the trainer's must not end the training
            self._say("trainer", error)

    def close(self) -> None:
        """The run ends: a last reading, for a limited time."""
        if self._watched is None:
            return
        self.start()
        thread = self._thread
        with self._changed:
            self._closing = True
            self._changed.notify()
        if thread is not None:
            thread.join(JOIN_SECONDS)
        self._thread = self._watched = None

    # The thread

    def _say(self, what: str, error: BaseException) -> None:
        if what not in self._said:
            self._said.add(what)
            words = f"{type(error).__name__}: {error}"
            log.warning(
                "megaresume: metrics: %s: %s; the training is not affected, and this is logged once", what, words
            )

    def _run(self) -> None:
        watched = self._watched
        assert watched is not None
        looker, every = Looker(self._shared, watched), self._shared.options.every
        due, closing = time.monotonic() + every, False
        while not closing:
            pause = min(due - time.monotonic(), PULSE, every)
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closing, max(pause, 0.0))
                events, self._events, closing = self._events, [], self._closing
            try:
                for mark in events:
                    looker.note(mark)
                if closing:
                    looker.note(self._shared.mark("end", *looker.position()))
                else:
                    looker.pulse()
                if closing or time.monotonic() >= due:
                    due = time.monotonic() + every
                    looker.look(is_last=closing)
            except Exception as error:  # noqa: BLE001  nothing that fails here may reach the training
                self._say("figures", error)
        looker.close()


class Looker:
    """What the thread of a meter does.

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
        self._sources: SourceFigures | None = None
        self._averages: Averages | None = None
        self._waited_by_rank: dict[str, float] = {}
        self._outlets: list[Outlet] = []
        self._is_open = False

    def _open(self) -> None:
        """What needs files and the stream: in the thread, as it may take a while."""
        if self._is_open:
            return
        self._is_open = True
        watched, directory = self._watched, self._directory
        lines: list[dict[str, Any]] = []
        if self._rank == 0:
            if directory is not None:
                self._record = RunRecord(directory)
                self._figures = Lines(directory / "figures.jsonl")
                self._tails = Tails(directory)
                lines = read_lines(directory / "run.jsonl")
                self._marks = marks_of(lines)
            if watched.stream is not None:
                self._sources = SourceFigures(watched.stream, self._samples, counts_at(lines, self._samples))
            self._outlets = [Outlet("a function", partial(Function, f)) for f in self._options.functions]
            self._outlets += [
                outlet_of(word, where, directory, watched.run)
                for word, where in self._options.sinks
                if (word, where) != ("jsonl", "")  # that is `_figures`
            ]
        if directory is not None:
            self._own = Lines(rank_path(directory, self._rank))

    def position(self) -> tuple[int, int]:
        """(step, samples) that are trained."""
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
        """(step, samples) between two updates of the training.

        It counts in another thread, without a lock, and perhaps in two parts: read in between, the samples may be too
        many. Their number never falls, so one that has not fallen after `SETTLED` seconds was complete.
        """
        while True:
            samples, step = self._watched.samples(), self._watched.step()
            time.sleep(SETTLED)
            if samples <= self._watched.samples():
                return step, samples

    def note(self, mark: Mark) -> None:
        """Write a mark down, with what was counted by then."""
        self._open()
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
        """Say how far it is."""
        if self._rank == 0 and self._record is not None:
            self._record.pulse(self._shared.mark("now", *self.position()))

    def look(self, *, is_last: bool = False) -> None:
        """Make a reading, and give it to the sinks."""
        self._open()
        step, samples = self.position()
        own = self._write_own(step, is_last)
        if self._rank:
            return
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
        if (workers := sys.modules.get("megaresume.batches.workers")) is not None:
            figures["megaresume.data.ahead"] = workers.num_ready()
        if (remote := sys.modules.get("megaresume.data.remote")) is not None:
            figures["megaresume.store.retries"] = remote.tried_again
        lines = [("", own)] if self._tails is None else self._tails.new()
        figures |= self._of_all(lines, step - before_step)
        figures |= self._watched.of_run([*self._marks, now])
        if self._watched.root is not None:
            figures["megaresume.disk.free"] = shutil.disk_usage(self._watched.root).free
        self._give(Reading(time=now.time, step=step, samples=samples, figures=figures))

    def _write_own(self, step: int, is_last: bool) -> dict[str, Any]:
        """The waits, steps and losses of this process, also into its file."""
        sums = self._shared.sums
        done = [] if sums is None else sums.take()
        line: dict[str, Any] = {"time": time.time(), "step": step, "waited": round(self._clocks.waited, 6)}
        line["attempt"] = self._watched.attempt
        if made := self._shared.steps.take(wait=is_last):
            line["steps"] = [self._with_digest(one).to_dict() for one in made]
        if done:
            line |= {"losses": [one.to_dict() for one in done], "by_source": self._by_source(done)}
        if self._own is not None:
            self._own.append(line)
        return line

    def _with_digest(self, made: Made) -> Made:
        """With the digest of what it and all steps before it have trained. On rank 0, of a stream."""
        stream = self._watched.stream
        if self._rank or stream is None or not made.samples:
            return made
        return replace(made, digest=f"{int(stream.plan(made.samples - 1, made.samples).digests[-1]):016x}")

    def _by_source(self, done: Sequence[Any]) -> dict[str, list[float]]:
        from megaresume.checkpoint.meter.losses import segments_of

        stream = self._watched.stream
        assert stream is not None
        documents = Documents([source.label for source in stream.config.sources])
        for one in done:
            documents.add(segments_of(stream, one.samples)[1], one)
        return {name: [total, tokens] for name, (total, tokens) in documents.by_source().items()}

    def _of_all(self, lines: Iterable[tuple[str, Mapping[str, Any]]], steps: int) -> dict[str, Value]:
        """What the processes of the run have written down since the last reading."""
        found: dict[str, Value] = {}
        sums: dict[str, list[float]] = {}
        for name, line in lines:
            self._waited_by_rank[name] = float(line.get("waited", 0.0))
            for source, (total, tokens) in line.get("by_source", {}).items():
                both = sums.setdefault(source, [0.0, 0.0])
                both[0], both[1] = both[0] + total, both[1] + tokens
        if self._waited_by_rank:
            found["megaresume.data.wait.slowest_rank"] = max(self._waited_by_rank.values())
        if sums or self._averages is not None:
            from megaresume.checkpoint.meter.losses import Averages

            self._averages = self._averages or Averages()
            self._averages.add(sums, steps)
            found["megaresume.source.loss"] = dict(self._averages)
        return found

    def _give(self, reading: Reading) -> None:
        if self._figures is not None:
            self._figures.append(reading.to_dict())
        self._shared.latest = reading
        if self._options.trainer:
            self._shared.pending = reading
        for outlet in self._outlets:
            outlet.write(reading)

    def close(self) -> None:
        """No more readings."""
        close_all(self._outlets)
        for file in (self._record, self._figures, self._own):
            if file is not None:
                file.close()
