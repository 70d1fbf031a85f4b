"""Rows of other formats as JSON lines: a JSON array, CSV, Parquet, Arrow.

[{"a": 1},        \\n{"a": 1}\\n       Byte for byte: a row has the same offset in the file and in the lines.
 {"a": 2}]          {"a": 2}\\n

Row 17 of a table is line 17, counted from 1. The rows of a damaged Parquet row group become lines that are not
objects, so that they are refused by name, or dropped and counted, like other bad lines. Damage in an Arrow file ends
the run: such a file does not say how many rows a damaged part had.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Protocol

from megaresume.encoding.text.conversations import KEYS
from megaresume.stream.errors import require

#: bytes read at once.
CHUNK = 1 << 20
#: most characters of a CSV field.
MAX_FIELD = 1 << 30
#: rows converted to Python together.
ROWS = 1000

_FILE = b"ARROW1"
#: The offset of the stream in a file of Arrow's file format, which is a stream with this prefix and a footer.
_START = 8
#: The end of a complete Arrow stream; pyarrow reads one cut between two batches as if it were complete.
_END = b"\xff\xff\xff\xff\0\0\0\0"
#: columns whose bytes are text, as Spark writes them.
TEXTS = frozenset({"text", "tools", "system", "input", "history", *(key for keys in KEYS.values() for key in keys)})
#: the place of a record batch that cannot be read without others.
NOT_ALONE = -1


class Lines(io.RawIOBase):
    """A stream of chunks.

    Args:
        chunks: none is empty.
    """

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._left = memoryview(b"")

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any) -> int:
        """The next bytes; 0 at the end."""
        while not self._left:
            try:
                self._left = memoryview(next(self._chunks))
            except StopIteration:
                return 0
        size: int = min(len(buffer), len(self._left))
        buffer[:size] = self._left[:size]
        self._left = self._left[size:]
        return size


def bounds_of(
    lines: Iterable[bytes], *, at: int = 0, before: int = 0, ends: bytes = b"\n"
) -> Iterator[tuple[int, int, int]]:
    """The first byte of each line, the one after its last, and its number, from 1; blank lines are skipped.

    Line ends do not count, nor does a byte order mark at the start of the file; elsewhere U+FEFF is a character.

    Args:
        lines: with their line ends.
        at: bytes of the file before them.
        before: lines of the file before them.
        ends: bytes that end a line.
    """
    for number, line in enumerate(lines, before + 1):
        mark = codecs.BOM_UTF8 if at == 0 and number == 1 and line.startswith(codecs.BOM_UTF8) else b""
        first = at + len(mark)
        yield first, first + (len(line.rstrip(ends)) - len(mark) if line[len(mark) :].strip() else 0), number
        at += len(line)


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


#: a string, which may continue in the next chunk; or the characters that matter outside strings.
_WORD = re.compile(rb'"(?:[^"\\]++|\\.)*+(")?|[\[\]{},\n\r]', re.DOTALL)
_REST = re.compile(rb'(?:[^"\\]++|\\.)*+(")?', re.DOTALL)
_NEWLINE, _SPACE = ord("\n"), ord(" ")


class ArrayLines(Lines):
    """The elements of a JSON array, each on a line, from the second line on.

    Brackets and commas of the array become line ends, and line ends in its elements become spaces. Anything after the
    array becomes a line, so that it is refused as one.

    Args:
        source: of the file's bytes.
        after: the bracket or comma of the array that precedes them; empty at the start of the file.
    """

    def __init__(self, source: _Readable, after: bytes = b"") -> None:
        self._source = source
        super().__init__(self._read(after))

    def _read(self, after: bytes) -> Iterator[bytes]:
        depth, begun = int(after in (b"[", b",")), bool(after)
        in_string, held = False, b""
        while data := self._source.read(CHUNK):
            data, held = held + data, b""
            escapes = len(data) - len(data.rstrip(b"\\"))
            if escapes % 2:  # the escaped character is in the next chunk
                data, held = data[:-1], data[-1:]
            done, at = bytearray(data), 0
            if in_string and (rest := _REST.match(data)) is not None:
                in_string, at = rest[1] is None, rest.end()
            for found in _WORD.finditer(data, at) if not in_string else ():
                word, at = found[0], found.start()
                if word[0] == ord('"'):
                    in_string = found[1] is None
                elif word in b"\n\r":
                    done[at] = _SPACE if depth or not begun else _NEWLINE
                elif word in b"[{":
                    if depth == 0 and word == b"[" and not begun:
                        done[at], begun = _NEWLINE, True
                    depth += 1
                elif word in b"]}":
                    depth -= 1
                    if depth == 0:
                        done[at] = _NEWLINE
                elif depth == 1:
                    done[at] = _NEWLINE
            yield bytes(done)
        if depth or in_string or held:
            raise EOFError("the array of JSON is not closed")


class CsvLines(Lines):
    """Rows of CSV as objects with the header's names as keys: row 17 is line 17, counted from 1.

    A row with another number of fields becomes a line that is not an object, so that it is refused by name, or dropped
    like other bad lines.

    Args:
        source: of the file's bytes.
        suffixes: of the file's name; in .tsv, tabs separate the fields.

    Raises:
        csv.Error: no header, or two columns with the same name.
    """

    def __init__(self, source: Any, suffixes: Sequence[str]) -> None:
        csv.field_size_limit(MAX_FIELD)
        text = io.TextIOWrapper(source, encoding="utf-8", errors="surrogateescape", newline="")
        delimiter = "\t" if ".tsv" in [suffix.lower() for suffix in suffixes] else ","
        self._rows = csv.reader(text, delimiter=delimiter, strict=True)
        self._text = text
        header = [name.removeprefix("\ufeff") for name in next(self._rows, [])]
        if not header or len(set(header)) < len(header):
            raise csv.Error(f"a header without a name for each column: {', '.join(header)}")
        super().__init__(self._read(header))

    def _read(self, header: list[str]) -> Iterator[bytes]:
        try:
            for row in self._rows:
                if row:
                    fits = len(row) == len(header)
                    wrong = f"{len(row)} fields, under a header of {len(header)}"
                    line = json.dumps(dict(zip(header, row, strict=True)) if fits else wrong, ensure_ascii=False)
                    yield f"{line}\n".encode("utf-8", "surrogateescape")
        except csv.Error as error:
            raise csv.Error(f"line {self._rows.line_num}: {error}") from error


def csv_errors() -> tuple[type[Exception], ...]:
    """The errors that `CsvLines` raises for a file that is not valid CSV."""
    return (csv.Error,)


class TableLines(Lines):
    """The rows of a table as JSON lines; columns of times, and of bytes that are not text, are left out.

    Args:
        schema: of the table.
        lines: of the table.
        key: see `columns_of`.

    Raises:
        pyarrow.ArrowInvalid: two columns have the same name.
    """

    def __init__(self, schema: Any, lines: Iterator[bytes], key: str | None) -> None:
        #: names of the columns that are read.
        self.columns = columns_of(schema, key)
        #: the first row, from 0, and the place of each row group or record batch read so far.
        self.chunks: list[tuple[int, int]] = []
        super().__init__(lines)

    @staticmethod
    def lines(batch: Any) -> bytes:
        """The rows of a record batch."""
        lines = (json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in batch.to_pylist())
        return "".join(lines).encode("utf-8", "surrogateescape")


def _plain(value: Any) -> str:
    """Bytes as UTF-8, as Spark writes texts; invalid ones are kept for --invalid-utf8 to decide."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def columns_of(schema: Any, key: str | None = None) -> list[str]:
    """Names of the columns to read; see `TableLines`.

    Args:
        schema: of the table.
        key: the column of the text or the messages, if it has an unusual name.

    Raises:
        pyarrow.ArrowInvalid: two columns have the same name.
    """
    pyarrow = load_pyarrow()
    if len(set(schema.names)) < len(schema.names):
        raise pyarrow.ArrowInvalid(f"two columns have the same name: {', '.join(schema.names)}")
    kinds = pyarrow.types
    texts = {*TEXTS, key, (key or "").partition(".")[0]}

    def is_read(field: Any) -> bool:
        if kinds.is_binary(field.type) or kinds.is_large_binary(field.type):
            return field.name in texts
        # Times may be finer than Python's, or out of their range.
        return not (kinds.is_fixed_size_binary(field.type) or kinds.is_temporal(field.type))

    return [field.name for field in schema if is_read(field)]


class ParquetLines(TableLines):
    """The rows of a Parquet file as JSON lines.

    Args:
        file: open for reading, seekable.
        size: of the file, in bytes.
        key: see `columns_of`.

    Raises:
        SetupError: `pyarrow` is missing.
        pyarrow.ArrowException: it is not a Parquet file, or its footer is damaged.
    """

    def __init__(self, file: Any, size: int, key: str | None = None) -> None:
        pyarrow = load_pyarrow()
        from pyarrow.parquet import ParquetFile

        self._size = size
        self._file = ParquetFile(pyarrow.PythonFile(file, mode="r"), page_checksum_verification=True)
        self._rows = self._file.metadata.num_rows
        self._done = 0
        super().__init__(self._file.schema_arrow, self._read(), key)

    def raw_position(self) -> int:
        """Approximate number of bytes of the file for the rows read so far."""
        return self._size * self._done // max(int(self._rows), 1)

    def _read(self) -> Iterator[bytes]:
        damaged: tuple[type[Exception], ...] = (*parquet_errors(), UnicodeDecodeError)
        for group in range(self._file.num_row_groups):
            left = self._file.metadata.row_group(group).num_rows
            self.chunks.append((self._done, group))
            try:
                for batch in self._file.iter_batches(ROWS, row_groups=[group], columns=self.columns):
                    lines = self.lines(batch)
                    left -= batch.num_rows
                    self._done += batch.num_rows
                    yield lines
            except damaged as error:
                if isinstance(error, OSError) and error.errno:  # an error of the file system, not of the file
                    raise
                yield (json.dumps(f"row group {group} is damaged: {error}") + "\n").encode() * left
                self._done += left


class ArrowLines(TableLines):
    """The rows of an Arrow file, in the file format or the stream format, as JSON lines.

    Args:
        file: open for reading, seekable.
        size: of the file, in bytes.
        key: see `columns_of`.

    Raises:
        SetupError: `pyarrow` is missing.
        pyarrow.ArrowException: it is not an Arrow file, or it is damaged.
    """

    def __init__(self, file: Any, size: int, key: str | None = None) -> None:
        pyarrow = load_pyarrow()
        from pyarrow import ipc

        is_file = file.read(len(_FILE)) == _FILE
        #: the offset after the last batch and the end marker.
        self._end = _footer(file, size) if is_file else size
        file.seek(max(self._end - len(_END), 0))
        if file.read(len(_END)) != _END:
            raise pyarrow.ArrowInvalid("no end marker")
        file.seek(_START if is_file else 0)
        self._source = file
        self._reader = ipc.open_stream(pyarrow.PythonFile(file, mode="r"))
        super().__init__(self._reader.schema, self._read(), key)

    def raw_position(self) -> int:
        """Approximate number of bytes of the file read so far."""
        return int(self._source.tell())

    def _read(self) -> Iterator[bytes]:
        # The values of a dictionary are not in the batch.
        alone = not any("dictionary<" in str(field.type) for field in self._reader.schema)
        rows, at = 0, self._source.tell()
        for batch in self._reader:
            batch.validate(full=True)
            self.chunks.append((rows, at if alone else NOT_ALONE))
            for start in range(0, batch.num_rows, ROWS):
                yield self.lines(batch.slice(start, ROWS).select(self.columns))
            rows, at = rows + batch.num_rows, self._source.tell()
        if self._source.tell() != self._end:
            raise load_pyarrow().ArrowInvalid("something follows its end, such as another file of Arrow")


def _footer(file: Any, size: int) -> int:
    """The offset of the footer in a file of the file format."""
    file.seek(max(size - len(_FILE) - 4, 0))
    nbytes, magic = int.from_bytes(file.read(4), "little", signed=True), file.read()
    if magic != _FILE or not 0 < nbytes < size:
        raise load_pyarrow().ArrowInvalid("no footer")
    return size - len(_FILE) - 4 - nbytes


def read_schema(file: Any) -> Any:
    """Read the schema of an Arrow file; leaves the file at the next message."""
    from pyarrow import ipc

    file.seek(0)
    file.seek(_START if file.read(len(_FILE)) == _FILE else 0)
    return ipc.read_schema(ipc.read_message(file))


def parquet_errors() -> tuple[type[Exception], ...]:
    """The errors that pyarrow raises for a damaged file."""
    return (load_pyarrow().ArrowException, OSError)


def load_pyarrow() -> Any:
    """The library; raises SetupError if it is missing."""
    action = "pip install pyarrow, or write the rows as JSON lines first"
    return require("pyarrow", "it reads .parquet and .arrow", action)
