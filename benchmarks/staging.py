"""Checkpoints in an object store: upload and download beside the store's own clients, and a step beside an upload.

An S3 server must run where ``AWS_ENDPOINT_URL`` says; a bucket is made there. All clients move the same files, in parts
of the same size, as many at a time, in turn, and what was downloaded is forced to the disk: what is not there may be
lost. Ours alone compares checksums of what it knows: a CRC32 of each part, which the store compares (or an MD5, if it
does not: that row is there for this), and xxh3_128 of each file, in both directions. Packages that are missing are
left out.

Processor time is that of this process, with all of its threads. Where the server shares the cores, as here, it is what
decides; on a machine of a cluster the line does.

A step lasts 20 ms asleep, as a GPU's does, and computes in Python for about 2 ms, in turns with and without an upload
of 60 MB/s.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import xxhash

from benchmarks.line import CHUNK, line
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, ratio, wall
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.store import store

BUCKET = "megaresume-benchmarks"
FILES, SIZE = 2, 64 << 20
LEAST, MOST_SLOWER = 0.9, 0.01
STEP, STEPS, RATE = 0.02, 60, 60e6


def rows(setup: Setup) -> Iterator[Row]:
    """See the module; nothing without a server."""
    if "AWS_ENDPOINT_URL" not in os.environ:
        print("benchmarks: checkpoints in a store are left out: AWS_ENDPOINT_URL is not set", file=sys.stderr)
        return
    import s3fs

    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    quick = setup.sizes.corpus_documents < 100_000
    local = setup.directory / "staging"
    local.mkdir()
    files = [(local / f"{k}.pt", f"run/{k}.pt") for k in range(FILES)]
    for path, _ in files:
        path.write_bytes(os.urandom((1 << 20) if quick else SIZE))
    client = s3fs.S3FileSystem(skip_instance_cache=True, config_kwargs={"max_pool_connections": 64})
    if not client.exists(BUCKET):
        client.mkdir(BUCKET)
    try:
        yield from _moved(files, _clients(client, _entries(files)), 1 if quick else setup.sizes.slow_repetitions)
        yield _slower(files, rounds=1 if quick else 8, setup=setup)
    finally:
        client.rm(BUCKET, recursive=True)


#: of a client: files to their names in the bucket; and back, into a directory.
Client = tuple[Callable[[list[tuple[Path, str]]], object], Callable[[list[tuple[Path, str]], Path], object]]


def _entries(files: list[tuple[Path, str]]) -> list[FileEntry]:
    return [
        FileEntry(path=path.name, size=path.stat().st_size, checksum=xxhash.xxh3_128_hexdigest(path.read_bytes()))
        for path, _ in files
    ]


def _clients(s3: Any, entries: list[FileEntry]) -> dict[str, Client]:
    """By name; those that are not installed are said."""
    ours = store.Store(f"s3://{BUCKET}")
    options = {"chunksize": store.PART, "max_concurrency": store.REQUESTS}
    clients: dict[str, Client] = {
        "ours": (
            lambda files: ours.upload_all((p, n, e) for (p, n), e in zip(files, entries, strict=True)),
            lambda files, to: ours.download_all(
                [(n, to / p.name, e) for (p, n), e in zip(files, entries, strict=True)], lambda: None
            ),
        ),
        "s3fs": (
            lambda files: s3.put([str(p) for p, _ in files], [f"{BUCKET}/{n}" for _, n in files], **options),
            lambda files, to: s3.get(
                [f"{BUCKET}/{n}" for _, n in files], [str(to / p.name) for p, _ in files], **options
            ),
        ),
    }
    for name, make in (("s3torchconnector", _s3torchconnector), ("multi-storage-client", _multi_storage_client)):
        try:
            clients[name] = make()
        except ImportError as error:
            print(f"benchmarks: {name} is left out: {error}", file=sys.stderr)
    return clients


def _s3torchconnector() -> Client:
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    config = S3ClientConfig(part_size=store.PART, force_path_style=True)
    bucket = S3Checkpoint(region="us-east-1", endpoint=os.environ["AWS_ENDPOINT_URL"], s3client_config=config)

    def put(files: list[tuple[Path, str]]) -> None:
        for path, name in files:
            with bucket.writer(f"s3://{BUCKET}/{name}") as out, path.open("rb") as file:
                while data := file.read(store.PART):
                    out.write(data)

    def get(files: list[tuple[Path, str]], to: Path) -> None:
        for path, name in files:
            with bucket.reader(f"s3://{BUCKET}/{name}") as reader, (to / path.name).open("wb") as out:
                while data := reader.read(store.PART):
                    out.write(data)

    return put, get


def _multi_storage_client() -> Client:
    from multistorageclient import StorageClient, StorageClientConfig

    options = {
        "base_path": BUCKET,
        "endpoint_url": os.environ["AWS_ENDPOINT_URL"],
        "region_name": "us-east-1",
        "multipart_threshold": store.PART,
        "multipart_chunksize": store.PART,
        "max_concurrency": store.REQUESTS,
    }
    profile = {"storage_provider": {"type": "s3", "options": options}}
    client = StorageClient(StorageClientConfig.from_dict({"profiles": {"far": profile}}, profile="far"))

    def put(files: list[tuple[Path, str]]) -> None:
        for path, name in files:
            client.upload_file(name, str(path))

    def get(files: list[tuple[Path, str]], to: Path) -> None:
        for path, name in files:
            client.download_file(name, str(to / path.name))

    return put, get


def _moved(files: list[tuple[Path, str]], clients: dict[str, Client], repetitions: int) -> Iterator[Row]:
    size = sum(path.stat().st_size for path, _ in files)
    down = files[0][0].parent / "down"
    down.mkdir()

    def download(name: str) -> Callable[[int], object]:
        def get(_: int) -> None:
            for path, _name in files:
                (down / path.name).unlink(missing_ok=True)
            clients[name][1](files, down)
            if name != "ours":  # which does so by itself
                for path, _name in files:
                    with (down / path.name).open("rb") as file:
                        os.fsync(file.fileno())

        return get

    up = {name: (lambda _, name=name: clients[name][0](files)) for name in clients}
    for what, calls in (("upload", up), ("download", {name: download(name) for name in clients})):
        seconds = interleaved(calls, repetitions, clock=wall)
        for name in [name for name in clients if name != "ours"]:
            faster = ratio(seconds["ours"], seconds[name])
            yield Row(
                what=f"{what} of {len(files)} files of {size / len(files) / 1e6:.0f} MB",
                ours=size / median(seconds["ours"]) / 1e6,
                unit="MB/s",
                baseline=size / median(seconds[name]) / 1e6,
                against=name,
                ratio=faster,
                must=f">= {LEAST} x" if name == "s3fs" else "",
                holds=faster >= LEAST if name == "s3fs" else None,
            )
        pairs = {name: calls[name] for name in ("ours", "s3fs")}
        if what == "upload":
            with_md5 = store.Store(f"s3://{BUCKET}/md5")
            with_md5._is_compared = False
            entries = _entries(files)
            pairs["ours with MD5"] = lambda _, to=with_md5, entries=entries: to.upload_all(
                (path, name, entry) for (path, name), entry in zip(files, entries, strict=True)
            )
        spent = interleaved(pairs, repetitions, clock=cpu, warm_up=False)
        for name in [name for name in pairs if name != "ours"]:
            yield Row(
                what=f"processor time of that {what}, a GB",
                ours=median(spent["ours"]) / size * 1e9,
                unit="s",
                baseline=median(spent[name]) / size * 1e9,
                against=name,
                ratio=ratio(spent["ours"], spent[name]),
            )


def _slower(files: list[tuple[Path, str]], *, rounds: int, setup: Setup) -> Row:
    """Steps with and without an upload beside them."""
    server, before = urlsplit(os.environ["AWS_ENDPOINT_URL"]), os.environ["AWS_ENDPOINT_URL"]
    entries, steps = _entries(files), dict[str, list[float]]()
    latency = store.REQUESTS * CHUNK / RATE  # each connection sends a chunk in it
    with line(server.hostname or "", server.port or 80, latency=latency, rate=RATE, cores=setup.cores) as port:
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{port}"
        target = store.Store(f"s3://{BUCKET}/beside")
        target.reopen()
        target.prepare()

        def upload() -> None:
            target.upload_all((path, name, entry) for (path, name), entry in zip(files, entries, strict=True))

        for number in range(2 * rounds):
            thread = threading.Thread(target=upload if number % 2 else time.sleep, args=() if number % 2 else (0.0,))
            thread.start()
            time.sleep(0.3)
            taken = [_step() for _ in range(STEPS)]
            steps.setdefault("upload" if number % 2 else "alone", []).append(median(taken))
            thread.join()
        os.environ["AWS_ENDPOINT_URL"] = before
    slower = median([b / a for a, b in zip(steps["alone"], steps["upload"], strict=True)]) - 1
    return Row(
        what="a step beside an upload",
        ours=1e3 * median(steps["upload"]),
        unit="ms",
        baseline=1e3 * median(steps["alone"]),
        against="alone",
        must="< 1 %",
        holds=slower < MOST_SLOWER,
    )


def _step() -> float:
    begin = wall()
    time.sleep(STEP)
    sum(range(100_000))
    return wall() - begin
