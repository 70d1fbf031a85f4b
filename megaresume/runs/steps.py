"""Which step trained a sample, and by which layout of ranks and micro-batches."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import dataclass

from megaresume.checkpoint.topology import Topology
from megaresume.runs.history import History
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import MegaresumeError, StateError, UsageError

#: stands for a step, rank or micro-batch that no record tells.
UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive samples of one batch size and one layout."""

    #: [first, stop) samples.
    first: int
    stop: int
    #: first sample and number (from 1) of a step at or before ``first`` from which on all are of this size.
    step_sample: int
    step: int
    #: samples of a step.
    batch_size: int | None
    topology: Topology | None

    @property
    def ranks(self) -> tuple[int, int] | None:
        """(data-parallel size, micro-batch size) where they are known and fit the batch size."""
        if self.topology is None or self.batch_size is None:
            return None
        dp, micro = self.topology.dp, self.topology.micro_batch_size
        if micro is None or micro < 1 or dp < 1 or self.batch_size % (dp * micro):
            return None
        return dp, micro


def schedule_of(history: History) -> BatchSchedule | None:
    """Batch sizes of a run: those recorded, then the last one for ever. None: no record tells."""
    state = history.state
    segments = list(state.batches)
    if not segments:
        for first, topology in history.topologies:
            size = topology.global_batch_size
            if size is None or (not segments and first):
                return None
            if not segments or segments[-1][1] != size:
                segments.append((first, size))
    if not segments:
        return None
    schedule = BatchSchedule(tuple(segments))
    size = history.next_batch_size
    if size is not None and schedule.size_at(state.samples) != size:
        schedule = BatchSchedule((*schedule.until(state.samples), (state.samples, size)))
    return schedule


class Steps:
    """Maps samples to steps and back, over a whole run."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.schedule = schedule_of(history)
        #: (first sample, steps before it, size) of runs of steps of one size
        self._runs: list[tuple[int, int, int]] = []
        self._contradiction: MegaresumeError | None = None
        self._offset = 0
        if self.schedule is not None:
            self._runs = _runs(self.schedule)
            self._set_offset()

    def _set_offset(self) -> None:
        """Iterations may be counted from another start than samples: a run that began with another one's weights."""
        assert self.schedule is not None
        try:
            offsets = {
                self.schedule.steps_before(point.samples) - point.iteration: point.iteration
                for point in self.history.points
            }
        except StateError as error:
            self._contradiction = error
            return
        self._offset = next(iter(offsets))
        if len(offsets) > 1:
            self._contradiction = StateError(
                "the iterations and the batch sizes of the records do not fit",
                found="; ".join(f"{o:+} steps at step {i}" for o, i in list(offsets.items())[:4]),
                expected="one count of steps over the whole run",
                cause="the iteration was set back or forth in the middle of the run",
                action="trace by samples: --samples A:B",
            )

    @property
    def known(self) -> bool:
        """Whether samples can be mapped to steps."""
        return self.schedule is not None and self._contradiction is None

    def samples(self, first: int, stop: int) -> tuple[int, int]:
        """The samples of steps ``first .. stop`` (numbers from 1).

        Raises:
            UsageError, StateError: steps before the first one; or the records do not tell batch sizes.
        """
        if self._contradiction is not None:
            raise self._contradiction
        if self.schedule is None:
            raise StateError(
                "the batch sizes of the run are not known",
                found="data states without batches, and no global batch size in the ledger",
                expected="(first sample, global batch size), as training records it",
                cause="the states were not saved by a training program",
                action="trace by samples: --samples A:B",
            )
        if first + self._offset < 1:
            raise UsageError(
                f"there is no step {first}",
                found=f"steps {first} to {stop - 1}",
                expected=f"steps from {1 - self._offset} on",
                cause="steps are counted from 1, as training prints them" if not self._offset else None,
            )
        return tuple(self.schedule.after(0, n - 1 + self._offset) for n in (first, stop))  # type: ignore[return-value]

    def spans(self, first: int, stop: int) -> list[Span]:
        """Samples ``first .. stop`` cut where the batch size, the layout, or the past changes."""
        cuts = {first for first, _ in self.history.topologies} | {run[0] for run in self._runs}
        cuts.add(self.history.state.samples)
        edges = [first, *sorted(cut for cut in cuts if first < cut < stop), stop]
        return [self._span(a, b) for a, b in itertools.pairwise(edges) if a < b]

    def _span(self, first: int, stop: int) -> Span:
        topologies = self.history.topologies
        index = bisect_right(topologies, first, key=lambda entry: entry[0]) - 1
        sample, step, size = 0, UNKNOWN, None
        if self.known:
            sample, before, size = self._runs[bisect_right(self._runs, first, key=lambda run: run[0]) - 1]
            step = before + 1 - self._offset
        return Span(
            first=first,
            stop=stop,
            step_sample=sample,
            step=step,
            batch_size=size,
            topology=topologies[index][1] if index >= 0 else None,
        )

    def span(self, sample: int) -> Span:
        """That of one sample."""
        return self._span(sample, sample + 1)

    def step_of(self, sample: int) -> int | None:
        """The step of a sample; None where no record tells."""
        span = self.span(sample)
        if span.batch_size is None:
            return None
        step = span.step + (sample - span.step_sample) // span.batch_size
        return step if step > 0 else None


def _runs(schedule: BatchSchedule) -> list[tuple[int, int, int]]:
    runs, steps, position = [], 0, 0
    ends = [*(first for first, _ in schedule.segments[1:]), None]
    for (_, size), end in zip(schedule.segments, ends, strict=True):
        num = 1 if end is None else max(-(-(end - position) // size), 0)
        if num:
            runs.append((position, steps, size))
        if end is not None:
            steps, position = steps + num, position + num * size
    return runs
