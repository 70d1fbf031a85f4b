"""One shard to one part of an index: what a worker process of ``megaresume prepare`` does for tar shards.

shard --walk--> records --encoder.measure--> columns --> part in the work directory
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import xxhash

from megaresume.data.energon import Fields
from megaresume.data.image_folder import Folder, walk_rows
from megaresume.data.prepare.work import WorkDirectory, disk_error
from megaresume.data.record_index import ShardIndex
from megaresume.data.shard_files import MAX_RECORD_BYTES, BlockFile, Place, ShardFiles
from megaresume.data.shard_source import UNMEASURED
from megaresume.data.tar import RecordExtent, content_hash, parse_record, walk
from megaresume.encoding.images.document import Measure
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import CorpusError

#: what becomes of a record that cannot be measured: stop; one masked token; length 0.
Invalid = Literal["error", "mask", "drop"]

#: of a part, records named in the header of the index.
SHOWN = 32
#: length of a record that could not be measured and is kept: the place of an end of document.
MASKED_TOKENS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexSpec:
    """What a worker needs to know. Small: the tokenizer is built in the worker."""

    #: of the index; parts go beside it.
    output: Path
    encoder: ImageTextEncoder
    invalid: Invalid
    #: every image is decoded, not only its header.
    decode: bool = False
    #: of an Energon data set.
    fields: Fields | None = None
    #: of images that rows of JSON lines name; None: tar shards.
    folder: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """One shard."""

    #: local path or URL.
    path: str
    #: bytes.
    size: int
    #: changes when the shard is written again.
    identity: str
    #: keys of records to leave out.
    excluded: frozenset[str] = frozenset()
    #: of JSON lines, the piece: rows that begin in these bytes of the file ``lines``, which may be unpacked.
    start: int = 0
    stop: int | None = None
    lines: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to be measured."""
        return (self.size if self.stop is None else self.stop) - self.start

    @property
    def part(self) -> str:
        """Name of its part: by its path, so that a part survives when shards are added to the list."""
        return f"shard-{xxhash.xxh3_64_hexdigest(f'{self.path} {self.start}'.encode())}"

    def head(self) -> dict[str, Any]:
        """What a part must say of itself to be used for this task."""
        excluded, piece = sorted(self.excluded), [self.start, self.stop]
        return {"path": self.path, "identity": self.identity, "excluded": excluded, "piece": piece}


@dataclass(slots=True)
class _Columns:
    """The columns of a part, being written."""

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
    """The head of the finished part of a shard, if it was made of the shard as it is now."""
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
            folder.check()  # without it, every row would be left out
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
        found=f"exclude: {', '.join(keys[:3])}{' ...' if len(keys) > 3 else ''}, which is not the key of any record",
        expected="SHARD/KEY, as in shard_000.tar/000017",
        cause="a number instead of Energon's key: Energon itself would silently leave nothing out",
        action="correct exclude in .nv-meta/split.yaml",
    )
