"""`RowSource`: rows of raw files as documents; lengths come from an index, and tokens are made when they are read.

raw files -- megaresume prepare --index-only --> .idx, .places -- data.yaml --> RowSource -- one row --> tokens

length(i)               .idx                                                          planning: reads no raw file
read(i, offset, n)      .places -> row -> the functions of `prepare` -> exactly the tokens that the index was built from
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock, RLock
from typing import Any

import numpy.typing as npt

from megaresume.data.documents import (
    DocumentEncoder,
    EncoderSpec,
    MadeDocument,
    Piece,
    checksum,
    documents_of,
    library_versions,
)
from megaresume.data.indexed_documents import IndexedDocuments, reopened
from megaresume.data.inputs import COMPRESSIONS, TABLES
from megaresume.data.record_index import RecordPlace, RowIndex
from megaresume.data.remote import is_url
from megaresume.data.row_lines import TableLines, columns_of, load_pyarrow, parquet_errors, read_schema
from megaresume.data.shard_files import BlockFile, Place, ShardFiles
from megaresume.data.sidecar import changed, map_file
from megaresume.data.streams import unpacked
from megaresume.stream.errors import CorpusError, MegaresumeError

#: tokens of recent documents that each process keeps, so that adjacent pieces of a document are tokenized once.
RECENT = 1 << 21
#: bytes of decoded row groups and record batches that each process keeps; at least one, whatever its size.
KEPT = 64 << 20
#: tables kept open.
OPEN = 64
#: least bytes fetched at once from a table.
BLOCK = 64 << 10
#: For a mapping of which little is used; Python has no name for it before 3.13. Other systems reserve nothing.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


class RowSource(IndexedDocuments):
    """Documents of a corpus made by ``megaresume prepare --index-only``: the same as if it had a .bin.

    Args:
        path: prefix of the corpus.
        inputs: directory or URL of the raw files; None: as in the index.

    Raises:
        CorpusError: a file of the index is missing or damaged.
        SetupError: no permission, or too many open files.
    """

    suffix = ".places"

    def __init__(self, path: str | Path, *, inputs: str | None = None) -> None:
        super().__init__(path)
        data, identity = map_file(self.tokens_path)
        if not identity.is_the_file(self._identity.bin):
            raise changed(self.tokens_path, identity, self._identity.bin)
        self._index = RowIndex(self.tokens_path, data, len(self))
        self._inputs = inputs
        self._recent: OrderedDict[int, npt.NDArray[Any]] = OrderedDict()
        self._recent_tokens = 0
        self._lock = Lock()
        #: a chat template is rendered by one thread at a time.
        self._making = Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (reopened, (functools.partial(RowSource, inputs=self._inputs), self.prefix, self._identity))

    @functools.cached_property
    def raw_files(self) -> RawFiles:
        """The files that have the rows."""
        return RawFiles(self._index, self._inputs, self._spec)

    @property
    def files(self) -> ShardFiles:
        """The reader of these files."""
        return self.raw_files.files

    @property
    def numbered(self) -> object:
        """Numbers the documents: which rows are documents, and how many each file has; compared between indexes."""
        counts = [(file["unit"], file["records"]) for file in self._index.header["files"]]
        return counts, self._index.header["encoder"]["text"]

    @functools.cached_property
    def _spec(self) -> EncoderSpec:
        return EncoderSpec.from_json(self._index.header["encoder"])

    @functools.cached_property
    def _encoder(self) -> DocumentEncoder:
        return DocumentEncoder(self._spec)

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on: read-only, with the dtype of the index.

        Raises:
            IndexError: no such document, or the range leaves it.
            CorpusError: its file is missing or changed, or its tokens differ from the index.
            SetupError: the store does not answer, or there is no room to decompress a file.
        """
        self._check_range(i, offset, length)
        with self._lock:
            tokens = self._recent.get(i)
        if tokens is None:
            tokens = self._made(i)
            tokens.flags.writeable = False
            self._keep(i, tokens)
        return tokens[offset : offset + length]

    def places(self, i: int) -> list[Place]:
        """The place of document i; empty if its bytes are not read by themselves, as in Parquet."""
        place = self.raw_files.bytes_of(self._index.place(i))
        return [] if place is None else [place]

    def _contents(self, start: int, stop: int) -> str:
        self._index.verify()
        return super()._contents(start, stop)

    def _keep(self, i: int, tokens: npt.NDArray[Any]) -> None:
        with self._lock:
            if i not in self._recent:
                self._recent[i] = tokens
                self._recent_tokens += len(tokens)
            while self._recent_tokens > RECENT and len(self._recent) > 1:
                self._recent_tokens -= len(self._recent.popitem(last=False)[1])

    def _made(self, i: int) -> npt.NDArray[Any]:
        place = self._index.place(i)
        if self.files.cache is not None:
            with contextlib.suppress(CorpusError):  # the cache may have bytes of another version of the file
                return self._made_of(i, place, self.raw_files.read(place))
        return self._made_of(i, place, self.raw_files.read(place, again=self.files.cache is not None))

    def _made_of(self, i: int, place: RecordPlace, data: bytes) -> npt.NDArray[Any]:
        unit = self._index.header["files"][place.file]["unit"]
        if unit == "json":  # an element of an array may span lines, which `prepare` joined
            data = data.replace(b"\n", b" ").replace(b"\r", b" ")
        # Not line 0, whose first character may be a byte order mark.
        piece = Piece(name=self.raw_files.path(place.file), unit=unit, line=1, data=data)
        try:
            documents = list(documents_of(piece, self._spec.text))
            with self._making:
                made = list(self._encoder.encode(documents))
        except MegaresumeError as error:
            raise self._other(i, place, error.headline) from error
        found = f"{len(made)} documents"
        if len(made) == 1:
            found = "a document that is left out"
            if isinstance(made[0], MadeDocument):
                tokens = made[0].tokens(self._spec.dtype)
                if len(tokens) == self.length(i) and checksum(tokens) == place.content:
                    return tokens
                found = f"{len(tokens)} tokens"
        raise self._other(i, place, found)

    def _other(self, i: int, place: RecordPlace, found: str) -> CorpusError:
        """The error for a document whose tokens are not those that it had when the index was made."""
        now = library_versions()
        differ = [
            f"{name} {version}, with {now.get(name, 'none')} here"
            for name, version in self._index.header["made_with"].items()
            if now.get(name) != version
        ]
        libraries = f", or the index was made with {'; '.join(differ)}" if differ else ""
        return CorpusError(
            f"{self.raw_files.where(place)} does not give the tokens that the index has of it",
            found=found,
            expected=f"the {self.length(i)} tokens of document {i} of {self.prefix}",
            cause=f"the file was changed in place{libraries}",
            action="put the file back as it was"
            + (", or install these versions" if differ else "")
            + "; or make the index again (megaresume prepare --index-only --overwrite) for a new run",
        )


class RawFiles:
    """Reads a document by its place: a range of a file, or a row of a row group or record batch.

    Safe to share between threads and to fork.

    Args:
        index: of the corpus.
        inputs: directory or URL of the files; None: as in the index.
        spec: what tokenizes them: for texts, one column is read; for conversations, all.
    """

    def __init__(self, index: RowIndex, inputs: str | None, spec: EncoderSpec) -> None:
        self._index = index
        self._root = index.header["root"] if inputs is None else inputs.rstrip("/")
        self._key = spec.text.json_key
        self._texts = spec.text.conversations is None
        self.files = ShardFiles()
        #: the decompressed copies of compressed files, and their sizes at that time.
        self._plain: dict[int, tuple[str, int]] = {}
        self._names: dict[int, tuple[str, str]] = {}
        #: the open tables of `_table`, and the row groups and record batches read last.
        self._tables: OrderedDict[int, Any] = OrderedDict()
        self._chunks: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._lock = RLock()

    @property
    def paths(self) -> list[str]:
        """Paths or URLs of all inputs."""
        return [self.path(file) for file in range(len(self._index.files))]

    def _named(self, file: int) -> tuple[str, str]:
        """Path and suffix of an input, cached: with pathlib, finding them takes longer than reading a row."""
        if file not in self._names:
            path = self.path(file)
            self._names[file] = path, Path(path).suffix
        return self._names[file]

    def path(self, file: int) -> str:
        """Path or URL of an input."""
        path = self._index.files[file].path
        return path if "://" in path else f"{self._root}/{path}"

    def bytes_of(self, place: RecordPlace) -> Place | None:
        """The range of bytes of a document; None if it is not one, or the file is compressed.

        Raises:
            CorpusError: the index is damaged there.
        """
        path, suffix = self._named(place.file)
        if suffix in (*TABLES, *COMPRESSIONS):
            return None
        return self._index.range_of(place, self.files, path, self._index.files[place.file].size)

    def read(self, place: RecordPlace, *, again: bool = False) -> bytes:
        """A document: its text, or its row as a JSON line. ``again``: bypass the cache, see `ShardFiles.fetch`.

        Raises:
            CorpusError: its file is missing, damaged, or not of the size that it had when the index was made.
            SetupError: the store does not answer; no room to decompress.
        """
        self._check(place.file)
        _, suffix = self._named(place.file)
        if suffix in TABLES:
            return self._row(place, self._row_group if suffix == ".parquet" else self._record_batch)
        lies = self.bytes_of(place) or self._index.range_of(place, self.files, *self._unpacked(place.file))
        return self.files.fetch(lies, again=again)

    def where(self, place: RecordPlace) -> str:
        """The file and line, or row, of a document, from 1, to show to people."""
        path = self.path(place.file)
        try:
            if Path(path).suffix == ".parquet":
                try:
                    metadata = self._table(place.file).metadata
                except parquet_errors():
                    return f"{path} (row {place.nbytes + 1} of row group {place.offset})"
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
                action="put it back as it was, and put new rows in separate files; or make the index again for a new "
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
        from pyarrow import BufferReader, py_buffer
        from pyarrow.parquet import ParquetFile

        table = self._table(file)
        columns = self._columns(table.schema_arrow)
        # Arrow would read Python's file in its own thread, even with use_threads=False. A store may take a minute to
        # answer, and a thread that returns to a finalized Python aborts the process. So it reads from memory: a mapping
        # as large as the file, in which only what is written takes space.
        size = self._index.files[file].size
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        for start, stop in _column_ranges(table.metadata.row_group(group), columns, size):
            memory[start:stop] = self.files.read(self.path(file), start, stop - start)
        opened = ParquetFile(BufferReader(py_buffer(memory)), metadata=table.metadata, page_checksum_verification=True)
        return opened.read_row_group(group, columns=columns, use_threads=False)

    def _record_batch(self, file: int, at: int) -> Any:
        from pyarrow import ipc

        schema, opened = self._table(file), self._opened(file)
        opened.seek(at)
        batch = ipc.read_record_batch(ipc.read_message(opened), schema)
        batch.validate(full=True)
        return batch.select(self._columns(schema))

    def _columns(self, schema: Any) -> list[str]:
        """Names of the columns that a row is built from.

        Raises:
            KeyError: the table has no text column.
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


def _column_ranges(group: Any, columns: Sequence[str], size: int) -> list[tuple[int, int]]:
    """The byte ranges of the columns of a row group in its file: as few as possible, in order."""
    ranges: list[tuple[int, int]] = []
    for number in range(group.num_columns):
        column = group.column(number)
        if not any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in columns):
            continue
        first = column.data_page_offset
        if column.has_dictionary_page and column.dictionary_page_offset is not None:
            first = min(first, column.dictionary_page_offset)
        # Old writers do not count the dictionary's header in the length; Arrow reads that much more.
        start, stop = max(first, 0), min(first + column.total_compressed_size + 100, size)
        if ranges and start - ranges[-1][1] <= BLOCK and start >= ranges[-1][0]:
            ranges[-1] = ranges[-1][0], max(stop, ranges[-1][1])
        elif start < stop:
            ranges.append((start, stop))
    return ranges
