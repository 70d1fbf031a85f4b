"""How well blocks of shards are mixed, and what has to be at hand for it: the table of docs/shards.md.

    python -m benchmarks.shuffle --streaming SITE_PACKAGES

``SITE_PACKAGES`` is where ``pip install --no-deps mosaicml-streaming`` put it: its own functions are run. Without it
our rows alone are printed.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream.config import StreamConfig
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

Int64Array = npt.NDArray[np.int64]
SHARDS, RECORDS, RECORD_BYTES = 1000, 1000, 100_000
BATCH = 256


@dataclass(frozen=True, slots=True)
class Mixed:
    """One order of an epoch."""

    #: shards in a batch, on average, and in the worst one of a hundred.
    shards: float
    fewest: float
    #: pairs of a batch that are of one shard, in units of those of a full shuffle.
    pairs: float
    #: of the epoch, in which the middle 90 % of the records of a shard come.
    spread: float
    #: records of blocks that are begun and not finished, at most.
    at_hand: int


def measure(order: Int64Array, block: int) -> Mixed:
    """Measure the order of an epoch.

    Args:
        order: records, int64[SHARDS * RECORDS].
        block: records that are fetched together.
    """
    shards = order // RECORDS
    batches = shards[: len(shards) // BATCH * BATCH].reshape(-1, BATCH)
    counts = np.stack([np.bincount(batch, minlength=SHARDS) for batch in batches])
    distinct = (counts > 0).sum(axis=1)
    pairs = (counts * (counts - 1)).sum() / (len(batches) * BATCH * (BATCH - 1))
    places = np.argsort(order, kind="stable").reshape(SHARDS, RECORDS)
    low, high = np.quantile(places, [0.05, 0.95], axis=1)
    blocks = np.argsort(order, kind="stable")[: len(order) // block * block].reshape(-1, block)
    begun, finished = np.sort(blocks.min(axis=1)), np.sort(blocks.max(axis=1))
    at_hand = int((np.arange(1, len(begun) + 1) - np.searchsorted(finished, begun)).max())
    return Mixed(
        shards=float(distinct.mean()),
        fewest=float(np.quantile(distinct, 0.01)),
        pairs=float(pairs * (len(order) - 1) / (RECORDS - 1)),
        spread=float(np.mean(high - low) / len(order)),
        at_hand=at_hand * block,
    )


def ours(shuffle: dict[str, int] | None) -> Int64Array:
    """The order of an epoch, as the stream hands it out."""
    source: dict[str, Any] = {} if shuffle is None else {"shuffle": shuffle}
    config = StreamConfig.from_dict({"seed": 1, "seq_length": 1, "packing": "none", "sources": {"pairs": source}})
    records = SHARDS * RECORDS
    return Stream(config, [LengthList(np.ones(records, np.int64))]).plan(0, records).table[:, 2]


def theirs(site_packages: Path) -> Iterator[tuple[str, Int64Array]]:
    """Those of MosaicML streaming, for one node and its default block size, and for blocks of 2^16."""
    for name in ("streaming", "streaming.base", "streaming.base.shuffle"):
        # Their functions need numpy alone; their packages would import torch and the clients of all stores.
        package = types.ModuleType(name)
        package.__path__ = [str(site_packages / name.replace(".", "/"))]
        sys.modules[name] = package
    sizes = np.full(SHARDS, RECORDS)
    for algorithm in ("py1e", "py1br"):
        module = importlib.import_module(f"streaming.base.shuffle.{algorithm}")
        function: Callable[..., Int64Array] = getattr(module, f"get_shuffle_{algorithm}")
        for bits in (18, 16):
            yield f"streaming {algorithm}, block size 2^{bits}", function(sizes, 1, 1, 0, 1 << bits)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shuffle", description=__doc__)
    parser.add_argument("--streaming", type=Path, metavar="SITE_PACKAGES", help="where mosaicml-streaming is installed")
    args = parser.parse_args()
    print(
        f"| order of {SHARDS} shards of {RECORDS} records | shards in a batch of {BATCH} | worst batch in 100 "
        "| pairs of one shard | spread | at hand | fetched at once |\n|---|---|---|---|---|---|---|"
    )
    for name, order, block in _orders(args.streaming):
        found = measure(order, block)
        print(
            f"| {name} | {found.shards:.0f} | {found.fewest:.0f} | {found.pairs:.2f} | {100 * found.spread:.1f} % "
            f"| {found.at_hand:,} records, {found.at_hand * RECORD_BYTES / 1e9:.1f} GB "
            f"| {block * RECORD_BYTES / 1e6:.1f} MB |",
            flush=True,
        )


def _orders(streaming: Path | None) -> Iterator[tuple[str, Int64Array, int]]:
    """(name, order of an epoch, records that are fetched together)."""
    yield "full shuffle", ours(None), 1
    for block, window in ((1000, 8), (1000, 64), (250, 256), (64, 1024), (32, 2048), (16, 4096)):
        yield f"`{{block: {block}, window: {window}}}`", ours({"block": block, "window": window}), block
    for name, order in () if streaming is None else theirs(streaming):
        yield name, order, RECORDS


if __name__ == "__main__":
    main()
