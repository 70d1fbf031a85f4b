"""Cuts the input into blocks of work: each is a function of the position where it starts, and of nothing else.

Therefore the blocks are the same whatever the number of workers, and a run that was killed goes on at the end of any
block that is finished.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from megaresume.corpora.prepare.inputs import InputFile, InputStream
from megaresume.stream.errors import CorpusError

__all__ = ["Block", "BlockReader", "Piece", "Position", "TextUnit", "block_bytes"]

TextUnit = Literal["file", "line", "paragraph"]
Unit = Literal["jsonl", "file", "line", "paragraph"]

#: a document larger than this is refused: it would have to be held in memory several times.
MAX_DOCUMENT_BYTES = 1 << 30
MIN_BLOCK_BYTES = 4 << 20
MAX_BLOCK_BYTES = 64 << 20
BLOCKS_WANTED = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """A place in the input, between two documents."""

    #: index into the files.
    file: int = 0
    #: decompressed bytes before it in the file.
    offset: int = 0
    #: lines before it in the file.
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """Whole documents of one file, not yet decoded."""

    #: for errors.
    name: str
    unit: Unit
    #: lines of the file before it.
    line: int
    data: bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """One unit of work."""

    pieces: tuple[Piece, ...] = field(repr=False)
    #: where the next block starts.
    end: Position
    #: bytes on disk that were read for it (about).
    raw_bytes: int


def block_bytes(inputs: Sequence[InputFile]) -> int:
    """Decompressed bytes for a block, so that there are some thousands of blocks, neither tiny nor huge."""
    total = sum(file.size for file in inputs)
    return min(max(total // BLOCKS_WANTED, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)


class BlockReader:
    """Reads blocks; keeps the file open between two that follow each other.

    Args:
        inputs: the files, in order.
        text_unit: what a document is in a text file.
        size: bytes a block holds at least, except the last.
    """

    def __init__(self, inputs: Sequence[InputFile], text_unit: TextUnit, size: int) -> None:
        self._inputs = inputs
        self._text_unit = text_unit
        self._size = size
        self._stream: InputStream | None = None
        self._at = Position()

    def read(self, start: Position) -> Block | None:
        """The block that starts there; None at the end of the input.

        Raises:
            CorpusError: a file is damaged or changed, or a document is too large.
        """
        if start != self._at:
            self.close()
            self._at = start
        pieces: list[Piece] = []
        size = raw_bytes = 0
        while size < self._size and self._at.file < len(self._inputs):
            file = self._inputs[self._at.file]
            unit: Unit = "jsonl" if file.format == "jsonl" else self._text_unit
            if self._stream is None:
                self._stream = InputStream(file, self._at.offset)
            raw_before = self._stream.raw_position() if self._at.offset else 0
            data = self._read_documents(self._stream, unit, self._size - size)
            raw_bytes += self._stream.raw_position() - raw_before
            if data or unit == "file":  # an empty file is an empty document
                pieces.append(Piece(name=str(file.path), unit=unit, line=self._at.line, data=data))
                size += len(data)
            if unit == "file" or not data:
                self.close()
                self._at = Position(file=self._at.file + 1)
            else:
                lines = data.count(b"\n")
                self._at = Position(file=self._at.file, offset=self._at.offset + len(data), line=self._at.line + lines)
        if not pieces:
            return None
        return Block(pieces=tuple(pieces), end=self._at, raw_bytes=raw_bytes)

    def close(self) -> None:
        """Close the file that is open."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _read_documents(self, stream: InputStream, unit: Unit, wanted: int) -> bytes:
        """Whole documents of at least ``wanted`` bytes; fewer, or none, only at the end of the file."""
        if unit == "file":
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
            _check_size(data, stream, self._at.line)
            return data
        parts = [stream.read(wanted)]
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            _check_size(line, stream, self._at.line)
            parts.append(line)
            # The first line is the rest of the one that read() stopped in: no blank line, even if it is empty.
            if unit != "paragraph" or (len(parts) > 2 and not line.strip()):
                break
            if sum(map(len, parts)) > MAX_DOCUMENT_BYTES + wanted:
                _check_size(b"".join(parts), stream, self._at.line)
        return b"".join(parts)


def _check_size(data: bytes, stream: InputStream, line: int) -> None:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CorpusError(
            f"{stream.file.path} has a document that is too large",
            found=f"more than {MAX_DOCUMENT_BYTES} bytes, after line {line}",
            expected=f"documents of at most {MAX_DOCUMENT_BYTES} bytes",
            cause="a text file with many documents, or one without line breaks",
            action="cut it into documents: --text-unit line or paragraph, or JSON lines",
        )
