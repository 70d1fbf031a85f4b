"""The small files of a checkpoint directory: opened if they are regular, replaced atomically, sealed by a checksum.

A pipe in the place of a record hangs whoever opens it, a device never ends; both look like a file to ``exists()``.

A reader, or the next start after a kill, sees the old content of a file or the new, never less: a temporary file in the
same directory, fsync, rename, fsync of the directory. A writer that is killed leaves at most a file named
``.<name>.megaresume-<pid>-<random>.tmp``: nobody reads it, and `remove_leftovers` clears it away.

Sealed JSON: objects whose last member is the checksum of every byte before it.

    {"format": "megaresume.step", "version": 1, ..., "checksum": "<xxh3_128 of all before this member, 32 hex>"}

The seal is over bytes, not over parsed values: no flipped bit passes, and checking ten thousand ledger lines needs no
second serialisation. **The seal itself is the same in every format version**, so that a damaged file is never
mistaken for one of a newer version: a newer version stops a resume, damage walks back to an older checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

import xxhash

from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError
from megaresume.stream.text import parse_json, visible

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a directory",
}


def open_file(path: str | os.PathLike[str]) -> FileIO:
    """Open a regular file for reading, without a buffer.

    Raises:
        OSError: as `open`; also for whatever is no regular file, and says what it is.
    """
    # Looked at first: opening a device may already set it going.
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


def check_regular(descriptor: int, path: str | os.PathLike[str]) -> None:
    """Raise an OSError if an open file is no regular one."""
    _check(os.fstat(descriptor).st_mode, path)


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, f"{kind}, not a file", os.fspath(path))


_LEFTOVER = re.compile(r"\..+\.megaresume-[0-9]+-[0-9a-f]{8}\.tmp")

#: What filesystems without fsync answer (some FUSE and network mounts). Harmless for a killed process, since renames
#: stay atomic; what is lost is only durability over a power cut, which such a mount never offered. Everything else
#: (EIO, ENOSPC, EDQUOT) means that data was lost, and is an error.
_NO_FSYNC = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS})

_CAUSES = {
    errno.ENOSPC: ("the disk is full", "free space on it, or save elsewhere"),
    errno.EDQUOT: ("the quota is used up", "free space in it, or save elsewhere"),
    errno.EROFS: ("the filesystem is mounted read-only", "save to a writable directory"),
    errno.EACCES: ("no permission to write there", "save to a directory that this user may write to"),
    errno.EPERM: ("no permission to write there", "save to a directory that this user may write to"),
    errno.EIO: ("the device or the network filesystem fails", "look at the kernel log; save elsewhere"),
    errno.EISDIR: ("a directory has the name of the file", "move that directory away"),
}


def write_error(path: Path, error: OSError) -> CheckpointError:
    """Turn the system's error into ours, with the likely cause and what to do."""
    cause, action = _CAUSES.get(error.errno or 0, (None, None))
    return CheckpointError(f"cannot write {path}", found=f"{error.strerror or error}", cause=cause, action=action)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of it: a single write may stop short on a full disk, a signal or a network filesystem."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def fsync_file(descriptor: int) -> None:
    """Force a file's content to the disk, where the filesystem can."""
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC:
            raise


def fsync_dir(directory: Path) -> None:
    """Force the names in a directory to the disk: a rename is only durable after this."""
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except PermissionError:
        return  # writable but not listable: the rename stands, only its durability cannot be forced
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
        sync_dir: False where another write into the same directory follows at once and brings its own.
        drafts: where the temporary file goes, on the same filesystem; None: beside the file.

    Raises:
        CheckpointError: disk full, read-only, no permission, ...; the old content is still there.
    """
    temporary = (drafts or path.parent) / leftover_name(path.name)
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            write_all(descriptor, data)
            fsync_file(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
        if sync_dir:
            fsync_dir(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise write_error(path, error) from error


def leftover_name(name: str) -> str:
    """A temporary name beside ``name``, which no other process takes and which the next start clears away."""
    return f".{name}.megaresume-{os.getpid()}-{os.urandom(4).hex()}.tmp"


def is_leftover(name: str) -> bool:
    """Whether a name is one of our temporary ones, left behind by a killed writer."""
    return _LEFTOVER.fullmatch(name) is not None


def remove_leftovers(directory: Path) -> int:
    """Delete what killed writers left. Only for the start of a run, when nothing is being written.

    Returns:
        how many were deleted; those that cannot be deleted are left, they harm nobody.
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


#: The tail is matched from its start, so that the search is linear whatever the file holds.
_SEAL = re.compile(rb',\s*"checksum":\s*"([0-9a-f]{32})"\s*\}\s*')
#: How a sealed object ends, whatever became of its checksum.
_END = re.compile(rb'"\s*\}\s*\Z')
_SEAL_START = b'"checksum"'


class NewerFormatError(StateError):
    """An intact file of a later format version: refused, and no reason to walk back to an older checkpoint."""


class SealError(ValueError):
    """Bytes that are not an intact sealed object; the message is the rest of a sentence about the file."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        #: the end is missing, as a killed writer leaves it.
        self.cut = cut


def _dumps(value: object) -> str:
    return json.dumps(value, allow_nan=False, separators=(", ", ": "))


def _spread(value: object, depth: int, indent: str = "") -> str:
    """JSON with one member per line down to ``depth``, compact below: readable, yet not a line per integer."""
    if depth == 0 or not isinstance(value, (dict, list)) or not value:
        return _dumps(value)
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f"{_dumps(str(key))}: {_spread(item, depth - 1, inner)}" for key, item in value.items()]
        opening, closing = "{", "}"
    else:
        parts = [_spread(item, depth - 1, inner) for item in value]
        opening, closing = "[", "]"
    return f"{opening}\n{inner}" + f",\n{inner}".join(parts) + f"\n{indent}{closing}"


def seal(fields: Mapping[str, Any], *, depth: int = 0) -> bytes:
    """Serialise an object and append its checksum.

    Args:
        fields: plain JSON values, not empty, without a member ``checksum``.
        depth: levels that are written one member a line; 0 gives a single line. Ends with a newline.
    """
    if not fields or "checksum" in fields:
        raise ValueError("sealed fields must not be empty nor hold a member named checksum")
    text = _spread(dict(fields), depth)
    body = text[: -(2 if depth else 1)].encode("ascii")
    opening, closing = (b",\n  ", b"\n}\n") if depth else (b", ", b"}\n")
    return body + opening + f'"checksum": "{xxhash.xxh3_128_hexdigest(body)}"'.encode("ascii") + closing


def unseal(data: bytes) -> dict[str, Any]:
    """Check and parse a sealed object.

    Returns:
        its members, ``checksum`` included.

    Raises:
        SealError: empty, cut short, or damaged.
    """
    if not data.strip():
        raise SealError("is empty" if not data else "holds nothing but white space")
    start = data.rfind(_SEAL_START)
    comma = data.rfind(b",", 0, start) if start >= 0 else -1
    match = _SEAL.fullmatch(data, comma) if comma >= 0 else None
    if match is None:
        if _END.search(data[-16:]):
            raise SealError("has no checksum at its end")
        raise SealError(f"is cut short after {len(data)} bytes", cut=True)
    actual = xxhash.xxh3_128_hexdigest(data[:comma])
    recorded = match[1].decode("ascii")
    if actual != recorded:
        raise SealError(f"is damaged: its content has checksum {actual}, recorded was {recorded}")
    try:
        fields = parse_json(data.decode("ascii"))
    except ValueError as error:
        raise SealError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise SealError("is not a JSON object")
    return fields


def read_sealed(
    path: Path, *, what: str, format_name: str, version: int, error: type[MegaresumeError]
) -> dict[str, Any]:
    """Read a sealed file of one of our formats.

    Args:
        path: the file.
        what: the words for it in errors: "the data state", "the manifest".
        format_name: the ``format`` member that it must have.
        version: the newest version that this code reads.
        error: the class to raise.

    Raises:
        error: missing, unreadable, empty, cut short, damaged, or another kind of file; each says so.
        NewerFormatError: intact, and of a later version.
    """
    try:
        data = read_file(path)
    except FileNotFoundError as problem:
        raise error(f"{what} is missing", found="no such file", expected=str(path)) from problem
    except OSError as problem:
        raise error(
            f"{what} cannot be read", found=f"{path}: {problem.strerror or problem}", expected="a readable file"
        ) from problem
    try:
        fields = unseal(data)
    except SealError as problem:
        raise error(
            f"{what} {problem}",
            found=f"{path}, {len(data)} bytes",
            expected="the bytes that were written, which end with their checksum",
            cause="the disk was full, the file was copied in part or edited, or the storage is failing",
        ) from problem
    if fields.get("format") != format_name:
        raise error(
            f"{what} is another kind of file",
            found=f"{path}: format {fields.get('format')!r}",
            expected=f"format {format_name!r}",
            cause="a file was renamed or copied over another one",
        )
    found_version = fields.get("version")
    if type(found_version) is not int or found_version < 1:
        raise error(f"{what} has no version", found=f"{path}: version {found_version!r}", expected="an integer")
    if found_version > version:
        raise NewerFormatError(
            f"{what} was written by a newer megaresume",
            found=f"{path}: version {found_version}",
            expected=f"version {version} or older",
            action="upgrade megaresume on this machine to the version that wrote it",
        )
    return fields


# Members are of the kind that was written, or the file was not written by us: nothing is converted.


def count(value: object) -> int:
    """The value, if it is an integer from 0 on, of 64 bits at most; else ValueError."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r:.80} is not a count")
    return value


def text(value: object) -> str:
    """The value, if it is text without control characters; else ValueError."""
    if not isinstance(value, str) or not (value.isprintable() or visible(value) == value):
        raise ValueError(f"{value!r:.80} is not text")
    return value


def rows(value: object) -> list[Any]:
    """The value, if it is a list; else ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} is not a list")
    return value


def flag(value: object) -> bool:
    """The value, if it is true or false; else ValueError."""
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is neither true nor false")
    return value
