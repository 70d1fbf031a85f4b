"""Ways to read records on S3: ``python -m benchmarks.store_readers PLAN.json`` takes one, and prints how long it was.

Each is a pair of functions. One makes its files of the records; the other gives the bytes of each record of an epoch,
shuffled as is its default, and what says where it is. What a package imports is not counted.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from benchmarks.timing import children, cpu

BUCKET = "megaresume-benchmarks"
#: MiB of memory of ours.
AHEAD = 64
#: records, of those that read batches.
BATCH = 10
#: How ours is shuffled as far as litData does it: a chunk of 64 MB, its default, has a thousand photographs.
BLOCKS = {"photographs": {"block": 64, "window": 16}, "text": {"block": 1024, "window": 8}}


@dataclass
class ReadPlan:
    """What a process does."""

    way: str
    kind: Literal["photographs", "text"]
    #: of all files: ``raw`` has the records, each way has a directory for what it writes.
    directory: str
    #: that ends with a way's directory in the bucket.
    prefix: str
    write: bool = False
    #: an epoch ends after so many.
    take: int = 0
    #: where it is after half of them is put here; or it begins there, and reads one.
    state: str = ""
    resume: bool = False

    @property
    def raw(self) -> Path:
        """Tar shards of photographs, or JSON lines."""
        return Path(self.directory) / "raw"

    @property
    def files(self) -> str:
        """The directory of this way's files."""
        return self.way.lower().replace(",", "").replace(" ", "-")

    @property
    def url(self) -> str:
        """Of this way's files."""
        return f"s3://{BUCKET}/{self.prefix}/{self.files}"


#: gives the next record's bytes, and what says where it is.
Reading = tuple[Iterator[bytes], Callable[[int], Any]]


def records_of(plan: ReadPlan) -> Iterator[dict[str, bytes]]:
    """Members of each record, in the order of the files."""
    if plan.kind == "text":
        with open(plan.raw / "text.jsonl", "rb") as lines:
            for line in lines:
                yield {"txt": json.loads(line)["text"].encode()}
        return
    for path in sorted(plan.raw.glob("*.tar")):
        with tarfile.open(path) as tar:
            members = [(m.name, tar.extractfile(m).read()) for m in tar if m.isfile()]  # type: ignore[union-attr]
        for (_, image), (_, text) in zip(members[::2], members[1::2], strict=True):
            yield {"jpg": image, "txt": text}


def _joined(members: dict[str, Any]) -> bytes:
    found = [members[name] for name in ("jpg", "txt") if name in members]
    return b"".join(part.encode() if isinstance(part, str) else bytes(part) for part in found)


def ours(plan: ReadPlan, at: Any, cache: str | None = None, *, blocks: bool = False) -> Reading:
    """Full shuffle of all records, or one of `BLOCKS`."""
    from megaresume.batches.loader import StreamLoader
    from megaresume.batches.open import open_stream
    from megaresume.stream.batches import BatchSchedule
    from megaresume.stream.kernel import DOCUMENT

    raw = f"s3://{BUCKET}/{plan.prefix}/raw"
    spec: dict[str, Any] = {"path": f"{plan.directory}/text", "inputs": raw}
    if plan.kind == "photographs":
        names = sorted(path.name for path in plan.raw.glob("*.tar"))
        index = f"{plan.directory}/photographs.shards.idx"
        spec = {"kind": "webdataset", "index": index, "path": [f"{raw}/{name}" for name in names]}
    if blocks:
        spec["shuffle"] = BLOCKS[plan.kind]
    stream = open_stream({"seed": 1, "seq_length": 8192, "packing": "none", "sources": {"records": spec}})
    source: Any = stream.sources[0]
    loader = StreamLoader(
        stream,
        BatchSchedule.constant(BATCH),
        start=at or 0,
        micro_batch_size=BATCH,
        dp_rank=0,
        dp_size=1,
        stop=len(source) // BATCH * BATCH,
        read_ahead=AHEAD,
        cache_dir=cache,
    )

    def read() -> Iterator[bytes]:
        ahead = loader.read_ahead_of()
        for samples in loader.indices():
            with ahead.reading(samples):
                for document in stream.plan(samples[0], samples[-1] + 1).table[:, DOCUMENT].tolist():
                    if plan.kind == "photographs":
                        yield _joined(source.record(document).members)
                    else:  # bytes, not tokens: as everybody here
                        (place,) = source.places(document)
                        yield json.loads(source.files.fetch(place))["text"].encode()
        ahead.close()

    return read(), lambda number: number


def ours_on_disk(plan: ReadPlan, at: Any) -> Reading:
    """With a cache on a local disk, as the others have one."""
    return ours(plan, at, tempfile.mkdtemp(dir=plan.directory))


def ours_in_blocks(plan: ReadPlan, at: Any) -> Reading:
    """Nothing on a disk, and neighbours read together."""
    return ours(plan, at, blocks=True)


def write_litdata(plan: ReadPlan, directory: Path) -> None:
    """Chunks of 64 MB, its default."""
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(directory), chunk_bytes="64MB")
    for k, members in enumerate(records_of(plan)):
        writer.add_item(k, {**members, "txt": members["txt"].decode()})  # it would collate bytes as numbers
    writer.done()
    writer.merge()


def _in_lists(samples: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """As litData's own does, which takes the bytes of an image for 60,000 numbers, as they come in a memoryview."""
    return {name: [sample[name] for sample in samples] for name in samples[0]}


def litdata(plan: ReadPlan, at: Any) -> Reading:
    """Its StreamingDataLoader."""
    from litdata import StreamingDataLoader, StreamingDataset
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # it has no option for that
    options = {"endpoint_url": os.environ["AWS_ENDPOINT_URL"]}
    cache = Path(plan.directory) / "cache"  # which its state knows
    shutil.rmtree(cache, ignore_errors=True)
    data = StreamingDataset(plan.url, cache_dir=str(cache), storage_options=options, shuffle=True)
    own = {} if plan.kind == "text" else {"collate_fn": _in_lists}
    loader = StreamingDataLoader(data, batch_size=BATCH, num_workers=0, **own)
    if at is not None:
        loader.load_state_dict(at)
    read = (
        _joined(dict(zip(batch, values, strict=True)))
        for batch in loader
        for values in zip(*batch.values(), strict=True)
    )
    return read, lambda number: loader.state_dict()


def write_mosaicml(plan: ReadPlan, directory: Path) -> None:
    """Shards of 64 MB, its default."""
    from streaming import MDSWriter

    names = ["jpg", "txt"] if plan.kind == "photographs" else ["txt"]
    with MDSWriter(out=str(directory), columns=dict.fromkeys(names, "bytes")) as writer:
        for members in records_of(plan):
            writer.write(members)


def mosaicml(plan: ReadPlan, at: Any) -> Reading:
    """Its StreamingDataset. Its own loader would take the bytes of a record for a batch when it counts."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()
    cache = tempfile.mkdtemp(dir=plan.directory)
    data = StreamingDataset(remote=plan.url, local=cache, shuffle=True, batch_size=1)
    if at is not None:
        data.load_state_dict(at)
    read = (_joined(sample) for sample in DataLoader(data, batch_size=None))
    return read, lambda number: data.state_dict(number, True)


def write_tars(plan: ReadPlan, directory: Path) -> None:
    """Tar shards of records, with what Energon keeps beside them if it is there."""
    import io

    for number, members in enumerate(records_of(plan)):
        if number % 400 == 0:
            tar = tarfile.open(directory / f"s{number // 400:03d}.tar", "w")  # noqa: SIM115
        for extension, content in members.items():
            member = tarfile.TarInfo(f"r{number:06d}.{extension}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        if number % 400 == 399:
            tar.close()
    tar.close()


def write_energon(plan: ReadPlan, directory: Path) -> None:
    """The same, prepared."""
    from megatron.energon.epathlib import EPath
    from megatron.energon.flavors import BaseWebdatasetFactory

    write_tars(plan, directory)
    names = sorted(path.name for path in directory.glob("*.tar"))
    BaseWebdatasetFactory.prepare_dataset(EPath(directory), names, split_parts_ratio=[("train", 1.0)], workers=1)
    sample = (
        ("CaptioningSample", "{image: jpg, caption: txt}")
        if plan.kind == "photographs"
        else ("TextSample", "{text: txt}")
    )
    (directory / ".nv-meta" / "dataset.yaml").write_text(
        f"sample_type: {{__module__: megatron.energon, __class__: {sample[0]}}}\nfield_map: {sample[1]}\n"
    )


def energon(plan: ReadPlan, at: Any) -> Reading:
    """Its savable loader, through multi-storage-client."""
    config = Path(plan.directory) / "msc.json"
    os.environ["MSC_CONFIG"] = str(config)
    storage = {"base_path": BUCKET, "endpoint_url": os.environ["AWS_ENDPOINT_URL"], "region_name": "us-east-1"}
    config.write_text(json.dumps({"profiles": {"far": {"storage_provider": {"type": "s3", "options": storage}}}}))
    from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless

    def content(sample: Any) -> bytes:
        text = sample.text if plan.kind == "text" else sample.caption
        text = text.encode() if isinstance(text, str) else bytes(text)
        return text if plan.kind == "text" else bytes(sample.image) + text

    class Task(DefaultTaskEncoder):
        decoder = None

        @stateless
        def batch(self, samples: list[Any]) -> list[bytes]:
            return [content(sample) for sample in samples]

    dataset = get_train_dataset(
        f"msc://far/{plan.prefix}/{plan.files}",
        worker_config=WorkerConfig(rank=0, world_size=1, num_workers=0),
        batch_size=1,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        task_encoder=Task(),
    )
    loader = get_savable_loader(dataset, watchdog_timeout_seconds=None)
    if at is not None:
        loader.restore_state_rank(at)
    return (batch[0] for batch in loader), lambda number: loader.save_state_rank()


def webdataset(plan: ReadPlan, at: Any) -> Reading:
    """Its shuffles of shards and of 1,000 records, over curl; it has no state: what was read is read again."""
    import boto3
    import webdataset

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    keys = [
        found["Key"] for found in client.list_objects_v2(Bucket=BUCKET, Prefix=f"{plan.prefix}/webdataset/")["Contents"]
    ]
    urls = [client.generate_presigned_url("get_object", Params={"Bucket": BUCKET, "Key": key}) for key in keys]
    data = webdataset.WebDataset([f"pipe:curl -s '{url}'" for url in urls], shardshuffle=100, seed=1).shuffle(1000)
    return islice((_joined(sample) for sample in data), at or 0, None), lambda number: number


def torch_dataset(plan: ReadPlan, at: Any) -> Reading:
    """A Dataset of one range read an item, by boto3, in torchdata's StatefulDataLoader."""
    import boto3
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"], region_name="us-east-1")
    ranges = json.loads((Path(plan.directory) / "ranges.json").read_text())

    class Records(torch.utils.data.Dataset[bytes]):
        def __len__(self) -> int:
            return len(ranges)

        def __getitem__(self, i: int) -> bytes:
            name, start, stop = ranges[i]
            got = client.get_object(Bucket=BUCKET, Key=f"{plan.prefix}/raw/{name}", Range=f"bytes={start}-{stop - 1}")
            return bytes(got["Body"].read())

    torch.manual_seed(1)
    loader = StatefulDataLoader(Records(), batch_size=None, shuffle=True)
    if at is not None:
        loader.load_state_dict(at)
    return iter(loader), lambda number: loader.state_dict()


#: name -> what makes its files (nothing: it reads those that there are), and what reads them.
WAYS: dict[str, tuple[Callable[[ReadPlan, Path], None] | None, Callable[[ReadPlan, Any], Reading]]] = {
    "ours": (None, ours_on_disk),
    "ours, no disk": (None, ours),
    "ours, no disk, in blocks": (None, ours_in_blocks),
    "litData": (write_litdata, litdata),
    "MosaicML streaming": (write_mosaicml, mosaicml),
    "Energon": (write_energon, energon),
    "webdataset": (write_tars, webdataset),
    "torch Dataset": (None, torch_dataset),
}
_OURS = "megaresume.batches.loader megaresume.batches.open megaresume.data.kernels numpy.ma tokenizers s3fs obstore"
#: what each imports: not counted.
IMPORTS = {
    "ours": _OURS,
    "ours, no disk": _OURS,
    "ours, no disk, in blocks": _OURS,
    "litData": "litdata obstore",
    "MosaicML streaming": "streaming boto3",
    "Energon": "megatron.energon boto3",
    "webdataset": "webdataset boto3",
    "torch Dataset": "torch torchdata.stateful_dataloader boto3",
}


def main(path: str) -> None:
    """See the module."""
    import importlib
    import pickle

    plan = ReadPlan(**json.loads(Path(path).read_text()))
    for name in IMPORTS[plan.way].split():
        importlib.import_module(name)
    write, read = WAYS[plan.way]
    if plan.write:
        directory = Path(plan.directory) / plan.files
        directory.mkdir()
        if write is not None:
            write(plan, directory)
        return
    at = pickle.loads(Path(plan.state).read_bytes()) if plan.resume else None
    gc.collect()
    gc.freeze()  # nor is it counted that Python's collector visits what was imported
    begun, spent = time.perf_counter(), _spent()
    reading, where = read(plan, at)
    nbytes, middle = len(data := next(reading)), hashlib.sha256(data).hexdigest()
    first, number = time.perf_counter() - begun, 1
    if not plan.resume:
        for data in islice(reading, plan.take - 1):
            nbytes += len(data)
            number += 1
            if number == plan.take // 2:
                Path(plan.state).write_bytes(pickle.dumps(where(number)))
            if number == plan.take // 2 + 1:
                middle = hashlib.sha256(data).hexdigest()
    took = Took(first, time.perf_counter() - begun, _spent() - spent, number, nbytes, middle)
    print(json.dumps(asdict(took)), flush=True)
    os._exit(0)  # without waiting for what others have begun to fetch


@dataclass
class Took:
    """What a process needed."""

    #: seconds to the first record, and of all; seconds of processor time, with those of child processes.
    first: float
    seconds: float
    cpu: float
    records: int
    nbytes: int
    #: a hash of the first record after half of them; or of the first one, after a resume.
    middle: str


def _spent() -> float:
    return cpu() + children()


if __name__ == "__main__":
    main(sys.argv[1])
