"""The rows of Parquet and Arrow files as JSON lines: row 17 of a file is line 17, counted from 1.

The rows of a row group of Parquet that is damaged are lines that are no objects, so that they are named, or left out
and counted, as bad lines are. What is damaged in Arrow ends the run: a part of such a file does not say how many rows
it had.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megaresume.data.row_lines import Lines
from megaresume.stream.errors import require
from megaresume.text.conversations import KEYS

#: rows turned into Python together.
ROWS = 1000

_FILE = b"ARROW1"
#: where the stream begins that a file of Arrow in the file format is, but for this start and the footer.
_START = 8
#: how a stream of Arrow ends that is whole; pyarrow reads one that was cut between two batches as if it were.
_END = b"\xff\xff\xff\xff\0\0\0\0"
#: columns whose bytes are text, as Spark writes it.
TEXTS = frozenset({"text", "tools", "system", "input", "history", *(key for keys in KEYS.values() for key in keys)})
#: place of a record batch that cannot be read without others.
NOT_ALONE = -1


class TableLines(Lines):
    """A stream of JSON lines of the rows of a table; columns of times, and of bytes that are no text, are left out.

    Args:
        schema: of the table.
        lines: of it.
        key: see `columns_of`.

    Raises:
        pyarrow.ArrowInvalid: two columns have the same name.
    """

    def __init__(self, schema: Any, lines: Iterator[bytes], key: str | None) -> None:
        #: names of those that are read.
        self.columns = columns_of(schema, key)
        #: first row, from 0, and place of what was read so far: of each row group, or record batch.
        self.chunks: list[tuple[int, int]] = []
        super().__init__(lines)

    @staticmethod
    def lines(batch: Any) -> bytes:
        """The rows of a record batch."""
        lines = (json.dumps(row, ensure_ascii=False, default=_plain) + "\n" for row in batch.to_pylist())
        return "".join(lines).encode("utf-8", "surrogateescape")


def _plain(value: Any) -> str:
    """Bytes are UTF-8, as Spark writes texts; those that are not stay as they are, for --invalid-utf8 to decide."""
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)


def columns_of(schema: Any, key: str | None = None) -> list[str]:
    """Names of the columns that are read; see `TableLines`.

    Args:
        schema: of the table.
        key: of the text or the messages, if it has an unusual name.

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
        # Times may be finer, or further away, than Python's.
        return not (kinds.is_fixed_size_binary(field.type) or kinds.is_temporal(field.type))

    return [field.name for field in schema if is_read(field)]


class ParquetLines(TableLines):
    """Of a Parquet file.

    Args:
        file: open for reading, seekable.
        size: bytes of it.
        key: see `columns_of`.

    Raises:
        SetupError: the library `pyarrow` is missing.
        pyarrow.ArrowException: it is no Parquet file, or its footer is damaged.
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
        """Bytes of the file that hold the rows that were read (about)."""
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
                if isinstance(error, OSError) and error.errno:  # the file system's, not the file's
                    raise
                yield (json.dumps(f"row group {group} is damaged: {error}") + "\n").encode() * left
                self._done += left


class ArrowLines(TableLines):
    """A stream of JSON lines of an Arrow file, in the file format or the stream format.

    Args:
        file: open for reading, seekable.
        size: bytes of it.
        key: see `columns_of`.

    Raises:
        SetupError: the library `pyarrow` is missing.
        pyarrow.ArrowException: it is no Arrow file, or it is damaged.
    """

    def __init__(self, file: Any, size: int, key: str | None = None) -> None:
        pyarrow = load_pyarrow()
        from pyarrow import ipc

        is_file = file.read(len(_FILE)) == _FILE
        #: after the last batch and the end marker.
        self._end = _footer(file, size) if is_file else size
        file.seek(max(self._end - len(_END), 0))
        if file.read(len(_END)) != _END:
            raise pyarrow.ArrowInvalid("no end marker")
        file.seek(_START if is_file else 0)
        self._source = file
        self._reader = ipc.open_stream(pyarrow.PythonFile(file, mode="r"))
        super().__init__(self._reader.schema, self._read(), key)

    def raw_position(self) -> int:
        """Bytes of the file that were read (about)."""
        return int(self._source.tell())

    def _read(self) -> Iterator[bytes]:
        # What a dictionary means stands elsewhere than in the batch.
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
    """Where the footer of a file in the file format begins."""
    file.seek(max(size - len(_FILE) - 4, 0))
    nbytes, magic = int.from_bytes(file.read(4), "little", signed=True), file.read()
    if magic != _FILE or not 0 < nbytes < size:
        raise load_pyarrow().ArrowInvalid("no footer")
    return size - len(_FILE) - 4 - nbytes


def read_schema(file: Any) -> Any:
    """Of an Arrow file; the next message follows."""
    from pyarrow import ipc

    file.seek(0)
    file.seek(_START if file.read(len(_FILE)) == _FILE else 0)
    return ipc.read_schema(ipc.read_message(file))


def parquet_errors() -> tuple[type[Exception], ...]:
    """What pyarrow raises of a file that is damaged."""
    return (load_pyarrow().ArrowException, OSError)


def load_pyarrow() -> Any:
    """The library; raises SetupError if it is missing."""
    action = "pip install pyarrow, or write the rows as JSON lines first"
    return require("pyarrow", "it reads .parquet and .arrow", action)
