"""The small files of a checkpoint directory: opens only regular ones, replaces them atomically, deletes in a thread.

Opening a pipe in place of a record would hang, and reading a device would never end; ``exists()`` is true for both.

A reader, or the next start after a kill, sees either the old or the new content of a file: writes use a temporary file
in the same directory, fsync, rename, and fsync of the directory. A killed writer leaves at most a file named
``.<name>.megaresume-<pid>-<random>.tmp``: nobody reads it, and `remove_leftovers` deletes it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import resource
import shutil
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import BinaryIO

from megaresume.stream.errors import CheckpointError

log = logging.getLogger(__name__)

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


#: open files for everything else in a process: sockets of ranks, checkpoints, worker processes.
OTHER_FILES = 1024


def open_file(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading, without a buffer.

    Raises:
        OSError: as `open`; also if it is not a regular file, and then names the kind.
    """
    # Checked first: opening a device may have an effect.
    _check(os.stat(path).st_mode, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        check_regular(descriptor, path)
        return FileIO(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a regular file. Raises OSError as `open_file`."""
    with open_file(path) as file:
        return file.read()


def allow_files(number: int) -> None:
    """Raise this process's limit of open files, if allowed, by enough for ``number`` files besides `OTHER_FILES`.

    Programs often start with a limit of 1,024, however many the administrator allows.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = number + OTHER_FILES if hard == resource.RLIM_INFINITY else min(number + OTHER_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # not allowed: whoever opens too many files reports it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def size_of(path: Path) -> int | None:
    """Bytes of a file; None if it is missing or cannot be looked at."""
    try:
        return path.stat().st_size
    except OSError:
        return None


def check_regular(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raise an OSError if an open file is not a regular one."""
    _check(os.fstat(descriptor).st_mode, path)


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"{kind}, not a file", os.fspath(path))


_LEFTOVER = re.compile(r"\..+\.megaresume-[0-9]+-[0-9a-f]{8}\.tmp")

#: Errors of filesystems without fsync (some FUSE and network mounts). Harmless for a killed process, since renames are
#: still atomic; only durability across a power cut is lost, which such a mount never offered. Anything else (EIO,
#: ENOSPC, EDQUOT) means lost data, and is an error.
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

#: errors of a file system -> the likely cause, and the next action.
CAUSES = {
    errno.ENOSPC: ("the disk is full", "free space on it, or save elsewhere"),
    errno.EDQUOT: ("the quota is used up", "free space in it, or save elsewhere"),
    errno.EROFS: ("the filesystem is mounted read-only", "save to a writable directory"),
    errno.EACCES: ("no permission to write there", "save to a directory that this user may write to"),
    errno.EPERM: ("no permission to write there", "save to a directory that this user may write to"),
    errno.EIO: ("the device or the network filesystem fails", "look at the kernel log; save elsewhere"),
    errno.ESTALE: (
        "a stale handle: the directory was replaced on its NFS server, or the server was restarted",
        "mount it again if this lasts; a node that has the old directory open writes into nothing",
    ),
    errno.ENOTDIR: (
        "a part of this path is a file, not a directory",
        "save to another directory, or move that file away",
    ),
    errno.ENAMETOOLONG: (
        "a name in this path is longer than the filesystem allows",
        "save to a directory with a shorter name",
    ),
    errno.EFBIG: (
        "the file is larger than the filesystem, or this user's limit, allows",
        "save elsewhere; ulimit -f shows the limit",
    ),
    errno.EISDIR: ("a directory has the name of the file", "move that directory away"),
}


#: The action for an existing file that cannot be read.
READABLE = "check its permissions, and that its file system is mounted and answers"


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Turn the system's error into ours, with the likely cause and the next action."""
    cause, action = CAUSES.get(error.errno or 0, (None, None))
    return CheckpointError(f"cannot write {path}", found=f"{error.strerror or error}", cause=cause, action=action)


def read_error(path: Path, error: OSError) -> CheckpointError:
    """The error for an existing file or directory of a checkpoint that cannot be read."""
    return CheckpointError(f"cannot read {path}", found=error.strerror or str(error), action=READABLE)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it: a single write may stop short because of a full disk, a signal or a network filesystem."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def is_torn(descriptor: int) -> bool:
    """Whether the last line of a file lacks its newline, as after a kill: then appended data must begin with one."""
    size = os.fstat(descriptor).st_size
    return size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"


def fsync_file(descriptor: int) -> None:
    """Force a file's content to the disk, if the filesystem supports it."""
    whole = getattr(fcntl, "F_FULLFSYNC", None)  # on macOS, where fsync leaves it in the disk's cache
    ways: list[Callable[[], object]] = [lambda: os.fsync(descriptor)]
    if whole is not None:
        ways.insert(0, lambda: fcntl.fcntl(descriptor, whole))
    for force in ways:
        try:
            force()
            return
        except OSError as error:
            if error.errno not in _NO_FSYNC:
                raise


def fsync_dir(directory: Path) -> None:
    """Force the names in a directory to the disk: a rename is durable only after this."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # writable but not listable: the rename is done, only its durability cannot be forced
    try:
        fsync_file(descriptor)
    finally:
        os.close(descriptor)


def make_dir(directory: Path) -> None:
    """Create a directory and its parents, durably. Raises CheckpointError."""
    try:
        missing = [place for place in (directory, *directory.parents) if not place.is_dir()]
        directory.mkdir(parents=True, exist_ok=True)
        for place in reversed(missing):
            fsync_dir(place.parent)
    except OSError as error:
        raise write_error(directory, error) from error


def write_atomic(path: Path, data: bytes, *, sync_dir: bool = True, drafts: Path | None = None) -> None:
    """Replace a file's content in one step. Its directory must exist.

    Args:
        path: the file.
        data: its new content.
        sync_dir: False if another write into the same directory follows at once with its own fsync.
        drafts: see `written_atomically`.

    Raises:
        CheckpointError: disk full, read-only, no permission, ...; the old content is preserved.
    """
    try:
        with written_atomically(path, drafts=drafts) as file:
            write_all(file.fileno(), data)
        if sync_dir:
            fsync_dir(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


@contextlib.contextmanager
def written_atomically(path: Path, *, sync: bool = True, drafts: Path | None = None) -> Iterator[BinaryIO]:
    """A temporary file to write to, which replaces ``path`` at the end: a reader sees the old file or the new one.

    If the block raises, the temporary file is gone, and so it is if it cannot be written.

    Args:
        path: the file.
        sync: force the content to the disk before that; False for what a reader checks, and makes again.
        drafts: where the temporary file goes, on the same filesystem; None: beside the file.

    Raises:
        OSError: it cannot be written.
    """
    temporary = (drafts or path.parent) / leftover_name(path.name)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
            yield file
            file.flush()
            if sync:
                fsync_file(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_output(path: Path, data: bytes) -> None:
    """Write a file that a user has asked for: atomically, or into a pipe that somebody reads, or a device.

    Raises:
        OSError: it cannot be written; nobody reads the pipe.
    """
    if not path.exists() or path.is_file():
        with written_atomically(Path(os.path.realpath(path)), sync=False) as file:
            file.write(data)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK)  # would otherwise wait for a reader
    with open(descriptor, "wb") as file:
        os.set_blocking(descriptor, True)
        file.write(data)


def leftover_name(name: str) -> str:
    """A temporary name for ``name``, unique to this process, which the next start would delete."""
    return f".{name}.megaresume-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def is_leftover(name: str) -> bool:
    """Whether a name is one of our temporary ones, from a writer that may have been killed."""
    return _LEFTOVER.fullmatch(name) is not None


def remove_leftovers(directory: Path) -> int:
    """Delete the leftovers of killed writers. Only for the start of a run, when nothing is being written.

    Returns:
        the number deleted; those that cannot be deleted are harmless.
    """
    removed = 0
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            if is_leftover(name):
                with contextlib.suppress(OSError):
                    if (directory / name).is_dir():
                        shutil.rmtree(directory / name)  # a checkpoint that was being pruned
                    else:
                        os.unlink(directory / name)
                    removed += 1
    return removed


def delete_soon(places: Sequence[Path]) -> None:
    """Delete what was renamed out of the way, in a thread that the interpreter waits for when it exits."""
    if places:
        # Not a daemon, even if the calling thread is one.
        threading.Thread(target=_delete, args=(places,), name="megaresume-delete", daemon=False).start()


def _delete(places: Sequence[Path]) -> None:
    """Delete paths; what cannot be deleted has the name of a temporary file, so that the next start tries again."""
    for place in places:
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            place.unlink(missing_ok=True)
        if os.path.lexists(place):
            log.warning("megaresume: %s could not be deleted completely", place)
