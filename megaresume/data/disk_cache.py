"""`DiskCache`: caches reads from an object store on a local disk, for all processes of a node, up to a limit in bytes.

    DIR/used      bytes of all files, and when to look again for files to delete; locked while it is changed
    DIR/3f/9a..   reads from one MiB of a shard, each record at its own place: checksum, bytes; holes elsewhere

A record is written at its final place, and every read verifies a checksum of key, place and bytes: partial writes, from
a kill, a power cut or a running process, are never served. Cache errors are logged, and the store is read instead.
Creating a file takes five times as long as writing a photograph into an existing one.

Files unused for longest are deleted first, but none used since the run began: with data that do not fit, a shuffled
epoch would otherwise delete each record just before it comes again. If all of it was used, nothing more is added.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from megaresume.data.store_counts import store_counts

log = logging.getLogger(__name__)

#: The number of directories over which files are spread, by their names.
DIRECTORIES = 256
#: The least space that a file takes; sizes are rounded up to multiples of this.
BLOCK = 4096
#: the part of the limit that is free after old records were deleted.
FREED = 0.1
#: seconds until what may be deleted is looked for again, after too little was found; of a write that failed.
LOOK_AGAIN, WRITE_AGAIN = 600.0, 60.0

_USED = struct.Struct("<qd")
#: bytes before those that are kept.
CHECKSUM = 16
#: The largest record that is cached, in bytes: one call reads or writes it.
LARGEST = 1 << 30


@dataclass
class DiskCache:
    """Safe to share between threads and processes, to fork and to pickle.

    Args:
        directory: on a local disk; created on first use.
        limit: bytes of all files in it, plus one record per writer while files are deleted: a write during that may
            only be counted the next time.
        began: seconds since 1970; files used later are not deleted.
    """

    directory: Path
    limit: int
    began: float = field(default_factory=time.time)
    _write_again: float = 0.0
    _full_until: float = 0.0

    @property
    def has_room(self) -> bool:
        """Whether the last `put` found room, or enough time has passed to try again."""
        return time.monotonic() >= max(self._full_until, self._write_again)

    @property
    def is_new(self) -> bool:
        """Whether the cache was never written to."""
        return not os.path.exists(f"{self.directory}/used")

    def get(self, key: str, nbytes: int | None, at: int | None = None) -> bytes | None:
        """Get the bytes cached under this key at this place, if there are this many (None: any number)."""
        data = self._get(key, nbytes, at)
        store_counts.add("misses" if data is None else "hits")
        return data

    def _get(self, key: str, nbytes: int | None, at: int | None) -> bytes | None:
        digest, start = xxhash.xxh3_128_digest(key.encode()), at or 0
        path = self._path(digest)
        try:
            # As few calls as possible: each releases the GIL, and then waits to get it back.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                found = os.fstat(descriptor)
                checksum = os.pread(descriptor, CHECKSUM, start) if stat.S_ISREG(found.st_mode) else b""
                if not any(checksum):  # do not read a hole: its zeros take longer than a record
                    return None
                size = max(found.st_size - CHECKSUM, 0) if nbytes is None else nbytes
                data = os.pread(descriptor, size, start + CHECKSUM)
            finally:
                os.close(descriptor)
            # A record at the end of its file that another index cached with fewer bytes reads as complete.
            if len(data) != size or checksum != _checksum(digest, start, data):
                self._wipe(path, start)
                return None
            if found.st_mtime < self.began:
                os.utime(path, times=(now := time.time(), now))
            return data
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed(error)
            return None

    @staticmethod
    def _wipe(path: str, start: int) -> None:
        """Erase a record, so that `has` is false for it."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, bytes(CHECKSUM), start)
        finally:
            os.close(descriptor)

    def has(self, key: str, at: int | None = None) -> bool:
        """Whether something is cached under this key at this place; only `get` verifies it."""
        try:
            descriptor = os.open(
                self._path(xxhash.xxh3_128_digest(key.encode())), os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
            )
            try:
                return any(os.pread(descriptor, CHECKSUM, at or 0))
            finally:
                os.close(descriptor)
        except OSError:
            return False

    def put(self, key: str, data: bytes | memoryview, at: int | None = None) -> None:
        """Cache bytes under a key, if there is room.

        Args:
            key: of a file.
            data: the bytes.
            at: byte of the file for their checksum, followed by them; None: they are the whole file.
        """
        start = at or 0
        nbytes = _allocated(start % BLOCK + CHECKSUM + len(data))
        if time.monotonic() < self._write_again or nbytes > min(self.limit, LARGEST):
            return
        digest = xxhash.xxh3_128_digest(key.encode())
        try:
            if not self._has_room(nbytes):
                self._full_until = time.monotonic() + LOOK_AGAIN
                return
            descriptor = _made(self._path(digest), os.O_WRONLY | (os.O_TRUNC if at is None else 0))
            try:
                # A short write, as on a full disk, leaves a checksum that does not match.
                os.pwritev(descriptor, (_checksum(digest, start, data), data), start)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._failed(error)

    def _path(self, digest: bytes) -> str:
        name = digest.hex()
        return f"{self.directory}/{name[:2]}/{name[2:]}"

    def _failed(self, error: OSError) -> None:
        if (now := time.monotonic()) < self._write_again:
            return
        self._write_again = now + WRITE_AGAIN
        log.warning(
            "megaresume: the cache %s fails: %s; records are read from their store, and none is kept for %.0f s",
            self.directory,
            error.strerror or error,
            WRITE_AGAIN,
        )

    def _has_room(self, nbytes: int) -> bool:
        """Count bytes as used before they are written: after a kill the count is too high, never too low."""
        with self._used() as used:
            if used.nbytes + nbytes <= self.limit:
                used.nbytes += nbytes
                return True
            if time.time() < used.look_again:
                return False
            used.look_again = time.time() + LOOK_AGAIN  # one process looks
            counted = used.nbytes
        part = 1 - (1 - FREED) * self.limit / (counted + nbytes)
        left, deleted = self._delete_oldest(part)
        with self._used() as used:
            used.nbytes += left - counted  # keeps what other processes have added meanwhile
            if deleted:
                used.look_again = 0.0
        return False

    @contextlib.contextmanager
    def _used(self) -> Iterator[_Used]:
        # Opened each time: threads and forked processes must not share a lock.
        descriptor = _made(f"{self.directory}/used", os.O_RDWR)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            data = os.pread(descriptor, _USED.size, 0)
            used = _Used(*_USED.unpack(data)) if len(data) == _USED.size else _Used(0, 0.0)
            if used.nbytes <= 0:  # new, or lost in a power cut
                used.nbytes = sum(entry.nbytes for k in range(DIRECTORIES) for entry in self._entries(k))
            yield used
            os.pwrite(descriptor, _USED.pack(used.nbytes, used.look_again), 0)
        finally:
            os.close(descriptor)

    def _delete_oldest(self, part: float) -> tuple[int, int]:
        """Delete the oldest part of each directory; return the bytes left, and the bytes deleted."""
        left = deleted = 0
        owed = 0.0
        for k in range(DIRECTORIES):
            entries = sorted(self._entries(k))
            nbytes = sum(entry.nbytes for entry in entries)
            left += nbytes
            owed += part * nbytes
            for entry in entries:
                if owed < entry.nbytes or entry.used >= self.began:
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)
                owed -= entry.nbytes
                left -= entry.nbytes
                deleted += entry.nbytes
        return left, deleted

    def _entries(self, directory: int) -> Iterator[_CacheEntry]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self.directory / f"{directory:02x}") as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    found = entry.stat(follow_symlinks=False)
                    yield _CacheEntry(found.st_mtime, 512 * found.st_blocks, entry.path)  # without holes


@dataclass
class _Used:
    nbytes: int
    look_again: float


@dataclass(frozen=True, order=True)
class _CacheEntry:
    #: when it was last used, in seconds since 1970.
    used: float
    nbytes: int
    path: str


def _allocated(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _made(path: str, flags: int) -> int:
    """A descriptor of a file, created with its directory if necessary."""
    flags |= os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o666)
    except FileNotFoundError:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return os.open(path, flags, 0o666)


def _checksum(digest: bytes, start: int, data: bytes | memoryview) -> bytes:
    checksum = xxhash.xxh3_128(digest, seed=start)
    checksum.update(data)
    return checksum.digest()
