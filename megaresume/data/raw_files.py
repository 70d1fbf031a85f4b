"""`RawFiles`: the bytes of a document by its place: a range of a file, or a row of a row group or record batch."""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from threading import RLock
from typing import Any

from megaresume.data.document_encoder import EncoderSpec
from megaresume.data.inputs import COMPRESSIONS, TABLES
from megaresume.data.record_index import RecordPlace, RowIndex
from megaresume.data.remote import is_url
from megaresume.data.row_lines import TableLines, columns_of, load_pyarrow, parquet_errors, read_schema
from megaresume.data.shard_files import BlockFile, Place, ShardFiles
from megaresume.data.streams import unpacked
from megaresume.stream.errors import CorpusError, MegaresumeError

#: bytes of row groups and record batches that are kept decoded, by each process; one is kept whatever its size.
KEPT = 64 << 20
#: tables kept open.
OPEN = 64
#: bytes fetched at once of a table, at least.
BLOCK = 64 << 10


class RawFiles:
    """Reads documents. Safe to share between threads and to fork.

    Args:
        index: of the corpus.
        inputs: directory or URL of the files; None: where they were.
        spec: what makes tokens of them: of texts one column is read, of conversations all.
    """

    def __init__(self, index: RowIndex, inputs: str | None, spec: EncoderSpec) -> None:
        self._index = index
        self._root = index.header["root"] if inputs is None else inputs.rstrip("/")
        self._key = spec.text.json_key
        self._texts = spec.text.conversations is None
        self.files = ShardFiles()
        #: where compressed files were unpacked, and their size then.
        self._plain: dict[int, tuple[str, int]] = {}
        #: what `_table` opened, and the row groups and record batches read last.
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = RLock()

    @property
    def paths(self) -> list[str]:
        """Paths or URLs of all inputs."""
        return [self.path(file) for file in range(len(self._index.files))]

    def path(self, file: int) -> str:
        """Path or URL of an input."""
        path = self._index.files[file].path
        return path if "://" in path else f"{self._root}/{path}"

    def bytes_of(self, place: RecordPlace) -> Place | None:
        """The range of bytes that is a document; None: it is none, or of a file that is compressed.

        Raises:
            CorpusError: the index is damaged there.
        """
        path = self.path(place.file)
        if Path(path).suffix in (*TABLES, *COMPRESSIONS):
            return None
        return self._index.range_of(place, self.files, path, self._index.files[place.file].size)

    def read(self, place: RecordPlace, *, again: bool = False) -> bytes:
        """A document: its text, or its row as a JSON line. ``again``: not from the cache, see `ShardFiles.fetch`.

        Raises:
            CorpusError: its file is missing, damaged, or of another size than when the index was made.
            SetupError: the store does not answer; no room to unpack.
        """
        self._check(place.file)
        suffix = Path(self.path(place.file)).suffix
        if suffix in TABLES:
            return self._row(place, self._row_group if suffix == ".parquet" else self._record_batch)
        lies = self.bytes_of(place) or self._index.range_of(place, self.files, *self._unpacked(place.file))
        return self.files.fetch(lies, again=again)

    def where(self, place: RecordPlace) -> str:
        """A document, for people: file and line, or row, from 1."""
        path = self.path(place.file)
        try:
            if Path(path).suffix == ".parquet":
                metadata = self._table(place.file).metadata
                before = sum(
                    metadata.row_group(group).num_rows for group in range(min(place.offset, metadata.num_row_groups))
                )
                return f"{path}:{before + place.nbytes + 1}"
            if Path(path).suffix == ".arrow":
                return f"{path} (row {place.nbytes + 1} of the record batch at byte {place.offset})"
            if not is_url(path):
                plain = self._unpacked(place.file)[0] if Path(path).suffix in COMPRESSIONS else path
                return f"{path}:{self.files.line_at(plain, place.offset)}"
        except MegaresumeError:
            pass
        return f"{path} (at byte {place.offset})"

    def _check(self, file: int) -> None:
        path = self.path(file)
        try:
            self.files.check(path, self._index.files[file].size)
        except CorpusError as error:
            if str(error.found).startswith("no such file"):
                raise CorpusError(
                    f"{path} is missing",
                    found=error.found,
                    expected=f"a raw file of {self._index.path}: its rows are read from it",
                    cause="it was moved or deleted",
                    action="put it back, or say where the files are now: inputs: DIRECTORY for the source in data.yaml",
                ) from error
            raise CorpusError(
                f"{path} changed since its index was made",
                found=error.found,
                expected=error.expected,
                cause="an interrupted copy, or something was appended to it",
                action="put it back as it was, and give new rows files of their own; or make the index again for a new "
                "run: megaresume prepare --index-only --overwrite",
            ) from error

    def _unpacked(self, file: int) -> tuple[str, int]:
        if file not in self._plain:
            said, last = self._index.header["files"][file], self._index.last(file)
            size = last.offset + last.nbytes
            path = unpacked(self.path(file), self.files, format=said["format"], size=size)
            self._plain[file] = path, os.stat(path).st_size
        return self._plain[file]

    def _row(self, place: RecordPlace, decode: Callable[[int, int], Any]) -> bytes:
        others = (EOFError, LookupError, OverflowError, UnicodeDecodeError)
        damaged: tuple[type[Exception], ...] = (*parquet_errors(), *others)
        with self._lock:
            key = (place.file, place.offset)
            chunk = self._chunks.pop(key, None)
            try:
                if chunk is None:
                    chunk = decode(*key)
                self._chunks[key] = chunk
                while len(self._chunks) > 1 and sum(kept.nbytes for kept in self._chunks.values()) > KEPT:
                    self._chunks.popitem(last=False)
                return TableLines.lines(chunk.slice(place.nbytes, 1))
            except damaged as error:
                raise CorpusError(
                    f"{self.where(place)} cannot be read",
                    found=f"{type(error).__name__}: {error}",
                    expected="the row that the index has of it",
                    cause="a damaged file, or one that was written again with another schema",
                    action="put the file back as it was when the index was made",
                ) from error

    def _row_group(self, file: int, group: int) -> Any:
        table = self._table(file)
        columns = self._columns(table.schema_arrow)
        return table.read_row_group(group, columns=columns, use_threads=False)

    def _record_batch(self, file: int, at: int) -> Any:
        from pyarrow import ipc

        schema, opened = self._table(file), self._opened(file)
        opened.seek(at)
        batch = ipc.read_record_batch(ipc.read_message(opened), schema)
        batch.validate(full=True)
        return batch.select(self._columns(schema))

    def _columns(self, schema: Any) -> list[str]:
        """Names of the columns that a row is made of.

        Raises:
            KeyError: the table has no column of texts.
        """
        key = self._key or "text"
        if not self._texts:
            return columns_of(schema, self._key)
        column = key if key in schema.names else key.partition(".")[0]
        if column not in schema.names:
            raise KeyError(f"no column {column}")
        return [column]

    def _table(self, file: int) -> Any:
        """A Parquet file; or the schema of an Arrow file."""
        from pyarrow.parquet import ParquetFile

        with self._lock:
            table = self._tables.pop(file, None)
            if table is None:
                is_parquet = self.path(file).endswith(".parquet")
                opened = self._opened(file)
                table = ParquetFile(opened, page_checksum_verification=True) if is_parquet else read_schema(opened)
            self._tables[file] = table
            if len(self._tables) > OPEN:
                self._tables.popitem(last=False)
            return table

    def _opened(self, file: int) -> Any:
        fetch = functools.partial(self.files.read, self.path(file))
        source = BlockFile(fetch, self._index.files[file].size, BLOCK)
        return load_pyarrow().PythonFile(source, mode="r")
