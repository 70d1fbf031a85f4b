"""Indexes that several machines made, each of its own shards, to one: as if one machine had made it of all shards.

a.shards.idx (shards 0 to 499) --+
b.shards.idx (500 to 999) -------+-->  pairs.shards.idx, of the same bytes as one prepare of 0 to 999
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.data.image_folder import folder_of
from megaresume.data.prepare.measure import IndexSpec, ShardTask
from megaresume.data.prepare.merge import merge_parts
from megaresume.data.prepare.shards import ShardSummary, check_free, summary_of
from megaresume.data.prepare.work import disk_error
from megaresume.data.record_index import ShardIndex, index_path
from megaresume.data.shard_files import ShardFiles
from megaresume.data.shard_paths import check_distinct, expand_shards, resolved
from megaresume.data.shard_source import UNMEASURED
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import UsageError
from megaresume.stream.progress import progress


def join_indexes(
    inputs: Sequence[str | os.PathLike[str]], output: str | Path, *, overwrite: bool = False
) -> ShardSummary:
    """Build ``OUTPUT.shards.idx`` of finished indexes; no record is read.

    Args:
        inputs: paths or patterns of indexes; their order is the order of the documents.
        output: where the index goes, with or without ``.shards.idx``; it may be one of the inputs.
        overwrite: replace an index that is there.

    Raises:
        UsageError: encoders or policies that differ, an Energon data set, one shard in two indexes, an output that
            exists.
        CorpusError: an index or a shard is missing, damaged, or another one.
        SetupError: no room, no permission.
    """
    begin = time.monotonic()
    target = index_path(output)
    check_free(target, overwrite)
    indexes = [ShardIndex(path) for path in expand_shards(inputs)]
    _check_alike(indexes)
    for index in indexes:
        index.verify()
    heads = [head for index in indexes for head in _heads(index)]
    tasks = [task for index in indexes for task in _tasks(index)]
    check_distinct([task.path for task in tasks])
    header = indexes[0].header
    invalid = header["invalid"]["policy"]
    encoder = ImageTextEncoder(header["encoder"]["spec"])
    spec = IndexSpec(output=target, encoder=encoder, invalid=invalid, folder=folder_of(indexes[0]))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress("writing the index", sum(head["records"] for head in heads), "records") as bar:
            parts = (part for index in indexes for part in _parts(index))
            joined = merge_parts(target, spec, tasks, heads, parts, None, bar.update)
    except OSError as error:
        raise disk_error(target.parent, error) from error
    return summary_of(joined, target, tasks, heads, seconds=time.monotonic() - begin)


def _tasks(index: ShardIndex) -> list[ShardTask]:
    files = ShardFiles()
    tasks = []
    for shard in index.files:
        path = resolved(shard.path, index.path)
        # Otherwise the new index would send every run to a place where there is nothing.
        files.check(path, shard.size)
        tasks.append(ShardTask(path=path, size=shard.size, identity=""))
    return tasks


def _heads(index: ShardIndex) -> list[dict[str, Any]]:
    """Of each shard, what the head of its part said; counts of the whole index are in that of its first shard."""
    unmeasured = index.column("num_images")
    heads = []
    for k, shard in enumerate(index.files):
        stop = shard.first + shard.records
        first = [entry for entry in index.header["invalid"]["first"] if shard.first <= entry["document"] < stop]
        heads.append(
            {
                "records": shard.records,
                "invalid": int(np.count_nonzero(unmeasured[shard.first : stop] == UNMEASURED)),
                "first_invalid": [{**entry, "record": entry["document"] - shard.first} for entry in first],
                "missing_images": 0 if k else index.header["missing_images"],
                "image_bytes": 0 if k else index.header.get("folder", {}).get("bytes", 0),
                "split": 0 if k else index.header["split"],
                "ignored": 0,
                "left_out": 0,
            }
        )
    return heads


def _parts(index: ShardIndex) -> Iterator[tuple[Mapping[str, Any], dict[str, np.ndarray[Any, Any]]]]:
    for head, shard in zip(_heads(index), index.files, strict=True):
        mine = slice(shard.first, shard.first + shard.records)
        yield head, {name: index.column(name)[mine] for name in ShardIndex.COLUMNS}


def _check_alike(indexes: Sequence[ShardIndex]) -> None:
    first = indexes[0]
    for index in indexes:
        if "energon" in index.header:
            raise UsageError(
                f"{index.path} is the index of an Energon data set",
                found="its own split",
                expected="indexes of tar shards",
                action="keep it as a separate source, or prepare its shards: 'DATASET/*.tar'",
            )
        made, found = _made(first), _made(index)
        for what in made:
            if found[what] != made[what]:
                raise UsageError(
                    f"indexes that were made in two ways: {what}",
                    found=f"{made[what]} in {first.path}, {found[what]} in {index.path}",
                    expected="the same in all",
                    action="make one of them again, or keep them as two sources",
                )


def _made(index: ShardIndex) -> dict[str, Any]:
    header = index.header
    return {
        "encoder": header["encoder"]["fingerprint"],
        "--invalid": header["invalid"]["policy"],
        "--image-folder": folder_of(index),
    }
