"""Shards that are 30 ms away: our loader at its default shuffle beside a sequential read of the same shards.

Both decode and encode every record with the same encoder, on one core; the server is another process. Elapsed time.
On S3, and beside others: `benchmarks.store`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec

from benchmarks.pairs import SEQ_LENGTH, Shards
from benchmarks.server import served
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio, wall
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.shard_source import ShardSource
from megaresume.data.tar import parse_record
from megaresume.encoding.images.document import Key
from megaresume.stream.batches import BatchSchedule
from tests.data.far import serve

#: seconds before every answer.
LATENCY = 0.03
#: MiB held, so little that what is read in a turn was not all read before it.
AHEAD = 4


def rows(setup: Setup) -> Iterator[Row]:
    """See the module."""
    quick = setup.sizes.read_samples < 1000
    records, turn = (24, 8) if quick else (600, 40)
    shards = Shards(setup.directory / "far", records=records)
    index = setup.directory / "far0"
    tars = sorted(shards.directory.glob("*.tar"))
    prepare_shards(tars, index, shards.encoders["pillow"])
    with served(_serve, shards.directory, cores=setup.cores) as url:
        urls = [f"{url}/{path.name}" for path in tars]
        read = {
            "ahead": _ours(index, urls, {"read_ahead": AHEAD}),
            "on demand": _ours(index, urls, {"read_ahead": 0}),
            "sequential": _sequential(index, urls),
        }

        def records_of(name: str) -> Any:
            return lambda _: [next(read[name]) for _ in range(turn)]

        seconds = interleaved({name: records_of(name) for name in read}, setup.sizes.slow_repetitions, clock=wall)
    for name in ("ahead", "on demand"):
        faster = ratio(seconds[name], seconds["sequential"])
        yield Row(
            what=f"records 30 ms away, shuffled, read {name}",
            ours=turn / median(seconds[name]),
            unit="records/s",
            baseline=turn / median(seconds["sequential"]),
            against="whole shards one after the other",
            ratio=faster,
            must=">= 0.8 x" if name == "ahead" else "",
            holds=faster >= 0.8 if name == "ahead" else None,
        )


def _ours(index: Path, urls: list[str], options: dict[str, Any]) -> Iterator[None]:
    source = {"kind": "webdataset", "index": f"{index}.shards.idx", "path": urls}
    stream = open_stream({"seed": 1, "seq_length": SEQ_LENGTH, "packing": "none", "sources": {"pairs": source}})
    schedule = BatchSchedule.constant(1)
    for _ in StreamLoader(stream, schedule, micro_batch_size=1, dp_rank=0, dp_size=1, prefetch=0, **options):
        yield


def _sequential(index: Path, urls: list[str]) -> Iterator[None]:
    """The records in the order of the shards, each shard by one request."""
    source = ShardSource(f"{index}.shards.idx")
    store, offsets, sizes = fsspec.filesystem("http"), source.index.column("offset"), source.index.column("nbytes")
    bounds = [*(shard.first for shard in source.index.files), len(source)]
    while True:
        for k, url in enumerate(urls):
            data = store.cat_file(url)
            for i in range(bounds[k], bounds[k + 1]):
                record = parse_record(data[int(offsets[i]) : int(offsets[i] + sizes[i])], url)
                source.encoder.encode(record, Key(seed=0, source="pairs", document=i, epoch=0))
                yield


def _serve(directory: Path, said: Any) -> None:
    with serve(directory, latency=LATENCY) as far:
        said.put(far.url)
        while True:
            time.sleep(3600)
