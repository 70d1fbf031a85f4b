"""The files that `megaresume prepare` reads: which, in which order, of which format; opened and decompressed.

Below a directory: those that match a pattern, through links, each directory once.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import zlib
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from operator import itemgetter
from pathlib import Path, PurePosixPath
from typing import IO, Any, Literal, Protocol

from megaresume.corpora.prepare.arrow import ArrowLines, saved_dataset
from megaresume.corpora.prepare.binary import HEAD_BYTES, check_text
from megaresume.corpora.prepare.parquet import ParquetLines, parquet_errors
from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError, UsageError


def files_below(directory: Path, pattern: str) -> tuple[list[Path], list[Path]]:
    """Files that match, sorted by their path; and links to directories that are read already, by another path.

    Names that begin with a dot are left out. The directories proper are gone through first, so that a link to one of
    them is what is left out, and so is a link to a directory that it lies in, which would lead round for ever.

    Args:
        directory: where to look.
        pattern: of paths in it, with ``**`` for any depth.

    Raises:
        UsageError: the pattern is none.
        CorpusError: a link that matches leads nowhere; a directory cannot be read.
    """
    wanted = _parts(pattern)
    files: list[Path] = []
    twice: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting, links = deque([directory]), deque[Path]()
    while waiting or links:
        here = waiting.popleft() if waiting else links.popleft()
        found = here.stat()
        if (found.st_dev, found.st_ino) in seen:
            twice.append(here)
            continue
        seen.add((found.st_dev, found.st_ino))
        for entry in _entries(here):
            path = here / entry.name
            # Not by the entry: of a link to itself it raises.
            if path.is_dir() if entry.is_symlink() else entry.is_dir():
                (links if entry.is_symlink() else waiting).append(path)
            elif _matches(path.relative_to(directory).parts, wanted):
                if path.is_file() if entry.is_symlink() else entry.is_file():
                    files.append(path)
                elif entry.is_symlink():
                    raise CorpusError(
                        f"{path} is a link that leads nowhere",
                        found=os.readlink(path),
                        expected="a link to a file or a directory",
                        cause="its target was moved, or is on a disk that is not mounted here",
                        action="correct or remove the link, or leave it out by --glob",
                    )
    return sorted(files, key=lambda file: file.relative_to(directory).as_posix()), twice


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise CorpusError(
            f"{directory} cannot be read",
            found=error.strerror or str(error),
            expected="a directory that can be listed: its files would be missing from the corpus",
            action=f"check: ls -ld {directory}",
        ) from error


def _parts(pattern: str) -> tuple[str, ...]:
    parts = PurePosixPath(pattern).parts
    if not parts or pattern.startswith("/") or any("**" in part and part != "**" for part in parts):
        raise UsageError(
            "bad --glob",
            found=repr(pattern),
            expected="a pattern of names below the directory, ** alone between two slashes",
            action="correct --glob, for example --glob '**/*.py'",
        )
    return parts


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches, name by name; ``**`` stands for any number of directories."""
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        rest = pattern[1:] or ("*",)
        return any(_matches(names[k:], rest) for k in range(len(names)))
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


Format = Literal["text", "jsonl"]

FORMATS: dict[str, Format] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    #: each row as a JSON line.
    ".parquet": "jsonl",
    ".arrow": "jsonl",
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
TABLES: dict[str, type[ParquetLines | ArrowLines]] = {".parquet": ParquetLines, ".arrow": ArrowLines}


class Store(Protocol):
    """What reads object stores: `megaresume.shards.files.ShardFiles`."""

    def identity(self, path: str) -> str:
        """Changes when the file is written again: its bytes, a colon, and what the store has."""
        ...

    def scan(self, path: str, size: int) -> io.RawIOBase:
        """The file, to be read."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file of the input."""

    path: Path
    format: Format
    #: as on disk.
    size: int
    mtime_ns: int = 0
    #: on an object store: its URL, what the store says that changes if it is written again, and what reads it.
    url: str | None = None
    identity: str = ""
    store: Store | None = field(default=None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """For people, and to find it again."""
        return self.url or str(self.path)

    @property
    def compressed(self) -> bool:
        """By its name: it cannot be read from the middle on."""
        return self.path.suffix in (*COMPRESSIONS, *TABLES)

    def to_dict(self) -> dict[str, object]:
        """What tells, on a rerun, that it is still the same file; plain JSON."""
        changes = {"mtime_ns": self.mtime_ns} if self.url is None else {"identity": self.identity}
        return {"path": self.name, "format": self.format, "size": self.size, **changes}


@dataclass(frozen=True, slots=True)
class Inputs:
    """What is read."""

    files: list[InputFile]
    #: links to directories that are read already, by another path.
    linked_twice: list[Path]


def find_inputs(
    paths: Sequence[str | Path], *, glob: str = "**/*", format: Format | None = None, store: Store | None = None
) -> Inputs:
    """Files in the order given; the files of a directory that match, sorted by their path in it.

    In a directory, whatever has no suffix of JSON lines is text: source code is. Names that begin with a dot are
    left out. Links to files and to directories are followed, each directory is read once.

    Args:
        paths: files and directories.
        glob: for directories, with ``**`` for any depth.
        format: for all files, whatever their names.
        store: reads URLs.

    Raises:
        UsageError: nothing there, an unknown suffix, a directory without a match.
        CorpusError: a link that leads nowhere, a directory that cannot be read.
    """
    inputs, linked_twice = [], []
    for named in paths:
        path = Path(named)
        if store is not None and "://" in str(named):
            inputs.append(remote_input(str(named), format or _known_format(path), store))
        elif path.is_dir():
            saved = saved_dataset(path)
            files, twice = (saved, []) if saved is not None else files_below(path, glob)
            linked_twice += twice
            if not files:
                raise UsageError(
                    f"no file in {path} matches",
                    found=f"--glob {glob!r}",
                    expected="at least one file; names that begin with a dot do not count",
                    action="correct --glob, for example --glob '**/*.py'",
                )
            inputs += [_input(file, format or _format(file) or "text") for file in files]
        elif path.is_file():
            inputs.append(_input(path, format or _known_format(path)))
        else:
            raise UsageError(
                f"{path} does not exist",
                found="no such file or directory",
                expected="files and directories to read",
                action="check the path",
            )
    return Inputs(inputs, linked_twice)


_Peekable = io.BufferedReader | bz2.BZ2File | lzma.LZMAFile


class InputStream:
    """The decompressed bytes of a file from some offset on, read forwards.

    Args:
        file: the file.
        offset: decompressed bytes to leave out: a seek in a plain file, otherwise they are read.

    Raises:
        CorpusError: the file is gone, changed since `find_inputs`, or its compression is damaged.
        UsageError: it is no text: an archive, a table, an image.
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
            if (lines := TABLES.get(file.path.suffix)) is not None:
                self._table = lines(self._raw, file.size)
                self._stream: _Peekable = io.BufferedReader(self._table, 1 << 20)
            else:
                self._stream = _decompressed(self._raw, file)
            if offset == 0:
                check_text(Path(file.name), self._stream.peek(HEAD_BYTES))
            elif not file.compressed:
                self._stream.seek(offset)
            else:
                while offset > 0:
                    skipped = len(self._stream.read(min(offset, 1 << 20)))
                    if not skipped:
                        raise _changed_length(file)
                    offset -= skipped

    def check_unchanged(self) -> None:
        """Refuse a file that changed since `find_inputs`: also after a read, of which a part may be another file's.

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
        """Up to size bytes; fewer only at the end."""
        with self._errors():
            return self._stream.read(size)

    def readline(self, limit: int) -> bytes:
        """Up to and with the next newline, or limit bytes."""
        with self._errors():
            return self._stream.readline(limit)

    def chunks_from(self, row: int) -> tuple[tuple[int, int], ...]:
        """First row and place of each row group, or record batch, from that of a row on; of no table: none."""
        chunks = [] if self._table is None else self._table.chunks
        return tuple(chunks[max(bisect_right(chunks, row, key=itemgetter(0)) - 1, 0) :])

    def raw_position(self) -> int:
        """Bytes of the file on disk that were read so far (about)."""
        return self._raw.tell() if self._table is None else self._table.raw_position()

    def close(self) -> None:
        """Close the file."""
        self._stream.close()
        self._raw.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        damaged: tuple[type[BaseException], ...] = (EOFError, zlib.error, lzma.LZMAError)
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


def _opened(file: InputFile) -> io.BufferedReader[Any]:
    if file.url is not None and file.store is not None:
        return io.BufferedReader(file.store.scan(file.url, file.size), 1 << 20)
    try:
        return open(file.path, "rb")
    except OSError as error:
        raise _unreadable(file, error) from error


def _identity(file: InputFile) -> str:
    """What a file is now, as `InputFile.identity`; of a local one, as an error shows it."""
    if file.url is not None and file.store is not None:
        return file.store.identity(file.url)
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
    """zstandard's own stream reader takes a file that was cut short for a complete one; this one does not."""

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
    try:
        import zstandard
    except ImportError as error:
        raise SetupError(
            "the library 'zstandard' is missing",
            found=str(error),
            expected="it reads .zst",
            action="pip install 'megaresume[text]', or decompress the files first",
        ) from error
    return zstandard


def _input(path: Path, format: Format) -> InputFile:
    stat = path.stat()
    return InputFile(path=path, format=format, size=stat.st_size, mtime_ns=stat.st_mtime_ns)


def remote_input(url: str, format: Format, store: Store) -> InputFile:
    """A file of an object store.

    Raises:
        CorpusError, SetupError: it is not there, or the store does not answer.
    """
    identity = store.identity(url)
    size, path = int(identity.partition(":")[0]), Path(url.partition("://")[2])
    return InputFile(path=path, format=format, size=size, url=url, identity=identity, store=store)


def is_text(path: str) -> bool:
    """Whether it is named as text or rows are."""
    return _format(Path(path)) is not None


def _known_format(path: Path) -> Format:
    known = _format(path)
    if known is None:
        raise UsageError(
            f"{path} has an unknown suffix",
            found=repr("".join(path.suffixes)),
            expected=f"one of {', '.join(FORMATS)}, alone or with {', '.join(COMPRESSIONS)}",
            action="say what it is: --format text or --format jsonl",
        )
    return known


def _format(path: Path) -> Format | None:
    suffixes = path.suffixes
    if suffixes and suffixes[-1] in COMPRESSIONS:
        suffixes = suffixes[:-1]
    return FORMATS.get(suffixes[-1].lower()) if suffixes else None


def _unreadable(file: InputFile, error: OSError) -> CorpusError:
    return CorpusError(
        f"{file.name} cannot be read",
        found=error.strerror or str(error),
        expected="a file that can be read",
        action=f"check: ls -l {file.name}",
    )


def _damaged(file: InputFile, error: BaseException) -> CorpusError:
    return CorpusError(
        f"{file.name} is damaged",
        found=f"{type(error).__name__}: {error}",
        expected=f"a complete {file.path.suffix} file",
        cause="an interrupted download or copy, or a file with the wrong suffix",
        action=f"fetch {file.path.name} again, then start again: --restart",
    )


def _changed_length(file: InputFile) -> CorpusError:
    return CorpusError(
        f"{file.name} is shorter than it was",
        found="its end, before the point where an earlier run stopped",
        expected="the same content as in the earlier run",
        action="start again: --restart",
    )
