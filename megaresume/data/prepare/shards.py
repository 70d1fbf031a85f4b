"""Builds an index of lengths from tar shards: parallel, resumable, the same bytes every time.

    shards -> workers: walk the tar, measure each record -> parts -> merge -> NAME.shards.idx

A part is one shard. Finished parts stay in ``NAME.shards.idx.prepare/`` until the index is complete; they are reused
only if the shard and the encoder are still the same.

Indexes that several machines made, each from its own shards, are joined as if one machine had made one from all shards:

    a.shards.idx (shards 0 to 499) --+
    b.shards.idx (500 to 999) -------+-->  pairs.shards.idx, with the same bytes as one prepare of 0 to 999
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.data.energon import EnergonDataset, read_energon
from megaresume.data.image_folder import Folder, folder_of, missing_folder, plain_lines
from megaresume.data.inputs import check_distinct, expand_shards, is_energon, join, resolved
from megaresume.data.prepare.measure import (
    IndexSpec,
    Invalid,
    ShardTask,
    find_part,
    measure_shard,
    merge_parts,
)
from megaresume.data.prepare.work import WorkDirectory, check_workers, disk_error, run
from megaresume.data.record_index import ShardIndex, index_path
from megaresume.data.remote import is_url
from megaresume.data.shard_files import ShardFiles
from megaresume.data.shard_source import UNMEASURED
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import CorpusError, UsageError
from megaresume.stream.progress import progress

#: bytes of JSON lines measured at a time; their images are some hundred times as large.
PIECE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSummary:
    """The result of preparing shards."""

    index: str
    shards: int
    #: bytes of the shards; for JSON lines, including the images.
    bytes: int
    records: int
    #: the number of documents: more than records if pages were split (template.split).
    documents: int
    tokens: int
    images: int
    image_tokens: int
    #: images that pages name and their records lack: left out (template.missing_images).
    missing_images: int
    #: tokens of the longest document.
    longest: int
    #: records that could not be measured, what was done with them, and the first ones: document, shard, key, reason.
    invalid: int
    invalid_policy: Invalid
    first_invalid: tuple[Mapping[str, Any], ...]
    #: files in the shards outside records: without an extension, or ``__meta__``.
    ignored_files: int
    #: records left out by the split of an Energon data set.
    excluded: int
    #: the folder of the images that rows of JSON lines name; None: tar shards.
    folder: str | None
    #: part of an Energon data set -> documents.
    parts: Mapping[str, int]
    #: fingerprint of the encoder.
    encoder: str
    #: wall clock time of this run.
    seconds: float
    #: shards, or pieces of JSON lines, that an earlier run had finished.
    resumed_shards: int


def prepare_shards(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | Path,
    encoder: ImageTextEncoder,
    *,
    folder: str | None = None,
    invalid: Invalid = "error",
    decode: bool = False,
    workers: int = 1,
    overwrite: bool = False,
    restart: bool = False,
    split_config: str = "split.yaml",
    dataset_config: str = "dataset.yaml",
) -> ShardSummary:
    """Build ``OUTPUT.shards.idx``.

    Args:
        inputs: patterns of tar shards, or of JSON lines, in order; or one directory prepared by Energon.
        output: path of the index, with or without ``.shards.idx``.
        encoder: measures the records; the index keeps its spec.
        folder: of the images that rows of JSON lines name: a directory or URL; None for tar shards.
        invalid: what happens to a record that cannot be measured: ``error``, ``mask`` (one token, masked), ``drop``
            (length 0: the stream skips it).
        decode: decode every image, to find truncated ones now rather than in training.
        workers: processes; the result does not depend on it.
        overwrite: replace an existing index.
        restart: discard what a killed run left.
        split_config: name of the split file of an Energon data set.
        dataset_config: name of its file with the field map.

    Raises:
        UsageError: wrong options, an existing output, leftovers of another run.
        CorpusError: a shard is missing, damaged or empty; a record cannot be measured.
        SetupError: no room, no permission, a store that does not answer, a worker that was killed.
    """
    begin = time.monotonic()
    check_workers(workers)
    index = index_path(output)
    check_free(index, overwrite)
    dataset = None if folder else _energon(inputs, split_config, dataset_config)
    if folder is not None:
        folder = folder.rstrip("/") if "://" in folder else os.path.abspath(os.path.expanduser(folder))
        Folder(path=folder, template=encoder.template, files=ShardFiles()).check()
    tasks, names = _tasks(inputs, dataset) if folder is None else (_pieces(inputs), [])
    fields = None if dataset is None else dataset.fields
    spec = IndexSpec(output=index, encoder=encoder, invalid=invalid, decode=decode, fields=fields, folder=folder)
    directory = WorkDirectory(index)
    plan = {
        "encoder": encoder.fingerprint,
        "invalid": invalid,
        "decode": decode,
        "fields": None if fields is None else fields.options(),
        "folder": folder,
    }
    try:
        index.parent.mkdir(parents=True, exist_ok=True)
        with directory.locked(plan, restart=restart):
            heads, resumed = _make_parts(directory, spec, tasks, workers)
            energon = None if dataset is None else _energon_header(dataset, tasks, names, heads)
            if folder is not None:
                _number_rows(tasks, heads)
                _check_found(folder, heads, directory)
            _check_some_measured(heads, invalid, directory)
            # Not the part's own head: its rows have no numbers yet.
            parts = ((head, directory.read(task.part)[1]) for head, task in zip(heads, tasks, strict=True))
            with progress("writing the index", sum(head["records"] for head in heads), "records") as advance:
                header = merge_parts(index, spec, tasks, heads, parts, energon, advance)
            directory.remove()
    except OSError as error:
        raise disk_error(index.parent, error) from error
    return summary_of(header, index, tasks, heads, seconds=time.monotonic() - begin, resumed_shards=resumed)


def check_free(index: Path, overwrite: bool) -> None:
    """Raises UsageError: the index exists, and is not to be replaced."""
    if index.exists() and not overwrite:
        raise UsageError(
            f"{index} exists",
            found="an index of shards",
            expected="an unused --output",
            action="give another --output, or replace it: --overwrite",
        )


def summary_of(
    header: Mapping[str, Any],
    index: Path,
    tasks: Sequence[ShardTask],
    heads: Sequence[Mapping[str, Any]],
    *,
    seconds: float,
    resumed_shards: int = 0,
) -> ShardSummary:
    """The summary of an index that was just written."""
    parts = header.get("energon", {}).get("parts", {})
    return ShardSummary(
        index=str(index),
        shards=len(header["files"]),
        bytes=sum(task.nbytes for task in tasks) + header.get("folder", {}).get("bytes", 0),
        folder=header.get("folder", {}).get("path"),
        invalid=header["invalid"]["count"],
        invalid_policy=header["invalid"]["policy"],
        first_invalid=tuple(header["invalid"]["first"]),
        ignored_files=sum(head["ignored"] for head in heads),
        excluded=sum(head["left_out"] for head in heads),
        parts={part: stop - first for part, (first, stop) in parts.items()},
        encoder=header["encoder"]["fingerprint"],
        seconds=seconds,
        resumed_shards=resumed_shards,
        records=header["records"] - header["split"],
        documents=header["records"],
        **{key: header[key] for key in ("tokens", "images", "image_tokens", "missing_images", "longest")},
    )


def _energon(inputs: Sequence[str | os.PathLike[str]], split_config: str, dataset_config: str) -> EnergonDataset | None:
    texts = [os.fspath(path) for path in inputs]
    directories = [path for path in texts if is_energon(path) or (is_url(path) and not path.endswith(".tar"))]
    if not directories:
        return None
    if len(inputs) > 1:
        raise UsageError(
            "several data sets for one index",
            found=", ".join(texts[:4]),
            expected="one directory that Energon has prepared, or tar shards",
            action="prepare each directory separately: each is its own source",
        )
    return read_energon(texts[0], split_config=split_config, dataset_config=dataset_config)


def _tasks(
    inputs: Sequence[str | os.PathLike[str]], dataset: EnergonDataset | None
) -> tuple[list[ShardTask], list[str]]:
    """The shards in document order, and their names in an Energon data set."""
    files = ShardFiles()
    if dataset is None:
        tasks = [_task(files, path, frozenset()) for path in expand_shards(inputs)]
        for task in tasks:
            files.check_ranges(task.path, task.size)
        return tasks, []
    names = [name for shards in dataset.parts.values() for name in shards]
    if not names:
        raise CorpusError(
            f"{dataset.path} has no shard",
            found=f"parts {', '.join(dataset.parts) or 'none'} in its split, all empty",
            expected="at least one shard",
            action=f"run energon prepare {dataset.path} again",
        )
    excluded = dataset.excluded
    return [_task(files, join(dataset.path, name), excluded.get(name, frozenset())) for name in names], names


def _task(files: ShardFiles, path: str, excluded: frozenset[str]) -> ShardTask:
    identity = files.identity(path)
    return ShardTask(path=path, size=int(identity.partition(":")[0]), identity=identity, excluded=excluded)


def _pieces(inputs: Sequence[str | os.PathLike[str]]) -> list[ShardTask]:
    """Files of JSON lines in pieces: the unit that one process measures, and that a kill loses."""
    files = ShardFiles()
    pieces: list[ShardTask] = []
    for path in expand_shards(inputs):
        whole = _task(files, path, frozenset())
        lines, size = plain_lines(path, files)
        starts = range(0, max(size, 1), PIECE)
        pieces += [replace(whole, start=at, stop=min(at + PIECE, size), lines=lines) for at in starts]
    return pieces


def _number_rows(tasks: Sequence[ShardTask], heads: Sequence[Mapping[str, Any]]) -> None:
    """Number the unmeasured rows by their line in the whole file; refuse a file without rows."""
    lines = records = 0
    for k, (task, head) in enumerate(zip(tasks, heads, strict=True)):
        lines, records = (0, 0) if not task.start else (lines, records)
        for entry in head["first_invalid"]:
            entry["key"] = f"line {lines + entry['line']}"
        lines, records = lines + head["lines"], records + head["records"]
        if not records and (k + 1 == len(tasks) or not tasks[k + 1].start):
            raise CorpusError(
                f"{task.path} has no row",
                found=f"{task.size} bytes, white space alone" if task.size else "an empty file",
                expected="rows of JSON, one on each line",
                action="leave the file out",
            )


def _check_some_measured(heads: Sequence[Mapping[str, Any]], invalid: Invalid, directory: WorkDirectory) -> None:
    """Refuse an index without anything to train on; deletes the parts, as the next run will have another plan."""
    bad, records = (sum(head[what] for head in heads) for what in ("invalid", "records"))
    if bad and bad + sum(head["left_out"] for head in heads) == records:
        first = next(head["first_invalid"][0] for head in heads if head["first_invalid"])
        directory.remove()
        raise CorpusError(
            "no record could be measured",
            found=f"{bad} records, all {'left out' if invalid == 'drop' else 'masked'}; the first, '{first['key']}': "
            f"{first['reason']}",
            expected="records that the encoder reads",
            cause="a template or keys of other data, or shards of another kind",
            action=f"see what is wrong with the first one: the same command without --invalid {invalid}",
        )


def _check_found(folder: str, heads: Sequence[Mapping[str, Any]], directory: WorkDirectory) -> None:
    """Refuse a folder that lacks every image; deletes the parts, so that the next run searches again."""
    found, missing = (sum(head["images_seen"].get(what, 0) for head in heads) for what in ("found", "missing"))
    if missing and not found:
        directory.remove()
        raise missing_folder(
            f"{folder} has none of the images that the rows name", f"{missing} images looked for, none of them there"
        )


def _make_parts(
    directory: WorkDirectory, spec: IndexSpec, tasks: Sequence[ShardTask], workers: int
) -> tuple[list[Mapping[str, Any]], int]:
    """Heads of all parts in order, and how many existed already."""
    heads: dict[str, Mapping[str, Any]] = {}
    with progress("measuring", sum(task.nbytes for task in tasks), "B") as advance:
        missing: dict[str, ShardTask] = {}
        for task in tasks:
            found = find_part(directory, task)
            if found is None:
                missing[task.part] = task
            else:
                heads[task.part] = found
                advance(task.nbytes)
        resumed = len(heads)

        # Starting a process takes longer than measuring a small shard.
        work = ((task,) for task in missing.values())
        with closing(run(work, measure_shard, spec, workers=min(workers, len(missing)))) as done:
            for task, head in zip(missing.values(), done, strict=True):
                heads[task.part] = head
                advance(task.nbytes)
    return [heads[task.part] for task in tasks], resumed


def _energon_header(
    dataset: EnergonDataset, tasks: Sequence[ShardTask], names: Sequence[str], heads: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    parts: dict[str, tuple[int, int]] = {}
    at = k = 0
    for part, shards in dataset.parts.items():
        first = at
        for name in shards:
            records, expected = heads[k]["records"] - heads[k]["split"], dataset.counts[name]
            if records != expected:
                raise CorpusError(
                    f"{tasks[k].path} is not the shard that Energon has prepared",
                    found=f"{records} records",
                    expected=f"{expected} records, as .nv-meta/.info.json says",
                    cause="the shard was written again after energon prepare",
                    action=f"run it again: energon prepare {dataset.path}",
                )
            at += heads[k]["records"]
            k += 1
        parts[part] = (first, at)
    return {"hash": dataset.hash, "parts": parts, "names": list(names)}


def join_indexes(
    inputs: Sequence[str | os.PathLike[str]], output: str | Path, *, overwrite: bool = False
) -> ShardSummary:
    """Build ``OUTPUT.shards.idx`` from finished indexes, without reading records.

    Args:
        inputs: paths or patterns of indexes; their order is the order of the documents.
        output: path of the index, with or without ``.shards.idx``; it may be one of the inputs.
        overwrite: replace an existing index.

    Raises:
        UsageError: different encoders or policies, an Energon data set, one shard in two indexes, an existing output.
        CorpusError: an index or a shard is missing, damaged or different.
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
    tasks = [task for index in indexes for task in _parts_of(index)]
    check_distinct([task.path for task in tasks])
    header = indexes[0].header
    invalid = header["invalid"]["policy"]
    encoder = ImageTextEncoder(header["encoder"]["spec"])
    spec = IndexSpec(output=target, encoder=encoder, invalid=invalid, folder=folder_of(indexes[0]))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with progress("writing the index", sum(head["records"] for head in heads), "records") as advance:
            parts = (part for index in indexes for part in _parts(index))
            joined = merge_parts(target, spec, tasks, heads, parts, None, advance)
    except OSError as error:
        raise disk_error(target.parent, error) from error
    return summary_of(joined, target, tasks, heads, seconds=time.monotonic() - begin)


def _parts_of(index: ShardIndex) -> list[ShardTask]:
    files = ShardFiles()
    tasks = []
    for shard in index.files:
        path = resolved(shard.path, index.path)
        # Otherwise every run would fail with the new index, which would point to missing files.
        files.check(path, shard.size)
        tasks.append(ShardTask(path=path, size=shard.size, identity=""))
    return tasks


def _heads(index: ShardIndex) -> list[dict[str, Any]]:
    """The head of each shard's part; the first one has the counts of the whole index."""
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
