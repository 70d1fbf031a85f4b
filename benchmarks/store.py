"""Records on S3, far away, shuffled by everybody's defaults, not decoded: ours beside MosaicML Streaming, litData and
Energon, each with its own files of the same records, and beside whole shards read one after the other.

An S3 server must run where ``AWS_ENDPOINT_URL`` says (http://HOST:PORT; also ``AWS_ACCESS_KEY_ID`` and
``AWS_SECRET_ACCESS_KEY``); a bucket is made there. It is read through `benchmarks.line`. Everybody begins with
nothing on the local disk, and reads each record once, Energon a tenth of them. Elapsed time; packages that are missing
are left out.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec

from benchmarks.line import line
from benchmarks.pairs import SEQ_LENGTH, SHUFFLE_BUFFER, Shards
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio, wall
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.shard_source import ShardSource
from megaresume.data.tar import parse_record
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.kernel import DOCUMENT

BUCKET = "megaresume-benchmarks"
#: seconds, and bytes a second of all connections together: a share of a node's network.
LATENCY, RATE = 0.03, 25e6
#: MiB held: a twelfth of the records, as neighbours of a small corpus would otherwise meet too often.
AHEAD = 16
_SHARDS = 8
SEQUENTIAL = "whole shards one after the other"
#: Neighbours come near each other, as litData's chunks of 64 MB, a third of the records, make them come.
BLOCKS = {"block": 32, "window": 32}

#: Gives the bytes of each record of one epoch.
Open = Callable[[], Iterator[int]]


def rows(setup: Setup) -> Iterator[Row]:
    """See the module; nothing without a server."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        print("benchmarks: S3 is left out: AWS_ENDPOINT_URL is not set", file=sys.stderr)
        return
    records = 64 if setup.sizes.read_samples < 1000 else 3000
    shards = Shards(setup.directory / "store", records=records, shards=_SHARDS)
    store, server = fsspec.filesystem("s3", endpoint_url=endpoint), urlsplit(endpoint)
    if not store.exists(BUCKET):
        store.mkdir(BUCKET)
    with line(server.hostname or "", server.port or 80, latency=LATENCY, rate=RATE, cores=setup.cores) as port:
        url = f"http://127.0.0.1:{port}"
        os.environ |= {"AWS_ENDPOINT_URL": url, "S3_ENDPOINT_URL": url}
        try:
            yield from _compared(setup, shards, store)
        finally:
            os.environ["AWS_ENDPOINT_URL"] = endpoint
            store.rm(BUCKET, recursive=True)


def _compared(setup: Setup, shards: Shards, store: Any) -> Iterator[Row]:
    urls = [_put(store, path) for path in sorted(shards.directory.glob("*.tar"))]
    index = setup.directory / "store0"
    prepare_shards(sorted(shards.directory.glob("*.tar")), index, shards.encoders["pillow"])
    opened: dict[str, Open] = {
        "ours": lambda: _ours(index, urls),
        "blocks": lambda: _ours(index, urls, shuffle=BLOCKS),
        SEQUENTIAL: lambda: _sequential(index, urls),
        **_others(setup, shards, store, index),
    }
    cache = setup.directory / "store-cache"
    for _ in _ours(index, urls, cache_dir=cache):
        pass
    opened["later"] = lambda: _ours(index, urls, cache_dir=cache)
    first: dict[str, list[float]] = {name: [] for name in opened}
    count: dict[str, int] = {}

    def epoch(name: str) -> Callable[[int], object]:
        def read(_: int) -> None:
            begin = wall()
            reading = opened[name]()
            next(reading)
            first[name].append(wall() - begin)
            count[name] = 1 + sum(1 for _ in reading)

        return read

    repetitions = setup.sizes.slow_repetitions // 2 + 1
    epochs = interleaved({name: epoch(name) for name in opened}, repetitions, clock=wall, warm_up=False)
    seconds = {name: [took / count[name] for took in epochs[name]] for name in opened}
    size = sum(path.stat().st_size for path in shards.directory.glob("*.tar")) / shards.records
    what = f"records of {size / 1e3:.0f} KB on S3, {1e3 * LATENCY:.0f} ms away, {RATE / 1e6:.0f} MB/s, not decoded"
    kinds = {
        "ours": what,
        "blocks": f"{what}, shuffled in blocks of {BLOCKS['block']}",
        "later": f"{what}: a later epoch, from its cache",
    }
    compared = [("ours", name) for name in opened if name not in kinds]
    for ours, name in [*compared, ("blocks", SEQUENTIAL), ("later", SEQUENTIAL)]:
        faster = ratio(seconds[ours], seconds[name])
        must = name == SEQUENTIAL
        yield Row(
            what=kinds[ours],
            ours=1 / median(seconds[ours]),
            unit="records/s",
            baseline=1 / median(seconds[name]),
            against=name,
            ratio=faster,
            must=">= 0.8 x" if must else "",
            holds=faster >= 0.8 if must else None,
        )
    for _, name in compared:
        yield Row(
            what=f"{what}: the first one",
            ours=1e3 * median(first["ours"]),
            unit="ms",
            baseline=1e3 * median(first[name]),
            against=name,
            ratio=ratio(first["ours"], first[name]),
        )


def _put(store: Any, path: Path, name: str = "") -> str:
    """Its URL."""
    url = f"s3://{BUCKET}/{name or path.name}"
    store.put_file(str(path), url)
    return url


def _ours(
    index: Path, urls: list[str], *, shuffle: Mapping[str, int] | str = "full", cache_dir: Path | None = None
) -> Iterator[int]:
    spec = {"kind": "webdataset", "index": f"{index}.shards.idx", "path": urls, "shuffle": shuffle}
    stream = open_stream({"seed": 1, "seq_length": SEQ_LENGTH, "packing": "none", "sources": {"pairs": spec}})
    source: Any = stream.sources[0]
    schedule = BatchSchedule.constant(1)
    loader = StreamLoader(
        stream,
        schedule,
        micro_batch_size=1,
        dp_rank=0,
        dp_size=1,
        stop=len(source),
        read_ahead=AHEAD,
        cache_dir=cache_dir,
    )
    ahead = loader.read_ahead_of()
    for samples in loader.indices():
        with ahead.reading(samples):
            for document in stream.plan(samples[0], samples[-1] + 1).table[:, DOCUMENT].tolist():
                yield sum(map(len, source.record(document).members.values()))
    ahead.close()


def _sequential(index: Path, urls: list[str]) -> Iterator[int]:
    """The records in the order of the shards, each shard by one request."""
    source = ShardSource(f"{index}.shards.idx")
    store, offsets, sizes = fsspec.filesystem("s3"), source.index.column("offset"), source.index.column("nbytes")
    bounds = [*(shard.first for shard in source.index.files), len(source)]
    for k, url in enumerate(urls):
        data = store.cat_file(url)
        for i in range(bounds[k], bounds[k + 1]):
            record = parse_record(data[int(offsets[i]) : int(offsets[i] + sizes[i])], url)
            yield sum(map(len, record.members.values()))


def _others(setup: Setup, shards: Shards, store: Any, index: Path) -> dict[str, Open]:
    """Those that are installed; of the others standard error says so."""
    source = ShardSource(f"{index}.shards.idx")
    there: dict[str, Open] = {}
    for name, prepare in {"MosaicML streaming": _mosaicml, "litData": _litdata, "Energon": _energon}.items():
        try:
            there[name] = prepare(setup, shards, store, source)
        except ImportError as error:
            print(f"benchmarks: {name} is left out: {error}", file=sys.stderr)
    return there


def _members(source: ShardSource) -> Iterator[dict[str, Any]]:
    for i in range(len(source)):
        members = source.record(i).members
        yield {"jpg": members["jpg"], "txt": members["txt"].decode()}


def _mosaicml(setup: Setup, shards: Shards, store: Any, source: ShardSource) -> Open:
    from streaming import MDSWriter, StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    folder = Path(tempfile.mkdtemp(dir=setup.directory)) / "mds"
    with MDSWriter(out=str(folder), columns={"jpg": "bytes", "txt": "str"}) as writer:
        for members in _members(source):
            writer.write(members)
    for path in folder.iterdir():
        _put(store, path, f"mds/{path.name}")

    def epoch() -> Iterator[int]:
        clean_stale_shared_memory()
        with tempfile.TemporaryDirectory(dir=setup.directory) as local:
            data = StreamingDataset(remote=f"s3://{BUCKET}/mds", local=local, shuffle=True, batch_size=1)
            for sample in DataLoader(data, batch_size=None):
                yield len(sample["jpg"]) + len(sample["txt"])

    return epoch


def _litdata(setup: Setup, shards: Shards, store: Any, source: ShardSource) -> Open:
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader
    from litdata.streaming.writer import BinaryWriter

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for that
    folder = Path(tempfile.mkdtemp(dir=setup.directory))
    writer = BinaryWriter(str(folder), chunk_bytes="64MB")
    for k, members in enumerate(_members(source)):
        writer.add_item(k, members)
    writer.done()
    writer.merge()
    for path in folder.iterdir():
        _put(store, path, f"lit/{path.name}")

    def epoch() -> Iterator[int]:
        local = tempfile.mkdtemp(dir=setup.directory)
        options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
        data = StreamingDataset(f"s3://{BUCKET}/lit", cache_dir=local, storage_options=options, shuffle=True)
        for batch in StreamingDataLoader(data, batch_size=1, num_workers=0):
            yield len(batch["jpg"][0]) + len(batch["txt"][0])
        shutil.rmtree(local, ignore_errors=True)

    return epoch


def _energon(setup: Setup, shards: Shards, store: Any, source: ShardSource) -> Open:
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless

    for path in filter(Path.is_file, shards.directory.rglob("*")):
        _put(store, path, f"energon/{path.relative_to(shards.directory)}")
    config = setup.directory / "msc.json"
    os.environ["MSC_CONFIG"] = str(config)
    storage = {"base_path": BUCKET, "endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    config.write_text(json.dumps({"profiles": {"far": {"storage_provider": {"type": "s3", "options": storage}}}}))

    class Task(DefaultTaskEncoder):
        decoder = None

        @stateless
        def batch(self, samples: list[Any]) -> list[int]:
            return [len(bytes(s.image)) + len(s.caption) for s in samples]

    def epoch() -> Iterator[int]:
        dataset = get_train_dataset(
            "msc://far/energon",
            worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
            batch_size=1,
            shuffle_buffer_size=SHUFFLE_BUFFER,
            max_samples_per_sequence=100,
            task_encoder=Task(),
        )
        loader = get_savable_loader(dataset, watchdog_timeout_seconds=None)
        for sizes in islice(loader, shards.records // 10):  # it has no end, and as many requests for each record
            yield sum(sizes)

    return epoch
