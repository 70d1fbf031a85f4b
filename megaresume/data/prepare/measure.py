"""Measures one shard into a part of an index, in a worker process; and merges finished parts into the index.

    shard --walk--> records --encoder.measure--> columns --> part in the work directory --merge--> NAME.shards.idx

Merging uses bounded memory; the index appears by rename, when it is complete. Its header has

    encoder        spec (with the tokenizer's content) and fingerprint
    files          path (relative to the index if below it), bytes, number of records of each, in order
    records, tokens, image_tokens, images, missing_images, longest
    split          documents in excess of one for each record: ``records`` counts documents
    invalid        policy, count, and the first records that could not be measured, with the reason
    fingerprints   range, tokens, hash of the lengths, hash of the contents: of all documents, and of each part of an
                   Energon data set
    columns        hash of each
    folder         for JSON lines: path of the folder of images (like those of shards), bytes of the images in rows
    energon        hash of the metadata, and part -> [first, stop) (Energon data sets only), with fields

and nothing that depends on the machine, the time or the workers: the same shards and encoder give the same bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megaresume.data.energon import Fields
from megaresume.data.image_folder import Folder, walk_rows
from megaresume.data.inputs import portable
from megaresume.data.prepare.work import WorkDirectory, disk_error
from megaresume.data.record_index import IndexWriter, ShardIndex
from megaresume.data.shard_files import MAX_RECORD_BYTES, BlockFile, Place, ShardFiles
from megaresume.data.shard_source import UNMEASURED
from megaresume.data.tar import RecordExtent, content_hash, parse_record, walk
from megaresume.encoding.images.document import Measure
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.files import fsync_dir, written_atomically
from megaresume.stream.errors import CorpusError, listed
from megaresume.stream.progress import Progress

#: What happens to a record that cannot be measured: stop; one masked token; length 0.
Invalid = Literal["error", "mask", "drop"]

#: Most records of a part that are listed in the header of the index.
SHOWN = 32
#: length of a record that is kept although it could not be measured: an end-of-document token.
MASKED_TOKENS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSpec:
    """The task of a worker; small, as the tokenizer is built in the worker."""

    #: the path of the index; parts are written beside it.
    output: Path
    encoder: ImageTextEncoder
    invalid: Invalid
    #: decode every image, not only its header.
    decode: bool = False
    #: the fields of an Energon data set.
    fields: Fields | None = None
    #: the folder of the images that rows of JSON lines name; None: tar shards.
    folder: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """One shard to measure."""

    #: local path or URL.
    path: str
    #: size of the shard in bytes.
    size: int
    #: an identity that changes when the shard is written again.
    identity: str
    #: keys of records to leave out.
    excluded: frozenset[str] = frozenset()
    #: for JSON lines: the piece, rows that begin in these bytes of the file ``lines``, which may be unpacked.
    start: int = 0
    stop: int | None = None
    lines: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to measure."""
        return (self.size if self.stop is None else self.stop) - self.start

    @property
    def part(self) -> str:
        """Name of its part; from its path, so that parts stay valid when shards are added to the list."""
        return f"shard-{xxhash.xxh3_64_hexdigest(f'{self.path} {self.start}'.encode())}"

    def head(self) -> dict[str, Any]:
        """The head that a part must have to be used for this task."""
        excluded, piece = sorted(self.excluded), [self.start, self.stop]
        return {"path": self.path, "identity": self.identity, "excluded": excluded, "piece": piece}


@dataclass(slots=True)
class _Columns:
    """The columns of a part while they are written."""

    rows: list[tuple[int, ...]] = field(default_factory=list)
    invalid: int = 0
    first_invalid: list[dict[str, Any]] = field(default_factory=list)
    ignored: int = 0
    missing_images: int = 0
    image_bytes: int = 0
    lines: int = 0
    split: int = 0
    excluded: list[str] = field(default_factory=list)

    def ignore(self, name: str) -> None:
        self.ignored += 1

    def count(self, lines: int) -> None:
        self.lines = lines


def find_part(directory: WorkDirectory, task: ShardTask) -> dict[str, Any] | None:
    """The head of a shard's finished part, if the shard has not changed since."""
    head = directory.find(task.part)
    if head is None or any(head.get(key) != value for key, value in task.head().items()):
        return None
    return head


def measure_shard(spec: IndexSpec, task: ShardTask) -> dict[str, Any]:
    """Measure every record of a shard and write its part; returns the head of the part.

    Raises:
        CorpusError: the shard cannot be read; or a record cannot be measured, and the policy is ``error``.
        SetupError: the store does not answer, or the part cannot be written.
    """
    files = ShardFiles()
    lines = task.lines or task.path
    file = files.scan(lines, task.size if task.lines is None else int(files.identity(lines).partition(":")[0]))
    columns = _Columns()
    folder = None
    extents = walk(file, task.path, columns.ignore)
    if spec.folder is not None:
        folder = Folder(path=spec.folder, template=spec.encoder.template, files=files)
        rows = walk_rows(file, task.path, task.start, task.start + task.nbytes, columns.count)
        extents = folder.with_images(rows, file)
    for number, extent in enumerate(extents):
        measures, content = [Measure(tokens=0, num_images=0, image_tokens=0)], 0
        if extent.key in task.excluded:
            columns.excluded.append(extent.key)
        else:
            measures, content = _measured(spec, task, number, extent, file, columns, folder)
        columns.split += len(measures) - 1
        for measure in measures:
            columns.missing_images += measure.missing_images
            lengths = (measure.tokens, measure.image_tokens, measure.num_images)
            columns.rows.append((*lengths, extent.offset, extent.nbytes, content))
    if unknown := task.excluded.difference(columns.excluded):
        raise _not_excluded(task, sorted(unknown))
    table = np.array(columns.rows, np.int64).reshape(-1, len(ShardIndex.COLUMNS))
    arrays = {name: table[:, k].astype(dtype) for k, (name, dtype) in enumerate(ShardIndex.COLUMNS.items())}
    head = {
        **task.head(),
        "records": len(table),
        "invalid": columns.invalid,
        "first_invalid": columns.first_invalid,
        "missing_images": columns.missing_images,
        "image_bytes": columns.image_bytes,
        "images_seen": {} if folder is None else dict(folder.seen),
        "lines": columns.lines,
        "split": columns.split,
        "ignored": columns.ignored,
        "left_out": len(columns.excluded),
    }
    directory = WorkDirectory(spec.output)
    try:
        directory.write(task.part, head, arrays)
    except OSError as error:
        raise disk_error(directory.directory, error) from error
    return head


def _measured(
    spec: IndexSpec,
    task: ShardTask,
    number: int,
    extent: RecordExtent,
    file: BlockFile,
    columns: _Columns,
    folder: Folder | None,
) -> tuple[list[Measure], int]:
    """Lengths of the documents of a record, and the hash of its content."""
    try:
        if extent.nbytes > MAX_RECORD_BYTES:
            raise CorpusError(
                f"record '{extent.key}' is too large",
                found=f"{extent.nbytes} bytes",
                expected=f"at most {MAX_RECORD_BYTES}",
                action="divide it into smaller records",
            )
        data = file.read_at(extent.offset, extent.nbytes)
        if folder is None:
            raw = parse_record(data, task.path)
        else:
            place = Place(folder.files, task.path, task.size, extent.offset, extent.nbytes)
            raw = folder.record(data, place)
            columns.image_bytes += sum(map(len, raw.members.values())) - len(data)
        record = raw if spec.fields is None else spec.fields.apply(raw)
        return spec.encoder.measures(record, decoded=spec.decode), content_hash(raw)
    except CorpusError as error:
        if folder is not None:
            folder.check()  # without the folder, every row would be left out
        if spec.invalid == "error":
            where = f"{task.path}, record {number} ('{extent.key}')"
            if folder is not None:
                where = f"{task.path}:{folder.files.line_at(task.lines or task.path, extent.offset)}"
            raise CorpusError(
                f"{where}: {error.headline}",
                found=error.found,
                expected=error.expected,
                cause=error.cause,
                action=f"{error.action or 'write the record again'}; or, for every such record: --invalid mask "
                "(one token that nothing is learned from) or drop (left out)",
            ) from error
        columns.invalid += 1
        if len(columns.first_invalid) < SHOWN:
            reason = error.headline if error.found is None else f"{error.headline}; found {error.found}"
            entry = {"record": len(columns.rows), "key": extent.key, "reason": reason, "line": extent.line}
            columns.first_invalid.append(entry)
        tokens = MASKED_TOKENS if spec.invalid == "mask" else 0
        return [Measure(tokens=tokens, num_images=UNMEASURED, image_tokens=0)], 0


def _not_excluded(task: ShardTask, keys: list[str]) -> CorpusError:
    return CorpusError(
        f"{task.path} has no record that split.yaml excludes from it",
        found=f"exclude: {listed(keys, 3)}, which is not the key of any record",
        expected="SHARD/KEY, as in shard_000.tar/000017",
        cause="a number instead of Energon's key: Energon itself would silently leave nothing out",
        action="correct exclude in .nv-meta/split.yaml",
    )


@dataclass(slots=True)
class _Totals:
    """The sums over all parts."""

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
    """The fingerprint of a range of documents, computed step by step."""

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
    tick: Progress,
) -> Mapping[str, Any]:
    """Write the index, replacing an older one.

    Args:
        index: path of the ``.shards.idx``.
        spec: what the parts were made with.
        tasks: all shards, in order.
        heads: of their parts.
        parts: head and columns of each, read when needed.
        energon: for an Energon data set: hash, parts (part -> [first, stop) documents), names of the shards.
        tick: called with the number of records written.

    Returns:
        the header.

    Raises:
        CorpusError: a part is damaged.
        OSError: such as a full disk.
    """
    records = sum(head["records"] for head in heads)
    ranges = {(0, records): _Range(0, records)}
    for first, stop in (energon or {}).get("parts", {}).values():
        ranges.setdefault((first, stop), _Range(first, stop))
    totals, at = _Totals(), 0
    with written_atomically(index) as file:
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
    fsync_dir(index.parent)
    return header


def _numbers(tasks: Sequence[ShardTask]) -> list[int]:
    """The number of each task's file: adjacent pieces may be of one file."""
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
