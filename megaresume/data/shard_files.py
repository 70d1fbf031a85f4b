"""Bytes of shards, wherever they lie: local files through a cache of open descriptors, others through `RemoteStore`.
What is read mostly forwards is read one block at a time.

`Ahead` reads places of shards, and images of folders, before they are needed, several at a time:

    wanted, in the order of need -> neighbours joined -> threads: cache, request -> bytes, until they are released

What is wanted while others wait, or are being read, joins them: so each part of a shard is asked for about once, by few
requests, however the order scatters its records.

It cannot change what is read: a place that it does not have, or whose request failed, is read by whoever needs it,
who then meets the error. Local shards are not read: the kernel is told what will be needed, to have it in its cache.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import threading
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, cast

from megaresume.data.remote import DiskCache, RemoteStore, is_url
from megaresume.files import open_file
from megaresume.stream.errors import CorpusError, MegaresumeError, SetupError

#: local shards that are kept open, by each process.
MAX_OPEN = 64
#: of one record: an index holds its bytes as uint32.
MAX_RECORD_BYTES = (1 << 32) - 1
#: bytes read at once when a whole shard is read.
SCAN_BLOCK = 8 << 20
#: bytes of a region, which the cache keeps with its checksum in as many whole blocks: about what can be read in the
#: time of a request.
REGION = (64 << 10) - 16
#: a record of so many bytes is read with all of its region, if there is a cache: the others in it will be needed too.
SMALL = REGION // 4
#: bytes in which lines are counted, for an error.
COUNTED = 1 << 20
#: of what is named as a file: nothing is there, or it is none.
_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EINVAL, errno.ENAMETOOLONG, errno.ELOOP)


class RecordError(CorpusError):
    """One record cannot be read, the shard around it can: what a fault policy may answer to."""


def local_path(path: str) -> str:
    """Without ``file://``."""
    return path.removeprefix("file://")


class ShardFiles:
    """Reads ranges of shards. Safe to share between threads, to fork and to pickle: descriptors are opened again.

    Args:
        max_open: local files kept open; the one that was not read for longest is closed first.
        cache: keeps what is read of stores; None if nothing is kept.
    """

    def __init__(self, max_open: int = MAX_OPEN, cache: DiskCache | None = None) -> None:
        self.max_open = max_open
        self.cache = cache
        #: has bytes that were read before they are needed, if a loader reads ahead.
        self.ahead: ReadBefore | None = None
        self._open: OrderedDict[str, _Descriptor] = OrderedDict()
        #: what `identity` said of each shard.
        self._checked: dict[str, str] = {}
        self._stores: dict[str, RemoteStore] = {}
        #: servers that answered with a range.
        self._ranged: set[str] = set()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (ShardFiles, (self.max_open, self.cache))

    @property
    def num_open(self) -> int:
        """Descriptors held now."""
        return len(self._open)

    def identity(self, path: str) -> str:
        """Changes when the shard is written again: its bytes, a colon, and the time of change or what its store has.

        Raises:
            CorpusError: it is missing.
            SetupError: it cannot be reached, or not be read.
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
        """Refuse a server that sends whole files where a range is asked for; asked once of each.

        Raises:
            SetupError: it does, or does not answer.
        """
        server = path.split("/")[2] if is_url(path) else ""
        if path.startswith(("http://", "https://")) and size > 1 and server not in self._ranged:
            self._store(path).read(path, 0, 1)
            self._ranged.add(server)

    def check(self, path: str, size: int) -> None:
        """Refuse a shard that has another size than when its index was made; asked once of each shard.

        Raises:
            CorpusError: it is missing, or has another size.
            SetupError: it cannot be reached.
        """
        if path in self._checked:
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

    def fetch(self, place: Place, *, again: bool = False) -> bytes:
        """The bytes of a place: those that were read ahead, those of the cache, or read now, and then kept by it.

        What is kept may have been read while the file was another one for a time: ``again`` replaces it.

        Raises:
            CorpusError: the file is missing, shorter, or of another size than when its index was made.
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
        """What to read for places of one file: all from the first to the last one, or to the ends of their regions."""
        start, stop = min(place.offset for place in places), max(place.stop for place in places)
        kept = self.cache is not None and self.cache.has_room and self._key(places[0]) is not None
        if kept and any(map(_is_small, places)):
            start, stop = start // REGION * REGION, min(-(-stop // REGION) * REGION, places[0].size)
        return start, stop

    def read_span(self, place: Place, start: int, stop: int) -> Span:
        """The bytes from ``start`` to ``stop`` of the file of a place, by one request.

        Raises:
            as `read`, and `read_whole`.
        """
        if place.whole:
            return Span(0, self.read_whole(place.path))
        if is_url(place.path):
            return Span(start, self._store(place.path).view(place.path, start, stop - start))
        return Span(start, self.read(place.path, start, stop - start))

    def kept(self, places: Sequence[Place]) -> dict[Place, bytes]:
        """What the cache has of places of one shard, which was checked: each region is read once for all of them."""
        if self.cache is None or self._key(places[0]) is None:
            return {}
        found: dict[Place, bytes] = {}
        regions: dict[int, memoryview | None] = {}
        for place in places:
            if _is_small(place):
                first, last = place.offset // REGION, (place.stop - 1) // REGION
                for number in range(first, last + 1):
                    if number not in regions:
                        region = _region(number, place)
                        regions[number] = self.cache.get(self._region_key(region), region.nbytes)
                data: bytes | memoryview | None = regions[first]
                if last > first:
                    parts = [part for number in range(first, last + 1) if (part := regions[number]) is not None]
                    data = b"".join(parts) if len(parts) > last - first else None
                if data is not None:
                    at = place.offset - first * REGION
                    found[place] = bytes(data[at : at + place.nbytes])
            else:
                kept = self.cache.get(cast(str, self._key(place)), None if place.whole else place.nbytes)
                if kept is not None:
                    found[place] = bytes(kept)
        return found

    def keep(self, places: Sequence[Place], span: Span, *, again: bool = False) -> None:
        """Have the cache keep what was read of places of one shard, which was checked.

        Args:
            places: those asked for; of small ones all regions are kept that were read.
            span: where they lie.
            again: also what it has.
        """
        if self.cache is None or self._key(places[0]) is None:
            return
        for place in places:
            if not _is_small(place):
                self.cache.put(cast(str, self._key(place)), span.view(place))
        if any(map(_is_small, places)):
            for number in range(span.start // REGION, -(-span.stop // REGION)):
                region = _region(number, places[0])
                whole = span.start <= region.offset and region.stop <= span.stop
                if whole and (again or not self.cache.has(self._region_key(region))):
                    self.cache.put(self._region_key(region), span.view(region))

    def read_whole(self, path: str) -> bytes:
        """A whole file.

        Raises:
            RecordError: it is missing, no file, or too large for a record.
            SetupError: it cannot be reached.
        """
        if is_url(path):
            try:
                return self._store(path).read_all(path)
            except CorpusError as error:
                raise RecordError(error.headline, found=error.found, expected="a file") from error
        try:
            with open_file(local_path(path)) as file:
                if (size := os.fstat(file.fileno()).st_size) > MAX_RECORD_BYTES:
                    raise OSError(errno.EINVAL, f"{size} bytes", path)
                return file.readall()
        except OSError as error:
            if error.errno in _NO_FILE:
                raise RecordError.unreadable(path, error, "a file") from error
            raise _cannot_open(path, error) from error

    def line_at(self, path: str, offset: int) -> int:
        """Number of the line at a byte of a file, from 1: all before it is read."""
        parts = range(0, offset, COUNTED)
        return 1 + sum(self.read(path, at, min(COUNTED, offset - at)).count(b"\n") for at in parts)

    def read(self, path: str, offset: int, nbytes: int) -> bytes:
        """Exactly ``nbytes`` bytes of a shard, by one range read; the cache is not asked.

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
        """Have the kernel read a range of a local shard into its cache. What is wrong with it shows when it is read."""
        if hasattr(os, "posix_fadvise"):  # not on macOS
            with contextlib.suppress(MegaresumeError, OSError):
                os.posix_fadvise(self._descriptor(path).number, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def scan(self, path: str, size: int) -> BlockFile:
        """The shard as a file to be read from front to back."""
        return BlockFile(lambda offset, nbytes: self.read(path, offset, nbytes), size, SCAN_BLOCK)

    def _key(self, place: Place) -> str | None:
        if not is_url(place.path):
            return None
        if place.whole:  # each reader compares it with the index, which spares a request
            return f"{place.path} whole"
        # What was written again is another file. Without a stamp nobody could tell.
        size, _, stamp = self._checked.get(place.path, "").partition(":")
        return f"{place.path} {size} {stamp} {place.offset}" if stamp else None

    def _region_key(self, region: Place) -> str:
        return f"{self._key(region)} region"

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
    """Where a record lies, or a file that belongs to one."""

    files: ShardFiles
    path: str
    #: bytes of the whole shard, as indexed.
    size: int
    offset: int
    #: of a whole file, about so many.
    nbytes: int
    #: of which no index knows the size: it is read to its end.
    whole: bool = False

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.offset + self.nbytes

    @property
    def held(self) -> bool:
        """Whether it is read ahead into memory. Of local shards the kernel does that."""
        return self.whole or is_url(self.path)


class Span(NamedTuple):
    """Bytes of a file."""

    #: the first one's place in it.
    start: int
    data: bytes | memoryview

    @property
    def stop(self) -> int:
        """The byte after the last one."""
        return self.start + len(self.data)

    def of(self, place: Place) -> bytes:
        """Those of a place within."""
        return bytes(self.view(place))

    def view(self, place: Place) -> bytes | memoryview:
        """The same, not copied if it need not be."""
        return self.data if place.whole else self.data[place.offset - self.start : place.stop - self.start]


def _is_small(place: Place) -> bool:
    """Whether the cache keeps the regions around it: of tiny records it would have more files than data."""
    return not place.whole and place.nbytes <= SMALL


def _region(number: int, shard: Place) -> Place:
    at = number * REGION
    return shard._replace(offset=at, nbytes=min(REGION, shard.size - at))


class ReadBefore(Protocol):
    """`megaresume.data.shard_files.Ahead`, for those who read."""

    def take(self, place: Place) -> bytes | None:
        """The bytes of a place; None: to be read by the caller."""
        ...


class _Descriptor:
    """Closed with the last reference to it: never under a thread that reads."""

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
    """What `tarfile` needs of a file, and `read_at`.

    Args:
        fetch: (offset, bytes) -> exactly so many bytes of the file.
        size: of the file, in bytes.
        block: bytes fetched at once.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, block: int = 4 << 20) -> None:
        self._fetch = fetch
        self.size = size
        self._block = block
        self._position = 0
        self._start = 0
        self._data = b""

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read starts, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; may lie after the end, as in any file."""
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
        """As `read`, for what is buffered above it."""
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes from a place, which must lie within the file; the position stays."""
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


log = logging.getLogger(__name__)

#: bytes that nobody wants, between two places that are read by one request.
GAP = 64 << 10
#: bytes of a request of several places.
LONGEST = 1 << 20
#: requests that will be made next and no longer change, for each that is made at a time.
SOON = 2
#: seconds after which a thread ends that has nothing to read: nobody closes what a dropped `StreamDataset` read ahead.
IDLE = 20.0


@dataclass(slots=True, eq=False)
class _Reading:
    """A range that is being read, or soon will be."""

    start: int
    stop: int
    #: of one file; grows while others are wanted that lie within.
    places: list[Place]

    @property
    def at(self) -> tuple[int, str, int]:
        """Where it begins."""
        return _at(self.places[0], self.start)

    def has(self, place: Place) -> bool:
        """Whether it will have the bytes of a place."""
        its = self.places[0]
        same = place.files is its.files and place.path == its.path and not place.whole
        return same and self.start <= place.offset and place.stop <= self.stop


def _at(place: Place, offset: int) -> tuple[int, str, int]:
    return id(place.files), place.path, offset


class Ahead:
    """Reads ahead for one loader in one process. Threads end with `close`.

    Args:
        requests: at a time.
    """

    def __init__(self, requests: int) -> None:
        self.requests = requests
        #: bytes of places that are wanted or here.
        self.held = 0
        #: how often each is wanted; and the bytes of those that are here, None if they are not read here.
        self._users: dict[Place, int] = {}
        self._read: dict[Place, bytes | None] = {}
        #: requests in the order of need; and those that are being made.
        self._waiting: deque[list[Place]] = deque()
        self._under_way: list[_Reading] = []
        self._checking: set[tuple[ShardFiles, str]] = set()
        self._readers: set[ShardFiles] = set()
        self._threads = 0
        lock = threading.Lock()
        #: something is here, or checked; something waits to be read. One of many threads is woken for one request.
        self._changed, self._given = threading.Condition(lock), threading.Condition(lock)
        self._closed = False
        self._owner = os.getpid()

    def want(self, places: Iterable[Place]) -> None:
        """Read these, in the order in which they will be needed; each is kept until it was released as often."""
        new: list[Place] = []
        with self._changed:
            for place in places:
                users = self._users.get(place, 0)
                self._users[place] = users + 1
                if not users:
                    self.held += place.nbytes
                    new.append(place)
            remote = [place for place in new if place.held]
            if remote:
                self._queue(remote)
            self._readers |= {place.files for place in remote}
            for files in self._readers:
                files.ahead = self
            if self._waiting and not self._threads and not self._start():
                self._read |= dict.fromkeys(chain(*self._waiting))
                self._waiting.clear()
                self._changed.notify_all()
            self._given.notify(len(self._waiting))
        for place in new:
            if not place.held:
                place.files.will_need(place.path, place.offset, place.nbytes)

    def take(self, place: Place) -> bytes | None:
        """The bytes of a place, as soon as they are here; None: to be read by the caller."""
        if os.getpid() != self._owner:  # forked: the threads are in the parent
            return None
        if (data := self._read.get(place)) is not None:  # mostly, and then it need not wait for a lock
            return data
        with self._changed:
            if place not in self._users or not place.held:
                return None
            # Also until nobody keeps it: another loader of the same shards may have wanted it, and be done with it.
            while place in self._users and place not in self._read and not self._closed:
                self._changed.wait()
            return self._read.get(place)

    def release(self, places: Iterable[Place]) -> None:
        """They were used, or will not be."""
        with self._changed:
            for place in places:
                users = self._users.get(place, 0)  # none: closed
                if users > 1:
                    self._users[place] = users - 1
                elif users:
                    del self._users[place]
                    self._read.pop(place, None)
                    self.held -= place.nbytes
            self._changed.notify_all()

    def close(self) -> None:
        """Read nothing more."""
        if os.getpid() != self._owner:  # forked, perhaps while a thread of the parent held the lock
            return
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._users.clear()
            self._read.clear()
            self._changed.notify_all()
            self._given.notify_all()
        for files in self._readers:
            if files.ahead is self:
                files.ahead = None

    def _queue(self, places: Sequence[Place]) -> None:
        """Have these read: by requests that are being made, or soon will be, if they lie within; or by others."""
        soon = list(islice(self._waiting, SOON * self.requests))  # not longer, or what is needed first would come later
        waiting = [_Reading(*request[0].files.around(request), request) for request in soon]
        ranges = sorted([*self._under_way, *waiting], key=lambda reading: reading.at)
        starts = [reading.at for reading in ranges]
        others = [place for request in islice(self._waiting, len(soon), None) for place in request]
        for place in places:
            before = bisect_right(starts, _at(place, place.offset)) - 1
            if before >= 0 and ranges[before].has(place):
                ranges[before].places.append(place)
            else:
                others.append(place)
        # With those that wait: what lies together is one request, whenever it was wanted.
        self._waiting = deque([*soon, *joined([place for place in others if place in self._users])])

    def _start(self) -> bool:
        """One more thread; False: the system has none left, and those that there are continue."""
        try:
            threading.Thread(target=self._work, name="megaresume-ahead", daemon=True).start()
        except RuntimeError as error:
            log.warning("megaresume: %s: %d requests at a time are read ahead", error, self._threads)
            self.requests = max(self._threads, 1)
            return False
        self._threads += 1
        return True

    def _work(self) -> None:
        while (places := self._next()) is not None:
            self._fetch(places)
            with self._changed:
                # Not before the first request: it makes the connection that the others share.
                while self._waiting and self._threads < self.requests and self._start():
                    pass

    def _next(self) -> list[Place] | None:
        """The next request, of what is still wanted; None: closed, or nothing was wanted for a while."""
        with self._changed:
            while True:
                while not self._waiting:
                    if self._closed:
                        return None
                    if not self._given.wait(IDLE) and not self._waiting:
                        self._threads -= 1
                        return None
                if places := [place for place in self._waiting.popleft() if place in self._users]:
                    return places

    def _fetch(self, places: Sequence[Place]) -> None:
        """Fetch what the cache lacks; if a request fails, for good, its places are done without bytes."""
        files, missing = places[0].files, places
        try:
            self._check(places[0])
            here = files.kept(places)
            self._done(here)
            missing = [place for place in places if place not in here]
        except Exception as error:  # noqa: BLE001
            self._failed(error)
            self._done(dict.fromkeys(missing))
            return
        for request in joined(missing):  # several, if the cache has what lies between
            reading = _Reading(*files.around(request), request)
            span: Span | None = None
            with self._changed:
                self._under_way.append(reading)
            try:
                span = files.read_span(request[0], reading.start, reading.stop)
            except BaseException as error:  # noqa: BLE001  a panic of obstore is no Exception
                self._failed(error)
            with self._changed:
                self._under_way.remove(reading)
            self._done({place: None if span is None else span.of(place) for place in reading.places})
            if span is not None:
                files.keep(reading.places, span)

    @staticmethod
    def _failed(error: BaseException) -> None:
        """Whatever it is: who needs the bytes must not wait forever."""
        if isinstance(error, RecordError):
            return  # which is for its reader to say
        what = error.headline if isinstance(error, MegaresumeError) else repr(error)
        log.warning("megaresume: %s (read ahead; it is read again when it is needed)", what)

    def _done(self, read: Mapping[Place, bytes | None]) -> None:
        """These are here, or will not be."""
        if not read:
            return
        with self._changed:
            self._read |= {place: data for place, data in read.items() if place in self._users}
            self._changed.notify_all()

    def _check(self, place: Place) -> None:
        """Ask for the size of a shard, but not in two threads at once."""
        if place.whole:
            return
        shard = (place.files, place.path)
        with self._changed:
            while shard in self._checking:
                self._changed.wait()
            self._checking.add(shard)
        try:
            place.files.check(place.path, place.size)
        finally:
            with self._changed:
                self._checking.discard(shard)
                self._changed.notify_all()


def joined(places: Sequence[Place]) -> list[list[Place]]:
    """Places to requests: neighbours in one, in the order in which the first of each is needed."""
    need = {place: k for k, place in enumerate(places)}
    requests: list[list[Place]] = []
    for place in sorted(places, key=lambda place: (id(place.files), place.path, place.offset)):
        last = requests[-1] if requests else None
        if (
            last is not None
            and (last[-1].files, last[-1].path) == (place.files, place.path)
            and place.offset - last[-1].stop <= GAP
            and place.stop - last[0].offset <= LONGEST
        ):
            last.append(place)
        else:
            requests.append([place])
    return sorted(requests, key=lambda request: min(need[place] for place in request))
