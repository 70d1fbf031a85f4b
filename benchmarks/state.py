"""Taking the state for a checkpoint: time and size, with ten sources and with a thousand."""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

from benchmarks.corpora import config, document_lengths
from benchmarks.lengths import LengthsOnDisk
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median
from megaresume.stream.state import Fingerprint
from megaresume.stream.stream import Stream

#: Sources -> what taking the state may take: seconds, bytes.
MOST = {10: (1.5e-3, 16384), 1000: (0.1, 65536)}
#: Samples planned; the state is that before one of the last, as far behind as a loader reads ahead.
PLANNED, BEHIND = 4096, 300
#: Samples of a step.
STEP = 8


class _Source(LengthsOnDisk):
    """With hashes that do not repeat, as those of real corpora do not."""

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """Of the lengths, all of them; the contents are made up."""
        digest = xxhash.xxh3_128_hexdigest(self._lengths.tobytes())
        return Fingerprint(
            documents=len(self), tokens=int(self._lengths.sum()), lengths=digest, contents=digest[::-2].ljust(16, "0")
        )


def rows(setup: Setup) -> Iterator[Row]:
    """`Stream.state_at` and `to_json` at samples inside the planned blocks."""
    for num_sources, (most_seconds, most_bytes) in MOST.items():
        names = [f"source_{i}" for i in range(num_sources)]
        num_documents = max(setup.sizes.corpus_documents // num_sources, 100)
        sources = [_Source(document_lengths(num_documents, seed)) for seed in range(num_sources)]
        for packing in ("best_fit", "split"):
            stream = Stream(config(packing, sources=names), sources)
            stream.plan(0, PLANNED)
            texts: list[str] = []

            def take(repetition: int, stream: Stream = stream, texts: list[str] = texts) -> None:
                # 37 and 300 have no common divisor: every distance from the start of a block comes up.
                texts.append(stream.state_at(PLANNED - 1 - repetition * 37 % BEHIND).to_json())

            def step(repetition: int, stream: Stream = stream) -> None:
                stream.state_at(PLANNED // 2 + STEP * repetition % (PLANNED // 2)).to_json()

            # Not in turns: the one before a step's state is that of the step before.
            repetitions = 50 * setup.sizes.slow_repetitions
            seconds = median(interleaved({"take": take}, repetitions)["take"])
            of_step = median(interleaved({"step": step}, repetitions)["step"])
            size = max(len(text) for text in texts)
            yield Row(
                what=f"taking the state, {num_sources:,} sources, {packing}",
                ours=seconds * 1e3,
                unit="ms",
                must=f"< {most_seconds * 1e3:g} ms",
                holds=seconds < most_seconds,
            )
            yield Row(
                what=f"taking the state after every step, {num_sources:,} sources, {packing}",
                ours=of_step * 1e3,
                unit="ms",
            )
            yield Row(
                what=f"size of the state, {num_sources:,} sources, {packing}",
                ours=size / 1024,
                unit="KB",
                must=f"< {most_bytes // 1024} KB",
                holds=size < most_bytes,
            )
