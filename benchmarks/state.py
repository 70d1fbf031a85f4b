"""Taking the state for a checkpoint: time and size, with ten sources."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.corpora import config, document_lengths
from benchmarks.lengths import LengthsOnDisk
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median
from megaresume.stream.stream import Stream

__all__ = ["rows"]

NUM_SOURCES = 10
#: Samples planned; the state is that before one of the last, as far behind as a loader reads ahead.
PLANNED, BEHIND = 4096, 300
MOST_SECONDS, MOST_BYTES = 1e-3, 16384


def rows(setup: Setup) -> Iterator[Row]:
    """`Stream.state_at` and `to_json` at samples inside the planned blocks."""
    names = [f"source_{i}" for i in range(NUM_SOURCES)]
    num_documents = max(setup.sizes.corpus_documents // NUM_SOURCES, 100)
    sources = [LengthsOnDisk(document_lengths(num_documents, seed)) for seed in range(NUM_SOURCES)]
    for packing in ("best_fit", "split"):
        stream = Stream(config(packing, sources=names), sources)
        stream.plan(0, PLANNED)
        texts: list[str] = []

        def take(repetition: int, stream: Stream = stream, texts: list[str] = texts) -> None:
            # 37 and 300 have no common divisor: every distance from the start of a block comes up.
            texts.append(stream.state_at(PLANNED - 1 - repetition * 37 % BEHIND).to_json())

        seconds = median(interleaved({"take": take}, 100 * setup.sizes.slow_repetitions)["take"])
        size = max(len(text) for text in texts)
        yield Row(
            what=f"taking the state, {NUM_SOURCES} sources, {packing}",
            ours=seconds * 1e3,
            unit="ms",
            must="< 1 ms",
            holds=seconds < MOST_SECONDS,
        )
        yield Row(
            what=f"size of the state, {NUM_SOURCES} sources, {packing}",
            ours=size / 1024,
            unit="KB",
            must="< 16 KB",
            holds=size < MOST_BYTES,
        )
