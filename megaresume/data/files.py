"""The files of a corpus: whether they are those that were opened, mapped, and written again without a half one."""

from __future__ import annotations

import contextlib
import errno
import json
import mmap
import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megaresume.data.layout import idx_path
from megaresume.data.spans import spans_path
from megaresume.files import open_file
from megaresume.stream.errors import CorpusError, SetupError


@dataclass(frozen=True, kw_only=True, slots=True)
class FileIdentity:
    """A file that is still the same one, as far as the file system can tell without reading it."""

    #: bytes.
    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, stat: os.stat_result) -> FileIdentity:
        """From `os.stat` or `os.fstat`."""
        return cls(size=stat.st_size, mtime_ns=stat.st_mtime_ns, ctime_ns=stat.st_ctime_ns, inode=stat.st_ino)

    def is_the_file(self, other: FileIdentity) -> bool:
        """Whether a run may continue with it: a touch, a chmod or a hard link is not a reason to stop one."""
        return (self.size, self.inode) == (other.size, other.inode)


@dataclass(frozen=True, kw_only=True, slots=True)
class CorpusIdentity:
    """The files of a corpus."""

    idx: FileIdentity
    #: the .bin, or what stands in its place.
    bin: FileIdentity
    #: None if it has none.
    spans: FileIdentity | None = None

    @classmethod
    def of(cls, prefix: Path, tokens: str = ".bin") -> CorpusIdentity:
        """As they are now.

        Args:
            prefix: of the corpus.
            tokens: suffix of the file that says what the tokens are.

        Raises:
            OSError: one cannot be looked at.
        """
        spans = None
        with contextlib.suppress(FileNotFoundError):
            spans = FileIdentity.of(spans_path(prefix).stat())
        bin_ = prefix.with_name(prefix.name + tokens)
        return cls(idx=FileIdentity.of(idx_path(prefix).stat()), bin=FileIdentity.of(bin_.stat()), spans=spans)


def map_file(path: Path) -> tuple[mmap.mmap | bytes, FileIdentity]:
    """Map a file read-only; an empty one, which cannot be mapped, is empty bytes."""
    with opened_file(path) as file:
        stat = os.fstat(file.fileno())
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if stat.st_size else b""
    return data, FileIdentity.of(stat)


@contextlib.contextmanager
def opened_file(path: Path) -> Iterator[FileIO]:
    """A file to read or to map; what goes wrong with it, in words."""
    try:
        with open_file(path) as file:
            yield file
    except FileNotFoundError as error:
        raise changed(path) from error
    except OSError as error:
        many = error.errno in (errno.EMFILE, errno.ENFILE)
        raise SetupError(
            f"{path} cannot be opened",
            found=error.strerror,
            expected="a file that can be read and memory-mapped",
            cause="every source holds two files open" if many else "permissions, or a file system without memory maps",
            action="raise the limit: ulimit -n 65536" if many else f"check: ls -l {path}",
        ) from error


def changed(path: Path, now: FileIdentity | None = None, opened: FileIdentity | None = None) -> CorpusError:
    """For a file that is not the one that was opened."""
    found = "no such file, or another one"
    if now is not None and opened is not None:
        found = f"{now.size} bytes" if now.size != opened.size else "a file of the same size that was written since"
    return CorpusError(
        f"{path} changed after the corpus was opened",
        found=found,
        expected="the same file" if opened is None else f"the same file of {opened.size} bytes, untouched",
        cause="the corpus is being rebuilt, copied or removed",
        action="wait until that is done and start again",
    )


def cache_directory() -> Path | None:
    """Of this user; None for one without a home."""
    if base := os.environ.get("MEGARESUME_CACHE"):
        return Path(base)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "megaresume"
    try:
        return Path.home() / ".cache" / "megaresume"
    except RuntimeError:  # a container that runs under a number that no user has
        return None


def write_json_atomically(path: Path, data: object) -> None:
    """Write by temporary file, fsync and rename: a reader sees the old file or the new one, never a part.

    Raises:
        OSError: it cannot be written; the temporary file is gone.
    """
    with written_atomically(path) as file:
        file.write(f"{json.dumps(data, indent=1)}\n".encode())


@contextlib.contextmanager
def written_atomically(path: Path) -> Iterator[BinaryIO]:
    """A temporary file to write to, which replaces `path` at the end; see `write_json_atomically`.

    Raises:
        OSError: it cannot be written; the temporary file is gone.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        with open(temporary, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
