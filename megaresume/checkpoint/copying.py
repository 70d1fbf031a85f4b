"""One file from one storage to another, proven by reading it back."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import xxhash

from megaresume.checkpoint.atomic import fsync_dir, fsync_file, make_dir, write_all, write_error
from megaresume.checkpoint.manifest import FileEntry
from megaresume.stream.errors import CheckpointError

__all__ = ["copy_checked"]

#: bytes at once; reading, hashing and writing release the interpreter lock.
_CHUNK = 8 << 20


def copy_checked(source: Path, target: Path, entry: FileEntry) -> str:
    """Copy a file, unless the same bytes are there already.

    Args:
        source: the file.
        target: where it goes; its directory is made.
        entry: its size, and its checksum if the save took one.

    Returns:
        the checksum of both, 32 hex digits.

    Raises:
        CheckpointError: a disk refuses; the source is not what was saved; or the target reads back other bytes.
    """
    if _is_there(target, entry.size):  # of a copy that was cut off
        expected = entry.checksum or _checksum(source)
        if _checksum(target) == expected:
            return expected
    make_dir(target.parent)
    written = _write(source, target)
    size = os.stat(source).st_size
    if size != entry.size or (entry.checksum is not None and written != entry.checksum):
        raise CheckpointError(
            f"{source} is not what was saved, and is not copied",
            found=f"{size} bytes, checksum {written}",
            expected=f"{entry.size} bytes" + (f", checksum {entry.checksum}" if entry.checksum else ""),
            cause="the local storage returns other bytes than were written, or the step is being saved again",
        )
    if (found := _checksum(target)) != written:
        raise CheckpointError(
            f"{target} was written and reads back other bytes",
            found=f"checksum {found}",
            expected=f"checksum {written}",
            cause="the shared storage or the network damages data",
            action="it is copied again; look at the storage",
        )
    return written


def _is_there(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except OSError:
        return False


def _write(source: Path, target: Path) -> str:
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open(source, "rb", buffering=0) as file:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                while size := file.readinto(buffer):
                    hasher.update(buffer[:size])
                    write_all(descriptor, buffer[:size])
                fsync_file(descriptor)
            finally:
                os.close(descriptor)
        fsync_dir(target.parent)
    except OSError as error:
        raise write_error(target, error) from error
    return hasher.hexdigest()


def _checksum(path: Path) -> str:
    """Of what the storage holds, not of what this machine remembers having written, where the system can tell."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open(path, "rb", buffering=0) as file:
            with contextlib.suppress(OSError, AttributeError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            while size := file.readinto(buffer):
                hasher.update(buffer[:size])
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read back", found=error.strerror or str(error)) from error
    return hasher.hexdigest()
