"""Records on S3, far away, photographs and text, shuffled by everybody's defaults and not decoded: ours beside litData,
MosaicML Streaming, Energon, webdataset and a torch Dataset, each with its own files of the same records.

An S3 server must run where ``AWS_ENDPOINT_URL`` says (http://HOST:PORT; also ``AWS_ACCESS_KEY_ID`` and
``AWS_SECRET_ACCESS_KEY``); a bucket is made there. It is read through `benchmarks.line`. Each epoch is a process of its
own that begins with nothing on the local disk, in the environment that ``make peers`` built for its package, or in
this one; `benchmarks.store_readers` has what it does. Energon and the torch Dataset, which wait for each record, read
a tenth.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import fsspec
import numpy as np

from benchmarks.line import line
from benchmarks.pairs import Shards
from benchmarks.setup import Setup
from benchmarks.store_readers import BUCKET, WAYS, ReadPlan, Took
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio, wall
from megaresume.data.prepare.corpus import PrepareOptions, prepare
from megaresume.data.prepare.shards import prepare_shards
from megaresume.data.shard_source import ShardSource

#: seconds, and bytes a second of all connections together: a share of a node's network.
LATENCY, RATE = 0.03, 25e6
_SHARDS = 8
_LETTERS = [chr(code) for code in range(33, 127) if chr(code) not in '"\\']
#: those that read a tenth: their requests wait for each other.
SLOW = ("Energon", "torch Dataset")
_ROOT = Path(__file__).parents[1]
#: environments that ``make peers`` builds.
ENVIRONMENTS = {"litData": "main", "MosaicML streaming": "mosaicml"}


def rows(setup: Setup) -> Iterator[Row]:
    """See the module; nothing without a server."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    if not endpoint:
        print("benchmarks: S3 is left out: AWS_ENDPOINT_URL is not set", file=sys.stderr)
        return
    quick = setup.sizes.read_samples < 1000
    store, server = fsspec.filesystem("s3", endpoint_url=endpoint), urlsplit(endpoint)
    if not store.exists(BUCKET):
        store.mkdir(BUCKET)
    made = {"photographs": _photographs(setup, 60 if quick else 3000), "text": _text(setup, 200 if quick else 20_000)}
    try:
        with line(server.hostname or "", server.port or 80, latency=LATENCY, rate=RATE, cores=setup.cores) as port:
            for kind, (directory, ranges) in made.items():
                (directory / "ranges.json").write_text(json.dumps(ranges))
                plan = ReadPlan("", kind, str(directory), kind, take=len(ranges))  # type: ignore[arg-type]
                yield from _compared(setup, plan, store, f"http://127.0.0.1:{port}")
    finally:
        store.rm(BUCKET, recursive=True)


def _compared(setup: Setup, plan: ReadPlan, store: Any, url: str) -> Iterator[Row]:
    directory = Path(plan.directory)
    for path in (directory / "raw").iterdir():
        store.put_file(str(path), f"s3://{BUCKET}/{plan.prefix}/raw/{path.name}")
    ways: dict[str, ReadPlan] = {}
    for way in WAYS:
        its = replace(plan, way=way, take=plan.take // 10 if way in SLOW else plan.take, state=str(directory / "state"))
        if _run(replace(its, write=True), os.environ["AWS_ENDPOINT_URL"]) is not None:
            ways[way] = its
            for path in (path for path in (directory / its.files).rglob("*") if path.is_file()):
                store.put_file(str(path), f"{its.url}/{path.relative_to(directory / its.files)}")
    epochs: dict[str, list[Took]] = {way: [] for way in ways}
    resumed: dict[str, list[Took]] = {way: [] for way in ways}

    def epoch(way: str) -> Callable[[int], object]:
        def read(_: int) -> None:
            for resume, into in ((False, epochs), (True, resumed)):
                if (took := _run(replace(ways[way], resume=resume), url)) is not None:
                    into[way].append(took)

        return read

    interleaved({way: epoch(way) for way in ways}, setup.sizes.slow_repetitions // 2 + 1, clock=wall, warm_up=False)
    ours = epochs["ours"]
    if any(end.middle != took.middle for took, end in zip(ours, resumed["ours"], strict=True)):
        raise AssertionError("ours did not go on with the record that comes next")
    size = ours[0].nbytes / ours[0].records
    what = f"{plan.kind} of {size / 1e3:.0f} KB on S3, {1e3 * LATENCY:.0f} ms away, {RATE / 1e6:.0f} MB/s, not decoded"
    for way in [way for way in ways if way != "ours" and epochs[way] and resumed[way]]:
        for name, unit, of, value in (
            ("one epoch", "records/s", epochs, lambda took: took.seconds / took.records),
            ("processor time of it", "records/s", epochs, lambda took: took.cpu / took.records),
            ("the first record", "ms", epochs, lambda took: took.first),
            ("the first record after a resume in the middle", "ms", resumed, lambda took: took.first),
        ):
            mine, theirs = ([value(took) for took in of[side]] for side in ("ours", way))
            each = (median(mine), median(theirs))
            shown = [1e3 * took if unit == "ms" else 1 / took for took in each]
            said = f"{what}: {name}"
            yield Row(what=said, ours=shown[0], unit=unit, baseline=shown[1], against=way, ratio=ratio(mine, theirs))


def _run(plan: ReadPlan, endpoint: str) -> Took | None:
    """What a process of it took; None, with a word on standard error, if it failed or its package is missing."""
    path = Path(plan.directory) / "plan.json"
    path.write_text(json.dumps(asdict(plan)))
    python = _ROOT / ".peers" / ENVIRONMENTS.get(plan.way, "-") / "bin" / "python"
    done = subprocess.run(
        [str(python) if python.exists() else sys.executable, "-m", "benchmarks.store_readers", str(path)],
        cwd=_ROOT,
        env={**os.environ, "AWS_ENDPOINT_URL": endpoint, "S3_ENDPOINT_URL": endpoint, "PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    if done.returncode:
        said = (done.stderr.strip() or "no word").splitlines()[-1]
        print(f"benchmarks: {plan.way} ({plan.kind}) is left out: {said}", file=sys.stderr)
        return None
    return Took(0, 0, 0, 0, 0, "") if plan.write else Took(**json.loads(done.stdout.splitlines()[-1]))


#: name of the file, first byte, byte after the last one: of each record.
_Ranges = list[tuple[str, int, int]]


def _photographs(setup: Setup, records: int) -> tuple[Path, _Ranges]:
    directory = setup.directory / "store-photographs"
    shards = Shards(directory / "raw", records=records, shards=_SHARDS)
    tars = sorted(shards.directory.glob("*.tar"))
    prepare_shards(tars, directory / "photographs", shards.encoders["pillow"])
    for path in [path for path in shards.directory.iterdir() if path not in tars]:  # Energon's
        path.rename(directory / path.name)
    source = ShardSource(f"{directory / 'photographs'}.shards.idx")
    places = [place for i in range(len(source)) for place in source.places(i)]
    return directory, [(Path(place.path).name, place.offset, place.stop) for place in places]


def _text(setup: Setup, documents: int) -> tuple[Path, _Ranges]:
    from benchmarks.prepare import train_tokenizer

    directory = setup.directory / "store-text"
    (directory / "raw").mkdir(parents=True)
    rng = np.random.default_rng(3)
    # That do not compress: what does, SeaweedFS keeps compressed, and unpacks 4 MB of it for each range asked for.
    words = np.array(["".join(rng.choice(_LETTERS, rng.integers(3, 12))) for _ in range(5000)])
    ranges: _Ranges = []
    at = 0
    with open(directory / "raw/text.jsonl", "w") as file:
        for _ in range(documents):
            row = json.dumps({"text": " ".join(words[rng.integers(0, len(words), rng.integers(100, 700))])}) + "\n"
            file.write(row)
            ranges.append(("text.jsonl", at, at := at + len(row)))
    with open(directory / "raw/text.jsonl") as file, open(directory / "some.jsonl", "w") as some:
        some.writelines(islice(file, 500))
    tokenizer = train_tokenizer(directory, directory / "some.jsonl")
    prepare([directory / "raw"], directory / "text", PrepareOptions(tokenizer=tokenizer, index_only=True))
    return directory, ranges
