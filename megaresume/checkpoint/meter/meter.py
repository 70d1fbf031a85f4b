"""`Meter`: what one process tells of its run, from a thread of its own.

    Session       began, saved, ended             -> a mark, written at once
    every second  how far is it?                  -> the pulse
    every 10 s    how many samples are trained?   -> a `Reading`, on rank 0 -> the sinks
                  the losses and waits of this process -> its file, which rank 0 reads

The training is asked for one number, its samples; the step is what its schedule makes of them. Nothing that fails here
reaches it.
"""

from __future__ import annotations

import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
from megaresume.checkpoint.meter.sinks import Function, Outlet, check, outlet_of
from megaresume.checkpoint.meter.sources import SourceFigures
from megaresume.checkpoint.meter.words import Asked
from megaresume.stream.errors import MegaresumeError, UsageError
from megaresume.stream.stream import Stream

log = logging.getLogger(__name__)

#: seconds between two pulses; that a number which another thread writes must hold; that the end of a run waits.
PULSE, SETTLED, PATIENCE = 1.0, 0.002, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Watched:
    """What a meter is told of its run, as training begins."""

    #: what is trained; None if it is no stream: there are no figures by source then.
    stream: Stream | None
    #: how many samples are trained, now; and optimizer steps.
    samples: Callable[[], int]
    step: Callable[[], int]
    #: the samples of this process that were handed out last; None if nobody knows.
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


class Meter:
    """See above.

    Args:
        asked: who is to be told.
        clocks: of this process.
        rank: of this process in the job; rank 0 tells.

    Raises:
        SetupError, UsageError: somebody who cannot be told.
    """

    def __init__(self, asked: Asked, clocks: Clocks, rank: int) -> None:
        self._asked, self._clocks, self._rank = asked, clocks, rank
        if rank == 0:
            for word, where in asked.sinks:
                check(word, where)
        #: the last reading, for the loggers of the trainer; None: they have it.
        self.pending: Reading | None = None
        #: the last one.
        self.latest: Reading | None = None
        self._watched: Watched | None = None
        self._events: list[Mark] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None
        self._said: set[str] = set()
        self._outlets: list[Outlet] = []
        self._sums: Any = None

    # What the training tells

    def begin(self, watched: Watched) -> None:
        """Training begins, or begins again after a load in one process."""
        if self._watched is not None:
            self.close()
        self._watched, self._closing = watched, False
        self._first = watched.step(), watched.samples()
        self._sums = None
        mark = replace(self._mark("start", *self._first), born=watched.born, attempt=watched.attempt)
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
            self._events.append(self._mark("save", step, samples))
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
        if self._sums is None:
            from megaresume.checkpoint.meter.losses import SegmentSums

            self._sums = SegmentSums(watched.stream)
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
        self._sums.add([int(sample) for sample in samples], token_loss, mask)

    def give(self, tell: Callable[[Mapping[str, float], int], Any]) -> None:
        """Tell the loggers of the trainer, in its own thread, if there is something new.

        Args:
            tell: given numbers by name, and the step.
        """
        reading, self.pending = self.pending, None
        if reading is None:
            return
        try:
            tell(reading.flat(), reading.step)
        except Exception as error:  # noqa: BLE001  a logger of the trainer's must not end the training
            self._say("trainer", error)

    def close(self) -> None:
        """The run ends: tell what is left, for a limited time."""
        if self._watched is None:
            return
        self.start()
        thread = self._thread
        with self._changed:
            self._closing = True
            self._changed.notify()
        if thread is not None:
            thread.join(PATIENCE)
        self._thread = self._watched = None

    # The thread

    def _mark(self, event: str, step: int, samples: int) -> Mark:
        clocks = self._clocks
        return Mark(
            event=event,
            time=time.time(),
            step=step,
            samples=samples,
            waited=round(clocks.waited, 6),
            saving=round(clocks.saving, 6),
        )

    def _say(self, what: str, error: BaseException) -> None:
        if what not in self._said:
            self._said.add(what)
            words = f"{type(error).__name__}: {error}"
            log.warning("megaresume: metrics: %s: %s; the training is not affected, and this is said once", what, words)

    def _run(self) -> None:
        watched = self._watched
        assert watched is not None
        looker = Looker(self, watched)
        due, closing = time.monotonic() + self._asked.every, False
        while not closing:
            pause = min(due - time.monotonic(), PULSE, self._asked.every)
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closing, max(pause, 0.0))
                events, self._events, closing = self._events, [], self._closing
            try:
                for mark in events:
                    looker.note(mark)
                if closing:
                    looker.note(self._mark("end", *looker.position()))
                else:
                    looker.pulse()
                if closing or time.monotonic() >= due:
                    due = time.monotonic() + self._asked.every
                    looker.look()
            except Exception as error:  # noqa: BLE001  nothing that fails here may reach the training
                self._say("figures", error)
        looker.close()


class Looker:
    """What the thread of a meter does.

    Args:
        meter: whose.
        watched: the run.
    """

    def __init__(self, meter: Meter, watched: Watched) -> None:
        self._meter, self._watched = meter, watched
        self._asked, self._clocks, self._rank = meter._asked, meter._clocks, meter._rank
        self._step, self._samples = meter._first
        self._last = time.time(), self._step
        self._directory = None if watched.root is None else meter_dir(watched.root)
        self._record: RunRecord | None = None
        self._figures: Lines | None = None
        self._own: Lines | None = None
        self._tails: Tails | None = None
        self._marks: list[Mark] = []
        self._sources: SourceFigures | None = None
        self._averages: Any = None
        self._slowest: dict[str, float] = {}
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
            self._outlets = [Outlet("a function", partial(Function, f)) for f in self._asked.functions]
            self._outlets += [
                outlet_of(word, where, directory, watched.run)
                for word, where in self._asked.sinks
                if word != "trainer" and (word, where) != ("jsonl", "")
            ]
        if directory is not None:
            self._own = Lines(rank_path(directory, self._rank))

    def position(self) -> tuple[int, int]:
        """(step, samples) that are trained."""
        watched = self._watched
        while True:
            # Another thread writes it, perhaps in two parts: what is true now is not more than what is true later.
            samples, step = watched.samples(), watched.step()
            time.sleep(SETTLED)
            if samples <= watched.samples():
                break
        if watched.stream is not None and watched.stream.schedule is not None:
            first_step, first = self._meter._first
            try:
                schedule = watched.stream.schedule
                step = first_step + schedule.steps_before(samples) - schedule.steps_before(first)
            except MegaresumeError:  # within a step, or after a short one
                pass
        self._step, self._samples = max(step, self._step), max(samples, self._samples)
        return self._step, self._samples

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
            self._record.pulse(self._meter._mark("now", *self.position()))

    def look(self) -> None:
        """Make a reading, and tell it."""
        self._open()
        step, samples = self.position()
        own = self._write_own(step)
        if self._rank:
            return
        now = self._meter._mark("now", step, samples)
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
        self._tell(Reading(time=now.time, step=step, samples=samples, figures=figures))

    def _write_own(self, step: int) -> dict[str, Any]:
        """The waits and losses of this process, also into its file."""
        sums = self._meter._sums
        done = [] if sums is None else sums.take()
        line: dict[str, Any] = {"time": time.time(), "step": step, "waited": round(self._clocks.waited, 6)}
        if done:
            line |= {"losses": [one.to_dict() for one in done], "by_source": self._by_source(done)}
        if self._own is not None:
            self._own.append(line)
        return line

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
            self._slowest[name] = float(line.get("waited", 0.0))
            for source, (total, tokens) in line.get("by_source", {}).items():
                both = sums.setdefault(source, [0.0, 0.0])
                both[0], both[1] = both[0] + total, both[1] + tokens
        if self._slowest:
            found["megaresume.data.wait.slowest_rank"] = max(self._slowest.values())
        if sums or self._averages is not None:
            from megaresume.checkpoint.meter.losses import Averages

            self._averages = self._averages or Averages()
            self._averages.add(sums, steps)
            found["megaresume.source.loss"] = dict(self._averages)
        return found

    def _tell(self, reading: Reading) -> None:
        if self._figures is not None:
            self._figures.append(reading.to_dict())
        self._meter.latest = reading
        if self._asked.trainer:
            self._meter.pending = reading
        for outlet in self._outlets:
            outlet.write(reading)

    def close(self) -> None:
        """Nothing is told any more."""
        for outlet in self._outlets:
            outlet.close()
        for file in (self._record, self._figures, self._own):
            if file is not None:
                file.close()
