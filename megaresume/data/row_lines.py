"""An array of JSON, and CSV, as JSON lines.

[{"a": 1},        \\n{"a": 1}\\n       Byte for byte: a row lies in the file where it lies in the lines.
 {"a": 2}]          {"a": 2}\\n
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

#: bytes read at once.
CHUNK = 1 << 20
#: characters of a field of CSV.
MAX_FIELD = 1 << 30


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


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


#: a string, which may go on after the chunk; or what counts outside of strings.
_WORD = re.compile(rb'"(?:[^"\\]++|\\.)*+(")?|[\[\]{},\n\r]', re.DOTALL)
_REST = re.compile(rb'(?:[^"\\]++|\\.)*+(")?', re.DOTALL)
_NEWLINE, _SPACE = ord("\n"), ord(" ")


class ArrayLines(Lines):
    """The elements of an array, each on a line, from the second line on.

    Brackets and commas of the array become line ends, line ends in its elements become spaces. What follows the array
    is a line of its own, so that it is refused as one.

    Args:
        source: of its bytes.
        after: the bracket or comma of the array that they follow; empty: they begin with the file.
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
            if escapes % 2:  # what it escapes is in the next chunk
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
    """Rows of CSV as objects under the names of the header: row 17 is line 17, counted from 1.

    A row with another number of fields is a line that is no object, so that it is named, or left out as bad lines are.

    Args:
        source: of its bytes.
        suffixes: of its name; of .tsv fields end with a tab.

    Raises:
        csv.Error: no header, or two columns of one name.
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
    """What `CsvLines` raises of a file that is none."""
    return (csv.Error,)
