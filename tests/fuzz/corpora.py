"""Files beside a run: the data config, recipes of patches, indexes of corpora, the guard's record."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import struct
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import xxhash

from megaresume.checkpoint.records.envelope import Envelope, OpaqueState
from megaresume.data.data_config import DataConfig
from megaresume.data.record_index import COLUMNS_AT, IndexWriter, RecordIndex, RowIndex, ShardIndex
from megaresume.data.sidecar import CorpusIdentity, read_fingerprint, read_tokenizer, sidecar_path
from megaresume.data.split import IndexedSource
from megaresume.hosts.megatron.guard.compare import describe
from megaresume.hosts.megatron.patching.recipe import read_recipe
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import MegaresumeError, StateError, parse_json
from megaresume.stream.state_text import checksum
from tests.fuzz.mutate import json_file, yaml_file
from tests.fuzz.target import Target, scratch

REPOSITORY = Path(__file__).parents[2]

# data.yaml

_DATA = b"""\
seed: 1
seq_length: 4096
packing: {mode: best_fit, open_bins: 16}
blend: {by: tokens}
sources:
  web: {path: corpora/web, weight: 0.7, max_epochs: 2, on_exhausted: drop}
  code: {path: corpora/code, weight: 3, shuffle: {block: 1024}}
stages:
  - {name: first, weights: {web: 1, code: 1}}
  - {name: second, at: 1000, weights: {web: 1}}
skip: {samples: ["100:200"], documents: {web: [1, "5:9", {file: bad.txt}]}}
validation:
  all: {sources: {web: {path: corpora/valid}}, samples: 100}
"""
_ODD = (
    b"a: 2001-13-45",
    b"a: 0x_",
    b"? [a]\n: b",
    b"&a [*a]",
    b"a: &a {b: *a}",
    b"seed: 1\nsources: &a {web: *a}",
    b"{" * 1000,
    b"!!python/object/apply:os.system ['true']",
    b"a: &a [x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (k + 1, k + 1, b", ".join([b"*%c" % k] * 8)) for k in range(97, 112)),
)


def check_data(data: bytes) -> None:
    path = scratch() / "data.yaml"
    path.write_bytes(data)
    try:
        config = DataConfig.of(path).stream_config()
    except MegaresumeError:
        return
    if StreamConfig.from_dict(config.to_dict()) != config:
        raise AssertionError("the normal form of a data config is read as another one")


# Recipes


def check_recipe(data: bytes) -> None:
    path = scratch() / "recipe.yaml"
    path.write_bytes(data)
    with contextlib.suppress(MegaresumeError):
        read_recipe(path)


def _recipes() -> list[bytes]:
    odd = b"name: x\nversion: 1\nupstream: u\ncalls: {f: {modules: [a], parameters: [p, q]}}\n"
    odd += b"provider: {of: f, parameter: p, named: 'a{99999999999999999999}'}\nflags: {of: f, parameter: q}\n"
    return [odd, *_ODD, *(path.read_bytes() for path in sorted((REPOSITORY / "patches").glob("*.yaml")))]


# .idx

_TOKENS = 24


@functools.cache
def _bin() -> Path:
    prefix = scratch() / "corpus"
    Path(f"{prefix}.bin").write_bytes(np.arange(_TOKENS, dtype="<i4").tobytes())
    return prefix


def _idx(lengths: list[int], boundaries: list[int], *, modes: bool = False, code: int = 4) -> bytes:
    pointers = [4 * sum(lengths[:k]) for k in range(len(lengths))]
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(boundaries))
    body = np.array(lengths, "<i4").tobytes() + np.array(pointers, "<i8").tobytes()
    return header + body + np.array(boundaries, "<i8").tobytes() + (bytes(len(lengths)) if modes else b"")


def _indexes() -> list[bytes]:
    return [
        _idx([5, 0, 9, 10], [0, 1, 3, 4]),
        _idx([24], [0, 1], modes=True),
        _idx([5, 19], [0, 1, 2], code=7),
        _idx([], [0]),
        b"MMIDIDX\0\0",
    ]


@functools.cache
def _known() -> dict[str, list[int]]:
    """Fingerprint of the lengths -> the tokens of the documents, for the intact ones."""
    return {}


def check_idx(data: bytes) -> None:
    """What an index says is within the .bin, and one with the same fingerprint gives the same documents."""
    prefix = _bin()
    Path(f"{prefix}.idx").write_bytes(data)
    sidecar_path(prefix).unlink(missing_ok=True)
    try:
        source = IndexedSource(prefix)
    except MegaresumeError:
        return
    documents: list[list[Any]] = []
    for i in range(min(len(source), 64)):
        try:
            tokens = source.get(i)
        except MegaresumeError:
            continue
        if len(tokens) != source.length(i):
            raise AssertionError(f"document {i}: {len(tokens)} tokens of {source.length(i)}")
        documents.append(tokens.tolist())
    try:
        fingerprint = source.fingerprint(recompute=True)
    except MegaresumeError:
        return
    if len(source) <= 64 and sum(map(len, documents)) != fingerprint.tokens:
        raise AssertionError(f"{sum(map(len, documents))} tokens, {fingerprint.tokens} by the fingerprint")
    for seed in _indexes()[:1]:
        if fingerprint.lengths == _lengths_of(seed) and documents != [
            list(range(5)), list(range(5, 14)), list(range(14, 24))
        ]:  # fmt: skip
            raise AssertionError(f"the same fingerprint and other documents: {documents}")


@functools.cache
def _lengths_of(seed: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(np.array([5, 9, 10], "<i8").tobytes())


def _mutate_idx(data: bytes, rng: Random) -> bytes:
    lengths = [rng.choice((0, 1, 2, 5, 9, 10, 24, -1)) for _ in range(rng.randrange(6))]
    boundaries = sorted(rng.randrange(len(lengths) + 1) for _ in range(rng.randrange(4)))
    boundaries = [0, *boundaries, len(lengths)]
    if rng.randrange(2):
        rng.shuffle(boundaries)
    return _idx(lengths, boundaries, modes=bool(rng.randrange(2)), code=rng.randrange(10))


# .shards.idx and .places

RECORDS = 5


@functools.cache
def _index(index: type[RecordIndex]) -> bytes:
    columns = {name: np.arange(1, RECORDS + 1).astype(dtype) for name, dtype in index.COLUMNS.items()}
    files = [{"path": "a", "size": 10240, "records": 2}, {"path": "b", "size": 10240, "records": 3}]
    header = {
        "root": "/data",
        "made_with": {},
        "tokens": 15,
        "longest": 5,
        "invalid": {"policy": "error", "count": 0, "first": []},
        "encoder": {"fingerprint": "0" * 32, "spec": {"tokenizer": {}}},
        "files": [file | {"format": "jsonl", "unit": "jsonl"} for file in files],
        "fingerprints": [{"range": [0, RECORDS], "tokens": 15, "hash": "0" * 32, "contents": "0" * 16}],
    }
    file = io.BytesIO()
    writer = IndexWriter(file, index, RECORDS)
    writer.add(columns)
    writer.finish(header)
    return file.getvalue()


def _check_index(index: type[RecordIndex], data: bytes) -> None:
    path = scratch() / ("pairs.shards.idx" if index is ShardIndex else "rows.places")
    path.write_bytes(data)
    try:
        found = ShardIndex(path) if index is ShardIndex else RowIndex(path, data, RECORDS)
        found.verify()
    except MegaresumeError:
        return
    if sum(file.records for file in found.files) != len(found) or any(file.records < 0 for file in found.files):
        raise AssertionError(f"{len(found)} records in files {found.files}")
    if any(len(found.column(name)) != len(found) for name in index.COLUMNS):
        raise AssertionError("columns of different lengths")


def check_shards(data: bytes) -> None:
    _check_index(ShardIndex, data)


def check_places(data: bytes) -> None:
    _check_index(RowIndex, data)


def _mutate_index(index: type[RecordIndex], data: bytes, rng: Random) -> bytes | None:
    end = index.column_places(RECORDS)["end"]
    body, header = _index(index)[COLUMNS_AT:end], _index(index)[end:]
    if rng.randrange(2) and len(data) > end:
        header = data[end:]
    changed = json_file(header, rng)
    if changed is None:
        return None
    return index.preamble(rng.choice((5, 5, 5, 4)), changed).ljust(COLUMNS_AT, b"\0") + body + changed


# Beside a corpus


@functools.cache
def _beside() -> Path:
    prefix = scratch() / "beside"
    Path(f"{prefix}.bin").write_bytes(bytes(4 * _TOKENS))
    Path(f"{prefix}.idx").write_bytes(_indexes()[0])
    os.utime(f"{prefix}.idx", ns=(0, 0))
    return prefix


def check_sidecar(data: bytes) -> None:
    prefix = _beside()
    sidecar_path(prefix).write_bytes(data)
    identity = CorpusIdentity.of(prefix)
    with contextlib.suppress(MegaresumeError):
        read_fingerprint(prefix, identity, 0, 3)
    with contextlib.suppress(MegaresumeError):
        read_tokenizer(prefix, idx_bytes=1, bin_bytes=1)
    with contextlib.suppress(MegaresumeError):
        IndexedSource(prefix).fingerprint()


def _sidecars() -> list[bytes]:
    from megaresume.data import sidecar

    entry = {**asdict(CorpusIdentity.of(_beside())), "range": [0, 3], "documents": 3, "tokens": 24}
    entry |= {"lengths": "0" * 32, "contents": "0" * 16}
    content = {"format": sidecar.FORMAT, "version": sidecar.VERSION, "fingerprints": [entry]}
    tokenizer = {"fingerprint": "x", "idx_bytes": 1, "bin_bytes": 1}
    return [json.dumps(c).encode() for c in (content, content | {"tokenizer": tokenizer})] + [b"[" * 100_000]


# .spans


@functools.cache
def _masked() -> Path:
    prefix = scratch() / "masked"
    Path(f"{prefix}.bin").write_bytes(bytes(4 * _TOKENS))
    Path(f"{prefix}.idx").write_bytes(_idx([5, 0, 9, 10], [0, 1, 2, 3, 4]))
    return prefix


def _spans(bounds: list[int], spans: list[int]) -> bytes:
    body = np.array(bounds, "<i8").tobytes() + np.array(spans, "<i4").tobytes()
    numbers = (1, len(bounds) - 1, len(spans) // 2, _TOKENS, 9, xxhash.xxh3_64_intdigest(body))
    return b"MGRSPANS" + struct.pack("<6Q", *numbers) + body


def _span_files() -> list[bytes]:
    some, pair = _spans([0, 1, 1, 3, 3], [1, 5, 0, 2, 4, 9]), _spans([0, 0, 0, 0, 3], [0, 4, 9, 9, 9, 10])
    return [some, pair, _spans([0] * 5, []), _spans([0], []), b"MGRSPANS"]


def check_span_file(data: bytes) -> None:
    """What is read lies within the file, and spans that have a fingerprint within their documents."""
    prefix = _masked()
    Path(f"{prefix}.spans").write_bytes(data)
    try:
        source = IndexedSource(prefix)
        found = source.trained_spans(np.arange(len(source)))
    except MegaresumeError:
        return
    assert found is not None
    try:
        source.fingerprint(recompute=True)
    except MegaresumeError:
        return
    for k in range(len(source)):
        spans, length = found.spans[found.starts[k] : found.starts[k + 1]], source.length(k)
        # One may be empty, where the rejected half of a preference pair begins: its neighbours may touch it.
        halves = np.flatnonzero(spans[:, 0] == spans[:, 1])[:1]
        assert all(0 < at < length for at in spans[halves, 0]), spans
        assert (np.diff([0, *spans.ravel().tolist(), length]) >= 0).all(), spans
        for part in np.split(np.delete(spans, halves, axis=0), halves):
            assert (np.diff(part.ravel()) > 0).all(), spans


def _mutate_spans(data: bytes, rng: Random) -> bytes:
    bounds = sorted(rng.randrange(4) for _ in range(3))
    ends = [rng.choice((-1, 0, 1, 2, 4, 5, 9, 10, 11)) for _ in range(6)]
    return _spans([0, *bounds, 3], sorted(ends) if rng.randrange(2) else ends)


# Megatron's guard, and the state in ``args``


@functools.cache
def _orders() -> list[bytes]:
    from megaresume.hosts.megatron.guard.record import (
        ArrayHashes,
        BuilderRecord,
        ComponentRecord,
        OrderRecord,
        SplitRecord,
    )

    part = ArrayHashes(samples=7, arrays={"shuffle_index": "0" * 16})
    component = ComponentRecord(
        path="web", documents=(0, 5), total=9, requested=None, built=part, lengths="0", tokens=None, epochs=(part,)
    )
    split = SplitRecord(components=(component,), blend=(part,))
    settings = {"random_seed": 1, "sequence_length": 16, "split": "9,1,0"}
    builder = BuilderRecord(
        dataset="GPTDataset",
        settings=settings,
        blend=(("web",), ("0x1p+0",)),
        blend_per_split=None,
        sizes=(7, None, None),
        splits=(split, None, None),
    )
    record = OrderRecord(megatron="0.16.1", since=0, builders=(builder,), accepted=("a word",))
    return [json.dumps(record.to_dict()).encode(), b"{}", b"[]", b"[" * 100_000]


def check_order(data: bytes) -> None:
    try:
        content = parse_json(data)
    except ValueError:
        return
    with contextlib.suppress(StateError):
        fields = content if isinstance(content, dict) else {}
        "\n".join(describe(OpaqueState(kind="order", samples=0, digest="0" * 16, content=fields))).encode(
            "utf-8", "replace"
        )


def _strings() -> list[bytes]:
    states = [OpaqueState(kind=kind, samples=80, digest="0" * 16, content={"a": 1}) for kind in ("order", "loader")]
    written = [Envelope(state=state, iteration=10, framework="megatron-core 0.16.1").to_text() for state in states]
    return [*(text.encode() for text in written), b'{"format": 1, "a": NaN}', b"[" * 100_000]


def check_string(data: bytes) -> None:
    with contextlib.suppress(StateError):
        envelope = Envelope.read(data.decode("utf-8", "replace"))
        fields = json.loads(data)
        found = (envelope.iteration, envelope.samples, envelope.kind, envelope.framework)
        if found != tuple(fields[name] for name in ("iteration", "samples", "kind", "framework")):
            raise AssertionError(f"{found} is not what was written")


def _with_checksum(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    body = {k: v for k, v in value.items() if k != "checksum"}
    return body | {"checksum": checksum(body)}


def _mutate_yaml(data: bytes, rng: Random) -> bytes | None:
    if rng.randrange(4):
        return yaml_file(data, rng)
    lines = data.split(b"\n")
    lines.insert(rng.randrange(len(lines) + 1), rng.choice(_ODD))
    return b"\n".join(lines)


TARGETS: dict[str, Target] = {
    "data-yaml": Target(seeds=lambda: [_DATA, *_ODD], check=check_data, mutate=_mutate_yaml),
    "recipe": Target(seeds=_recipes, check=check_recipe, mutate=_mutate_yaml),
    "idx": Target(seeds=_indexes, check=check_idx, mutate=_mutate_idx),
    "shards-idx": Target(
        seeds=lambda: [_index(ShardIndex)], check=check_shards, mutate=functools.partial(_mutate_index, ShardIndex)
    ),
    "places": Target(
        seeds=lambda: [_index(RowIndex)], check=check_places, mutate=functools.partial(_mutate_index, RowIndex)
    ),
    "spans": Target(seeds=_span_files, check=check_span_file, mutate=_mutate_spans),
    "sidecar": Target(seeds=_sidecars, check=check_sidecar, mutate=json_file),
    "order": Target(seeds=_orders, check=check_order, mutate=json_file),
    "args": Target(
        seeds=_strings, check=check_string, mutate=lambda data, rng: json_file(data, rng, finish=_with_checksum)
    ),
}
