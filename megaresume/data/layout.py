"""The format of a corpus, Megatron's ``.bin/.idx`` pair, for reader and writer.

The ``.bin`` holds the tokens of all sequences, one after another, and nothing else. The ``.idx`` (little-endian):

    bytes   what
    9       magic ``MMIDIDX\\0\\0``
    8       version, uint64, always 1
    1       code of the tokens' dtype
    8       S, sequences, uint64
    8       D + 1, document boundaries, uint64
    4 S     tokens of each sequence, int32
    8 S     byte offset of each sequence in the .bin, int64; they follow each other without gaps
    8 D+8   document d is the sequences boundary[d] to boundary[d + 1]; the first is 0, the last S; int64
    S       mode of each sequence, int8; only in multimodal corpora

Source: ``megatron/core/datasets/indexed_dataset.py`` of Megatron-LM (``_IndexWriter``, ``DType``).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import CorpusError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
#: code in the .idx -> dtype of the tokens in the .bin.
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
_HEADER = struct.Struct("<9sQBQQ")
HEADER_BYTES = _HEADER.size
#: lengths are stored as int32.
MAX_SEQUENCE_TOKENS = (1 << 31) - 1


def prefix_of(path: str | Path) -> Path:
    """The common part of both paths, from it, the ``.bin`` or the ``.idx``: ``web_text_document``."""
    path = Path(path)
    return path.with_suffix("") if path.suffix in (".bin", ".idx") else path


def bin_path(prefix: Path) -> Path:
    """The path of the tokens."""
    return prefix.with_name(prefix.name + ".bin")


def idx_path(prefix: Path) -> Path:
    """The path of the index."""
    return prefix.with_name(prefix.name + ".idx")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexHeader:
    """The first 34 bytes of an ``.idx``, and where the arrays after them start (byte offsets)."""

    dtype: np.dtype[Any]
    sequences: int
    documents: int

    @property
    def lengths_at(self) -> int:
        """Byte offset of the lengths, int32[sequences]."""
        return HEADER_BYTES

    @property
    def pointers_at(self) -> int:
        """Byte offset of the pointers, int64[sequences]."""
        return self.lengths_at + 4 * self.sequences

    @property
    def boundaries_at(self) -> int:
        """Byte offset of the boundaries, int64[documents + 1]."""
        return self.pointers_at + 8 * self.sequences

    @property
    def modes_at(self) -> int:
        """Byte offset of the modes, int8[sequences], or the end of the file."""
        return self.boundaries_at + 8 * (self.documents + 1)

    def pack(self) -> bytes:
        """The header as bytes of the file."""
        code = next(code for code, dtype in DTYPES.items() if dtype == self.dtype)
        return _HEADER.pack(MAGIC, VERSION, code, self.sequences, self.documents + 1)

    @classmethod
    def unpack(cls, data: bytes, path: Path, size: int) -> IndexHeader:
        """Read and check a header against the size of its file, in bytes.

        Raises:
            CorpusError: too short, or a bad magic, version, dtype code or counts, each with its own text.
        """
        interrupted = "a copy or the preprocessing was interrupted"
        newer = "a damaged file, or a format newer than this release"

        def bad(what: str, found: str, expected: str, cause: str) -> CorpusError:
            action = "copy the .idx again or rebuild the corpus: megaresume prepare"
            return CorpusError(f"{path} {what}", found=found, expected=expected, cause=cause, action=action)

        if len(data) < HEADER_BYTES and MAGIC.startswith(data[: len(MAGIC)]):
            raise bad("is truncated", f"{size} bytes", f"a header of {HEADER_BYTES} bytes", interrupted)
        if data[: len(MAGIC)] != MAGIC:
            raise bad(
                "is not the index of a Megatron corpus",
                f"the first bytes are {data[: len(MAGIC)]!r}",
                f"{MAGIC!r}",
                "another kind of file, a Git LFS pointer, or a corpus in an old format ('cached', 'lazy')",
            )
        _, version, code, sequences, boundaries = _HEADER.unpack(data[:HEADER_BYTES])
        if version != VERSION:
            raise bad("has an unknown version", f"version {version}", f"version {VERSION}", newer)
        if code not in DTYPES:
            known = ", ".join(f"{c} ({d.name})" for c, d in DTYPES.items())
            raise bad("has an unknown code for the type of its tokens", f"code {code}", known, newer)
        if boundaries < 1:
            expected = "at least 1 (documents + 1)"
            raise bad("has inconsistent counts", "0 document boundaries", expected, "the header is damaged")
        header = cls(dtype=DTYPES[code], sequences=sequences, documents=boundaries - 1)
        expected = f"{header.modes_at} bytes for {sequences} sequences and {header.documents} documents"
        if size < header.modes_at:
            cause = f"{interrupted}, or the counts in the header are damaged"
            raise bad("is shorter than its counts say", f"{size} bytes", expected, cause)
        if size not in (header.modes_at, header.modes_at + sequences):
            raise bad(
                "has counts that do not match its size",
                f"{size} bytes",
                f"{expected}, or {header.modes_at + sequences} with a mode for each sequence",
                "the counts in the header are damaged, or something was appended to the file",
            )
        return header


#: boundaries written together.
_CHUNK = 1 << 20


class IdxWriter:
    """Writes the ``.idx`` of a corpus while its documents come, one sequence each. Its arrays grow side by side.

    Args:
        file: open for writing, empty.
        dtype: of the tokens.
        documents: the total number.
    """

    def __init__(self, file: BinaryIO, *, dtype: np.dtype[Any], documents: int) -> None:
        self._file, self._header = file, IndexHeader(dtype=dtype, sequences=documents, documents=documents)
        self._documents = 0
        #: written so far.
        self.tokens = 0
        file.write(self._header.pack())

    def add(self, lengths: npt.NDArray[np.int32]) -> None:
        """Add the next documents: int32[n], tokens of each. Raises OSError: it cannot be written."""
        header = self._header
        ends = self.tokens + np.cumsum(lengths, dtype=np.int64)
        self._put(header.lengths_at + 4 * self._documents, lengths)
        self._put(header.pointers_at + 8 * self._documents, ((ends - lengths) * header.dtype.itemsize).astype("<i8"))
        self._documents += len(lengths)
        self.tokens = int(ends[-1]) if len(ends) else self.tokens

    def finish(self) -> None:
        """Write the boundaries; the file is complete. Raises OSError: it cannot be written."""
        documents = self._header.documents
        self._file.seek(self._header.boundaries_at)
        for first in range(0, documents + 1, _CHUNK):
            self._file.write(np.arange(first, min(first + _CHUNK, documents + 1), dtype="<i8").data)

    def _put(self, at: int, array: npt.NDArray[Any]) -> None:
        self._file.seek(at)
        self._file.write(array.data)
