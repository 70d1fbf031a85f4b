"""What planning costs one process and all of them together, from 1 rank to 4,096.

Every process plans the whole stream: its cost a sample is the same whatever the number of ranks. What depends on them
is which samples are its own (`places_of`): one rank of 4,096 has one range a step, one rank alone has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.corpora import config, document_lengths
from benchmarks.lengths import LengthsOnDisk
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio
from megaresume.stream.dealing import in_parts, places_of
from megaresume.stream.stream import Stream

#: As fast as one rank alone.
LEAST = 0.8


def cost_rows(setup: Setup, ranks: Sequence[int], step_samples: int) -> Iterator[Row]:
    """By ranks, all of them data-parallel with micro-batches of 1: time of a step of ``step_samples`` samples."""
    steps = max(setup.sizes.planned_samples // step_samples // 4, 1)
    processes = {num: _Process(setup, num, step_samples, steps) for num in ranks}
    seconds = interleaved({str(num): p for num, p in processes.items()}, setup.sizes.repetitions)
    slicing = interleaved({str(num): p.slice for num, p in processes.items()}, setup.sizes.repetitions)
    alone = seconds[str(ranks[0])]
    for num in ranks:
        own = median(seconds[str(num)]) / steps
        slices = median(slicing[str(num)]) / steps
        as_fast = ratio(seconds[str(num)], alone)
        yield Row(
            what=f"planning a step of {step_samples:,} samples, one process of {num:,}",
            ours=own * 1e3,
            unit="ms",
            baseline=median(alone) / steps * 1e3,
            against="one rank alone",
            ratio=as_fast,
            must=f">= {LEAST} x",
            holds=as_fast >= LEAST,
        )
        yield Row(what=f"of it, which samples are its own, one process of {num:,}", ours=slices * 1e6, unit="us")
        together = f"planning a step of {step_samples:,} samples, {num:,} processes together"
        yield Row(what=together, ours=own * num, unit="s")


class _Process:
    """The data-parallel rank in the middle: plans on and on, and takes its own samples of each step."""

    def __init__(self, setup: Setup, num_ranks: int, step_samples: int, steps: int) -> None:
        num_documents = max(setup.sizes.corpus_documents // 3, 100)
        self.stream = Stream(config("best_fit"), [LengthsOnDisk(document_lengths(num_documents, k)) for k in range(3)])
        self.num_ranks, self.step_samples, self.steps = num_ranks, step_samples, steps

    def __call__(self, repetition: int) -> None:
        for step in range(repetition * self.steps, (repetition + 1) * self.steps):
            first = step * self.step_samples
            self.stream.plan(first, first + self.step_samples)
            self._own(first)

    def slice(self, repetition: int) -> None:
        """Of a step, what is this rank's own."""
        for step in range(repetition * self.steps, (repetition + 1) * self.steps):
            self._own(step * self.step_samples)

    def _own(self, first: int) -> list[range]:
        rank = self.num_ranks // 2
        sizes = in_parts(self.step_samples, micro_batch_size=1, dp_size=self.num_ranks)
        samples = range(first, first + self.step_samples)
        return [samples[place] for place in places_of(sizes, dp_rank=rank, dp_size=self.num_ranks)]
