"""Reads bytes of shards: local files through a cache of open descriptors, others through `RemoteStore`.

Anything read mostly forwards is read one block at a time.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from megaresume.data.disk_cache import CHECKSUM, DiskCache
from megaresume.data.remote import RemoteStore, is_url
from megaresume.files import open_file
from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError

#: local shards that each process keeps open.
MAX_OPEN = 64
#: The largest record, in bytes: an index stores sizes as uint32.
MAX_RECORD_BYTES = (1 << 32) - 1
#: bytes read at once when a whole shard is read.
SCAN_BLOCK = 8 << 20
#: bytes of a region, the unit of the cache for small records: about what can be read in the time of a request. With its
#: checksum it fills whole disk blocks.
REGION = (64 << 10) - CHECKSUM
#: a record of up to this many bytes is read with its whole region, if there is a cache: its neighbours follow.
SMALL = REGION // 4
#: bytes of a shard that the cache keeps in one file.
TOGETHER = 16 * REGION
#: bytes read at once to count lines, for an error.
COUNTED = 1 << 20
#: The errors that say that a path is not a file.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP)

_RESTORE = "restore the file, or see on_fault"


class RecordError(CorpusError):
    """Raised if one record cannot be read although its shard can: a fault policy may handle it."""


def local_path(path: str) -> str:
    """The path without ``file://``."""
    return path.removeprefix("file://")


class ShardFiles:
    """Reads ranges of shards. Safe to share between threads, to fork and to pickle: descriptors are reopened.

    Args:
        cache: for reads from stores; None for no caching.
    """

    #: local files kept open; the least recently read is closed first.
    max_open = MAX_OPEN

    def __init__(self, cache: DiskCache | None = None) -> None:
        self.cache = cache
        #: has bytes that were read before they are needed, if a loader reads ahead.
        self.ahead: ReadBefore | None = None
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()
        #: the identity of each checked shard, see `identity`.
        self._checked: dict[str, str] = {}
        self._stores: dict[str, RemoteStore] = {}
        #: servers that answered with a range.
        self._ranged: set[str] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (ShardFiles, (self.cache,))

    @property
    def num_open(self) -> int:
        """The number of open descriptors."""
        return len(self._open)

    def identity(self, path: str) -> str:
        """An identity that changes when the shard is written again: bytes, a colon, mtime or the store's stamp.

        Raises:
            CorpusError: it is missing.
            SetupError: it cannot be reached or read.
        """
        if is_url(path):
            info = self._store(path).info(path)
            stamp = next(
                (str(info[key]) for key in ("ETag", "etag", "md5Hash", "LastModified", "Last-Modified") if key in info),
                "",
            )
            return f"{info['size']}:{stamp}"
        try:
            stat = os.stat(local_path(path))
        except OSError as error:
            raise _cannot_open(path, error) from error
        return f"{stat.st_size}:{stat.st_mtime_ns}"

    def check_ranges(self, path: str, size: int) -> None:
        """Refuse a server that sends whole files when asked for a range; each server is asked once.

        Raises:
            SetupError: it does, or does not answer.
        """
        server = path.split("/")[2] if is_url(path) else ""
        if path.startswith(("http://", "https://")) and size > 1 and server not in self._ranged:
            self._store(path).read(path, 0, 1)
            self._ranged.add(server)

    def check(self, path: str, size: int) -> None:
        """Refuse a shard whose size differs from the index; each shard is asked once.

        Raises:
            CorpusError: it is missing, or has another size.
            SetupError: it cannot be reached.
        """
        if self.is_checked(path):
            return
        identity = self.identity(path)
        found = int(identity.partition(":")[0])
        if found != size:
            raise CorpusError(
                f"{path} is not the shard that the index was made of",
                found=f"{found} bytes",
                expected=f"{size} bytes",
                cause="an interrupted copy" if found < size else "the shard was written again, or appended to",
                action="put the shard back, or make the index again: megaresume prepare --overwrite",
            )
        self._checked[path] = identity

    def is_checked(self, path: str) -> bool:
        """Whether `check` has nothing left to ask."""
        return path in self._checked

    def check_all(self, shards: Mapping[str, int]) -> None:
        """Check several shards as `check` does: path -> size. Those on S3 are asked concurrently."""
        first = next(iter(shards), "")
        if len(shards) == 1 or not first.startswith("s3://"):
            for path, size in shards.items():
                self.check(path, size)
            return
        self._store(first).connect(first)
        with ThreadPoolExecutor(len(shards)) as pool:
            list(pool.map(self.check, shards.keys(), shards.values()))

    def check_by_reading(self, place: Place, start: int, stop: int) -> Span | None:
        """Check the file of a place as `check` does; if possible, by reading a range of it, which is then returned.

        Raises:
            as `check`, which is called if the read fails or shows another size.
        """
        # The keys of the cache need the identity that `check` asks for.
        if place.path not in self._checked and is_url(place.path) and (self.cache is None or self.cache.is_new):
            found = self._store(place.path).view_with_identity(place.path, start, stop - start)
            if found is not None and found[0] == place.size:
                self._checked[place.path] = f"{found[0]}:{found[1]}"
                return Span(start, found[2])
        self.check(place.path, place.size)
        return None

    def fetch(self, place: Place, *, again: bool = False) -> bytes:
        """The bytes of a place: read ahead, from the cache, or read now and then cached.

        Cached bytes may be of another version that the file had for a time: ``again`` replaces them.

        Raises:
            CorpusError: the file is missing, shorter, or not of the size in the index.
            SetupError: it cannot be reached.
        """
        data = None if again or self.ahead is None else self.ahead.take(place)
        if data is None:
            if not place.whole:
                self.check(place.path, place.size)
            data = None if again else self.kept([place]).get(place)
        if data is None:
            span = self.read_span(place, *self.around([place]))
            self.keep([place], span, again=again)
            data = span.of(place)
        return data

    def around(self, places: Sequence[Place]) -> tuple[int, int]:
        """The range to read for places of one file: from first to last, extended to whole regions for small records."""
        start, stop = min(place.offset for place in places), max(place.stop for place in places)
        # A file that was not checked yet will probably be cached.
        keeps = places[0].path not in self._checked or self._keeps(places[0])
        kept = self.cache is not None and self.cache.has_room and is_url(places[0].path) and keeps
        if kept and any(map(is_small, places)):
            start, stop = start // REGION * REGION, min(-(-stop // REGION) * REGION, places[0].size)
        return start, stop

    def read_span(self, place: Place, start: int, stop: int) -> Span:
        """The bytes ``start`` to ``stop`` of the file of a place, by one request.

        Raises:
            as `read`, and `read_whole`.
        """
        if place.whole:
            return Span(0, self.read_whole(place.path))
        if is_url(place.path):
            return Span(start, self._store(place.path).view(place.path, start, stop - start))
        return Span(start, self.read(place.path, start, stop - start))

    def kept(self, places: Sequence[Place]) -> dict[Place, bytes]:
        """Places of one checked shard from the cache; each region is read once for all of them."""
        found = {place: b"" for place in places if not place.nbytes and not place.whole}  # they are in no region
        if self.cache is None or not self._keeps(places[0]):
            return found
        regions: dict[int, bytes | None] = {}
        for place in places:
            if place in found:
                continue
            if is_small(place):
                first, last = place.offset // REGION, (place.stop - 1) // REGION
                for number in range(first, last + 1):
                    if number not in regions:
                        region = _region(number, place)
                        regions[number] = self.cache.get(
                            self._key(region, "regions"), region.nbytes, _slot(region, REGION)
                        )
                data = regions[first]
                if last > first:
                    parts = [part for number in range(first, last + 1) if (part := regions[number]) is not None]
                    data = b"".join(parts) if len(parts) > last - first else None
                if data is not None:
                    at = place.offset - first * REGION
                    found[place] = data[at : at + place.nbytes]
            else:
                kept = self.cache.get(self._key(place), None if place.whole else place.nbytes, _slot(place, SMALL))
                if kept is not None:
                    found[place] = kept
        return found

    def keep(self, places: Sequence[Place], span: Span, *, again: bool = False) -> None:
        """Cache the bytes read for places of one checked shard.

        Args:
            places: those asked for; for small ones, every region read is cached.
            span: the bytes read.
            again: replace what is cached.
        """
        if self.cache is None or not self._keeps(places[0]):
            return
        for place in places:
            if not is_small(place):
                self.cache.put(self._key(place), span.view(place), _slot(place, SMALL))
        if any(map(is_small, places)):
            for number in range(span.start // REGION, -(-span.stop // REGION)):
                region = _region(number, places[0])
                whole = span.start <= region.offset and region.stop <= span.stop
                key, at = self._key(region, "regions"), _slot(region, REGION)
                if whole and (again or not self.cache.has(key, at)):
                    self.cache.put(key, span.view(region), at)

    def read_whole(self, path: str) -> bytes:
        """A whole file.

        Raises:
            RecordError: it is missing, not a file, or too large for a record.
            SetupError: it cannot be reached.
        """
        if is_url(path):
            try:
                return self._store(path).read_all(path)
            except CorpusError as error:
                raise RecordError(error.headline, found=error.found, expected="a file", action=_RESTORE) from error
        try:
            with open_file(local_path(path)) as file:
                if (size := os.fstat(file.fileno()).st_size) > MAX_RECORD_BYTES:
                    raise OSError(errno.EINVAL, f"{size} bytes", path)
                return file.readall()
        except OSError as error:
            if error.errno in _NO_FILE:
                raise RecordError.unreadable(path, error, "a file", action=_RESTORE) from error
            raise _cannot_open(path, error) from error

    def line_at(self, path: str, offset: int) -> int:
        """The number of the line at an offset of a file, from 1: reads everything before it."""
        parts = range(0, offset, COUNTED)
        return 1 + sum(self.read(path, at, min(COUNTED, offset - at)).count(b"\n") for at in parts)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a shard, by one range read that bypasses the cache.

        Raises:
            CorpusError: it is missing, or shorter.
            SetupError: it cannot be reached.
        """
        if is_url(path):
            return self._store(path).read(path, offset, nbytes)
        descriptor = self._descriptor(path)
        try:
            data = os.pread(descriptor.number, nbytes, offset)
            while len(data) < nbytes and (more := os.pread(descriptor.number, nbytes - len(data), offset + len(data))):
                data += more
        except OSError as error:
            raise _cannot_open(path, error) from error
        if len(data) != nbytes:
            raise CorpusError(
                f"{path} is cut",
                found=f"{offset + len(data)} bytes",
                expected=f"at least {offset + nbytes} bytes",
                cause="the file was cut while it was in use",
                action="copy the shard again",
            )
        return data

    def will_need(self, path: str, offset: int, nbytes: int) -> None:
        """Have the kernel read a range of a local shard into its cache. Errors show when it is read."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            with contextlib.suppress(MegaresumeError, OSError):
                os.posix_fadvise(self._descriptor(path).number, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def scan(self, path: str, size: int) -> BlockFile:
        """The shard as a file to be read from start to end."""
        return BlockFile(lambda offset, nbytes: self.read(path, offset, nbytes), size, SCAN_BLOCK)

    def _keeps(self, place: Place) -> bool:
        """Whether it may be cached. A rewritten file must have another key; without a stamp, it would not."""
        stamp = self._checked.get(place.path, "").partition(":")[2]
        return self.cache is not None and is_url(place.path) and (place.whole or bool(stamp))

    def _key(self, place: Place, what: str = "records") -> str:
        """The key of the cache's file for a place."""
        if place.whole:  # readers compare it with the index, which saves a request
            return f"{place.path} whole"
        return f"{place.path} {self._checked[place.path]} {what} {place.offset // TOGETHER}"

    def _store(self, path: str) -> RemoteStore:
        protocol = path.partition("://")[0]
        return self._stores.setdefault(protocol, RemoteStore(protocol))

    def _descriptor(self, path: str) -> _Descriptor:
        with self._lock:
            descriptor = self._open.get(path)
            if descriptor is None:
                try:
                    descriptor = self._open[path] = _Descriptor(Path(local_path(path)))
                except OSError as error:
                    raise _cannot_open(path, error) from error
                if len(self._open) > self.max_open:
                    self._open.popitem(last=False)
            self._open.move_to_end(path)
            return descriptor


class Place(NamedTuple):
    """The place of a record, or of a file that belongs to one."""

    files: ShardFiles
    path: str
    #: size of the whole shard in bytes, as indexed.
    size: int
    offset: int
    #: bytes; of a whole file, approximately.
    nbytes: int
    #: whether the index does not know the size, so that the file is read to its end.
    whole: bool = False

    @property
    def stop(self) -> int:
        """The offset after the last byte."""
        return self.offset + self.nbytes

    @property
    def held(self) -> bool:
        """Whether read-ahead keeps it in memory. For local shards, the kernel does."""
        return self.whole or is_url(self.path)


class Span(NamedTuple):
    """Bytes of a file."""

    #: offset of the first byte in the file.
    start: int
    data: bytes | memoryview

    @property
    def stop(self) -> int:
        """The offset after the last byte."""
        return self.start + len(self.data)

    def of(self, place: Place) -> bytes:
        """The bytes of a place within this span."""
        return bytes(self.view(place))

    def view(self, place: Place) -> bytes | memoryview:
        """The bytes of a place, copied only if necessary."""
        return self.data if place.whole else self.data[place.offset - self.start : place.stop - self.start]


def is_small(place: Place) -> bool:
    """Whether the cache stores its regions: one file for each tiny record would be more files than data."""
    return not place.whole and place.nbytes <= SMALL


def _slot(place: Place, apart: int) -> int | None:
    """The offset of a place in the cache's file, if no two places begin within ``apart`` bytes; None: the whole file.

    Each is preceded by a checksum.
    """
    within = place.offset % TOGETHER
    return None if place.whole else within + CHECKSUM * (within // apart)


def _region(number: int, shard: Place) -> Place:
    at = number * REGION
    return shard._replace(offset=at, nbytes=min(REGION, shard.size - at))


class ReadBefore(Protocol):
    """`megaresume.data.read_ahead.Ahead`, as readers see it."""

    def take(self, place: Place) -> bytes | None:
        """The bytes of a place; None: the caller reads them."""


class _Descriptor:
    """A descriptor that is closed with the last reference to it, so never while a thread reads."""

    def __init__(self, path: Path) -> None:
        with open_file(path) as file:
            self.number = os.dup(file.fileno())

    def __del__(self) -> None:
        if hasattr(self, "number"):
            os.close(self.number)


def _cannot_open(path: str, error: OSError) -> CorpusError | SetupError:
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return CorpusError(
            f"{path} is missing",
            found="no such file",
            expected="a shard",
            cause="a wrong path, or a shard that was moved or deleted",
            action="check the path, or give the shards' new location: path in data.yaml",
        )
    too_many = error.errno in (errno.EMFILE, errno.ENFILE)
    return SetupError(
        f"{path} cannot be read",
        found=error.strerror or str(error),
        expected="a file that this process may read",
        cause="too many open files" if too_many else None,
        action="raise the limit: ulimit -n" if too_many else "check the permissions and the file system",
    )


class BlockFile(io.RawIOBase):
    """A file with the methods that `tarfile` needs, and `read_at`.

    Args:
        fetch: (offset, bytes) -> exactly that many bytes of the file.
        size: of the file, in bytes.
        block: bytes read at once.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, block: int = 4 << 20) -> None:
        self._fetch = fetch
        self.size = size
        self._block = block
        self._position = 0
        self._start = 0
        self._data = b""

    def readable(self) -> bool:
        """True."""
        return True

    def seekable(self) -> bool:
        """True."""
        return True

    def tell(self) -> int:
        """The offset of the next read, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the offset; may be after the end, as in any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Up to ``size`` bytes; fewer only at the end."""
        left = max(self.size - self._position, 0)
        data = self.read_at(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        """Read into a buffer, for a buffered reader on top."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes from an offset, all within the file; does not move the position."""
        if not nbytes:
            return b""
        start = offset - self._start
        if start >= 0 and start + nbytes <= len(self._data):
            return self._data[start : start + nbytes]
        if nbytes >= self._block:
            return self._fetch(offset, nbytes)
        self._data = self._fetch(offset, min(self._block, self.size - offset))
        self._start = offset
        return self._data[:nbytes]
