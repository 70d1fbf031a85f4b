"""The bytes of ``NAME.shards.idx``: where each record lies and how long it is, for memory maps.

    0        preamble, 128 bytes: magic, version, records, where the header is, its hash, a hash of the preamble
    4096     columns, one after the other, each from a multiple of 64 bytes on:
             tokens, image_tokens, num_images, shard int32[n]; offset int64[n]; nbytes, content uint32[n]
    ...      header: JSON, up to the end of the file

Opening reads the preamble and the header, whatever n is. The header lies behind the columns because it holds their
hashes: an index is written in one pass.

Raise `VERSION` when a reader of the old version would misread the new one. A reader refuses what is newer.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from megaresume.stream.errors import CorpusError

__all__ = ["COLUMNS", "FORMAT", "MAX_RECORD_BYTES", "SUFFIX", "VERSION", "Preamble", "column_places", "index_path"]

FORMAT = "megaresume.shards"
VERSION = 3
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
