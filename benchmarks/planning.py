"""Documents planned in a second: ids and lengths of ten million documents, permuted, blended and packed."""

from __future__ import annotations

import random
from collections.abc import Iterator

from benchmarks import gpt
from benchmarks.corpora import SEQ_LENGTH, WEIGHTS, config, document_lengths
from benchmarks.lengths import LengthsOnDisk
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio
from megaresume.stream.config import StreamConfig
from megaresume.stream.stream import Stream
from tests.stream.reference import reference_samples

#: Samples asked for at a time.
BLOCK = 128
#: Samples that the plain-Python reference plans in a repetition.
REFERENCE_SAMPLES = 50
LEAST = 5e6
#: Sources of the last row, and of the speed with three what it must keep.
MANY, LEAST_OF_FEW = 1000, 0.5


def rows(setup: Setup) -> Iterator[Row]:
    """``best_fit`` against the same algorithm in plain Python, both packings against Megatron building its indexes."""
    yield _best_fit(setup)
    yield from _against_megatron(setup)
    yield _many(setup)


class _Planning:
    """Plans on and on, as every rank of a run does."""

    def __init__(self, setup: Setup, packing: str) -> None:
        self.num_samples = setup.sizes.planned_samples
        self.stream = Stream(config(packing), setup.sources(setup.index_corpora))
        self.planned: dict[int, int] = {}

    def __call__(self, repetition: int) -> None:
        first = repetition * self.num_samples
        for sample in range(first, first + self.num_samples, BLOCK):
            self.stream.plan(sample, sample + BLOCK)
        self.planned[repetition] = self.stream.fields_at(first + self.num_samples)["documents"]

    def documents(self, repetition: int) -> int:
        return self.planned[repetition] - self.planned[repetition - 1]


class _Many(_Planning):
    """The same over a thousand sources of random weights."""

    def __init__(self, setup: Setup) -> None:
        rng = random.Random(0)
        self.num_samples = setup.sizes.planned_samples
        weights = {f"source_{i}": {"weight": rng.random()} for i in range(MANY)}
        lengths = [LengthsOnDisk(document_lengths(10_000, seed)) for seed in range(MANY)]
        data = {"seq_length": SEQ_LENGTH, "packing": "best_fit", "sources": weights}
        self.stream = Stream(StreamConfig.from_dict(data), lengths)
        self.planned = {}


def _many(setup: Setup) -> Row:
    ours, few = _Many(setup), _Planning(setup, "best_fit")
    seconds = interleaved({"ours": ours, "few": few}, setup.sizes.repetitions)
    per_document = [s / ours.documents(r) for r, s in enumerate(seconds["ours"], 1)]
    baseline = [s / few.documents(r) for r, s in enumerate(seconds["few"], 1)]
    times = ratio(per_document, baseline)
    return Row(
        what=f"planning, best_fit, {MANY:,} sources",
        ours=1 / median(per_document) / 1e6,
        unit="M documents/s",
        baseline=1 / median(baseline) / 1e6,
        against="3 sources",
        ratio=times,
        must=f">= {LEAST_OF_FEW} x",
        holds=times >= LEAST_OF_FEW,
    )


def _best_fit(setup: Setup) -> Row:
    ours = _Planning(setup, "best_fit")
    lengths = {name: document_lengths(1000, seed).tolist() for seed, name in enumerate(WEIGHTS)}
    counts: dict[int, int] = {}

    def reference(repetition: int) -> None:
        samples = list(reference_samples(ours.stream.config, lengths, REFERENCE_SAMPLES))
        counts[repetition] = sum(len(sample) for sample in samples)

    seconds = interleaved({"ours": ours, "reference": reference}, setup.sizes.repetitions)
    return _row("planning, best_fit", ours, seconds, "reference", counts, "the same in plain Python")


def _against_megatron(setup: Setup) -> Iterator[Row]:
    ours = {packing: _Planning(setup, packing) for packing in ("split", "best_fit")}
    counts: dict[int, int] = {}
    # As many samples as one epoch holds, nearly.
    num_samples = setup.sizes.index_documents * 600 // 4096 * 9 // 10

    def build(repetition: int) -> None:
        gpt.forget_index(setup.index_corpora)
        blend = gpt.build(setup.index_corpora, num_samples)
        counts[repetition] = sum(len(part.document_index) for part in blend.datasets)

    seconds = interleaved({**ours, "build": build}, setup.sizes.slow_repetitions)
    gpt.forget_index(setup.index_corpora)
    for packing, planning in ours.items():
        both = {"ours": seconds[packing], "build": seconds["build"]}
        yield _row(f"planning, {packing}", planning, both, "build", counts, "GPTDataset building its indexes")


def _row(
    what: str, ours: _Planning, seconds: dict[str, list[float]], name: str, counts: dict[int, int], against: str
) -> Row:
    per_document = [s / ours.documents(r) for r, s in enumerate(seconds["ours"], 1)]
    baseline = [s / counts[r] for r, s in enumerate(seconds[name], 1)]
    rate = 1 / median(per_document)
    return Row(
        what=what,
        ours=rate / 1e6,
        unit="M documents/s",
        baseline=1 / median(baseline) / 1e6,
        against=against,
        ratio=ratio(per_document, baseline),
        must=">= 5 M documents/s",
        holds=rate >= LEAST,
    )
