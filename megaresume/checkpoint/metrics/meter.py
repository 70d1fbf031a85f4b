"""`Meter`: the figures of one process, measured in a separate thread, by `Looker`.

    Session       began, saved, ended             -> a mark, written at once
    every second  the current position            -> the pulse
    every 10 s    the number of samples trained   -> a `Reading`, on rank 0 -> the sinks
                  losses and waits of the process -> its file, which rank 0 reads

Errors here never reach the training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.metrics.figures import Reading
from megaresume.checkpoint.metrics.looker import Looker, Shared, Watched
from megaresume.checkpoint.metrics.record import Mark
from megaresume.checkpoint.metrics.sinks import check
from megaresume.checkpoint.metrics.words import MeterOptions
from megaresume.stream.errors import UsageError

log = logging.getLogger(__name__)

#: seconds between two pulses; most seconds that the end of a run waits for everything.
PULSE, JOIN_SECONDS = 1.0, 5.0


class Meter:
    """Receives figures from the training, and starts the thread.

    Args:
        options: the sinks, and the interval.
        clocks: of this process.
        rank: of this process in the job; rank 0 feeds the sinks.

    Raises:
        SetupError: the package of a sink is missing.
        UsageError: a sink with an invalid value.
    """

    def __init__(self, options: MeterOptions, clocks: Clocks, rank: int) -> None:
        if rank == 0:
            for word, where in options.sinks:
                check(word, where)
        self._shared = Shared(options, clocks, rank)
        #: what hosts report for each step: see `StepNumbers`.
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
        """The newest reading, if the trainer's loggers do not have it yet."""
        return self._shared.pending

    # Called by the training

    def begin(self, watched: Watched) -> None:
        """Note that training begins, or begins again after a load in the same process."""
        if self._watched is not None:
            self.close()
        self._watched, self._closing = watched, False
        shared = self._shared
        shared.first, shared.sums = (watched.step(), watched.samples()), None
        self.steps.begin()
        mark = replace(shared.mark("start", *shared.first), born=watched.born, attempt=watched.attempt)
        self._events = [mark]

    def start(self) -> None:
        """Start the thread; by now the processes that read data exist: a fork is safest with a single thread."""
        if self._thread is None and self._watched is not None:
            self._thread = threading.Thread(target=self._run, name="megaresume-meter", daemon=True)
            self._thread.start()

    def saves(self, step: int, samples: int) -> None:
        """Note that a save begins: counts by source are recorded before the checkpoint is complete."""
        self._note("counts", step, samples)

    def saved(self, step: int, samples: int) -> None:
        """Note that the training continues after a save."""
        self._note("save", step, samples)

    def _note(self, event: str, step: int, samples: int) -> None:
        if self._watched is None:
            return
        with self._changed:
            self._events.append(self._shared.mark(event, step, samples))
            self._changed.notify()
        self.start()

    def losses(self, batch: Any, token_loss: Any, mask: Any = None) -> None:
        """Take the losses of a micro-batch, for figures by source and by document. Does not wait for the device.

        Args:
            batch: as handed out: its ``samples`` identify its documents; without them, it must be the last one; or
                sample numbers.
            token_loss: float[m, S], any device: the loss of each label, without reduction. Or [1, tokens], for samples
                one after the other.
            mask: bool or float[m, S]: which of them are trained; None: ``loss_mask`` of the batch, or losses that are
                not 0.

        Raises:
            UsageError: a batch without sample numbers, or losses of another shape.
        """
        watched = self._watched
        if watched is None or watched.stream is None:
            return
        sums = self._shared.sums
        if sums is None:
            from megaresume.checkpoint.metrics.losses import SegmentSums

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
        """Pass a new reading to the trainer's loggers, in its own thread; does nothing if they have the newest.

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
        """Make a last reading at the end of the run, in limited time."""
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
        events: list[Mark] = []
        while not closing:
            pause = min(due - time.monotonic(), PULSE, every)
            with self._changed:
                self._changed.wait_for(lambda: self._events or self._closing, max(pause, 0.0))
                events, self._events, closing = [*events, *self._events], [], self._closing
            try:
                while events:
                    looker.note(events.pop(0))
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
