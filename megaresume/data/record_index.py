"""Indexes of records: the place of each record, and what it is compared with when it is read.

    NAME.shards.idx   `ShardIndex`   records of tar shards or JSON lines, and their lengths
    <prefix>.places   `RowIndex`     documents of raw files; their lengths are in the .idx beside it

    0        preamble, 128 bytes: magic, version, records, position of the header, its hash, a hash of the preamble
    4096     columns, one after the other, each aligned to 64 bytes; in both indexes
             offset int64[n]; nbytes, content uint32[n]
    ...      header: JSON, up to the end of the file; ``files`` has path, size and number of records of each file,
             in the order of the records

Opening reads the preamble and the header and maps the columns: it takes as long for 10^9 records as for ten. The header
comes after the columns because it has their hashes: an index is written in one pass.

Raise ``VERSION`` when a reader of the old version would misread the new one. A reader refuses newer versions.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.data.shard_files import Place, ShardFiles
from megaresume.files import open_file
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import CorpusError, SetupError, parse_json

#: the file name suffix of a `ShardIndex`.
SUFFIX = ".shards.idx"
PREAMBLE_BYTES = 128
COLUMNS_AT = 4096
_ALIGN = 64
_STRUCT = struct.Struct("<24sIIQQQ16s")


def index_path(output: str | Path) -> Path:
    """``shards/pairs`` -> ``shards/pairs.shards.idx``; a path that already ends so is unchanged."""
    path = Path(output)
    return path if path.name.endswith(SUFFIX) else path.with_name(path.name + SUFFIX)


def places_path(prefix: Path) -> Path:
    """The path of the `RowIndex` of a corpus."""
    return prefix.with_name(prefix.name + ".places")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedFile:
    """A file of an index."""

    #: for shards relative to the index, absolute, or a URL; for raw files relative to the ``root`` of the header.
    path: str
    #: bytes of the file.
    size: int
    #: number of its first record in the index, and the number of its records.
    first: int
    records: int


class RecordPlace(NamedTuple):
    """The place of one record."""

    #: number of the file in the index.
    file: int
    offset: int
    nbytes: int
    content: int


class RecordIndex:
    """The common part of both indexes. Safe to share between threads.

    Args:
        path: of the file.
        data: the whole file, mapped.

    Raises:
        CorpusError: truncated, damaged, or of another version.
    """

    MAGIC: ClassVar[bytes]
    FORMAT: ClassVar[str]
    VERSION: ClassVar[int]
    #: name -> dtype, in the order of the file.
    COLUMNS: ClassVar[Mapping[str, np.dtype[Any]]] = {
        # of the record; documents of one record are adjacent.
        "offset": np.dtype("<i8"),
        "nbytes": np.dtype("<u4"),
        # a hash of the record; 0 if it was not read.
        "content": np.dtype("<u4"),
    }
    #: the command that makes the index.
    COMMAND: ClassVar[str]

    def __init__(self, path: Path, data: mmap.mmap | bytes) -> None:
        self.path = path
        records, header_at, header_hash = self._preamble(data[:PREAMBLE_BYTES], len(data))
        header = data[header_at:]
        if xxhash.xxh3_128_digest(header) != header_hash:
            raise self.damaged("another hash of its header than when it was written")
        self._hash = header_hash
        self._records = records
        #: everything that is not a column; plain JSON.
        self.header: Mapping[str, Any] = self._header(header)
        places = self.column_places(records)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(data, dtype, records, places[name]) for name, dtype in self.COLUMNS.items()
        }
        counts = [entry["records"] for entry in self.header["files"]]
        #: the number after the last record of each file.
        self._stops = list(accumulate(counts))
        firsts = [stop - count for stop, count in zip(self._stops, counts, strict=True)]
        self.files: Sequence[IndexedFile] = [
            IndexedFile(path=entry["path"], size=entry["size"], first=first, records=entry["records"])
            for entry, first in zip(self.header["files"], firsts, strict=True)
        ]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r}: {self._records} records in {len(self.files)} files)"

    def __len__(self) -> int:
        """The number of records."""
        return self._records

    @classmethod
    def column_places(cls, records: int) -> dict[str, int]:
        """The start of each column in bytes from the start of the file; and, as ``end``, the end of the last one."""
        places, at = {}, COLUMNS_AT
        for name, dtype in cls.COLUMNS.items():
            places[name] = at
            end = at + records * dtype.itemsize
            at = -(-end // _ALIGN) * _ALIGN
        return {**places, "end": at}

    @classmethod
    def preamble(cls, records: int, header: bytes) -> bytes:
        """The first `PREAMBLE_BYTES` of an index with this header."""
        at, digest = cls.column_places(records)["end"], xxhash.xxh3_128_digest(header)
        body = _STRUCT.pack(cls.MAGIC, cls.VERSION, 0, records, at, len(header), digest)
        body = body.ljust(PREAMBLE_BYTES - 8, b"\0")
        return body + xxhash.xxh3_64_digest(body)

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column, read-only and memory-mapped: see ``COLUMNS``."""
        return self._columns[name]

    def files_of(self, ids: Int64Array) -> Int64Array:
        """The number of each record's file: int64[n] in [0, len) to int64[n]."""
        return np.searchsorted(self._stops, ids, "right")

    def file_of(self, i: int) -> int:
        """The file number of one record. Not by numpy's search, which releases the GIL and has to wait for it."""
        return bisect_right(self._stops, i)

    def place(self, i: int) -> RecordPlace:
        """The place of record i, in [0, len).

        Raises:
            CorpusError: the index is damaged there.
        """
        columns = self._columns
        offset = columns["offset"].item(i)
        if offset < 0:
            raise self.damaged(f"record {i} at byte {offset}")
        return RecordPlace(self.file_of(i), offset, columns["nbytes"].item(i), columns["content"].item(i))

    def range_of(self, place: RecordPlace, files: ShardFiles, path: str, size: int) -> Place:
        """The range of bytes of a record.

        Args:
            place: of the record.
            files: the reader.
            path, size: of the file, which may be unpacked.

        Raises:
            CorpusError: it is not within the file.
        """
        if place.offset + place.nbytes > size:
            raise self.damaged(f"bytes {place.offset} to {place.offset + place.nbytes} of {path}, which has {size}")
        return Place(files, path, size, place.offset, place.nbytes)

    def verify(self, *names: str) -> None:
        """Read these columns, or all if none are named, and compare them with the hashes taken when they were written.

        Raises:
            CorpusError: one differs.
        """
        for name in names or self._columns:
            column = self._columns[name]
            found = xxhash.xxh3_128_hexdigest(column.data) if len(column) else xxhash.xxh3_128_hexdigest(b"")
            if found != self.header["columns"][name]:
                raise self.damaged(f"another hash of column {name} than when it was written")

    def damaged(self, found: str) -> CorpusError:
        """The error for an index that is not as it was written."""
        return CorpusError(
            f"{self.path} is damaged",
            found=found,
            expected=f"an index as {self.COMMAND} writes it",
            cause="an interrupted copy, a file of another kind, or files of two builds",
            action=f"copy the index again, or make it again: {self.COMMAND} --overwrite",
        )

    def _preamble(self, data: bytes, size: int) -> tuple[int, int, bytes]:
        """Number of records, position of the header, and its hash."""
        if len(data) < PREAMBLE_BYTES or not data.startswith(self.MAGIC):
            raise self.damaged(f"{size} bytes that do not start as such an index does")
        _, version, _, records, header_at, header_bytes, header_hash = _STRUCT.unpack_from(data)
        if version > self.VERSION:
            raise CorpusError(
                f"{self.path} has a version that this release cannot read",
                found=f"version {version}",
                expected=f"version {self.VERSION} at most",
                cause="it was written by a newer megaresume",
                action="upgrade: pip install --upgrade megaresume",
            )
        if version < self.VERSION:
            raise CorpusError(
                f"{self.path} was written by an older megaresume",
                found=f"version {version}",
                expected=f"version {self.VERSION}",
                action=f"make it again: {self.COMMAND} --overwrite",
            )
        if xxhash.xxh3_64_digest(data[: PREAMBLE_BYTES - 8]) != data[PREAMBLE_BYTES - 8 :]:
            raise self.damaged("another hash of its first bytes than when it was written")
        if header_at != self.column_places(records)["end"] or header_at + header_bytes != size:
            raise self.damaged(f"{size} bytes, where {records} records take {header_at + header_bytes}")
        return records, header_at, header_hash

    def _header(self, content: bytes) -> Mapping[str, Any]:
        """Parse the header. Its hash is right, but a faulty program may have written it."""
        try:
            header: Mapping[str, Any] = parse_json(content)
            if header["format"] != self.FORMAT:
                raise ValueError(f"format {header['format']!r}")
            for file in header["files"]:
                counts = (file["size"], file["records"])
                if not isinstance(file["path"], str) or any(type(count) is not int or count < 0 for count in counts):
                    raise ValueError(f"file {file!r:.200}")
            if (counted := sum(file["records"] for file in header["files"])) != self._records:
                raise ValueError(f"{counted} records in its files, {self._records} in its columns")
            if not all(isinstance(header["columns"][name], str) for name in self.COLUMNS):
                raise ValueError("no hashes of its columns")
            self._check(header)
        except KeyError as error:
            raise self.damaged(f"a header without {error}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise self.damaged(f"an invalid header: {error}") from error
        return header

    def _check(self, header: Mapping[str, Any]) -> None:
        """Raise KeyError or ValueError for a header without the fields that only this index has."""


class RowIndex(RecordIndex):
    """``<prefix>.places``, in place of a .bin: tokens are made when they are read.

    For text and JSON lines, ``offset`` is the first byte of a document, decompressed, and ``nbytes`` its size; for
    Parquet the row group, and the row in it; for Arrow the byte of the record batch, and the row in it. ``content`` is
    the `megaresume.data.documents.checksum` of the tokens. The header has what makes the tokens (``encoder``,
    ``made_with``), the ``root`` of all paths, and the format and unit of each file.

    Args:
        path: of the file.
        data: the whole file, mapped.
        documents: their number in the .idx beside it.

    Raises:
        CorpusError: it is damaged, or of another corpus.
    """

    MAGIC = b"megaresume place index\r\n"
    FORMAT = "megaresume.places"
    VERSION = 2
    COMMAND = "megaresume prepare --index-only"

    def __init__(self, path: Path, data: mmap.mmap | bytes, documents: int) -> None:
        super().__init__(path, data)
        if len(self) != documents:
            raise self.damaged(f"{len(self)} documents, of {documents} in the .idx")

    def last(self, file: int) -> RecordPlace:
        """The last document of a file; the file has at least one."""
        return self.place(self._stops[file] - 1)

    def _check(self, header: Mapping[str, Any]) -> None:
        if not isinstance(header["root"], str):
            raise ValueError(f"root {header['root']!r:.200}")
        for file in header["files"]:
            if not isinstance(file["format"], str) or not isinstance(file["unit"], str):
                raise ValueError(f"file {file!r:.200}")
        dict(header["encoder"]), dict(header["made_with"])


class ShardIndex(RecordIndex):
    """``NAME.shards.idx``, of tar shards or JSON lines. Safe to fork and to pickle (it is reopened).

    The header: see `megaresume.data.prepare.measure`.

    Args:
        path: of the index.

    Raises:
        CorpusError: missing, truncated, damaged, or of another version.
        SetupError: no permission.
    """

    MAGIC = b"megaresume shard index\r\n"
    FORMAT = "megaresume.shards"
    VERSION = 5
    COLUMNS: ClassVar[Mapping[str, np.dtype[Any]]] = {
        # of the whole document; 0: skipped.
        "tokens": np.dtype("<i4"),
        "image_tokens": np.dtype("<i4"),
        # -1: could not be measured, and was accepted as invalid (--invalid).
        "num_images": np.dtype("<i4"),
        **RecordIndex.COLUMNS,
    }
    COMMAND = "megaresume prepare"

    def __init__(self, path: str | Path) -> None:
        path = Path(path)
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise _cannot_open(path, error) from error
        super().__init__(path, data)

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopened, (self.path, self._hash))

    def _check(self, header: Mapping[str, Any]) -> None:
        folder = header.get("folder")
        if folder is not None and (not isinstance(folder["path"], str) or type(folder["bytes"]) is not int):
            raise ValueError(f"folder {folder!r:.200}")


class IndexWriter:
    """Writes an index in one pass, as its records come.

    Args:
        file: open for writing, empty.
        index: which of the two kinds.
        records: the total number.
    """

    def __init__(self, file: BinaryIO, index: type[RecordIndex], records: int) -> None:
        self._file, self._index, self._records = file, index, records
        self._places = index.column_places(records)
        self._hashers = {name: xxhash.xxh3_128() for name in index.COLUMNS}
        self._done = 0

    def add(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Add the next records.

        Raises:
            OSError: it cannot be written.
        """
        for name, dtype in self._index.COLUMNS.items():
            column = np.ascontiguousarray(columns[name], dtype)
            self._file.seek(self._places[name] + self._done * dtype.itemsize)
            self._file.write(column.data)
            self._hashers[name].update(column.data)
        self._done += len(columns["offset"])

    def finish(self, said: Mapping[str, Any]) -> dict[str, Any]:
        """Write the header, ``said`` and the fields of every index; this completes the file.

        Raises:
            OSError: it cannot be written.
        """
        assert self._done == self._records, "records are missing"
        header = {
            "format": self._index.FORMAT,
            "version": self._index.VERSION,
            "records": self._records,
            **said,
            "columns": {name: hasher.hexdigest() for name, hasher in self._hashers.items()},
        }
        content = json.dumps(header, separators=(",", ":")).encode()
        self._file.truncate(self._places["end"])
        self._file.seek(self._places["end"])
        self._file.write(content)
        self._file.seek(0)
        self._file.write(self._index.preamble(self._records, content).ljust(COLUMNS_AT, b"\0"))
        return header


def _reopened(path: Path, header_hash: bytes) -> ShardIndex:
    """Reopen the index in another process; it must be the same one."""
    index = ShardIndex(path)
    if index._hash != header_hash:
        raise CorpusError(
            f"{path} changed while it was in use",
            found="another index than the one that the parent process opened",
            expected="the same index",
            cause="megaresume prepare --overwrite ran at the same time",
            action="start the run again",
        )
    return index


def _cannot_open(path: Path, error: OSError) -> CorpusError | SetupError:
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return CorpusError(
            f"{path} is missing",
            found="a directory" if isinstance(error, IsADirectoryError) else "no such file",
            expected="the index of the shards",
            cause="the shards were not prepared yet, or the path is wrong",
            action="make it: megaresume prepare SHARDS --output NAME ..., which writes NAME.shards.idx",
        )
    return SetupError.unreadable(
        path, error, "a file that this process may read", action="check the permissions and the file system"
    )
