"""`InputStream`: an input file, opened, decompressed and checked: one that is not text, or that changed, is refused.

Files that cannot be read from the middle are unpacked once on each machine, in the cache directory: compressed files,
and JSON lines on a store that name images, which can be read ahead only if the lines are at hand.
"""

from __future__ import annotations

import bz2
import codecs
import fcntl
import gzip
import io
import lzma
import re
import shutil
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import IO, Any

import xxhash

from megaresume.data.inputs import COMPRESSIONS, TABLES, Format, InputFile, find_inputs
from megaresume.data.row_lines import ArrayLines, ArrowLines, CsvLines, ParquetLines, csv_errors, parquet_errors
from megaresume.data.shard_files import ShardFiles
from megaresume.data.sidecar import cache_directory
from megaresume.files import written_atomically
from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError, UsageError, require
from megaresume.stream.progress import progress

#: bytes checked at the start of a file: enough for every mark below, and for a NUL in most files that have one.
HEAD_BYTES = 8192
#: a larger document is refused: it would have to be in memory several times.
MAX_DOCUMENT_BYTES = 1 << 30
#: bytes written at once when a file is unpacked.
CHUNK = 1 << 20

_Peekable = io.BufferedReader | bz2.BZ2File | lzma.LZMAFile


class InputStream:
    """The decompressed bytes of a file from an offset on, read forwards.

    Args:
        file: the file.
        offset: decompressed bytes to skip: by a seek in a plain file, otherwise by reading.

    Raises:
        CorpusError: the file is gone, changed since `find_inputs`, or its compression is damaged.
        UsageError: it is not text: an archive, a table, an image.
        SetupError: the library for its compression is missing.
    """

    def __init__(self, file: InputFile, offset: int = 0) -> None:
        self.file = file
        self._raw = _opened(file)
        try:
            self.check_unchanged()
        except MegaresumeError:
            self._raw.close()
            raise
        self._table: ParquetLines | ArrowLines | None = None
        with self._errors():
            if file.path.suffix in TABLES:
                table = ParquetLines if file.path.suffix == ".parquet" else ArrowLines
                self._table = table(self._raw, file.size, file.key)
                self._stream: _Peekable = io.BufferedReader(self._table, 1 << 20)
            else:
                self._stream = _decompressed(self._raw, file)
            before = b""
            if offset == 0:
                check_text(Path(file.name), self._stream.peek(HEAD_BYTES))
            elif not file.compressed:
                self._stream.seek(offset - 1)
                before = self._stream.read(1)
            if file.format == "json":
                lines = ArrayLines(self._stream, before)
                self._stream = io.BufferedReader(lines, 1 << 20)
            elif file.format == "csv":
                self._stream = io.BufferedReader(CsvLines(self._stream, file.path.suffixes), 1 << 20)
            if file.compressed:
                while offset > 0:
                    skipped = len(self._stream.read(min(offset, 1 << 20)))
                    if not skipped:
                        raise CorpusError(
                            f"{file.name} is shorter than it was",
                            found="its end, before the point where an earlier run stopped",
                            expected="the same content as in the earlier run",
                            action="start again: --restart",
                        )
                    offset -= skipped

    def check_unchanged(self) -> None:
        """Refuse a file that changed since `find_inputs`. Also called after a read, which may have mixed both versions.

        Raises:
            CorpusError: it changed, or is gone.
        """
        said = self.file.identity or _stamp(self.file.size, self.file.mtime_ns)
        if (found := _identity(self.file)) != said:
            raise CorpusError(
                f"{self.file.name} changed while it was being prepared",
                found=found,
                expected=said,
                action="wait until it is complete and start again with --restart",
            )

    def read(self, size: int) -> bytes:
        """Read up to size bytes; fewer only at the end."""
        with self._errors():
            return self._stream.read(size)

    def readline(self, limit: int) -> bytes:
        """Read up to and including the next newline, or limit bytes."""
        with self._errors():
            return self._stream.readline(limit)

    def chunks_from(self, row: int) -> tuple[tuple[int, int], ...]:
        """First row and place of each row group or record batch, starting with that of a row; empty if not a table."""
        chunks = [] if self._table is None else self._table.chunks
        return tuple(chunks[max(bisect_right(chunks, row, key=itemgetter(0)) - 1, 0) :])

    def raw_position(self) -> int:
        """Approximate number of bytes of the file on disk read so far."""
        return self._raw.tell() if self._table is None else self._table.raw_position()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._raw.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        damaged: tuple[type[BaseException], ...] = (EOFError, zlib.error, lzma.LZMAError, *csv_errors())
        if self.file.path.suffix == ".zst":
            damaged += (_zstandard().ZstdError,)
        if self.file.path.suffix in TABLES:
            damaged += parquet_errors()[:1]
        try:
            yield
        except damaged as error:
            raise _damaged(self.file, error) from error
        except OSError as error:
            # gzip and bz2 report damage as an OSError that does not come from the operating system
            raise _unreadable(self.file, error) if error.errno else _damaged(self.file, error) from error


def unpacked(path: str, files: ShardFiles, *, format: Format = "jsonl", size: int = 0) -> str:
    """The path of a file's decompressed copy in the cache directory; the first process that asks makes it.

    Args:
        path: local, or a URL.
        files: the reader of stores.
        format: of its content.
        size: least size in bytes that it will have.

    Raises:
        CorpusError: it is damaged, or changes while it is read.
        SetupError: no cache directory, or no room in it.
    """
    file = find_inputs([path], format=format, store=files).files[0]
    size = max(size, file.size)
    base = cache_directory()
    if base is None:
        raise _no_room(file, size, "a user without a home", None)
    directory = base / "unpacked"
    key = xxhash.xxh3_64_hexdigest(repr(sorted(file.to_dict().items())).encode())
    plain = directory / f"{file.path.stem}-{key}"
    try:
        if plain.exists():
            return str(plain)
        directory.mkdir(parents=True, exist_ok=True)
        with open(plain.with_name(f".{plain.name}.lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not plain.exists():
                if (free := shutil.disk_usage(directory).free) < size:
                    raise _no_room(file, size, f"{free} bytes free", directory)
                _unpack(file, plain, size)
    except OSError as error:
        raise _no_room(file, size, error.strerror or str(error), directory) from error
    return str(plain)


def _unpack(file: InputFile, path: Path, size: int) -> None:
    with (
        closing(InputStream(file)) as stream,
        written_atomically(path) as out,
        progress(f"unpacking {file.path.name}", size, "B") as advance,
    ):
        while data := stream.read(CHUNK):
            out.write(data)
            advance(len(data))


def _no_room(file: InputFile, size: int, found: str, directory: Path | None) -> SetupError:
    return SetupError(
        f"{file.name} cannot be unpacked",
        found=found,
        expected=f"{size} bytes for it" + ("" if directory is None else f" in {directory}"),
        cause="its rows are read in another order than they are compressed in",
        action="name a directory with room: MEGARESUME_CACHE=DIR; or, of text, prepare a .bin, which is smaller: "
        "megaresume prepare without --index-only",
    )


def of_content(file: InputFile) -> InputFile:
    """The file with its real format: one that is named .json may be an array, or JSON lines."""
    suffixes = [suffix.lower() for suffix in file.path.suffixes if suffix not in COMPRESSIONS]
    if file.format != "jsonl" or suffixes[-1:] != [".json"]:
        return file
    with closing(InputStream(file)) as stream:
        head = stream.read(HEAD_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
    return replace(file, format="json") if head.startswith(b"[") else file


def _opened(file: InputFile) -> io.BufferedReader[Any]:
    if file.store is not None:
        return io.BufferedReader(file.store.scan(file.name, file.size), 1 << 20)
    try:
        return open(file.path, "rb")
    except OSError as error:
        raise _unreadable(file, error) from error


def _identity(file: InputFile) -> str:
    """The file's identity now, as in `InputFile.identity`; of a local file, as shown in errors."""
    if file.store is not None:
        return file.store.identity(file.name)
    try:
        stat = file.path.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    return _stamp(stat.st_size, stat.st_mtime_ns)


def _stamp(size: int, mtime_ns: int) -> str:
    return f"{size} bytes, changed at {mtime_ns}"


def _decompressed(raw: io.BufferedReader, file: InputFile) -> _Peekable:
    suffix = file.path.suffix
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw), 1 << 20)
    if suffix == ".bz2":
        return bz2.BZ2File(raw)
    if suffix == ".xz":
        return lzma.LZMAFile(raw)
    if suffix == ".zst":
        return io.BufferedReader(_ZstdReader(raw), 1 << 20)
    return raw


class _ZstdReader(io.RawIOBase):
    """A reader that notices a truncated file; zstandard's own treats it as complete."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._context = _zstandard().ZstdDecompressor()
        self._frame: Any = None
        self._output = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._output:
            data = self._frame.unused_data if self._frame is not None and self._frame.eof else b""
            data = data or self._raw.read(1 << 17)
            if not data:
                if self._frame is not None and not self._frame.eof:
                    raise EOFError("compressed file ended before the end of its last frame")
                return 0
            if self._frame is None or self._frame.eof:
                self._frame = self._context.decompressobj()
            self._output = memoryview(self._frame.decompress(data))
        size = min(len(buffer), len(self._output))
        buffer[:size] = self._output[:size]
        self._output = self._output[size:]
        return size


def _zstandard() -> Any:
    return require("zstandard", "it reads .zst", "pip install 'megaresume[text]', or decompress the files first")


def _unreadable(file: InputFile, error: OSError) -> CorpusError:
    return CorpusError.unreadable(file.name, error, "a file that can be read", action=f"check: ls -l {file.name}")


def _damaged(file: InputFile, error: BaseException) -> CorpusError:
    return CorpusError(
        f"{file.name} is damaged",
        found=f"{type(error).__name__}: {error}",
        expected=f"a complete {file.path.suffix} file",
        cause="an interrupted download or copy, or a file with the wrong suffix",
        action=f"fetch {file.path.name} again, then start again: --restart",
    )


#: (offset, bytes there, what it is)
_MARKS = (
    (257, b"ustar", "a tar archive"),
    (0, b"PK\x03\x04", "a zip archive"),
    (0, b"\x1f\x8b", "gzip"),
    (0, b"BZh", "bzip2"),
    (0, b"\xfd7zXZ\x00", "xz"),
    (0, b"\x28\xb5\x2f\xfd", "zstd"),
    (0, b"PAR1", "a Parquet table"),
    (0, b"ARROW1", "an Arrow table"),
    (0, b"\x89PNG", "a PNG image"),
    (0, b"\xff\xd8\xff", "a JPEG image"),
    (0, b"GIF8", "a GIF image"),
    (8, b"WEBP", "a WebP image"),
    (0, b"II*\x00", "a TIFF image"),
    (0, b"MM\x00*", "a TIFF image"),
    (0, b"BM", "a BMP image"),
    (0, b"%PDF-", "a PDF"),
    (0, b"\x89HDF", "an HDF5 file"),
    (0, b"\x93NUMPY", "a NumPy array"),
    (0, b"\x7fELF", "a program"),
    (0, b"MMIDIDX\x00", "the index of a Megatron corpus"),
    (0, b"SQLite format 3\x00", "an SQLite database"),
)
_COMPRESSED = {"gzip": ".gz", "bzip2": ".bz2", "xz": ".xz", "zstd": ".zst"}
_UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
#: Control characters that no text has; white space, form feeds and terminal escapes are allowed.
_CONTROL = re.compile(rb"[\x00-\x07\x0e-\x1a\x1c-\x1f\x7f]")


def check_text(path: Path, head: bytes) -> None:
    """Raise a UsageError if a file begins as no text does. Text encodings other than UTF-8 are not checked here.

    Args:
        path: of the file.
        head: its first bytes, decompressed; up to `HEAD_BYTES` of them count.
    """
    head = head[:HEAD_BYTES]
    if _is_text(head):
        return  # also if it begins with a mark: PAR1 is also a gene
    kind = next((kind for at, mark, kind in _MARKS if head.startswith(mark, at)), None)
    if kind is None and b"\0" not in head:
        return  # another encoding, or stray characters: --invalid-utf8 decides
    raise UsageError(
        f"{path} is not text",
        found=kind or f"a NUL byte at {head.index(0)}",
        expected="text in UTF-8, or JSON lines",
        cause="text in UTF-16" if head.startswith(_UTF16) else None if kind else "a binary file among the inputs",
        action=_action(path, kind, head),
    )


def _is_text(head: bytes) -> bool:
    if _CONTROL.search(head):
        return False
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True


def _action(path: Path, kind: str | None, head: bytes) -> str:
    if kind == "a tar archive":
        return f"name the shards themselves, with a processor: megaresume prepare {path.parent}/*.tar --processor KIND"
    if kind == "a Parquet table":
        return f"give it the suffix that says so: {path.name}.parquet"
    if kind in _COMPRESSED:
        return f"give it the suffix that says so: {path.name}{_COMPRESSED[kind]}"
    if head.startswith(_UTF16):
        return f"iconv -f UTF-16 -t UTF-8 {path}"
    return "leave it out: name the files that are text, or --glob '**/*.txt'"
