"""What the guard adds to a start, hashing the index arrays, beside what Megatron does to one of them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio
from megaresume.hosts.megatron.guard.record import array_digest


def rows(setup: Setup) -> Iterator[Row]:
    """A memory-mapped shuffle index (uint32) in the page cache; shuffling it is part of what a cold start does."""
    entries = setup.sizes.most_documents // 10
    path = setup.directory / "shuffle_index.npy"
    rng = np.random.RandomState(1)
    index = np.arange(entries, dtype=np.uint32)
    np.save(path, index)

    def read(_: int) -> str:
        # Opened through a name of its own: a file that was hashed once is not hashed again.
        again = path.with_name(f"{np.random.randint(1 << 60)}.npy")
        again.hardlink_to(path)
        try:
            return array_digest(np.load(again, mmap_mode="r"), "the index")
        finally:
            again.unlink()

    def shuffle(_: int) -> None:
        rng.shuffle(index)

    seconds = interleaved({"hash": read, "shuffle": shuffle}, 2 if entries > 10**7 else 5)
    path.unlink()
    yield Row(
        what=f"hash an index of {entries:,} entries",
        ours=median(seconds["hash"]),
        unit="s",
        baseline=median(seconds["shuffle"]),
        against="shuffle it, as a cold start does",
        ratio=ratio(seconds["hash"], seconds["shuffle"]),
        must="< 1 s",
        holds=median(seconds["hash"]) < 1,
    )
