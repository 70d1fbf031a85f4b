"""The bytes of ``NAME.shards.idx``: where each record lies and how long it is, for memory maps.

    0        preamble, 128 bytes: magic, version, records, where the header is, its hash, a hash of the preamble
    4096     columns, one after the other, each from a multiple of 64 bytes on:
             tokens, image_tokens, num_images, shard int32[n]; offset int64[n]; nbytes, content uint32[n]
    ...      header: JSON, up to the end of the file

Opening reads the preamble and the header and maps the columns: the same time for ten records as for 10^9. The header
comes after the columns because it holds their hashes: an index is written in one pass.

Raise `VERSION` when a reader of the old version would misread the new one. A reader refuses what is newer.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.files import open_file
from megaresume.stream.errors import CorpusError, SetupError
from megaresume.stream.text import parse_json

FORMAT = "megaresume.shards"
VERSION = 4
SUFFIX = ".shards.idx"
#: name -> dtype, in the order of the file.
COLUMNS: Mapping[str, np.dtype[Any]] = {
    # of the whole document; 0: passed over.
    "tokens": np.dtype("<i4"),
    "image_tokens": np.dtype("<i4"),
    # -1: could not be measured, and was declared so (--invalid).
    "num_images": np.dtype("<i4"),
    # index into the shards of the header.
    "shard": np.dtype("<i4"),
    # of the record; documents of one record follow one another.
    "offset": np.dtype("<i8"),
    "nbytes": np.dtype("<u4"),
    # `tar.content_hash` of the record; 0 where it was not read.
    "content": np.dtype("<u4"),
}
MAX_RECORD_BYTES = (1 << 32) - 1
PREAMBLE_BYTES = 128
COLUMNS_AT = 4096
_ALIGN = 64
_STRUCT = struct.Struct("<24sIIQQQ16s")
_MAGIC = b"megaresume shard index\r\n"


def index_path(output: str | Path) -> Path:
    """``shards/pairs`` -> ``shards/pairs.shards.idx``; a path that ends so already stays."""
    path = Path(output)
    return path if path.name.endswith(SUFFIX) else path.with_name(path.name + SUFFIX)


def column_places(records: int) -> dict[str, int]:
    """Where each column starts, in bytes from the start of the file; and, as ``end``, where the last one ends."""
    places, at = {}, COLUMNS_AT
    for name, dtype in COLUMNS.items():
        places[name] = at
        end = at + records * dtype.itemsize
        at = -(-end // _ALIGN) * _ALIGN
    return {**places, "end": at}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preamble:
    """What the first bytes say."""

    records: int
    #: bytes from the start of the file.
    header_at: int
    header_bytes: int
    #: xxh3_128 of the header.
    header_hash: bytes

    def pack(self) -> bytes:
        """The first `PREAMBLE_BYTES` of the file."""
        body = _STRUCT.pack(_MAGIC, VERSION, 0, self.records, self.header_at, self.header_bytes, self.header_hash)
        body = body.ljust(PREAMBLE_BYTES - 8, b"\0")
        return body + xxhash.xxh3_64_digest(body)

    @classmethod
    def unpack(cls, data: bytes, path: Path, size: int) -> Preamble:
        """From the first bytes of an index of ``size`` bytes.

        Raises:
            CorpusError: not an index, of a newer version, cut or damaged.
        """
        if len(data) < PREAMBLE_BYTES or not data.startswith(_MAGIC):
            raise damaged(path, f"{size} bytes that do not start as an index of shards does")
        _, version, _, records, header_at, header_bytes, header_hash = _STRUCT.unpack_from(data)
        if version > VERSION:
            raise CorpusError(
                f"{path} has a version that this release cannot read",
                found=f"version {version}",
                expected=f"version {VERSION} at most",
                cause="it was written by a newer megaresume",
                action="upgrade: pip install --upgrade megaresume",
            )
        if version < VERSION:
            raise CorpusError(
                f"{path} was written by an older megaresume",
                found=f"version {version}",
                expected=f"version {VERSION}",
                action="make it again: megaresume prepare --overwrite",
            )
        if xxhash.xxh3_64_digest(data[: PREAMBLE_BYTES - 8]) != data[PREAMBLE_BYTES - 8 : PREAMBLE_BYTES]:
            raise damaged(path, "another hash of its first bytes than when it was written")
        if header_at != column_places(records)["end"] or header_at + header_bytes != size:
            raise damaged(path, f"{size} bytes, where {records} records take {header_at + header_bytes}")
        return cls(records=records, header_at=header_at, header_bytes=header_bytes, header_hash=header_hash)


def damaged(path: Path, found: str) -> CorpusError:
    """For an index that is not what was written."""
    return CorpusError(
        f"{path} is damaged",
        found=found,
        expected="an index as megaresume prepare writes it",
        cause="an interrupted copy, or a file of another kind",
        action="copy the index again, or make it again: megaresume prepare --overwrite",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardInfo:
    """One shard of an index."""

    #: relative to the index, absolute, or a URL.
    path: str
    #: bytes.
    size: int
    #: number of its first record in the index, and how many it has.
    first: int
    records: int


class ShardIndex:
    """An index of tar shards or JSON lines. Safe to share between threads, to fork and to pickle (it is opened again).

    Args:
        path: of the ``.shards.idx``.

    Raises:
        CorpusError: missing, cut, damaged, or of a newer version.
        SetupError: no permission.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open_file(self.path) as file:
                size = os.fstat(file.fileno()).st_size
                data: mmap.mmap | bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
        except OSError as error:
            raise _cannot_open(self.path, error) from error
        preamble = Preamble.unpack(data[:PREAMBLE_BYTES], self.path, size)
        header = data[preamble.header_at :]
        if xxhash.xxh3_128_digest(header) != preamble.header_hash:
            raise damaged(self.path, "another hash of its header than when it was written")
        self._hash = preamble.header_hash
        self._records = preamble.records
        #: everything that is not a column, plain JSON: see `megaresume.data.prepare.merge`.
        self.header: Mapping[str, Any] = _header(self.path, header, self._records)
        places = column_places(self._records)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: np.frombuffer(data, dtype, self._records, places[name]) for name, dtype in COLUMNS.items()
        }
        self.shards: Sequence[ShardInfo] = _shards(self.header["shards"])

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopened, (self.path, self._hash))

    def __repr__(self) -> str:
        return f"ShardIndex({str(self.path)!r}: {self._records} records in {len(self.shards)} shards)"

    def __len__(self) -> int:
        """Records."""
        return self._records

    def column(self, name: str) -> npt.NDArray[Any]:
        """A column, read-only and memory-mapped: see `layout.COLUMNS`."""
        return self._columns[name]

    def verify(self) -> None:
        """Read every column and compare with the hash that was taken when it was written.

        Raises:
            CorpusError: one differs.
        """
        for name, column in self._columns.items():
            found = xxhash.xxh3_128_hexdigest(column.data) if len(column) else xxhash.xxh3_128_hexdigest(b"")
            if found != self.header["columns"][name]:
                raise damaged(self.path, f"another hash of column {name} than when it was written")


def _header(path: Path, content: bytes, records: int) -> Mapping[str, Any]:
    """Its hash fits; a faulty program may have written it all the same."""
    try:
        header: Mapping[str, Any] = parse_json(content)
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']!r}")
        counted = 0
        for shard in header["shards"]:
            if not isinstance(shard["path"], str) or any(
                type(shard[name]) is not int or shard[name] < 0 for name in ("size", "records")
            ):
                raise ValueError(f"shard {shard!r:.200}")
            counted += shard["records"]
        if (folder := header.get("folder")) is not None and (
            not isinstance(folder["path"], str) or type(folder["bytes"]) is not int
        ):
            raise ValueError(f"folder {folder!r:.200}")
        if counted != records:
            raise ValueError(f"{counted} records in its shards, {records} in its columns")
        if not all(isinstance(header["columns"][name], str) for name in COLUMNS):
            raise ValueError("no hashes of its columns")
    except KeyError as error:
        raise damaged(path, f"a header without {error}") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise damaged(path, f"an invalid header: {error}") from error
    return header


def _shards(entries: Sequence[Mapping[str, Any]]) -> list[ShardInfo]:
    first, shards = 0, []
    for entry in entries:
        shards.append(ShardInfo(path=entry["path"], size=entry["size"], first=first, records=entry["records"]))
        first += entry["records"]
    return shards


def _reopened(path: Path, header_hash: bytes) -> ShardIndex:
    """In another process: only the same index will do."""
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
    return SetupError(
        f"{path} cannot be opened",
        found=error.strerror or str(error),
        expected="a file that this process may read",
        action="check the permissions and the file system",
    )
