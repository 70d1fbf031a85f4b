"""Finished parts to ``NAME.shards.idx``, in bounded memory; it appears by rename, when it is complete.

The header holds

    encoder        spec (with the tokenizer's content) and fingerprint
    files          path (relative to the index where they lie below it), bytes, records of each, in order
    records, tokens, image_tokens, images, missing_images, longest
    split          documents beyond one for each record: ``records`` counts documents
    invalid        policy, count, and the first records that could not be measured, with the reason
    fingerprints   range, tokens, hash of the lengths, hash of the contents: of all documents, and of each part of an
                   Energon data set
    columns        hash of each
    folder         of JSON lines: path of the folder of images (as those of shards), bytes of the images that rows name
    energon        hash of the metadata, and part -> [first, stop) (Energon data sets only), with fields

and nothing of the machine, the time or the workers: the same shards and encoder give the same bytes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megaresume.data.prepare.measure import SHOWN, IndexSpec, ShardTask
from megaresume.data.record_index import IndexWriter, ShardIndex
from megaresume.data.shard_paths import portable
from megaresume.files import fsync_dir


@dataclass(slots=True)
class _Totals:
    """What is known when every part was seen."""

    tokens: int = 0
    image_tokens: int = 0
    images: int = 0
    missing_images: int = 0
    image_bytes: int = 0
    split: int = 0
    longest: int = 0
    invalid: int = 0
    first_invalid: list[dict[str, Any]] = field(default_factory=list)


class _Range:
    """Fingerprint of a range of documents, being made."""

    def __init__(self, first: int, stop: int) -> None:
        self.first, self.stop = first, stop
        self.tokens = 0
        self._lengths, self._contents = xxhash.xxh3_128(), xxhash.xxh3_64()

    def add(self, at: int, columns: Mapping[str, np.ndarray[Any, Any]]) -> None:
        mine = slice(max(self.first - at, 0), max(self.stop - at, 0))
        tokens = columns["tokens"][mine].astype("<i8")
        self._lengths.update(tokens.tobytes())
        self._contents.update(columns["content"][mine].tobytes())
        self.tokens += int(tokens.sum())

    def entry(self) -> dict[str, Any]:
        return {
            "range": [self.first, self.stop],
            "tokens": self.tokens,
            "hash": self._lengths.hexdigest(),
            "contents": self._contents.hexdigest(),
        }


def merge_parts(
    index: Path,
    spec: IndexSpec,
    tasks: Sequence[ShardTask],
    heads: Sequence[Mapping[str, Any]],
    parts: Iterable[tuple[Mapping[str, Any], dict[str, np.ndarray[Any, Any]]]],
    energon: Mapping[str, Any] | None,
    tick: Callable[[int], Any],
) -> Mapping[str, Any]:
    """Write the index and put it in place of an older one, if there is one.

    Args:
        index: path of the ``.shards.idx``.
        spec: what the parts were made with.
        tasks: all shards, in order.
        heads: of their parts.
        parts: head and columns of each, read as they are needed.
        energon: of an Energon data set: hash, parts (part -> [first, stop) documents), names of the shards.
        tick: called with the records written.

    Returns:
        the header.

    Raises:
        CorpusError: a part is damaged.
        OSError: the disk is full, or the like.
    """
    records = sum(head["records"] for head in heads)
    ranges = {(0, records): _Range(0, records)}
    for first, stop in (energon or {}).get("parts", {}).values():
        ranges.setdefault((first, stop), _Range(first, stop))
    totals, at = _Totals(), 0
    new = index.with_name(f".{index.name}.new")
    with open(new, "wb") as file:
        writer = IndexWriter(file, ShardIndex, records)
        for task, (head, columns) in zip(tasks, parts, strict=True):
            writer.add(columns)
            for part in ranges.values():
                part.add(at, columns)
            _add(totals, columns, head, at, task)
            at += head["records"]
            tick(head["records"])
        fingerprints = [part.entry() for part in ranges.values()]
        header = writer.finish(_header(index, spec, tasks, heads, totals, energon) | {"fingerprints": fingerprints})
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, index)
    fsync_dir(index.parent)
    return header


def _numbers(tasks: Sequence[ShardTask]) -> list[int]:
    """The shard of each task: pieces of one file follow one another."""
    others = (task.path != before.path for before, task in itertools.pairwise(tasks))
    return list(itertools.accumulate(others, initial=0)) if tasks else []


def _add(totals: _Totals, columns: Mapping[str, Any], head: Mapping[str, Any], at: int, task: ShardTask) -> None:
    tokens = columns["tokens"]
    totals.tokens += int(tokens.sum(dtype=np.int64))
    totals.image_tokens += int(columns["image_tokens"].sum(dtype=np.int64))
    totals.images += int(np.maximum(columns["num_images"], 0).sum(dtype=np.int64))
    totals.missing_images += head["missing_images"]
    totals.image_bytes += head["image_bytes"]
    totals.split += head["split"]
    totals.longest = max(totals.longest, int(tokens.max(initial=0)))
    totals.invalid += head["invalid"]
    for entry in head["first_invalid"][: SHOWN - len(totals.first_invalid)]:
        place = {"document": at + entry["record"], "shard": task.path.rpartition("/")[2]}
        totals.first_invalid.append(place | {"key": entry["key"], "reason": entry["reason"]})


def _header(
    index: Path,
    spec: IndexSpec,
    tasks: Sequence[ShardTask],
    heads: Sequence[Mapping[str, Any]],
    totals: _Totals,
    energon: Mapping[str, Any] | None,
) -> dict[str, Any]:
    files: list[dict[str, Any]] = []
    for k, task, head in zip(_numbers(tasks), tasks, heads, strict=True):
        if k == len(files):
            files.append({"path": portable(task.path, index), "size": task.size, "records": 0})
        files[k]["records"] += head["records"]
    header = {
        "tokens": totals.tokens,
        "image_tokens": totals.image_tokens,
        "images": totals.images,
        "missing_images": totals.missing_images,
        "split": totals.split,
        "longest": totals.longest,
        "invalid": {"policy": spec.invalid, "count": totals.invalid, "first": totals.first_invalid},
        "encoder": {"fingerprint": spec.encoder.fingerprint, "spec": spec.encoder.to_spec()},
        "files": files,
    }
    if spec.folder is not None:
        header["folder"] = {"path": portable(spec.folder, index), "bytes": totals.image_bytes}
    if spec.fields is not None:
        header["fields"] = spec.fields.options()
    if energon is not None:
        header["energon"] = {"hash": energon["hash"], "parts": energon["parts"]}
        for file, name in zip(files, energon["names"], strict=True):
            file["name"] = name
    return header
