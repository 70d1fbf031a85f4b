"""``<prefix>.places``: where each document of a corpus lies in its raw files, and how it becomes tokens.

It stands in the place of a .bin: the tokens are made when they are read. The file (little-endian):

    bytes   what
    8       magic ``MGRPLACE``
    8       version, uint64, always 1
    8       D, documents, uint64
    8       J, bytes of JSON, uint64
    8       xxh3_64 of the JSON, uint64
    16 D    `PLACE` of each document, in the order of the files
    J       {"encoder": what makes the tokens (`EncoderSpec.to_json`), "made_with": {library: version},
             "root": what all paths begin with, "inputs": [{"path", "format", "unit", "size", "documents"}]}

``megaresume prepare --index-only`` writes it. Raise `VERSION` when a reader of the old one would misread the new one.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.errors import CorpusError

MAGIC = b"MGRPLACE"
VERSION = 1
_HEADER = struct.Struct("<8s4Q")
#: ``at``, ``extent`` in text and JSON lines: first byte, decompressed, and bytes; in Parquet: row group, and row in it;
#: in Arrow: byte of the record batch, and row in it. ``check``: see `checksum`.
PLACE = np.dtype([("at", "<i8"), ("extent", "<i4"), ("check", "<u4")])
REBUILD = "copy the corpus again, or make it again: megaresume prepare --index-only --overwrite"


def places_path(prefix: Path) -> Path:
    """Where the places are."""
    return prefix.with_name(prefix.name + ".places")


def checksum(tokens: npt.NDArray[Any]) -> int:
    """The lower half of xxh3_64 of the tokens of a document, in the type of the corpus."""
    return xxhash.xxh3_64_intdigest(np.ascontiguousarray(tokens).data) & 0xFFFFFFFF


class DocumentPlace(NamedTuple):
    """Where one document lies."""

    #: index into the inputs.
    file: int
    at: int
    extent: int
    check: int


class PlacesFile:
    """The places of a corpus, read where they lie.

    Args:
        path: of the file.
        data: all of it, mapped.
        documents: of the .idx beside it.

    Raises:
        CorpusError: it is damaged, or of another corpus.
    """

    def __init__(self, path: Path, data: mmap.mmap | bytes, documents: int) -> None:
        self.path = path
        header = bytes(data[: _HEADER.size])
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise self.damaged(f"{len(data)} bytes that begin with {header[: len(MAGIC)]!r}")
        _, version, count, size, found = _HEADER.unpack(header)
        if version != VERSION:
            raise self.damaged(f"version {version}", f"version {VERSION}, or a newer megaresume")
        end = _HEADER.size + PLACE.itemsize * count
        if len(data) != end + size or count != documents:
            raise self.damaged(f"{len(data)} bytes for {count} documents, of {documents} in the .idx")
        text = bytes(data[end:])
        if xxhash.xxh3_64_intdigest(text) != found:
            raise self.damaged("another hash of its JSON", "that of when it was written")
        said = json.loads(text)
        #: as the file says.
        self.encoder: Mapping[str, Any] = said["encoder"]
        self.made_with: Mapping[str, str] = said["made_with"]
        self.root: str = said["root"]
        self.inputs: Sequence[Mapping[str, Any]] = said["inputs"]
        self._places = np.frombuffer(data, PLACE, count, _HEADER.size)
        #: one after the last document of each input.
        self.stops = np.cumsum([file["documents"] for file in self.inputs], dtype=np.int64)
        if not len(self.stops) or self.stops[-1] != count:
            raise self.damaged(f"inputs of {self.stops[-1:].tolist()} documents", f"inputs of {count}")

    def place(self, i: int) -> DocumentPlace:
        """Of document i, in [0, documents).

        Raises:
            CorpusError: the file is damaged there.
        """
        at, extent, check = self._places[i].item()
        if at < 0 or extent < 0:
            raise self.damaged(f"document {i} at {at}, {extent}")
        return DocumentPlace(int(np.searchsorted(self.stops, i, "right")), at, extent, check)

    def last(self, file: int) -> DocumentPlace:
        """Of the last document of a file that has any."""
        return self.place(int(self.stops[file]) - 1)

    def damaged(self, found: str, expected: str = "what megaresume prepare --index-only writes") -> CorpusError:
        """What is wrong with it, in words."""
        return CorpusError(
            f"{self.path} is damaged",
            found=found,
            expected=expected,
            cause="a copy that was interrupted, or files of two builds",
            action=REBUILD,
        )


def write_header(file: BinaryIO, documents: int, said: Mapping[str, Any]) -> None:
    """Complete a file that has `PLACE` of every document at its place: the header before, the JSON after them.

    Raises:
        OSError: it cannot be written.
    """
    text = json.dumps(said, separators=(",", ":")).encode()
    file.seek(_HEADER.size + PLACE.itemsize * documents)
    file.write(text)
    file.seek(0)
    file.write(_HEADER.pack(MAGIC, VERSION, documents, len(text), xxhash.xxh3_64_intdigest(text)))


#: bytes before the first place.
HEADER_BYTES = _HEADER.size
