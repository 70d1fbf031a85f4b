"""Splits the input into blocks of work; and, for several machines (``--part K/N``), into stretches of similar size.

    files   |---- a.jsonl ----|-- b.jsonl.gz --|-- c.jsonl --|
    N = 3   |---- 1 ----|----------- 2 --------|----- 3 -----|

A block depends only on the position where it starts. So the blocks do not depend on the number of workers, and a run
that was killed resumes at the end of any finished block.

A stretch depends only on the files and on N. It starts with a file, or with a line of a file that can be read from the
middle. Its blocks follow from its start, so that no machine needs to know about the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace

from megaresume.data.documents import Piece, TextUnit, Unit, unit_of
from megaresume.data.inputs import InputFile
from megaresume.data.streams import MAX_DOCUMENT_BYTES, InputStream
from megaresume.stream.errors import CorpusError, UsageError

MIN_BLOCK_BYTES = 4 << 20
MAX_BLOCK_BYTES = 64 << 20
BLOCKS_WANTED = 4096
#: bytes read at once to count lines.
COUNTED = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class Position:
    """A place in the input, between two documents; ordered as the input is."""

    #: the file, as an index into the files.
    file: int = 0
    #: decompressed bytes before it in the file.
    offset: int = 0
    #: lines before it in the file.
    line: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A unit of work: a range of the input."""

    pieces: tuple[Piece, ...] = field(repr=False)
    #: the start of the next block.
    end: Position
    #: approximate number of bytes read from disk for it.
    raw_bytes: int


def block_bytes(inputs: Sequence[InputFile]) -> int:
    """Decompressed bytes per block, chosen to make some thousands of blocks, neither tiny nor huge."""
    total = sum(file.size for file in inputs)
    return min(max(total // BLOCKS_WANTED, MIN_BLOCK_BYTES), MAX_BLOCK_BYTES)


class BlockReader:
    """Reads blocks; keeps the file open between adjacent ones.

    Args:
        inputs: the files, in order.
        text_unit: what a document is in a text file.
        size: least bytes of a block, except the last.
        stop: the end of the last block, at the start of a file or of a line; None: the end of the input.
    """

    def __init__(
        self, inputs: Sequence[InputFile], text_unit: TextUnit, size: int, stop: Position | None = None
    ) -> None:
        self._inputs = inputs
        self._stop = stop or Position(file=len(inputs))
        self._text_unit = text_unit
        self._size = size
        self._stream: InputStream | None = None
        self._at = Position()

    def read(self, start: Position) -> Block | None:
        """The block that starts at a position; None at the end.

        Raises:
            CorpusError: a file is damaged or changed, or a document is too large.
        """
        if start != self._at:
            self.close()
            self._at = start
        pieces: list[Piece] = []
        size = raw_bytes = 0
        while size < self._size and self._at < self._stop:
            file = self._inputs[self._at.file]
            unit = unit_of(file, self._text_unit)
            if self._stream is None:
                self._stream = InputStream(file, self._at.offset)
            raw_before = self._stream.raw_position() if self._at.offset else 0
            wanted = self._size - size
            if self._at.file == self._stop.file:
                # One byte less, as a read continues to the end of its line.
                wanted = min(wanted, self._stop.offset - self._at.offset - 1)
            data = self._read_documents(self._stream, unit, wanted)
            self._stream.check_unchanged()
            raw_bytes += self._stream.raw_position() - raw_before
            if data or unit == "file":  # an empty file is an empty document
                at = self._at
                chunks = self._stream.chunks_from(at.line)
                piece = Piece(name=file.name, unit=unit, line=at.line, data=data, file=at.file, offset=at.offset)
                pieces.append(replace(piece, chunks=chunks) if chunks else piece)
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

    def with_line(self, start: Position) -> Position:
        """The position with its line number, counted from the start of the file."""
        if start.offset == 0:
            return start
        with closing(InputStream(self._inputs[start.file])) as stream:
            pieces = range(0, start.offset, COUNTED)
            lines = sum(stream.read(min(COUNTED, start.offset - at)).count(b"\n") for at in pieces)
        return replace(start, line=lines)

    def close(self) -> None:
        """Close the file that is open."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _read_documents(self, stream: InputStream, unit: Unit, wanted: int) -> bytes:
        """Complete documents of at least ``wanted`` bytes; fewer, or none, only at the end of the file."""
        if unit == "file":
            data = stream.read(MAX_DOCUMENT_BYTES + 1)
            _check_size(data, stream, self._at.line)
            return data
        parts = [stream.read(wanted)]
        size = len(parts[0])
        while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
            _check_size(line, stream, self._at.line)
            parts.append(line)
            size += len(line)
            # The first line is the rest of the one where read() stopped: not a blank line, even if it is empty.
            if unit != "paragraph" or (len(parts) > 2 and not line.strip()):
                break
            if size > MAX_DOCUMENT_BYTES + wanted:
                _check_size(b"".join(parts), stream, self._at.line)
        return b"".join(parts)


def _check_size(data: bytes, stream: InputStream, line: int) -> None:
    if len(data) > MAX_DOCUMENT_BYTES:
        raise CorpusError(
            f"{stream.file.name} has a document that is too large",
            found=f"more than {MAX_DOCUMENT_BYTES} bytes, after line {line}",
            expected=f"documents of at most {MAX_DOCUMENT_BYTES} bytes",
            cause="a text file with many documents, or one without line breaks",
            action="cut it into documents: --text-unit line or paragraph, or JSON lines",
        )


#: most machines: names have five digits.
MOST = 99_999


@dataclass(frozen=True, kw_only=True, slots=True)
class Stretch:
    """The part of the input that one machine prepares."""

    #: the number of the stretch, from 1, and the number of stretches.
    number: int
    of: int
    #: the start of its first block; ``line`` is not counted yet.
    start: Position
    #: the start of the next stretch.
    stop: Position
    #: approximate number of bytes on disk.
    size: int

    @property
    def directory(self) -> str:
        """The directory of its blocks, within the directory of the whole prepare."""
        return "" if self.of == 1 else f"{self.number:05d}-of-{self.of:05d}"

    def name(self, index: int) -> str:
        """The name of a block; names sort in the order of the input."""
        block = f"part-{index:08d}"
        return block if self.of == 1 else f"{self.directory}/{block}"


def cut(files: Sequence[InputFile], text_unit: TextUnit, of: int) -> list[Stretch]:
    """Split the input into stretches, in order; some are empty if the input is too small.

    Args:
        files: the input.
        text_unit: what a document is in a text file.
        of: the number of stretches.

    Raises:
        CorpusError: a file is gone, or changed.
    """
    total = sum(file.size for file in files)
    starts = [Position(), *(_start(files, text_unit, total * k // of) for k in range(1, of)), Position(file=len(files))]
    return [Stretch(number=k + 1, of=of, start=starts[k], stop=starts[k + 1], size=total // of) for k in range(of)]


def _start(files: Sequence[InputFile], text_unit: TextUnit, target: int) -> Position:
    """A position where a stretch can start, close to a byte of the whole input; increases with that byte."""
    for number, file in enumerate(files):
        if target <= 0:
            return Position(file=number)
        if target < file.size:
            if file.compressed or unit_of(file, text_unit) not in ("jsonl", "line"):
                return Position(file=number if 2 * target < file.size else number + 1)
            with closing(InputStream(file, target - 1)) as stream:
                offset = target - 1 + len(stream.readline(MAX_DOCUMENT_BYTES + 1))
            return Position(file=number, offset=offset) if offset < file.size else Position(file=number + 1)
        target -= file.size
    return Position(file=len(files))


def check_part(part: tuple[int, int]) -> None:
    """Refuse an impossible part.

    Raises:
        UsageError: not 1 <= K <= N.
    """
    number, of = part
    if not 1 <= number <= of <= MOST:
        raise UsageError(
            "bad --part",
            found=f"{number}/{of}",
            expected=f"K/N with K from 1 to N, N at most {MOST}",
            action="for a Slurm array: --array=1-N and --part $SLURM_ARRAY_TASK_ID/N",
        )
