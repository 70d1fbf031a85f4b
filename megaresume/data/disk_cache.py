"""`DiskCache`: records of remote shards on a local disk, for all processes of a node, in a bounded number of bytes.

    DIR/used      bytes of all files, and when to look again for what may be deleted; locked while it is changed
    DIR/3f/9a..   one record: checksum of its key and its bytes, its bytes

A record is written to a temporary file, which is renamed, and every read compares the checksum: what a kill or a power
cut left is never served. Whatever fails here is logged, and the store is read instead.

Deleted is what nobody has used for longest, but nothing that was used since the run began: of data that do not fit, a
shuffled epoch would otherwise delete each record just before it comes again. If all of it was used, no more is kept.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from megaresume.files import leftover_name, open_file, write_all

log = logging.getLogger(__name__)

#: of names: records are spread over so many directories.
DIRECTORIES = 256
#: what a file takes at least, and is rounded up to.
BLOCK = 4096
#: part of the bound that is free after old records were deleted.
FREED = 0.1
#: seconds until what may be deleted is looked for again, after too little was found; of a write that failed.
LOOK_AGAIN, WRITE_AGAIN = 600.0, 60.0

_USED = struct.Struct("<qd")
_CHECKSUM = 16


@dataclass
class DiskCache:
    """Safe to share between threads and processes, to fork and to pickle.

    Args:
        directory: on a local disk; made when something is kept.
        limit: bytes of all files in it.
        began: seconds since 1970; what was used later is not deleted.
    """

    directory: Path
    limit: int
    began: float = field(default_factory=time.time)
    _write_again: float = 0.0

    def get(self, key: str, nbytes: int | None) -> bytes | None:
        """So many bytes (None: however many), if they were kept under this key."""
        digest = xxhash.xxh3_128_digest(key.encode())
        path = self._path(digest)
        try:
            with open_file(path) as file:
                checksum, data = file.read(_CHECKSUM), file.readall()
                written = os.fstat(file.fileno()).st_mtime
            if nbytes not in (None, len(data)) or checksum != _checksum(digest, data):
                os.unlink(path)
                return None
            if written < self.began:
                os.utime(path, times=(now := time.time(), now))
            return data
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed(error)
            return None

    def put(self, key: str, data: bytes) -> None:
        """Keep bytes under a key, if there is room."""
        if time.monotonic() < self._write_again:
            return
        digest = xxhash.xxh3_128_digest(key.encode())
        path = self._path(digest)
        temporary = path.with_name(leftover_name(path.name))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not self._has_room(_allocated(_CHECKSUM + len(data))):
                return
            descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                write_all(descriptor, _checksum(digest, data))
                write_all(descriptor, data)
            finally:
                os.close(descriptor)
            os.replace(temporary, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            self._failed(error)

    def _path(self, digest: bytes) -> Path:
        name = digest.hex()
        return self.directory / name[:2] / name[2:]

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
        """Count them as used, before they are: a kill leaves too much counted, never too little."""
        if nbytes > self.limit:
            return False
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
            used.nbytes += left - counted  # with what others have added meanwhile
            if deleted:
                used.look_again = 0.0
        return False

    @contextlib.contextmanager
    def _used(self) -> Iterator[_Used]:
        # Opened each time: threads and forked processes must not share a lock.
        descriptor = os.open(self.directory / "used", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            data = os.pread(descriptor, _USED.size, 0)
            used = _Used(*_USED.unpack(data)) if len(data) == _USED.size else _Used(0, 0.0)
            if not used.nbytes:  # new, or lost in a power cut
                used.nbytes = sum(entry.nbytes for k in range(DIRECTORIES) for entry in self._entries(k))
            yield used
            os.pwrite(descriptor, _USED.pack(used.nbytes, used.look_again), 0)
        finally:
            os.close(descriptor)

    def _delete_oldest(self, part: float) -> tuple[int, int]:
        """Delete the oldest part of each directory; bytes that are left, and that were deleted."""
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
                    stat = entry.stat(follow_symlinks=False)
                    yield _CacheEntry(stat.st_mtime, _allocated(stat.st_size), entry.path)


@dataclass
class _Used:
    nbytes: int
    look_again: float


@dataclass(frozen=True, order=True)
class _CacheEntry:
    #: seconds since 1970.
    used: float
    nbytes: int
    path: str


def _allocated(nbytes: int) -> int:
    return -(-nbytes // BLOCK) * BLOCK


def _checksum(digest: bytes, data: bytes) -> bytes:
    checksum = xxhash.xxh3_128(digest)
    checksum.update(data)
    return checksum.digest()
