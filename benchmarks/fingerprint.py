"""What a fingerprint costs that is not kept yet: the windows of the contents, and the scan of the lengths."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.corpora import document_lengths, write_corpus
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import median, wall
from megaresume.data.split import IndexedSource

MOST_SECONDS = 0.05


def rows(setup: Setup) -> Iterator[Row]:
    """A corpus with tokens, and one of many documents; both warm, both without a cached fingerprint."""
    large = setup.directory / "fingerprint"
    write_corpus(large, document_lengths(10 * setup.sizes.index_documents, seed=9), sparse=True)
    for prefix in (setup.corpora["web"], large):
        source = IndexedSource(prefix)
        source.fingerprint(recompute=True)
        seconds = []
        for _ in range(setup.sizes.repetitions):
            begin = wall()
            IndexedSource(prefix)._contents(0, len(source))
            seconds.append(wall() - begin)
        yield Row(
            what=f"contents of a fingerprint, {len(source):,} documents",
            ours=median(seconds) * 1e3,
            unit="ms",
            must="< 50 ms",
            holds=median(seconds) < MOST_SECONDS,
        )
    begin = wall()
    source.fingerprint(recompute=True)
    yield Row(what=f"whole fingerprint, {len(source):,} documents", ours=wall() - begin, unit="s")
