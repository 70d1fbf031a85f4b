"""``NAME.shards.idx`` opened: columns as memory maps, in the same time for ten records as for 10^9."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.shards.layout import COLUMNS, FORMAT, PREAMBLE_BYTES, Preamble, column_places, damaged
from megaresume.stream.errors import CorpusError, SetupError
from megaresume.stream.json_text import parse_json

__all__ = ["ShardIndex", "ShardInfo"]


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
    """An index of tar shards. Safe to share between threads, to fork and to pickle (it is opened again).

    Args:
        path: of the ``.shards.idx``.

    Raises:
        CorpusError: missing, cut, damaged, or of a newer version.
        SetupError: no permission.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as file:
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
        #: everything that is not a column, plain JSON: see `megaresume.shards.index_merge`.
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
