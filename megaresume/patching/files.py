"""Reads a script, and replaces it in one step, with its mode and owner; refuses where that would surprise."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from megaresume.checkpoint.atomic import fsync_dir, fsync_file, write_all
from megaresume.patching.errors import PatchError
from megaresume.stream.errors import SetupError, UsageError

__all__ = ["read_script", "replace_script"]

#: no training script is larger; a file that is was given by mistake.
MAX_BYTES = 16 << 20


def read_script(path: Path) -> bytes:
    """The bytes of a script. Raises UsageError where it cannot be one."""
    if path.is_dir():
        raise UsageError("not a script", found=f"{path} is a directory", expected="a Python file, as pretrain_gpt.py")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise UsageError("not a script", found=f"{path} is a device or a pipe", expected="a Python file")
        if path.stat().st_size > MAX_BYTES:
            raise UsageError(
                "not a script",
                found=f"{path}: {path.stat().st_size:,} bytes",
                expected=f"a Python file of at most {MAX_BYTES:,} bytes",
            )
        return path.read_bytes()
    except FileNotFoundError as error:
        raise UsageError("no such script", found=str(path), expected="a Python file, as pretrain_gpt.py") from error
    except OSError as error:
        raise UsageError("cannot read the script", found=f"{path}: {error.strerror}") from error


def replace_script(path: Path, old: bytes, new: bytes) -> None:
    """Replace a script's content: temporary file, fsync, rename. Mode, owner and extended attributes are kept.

    Args:
        path: the script.
        old: the content that ``new`` was made from; anything else there now is left alone.
        new: the new content.

    Raises:
        PatchError: a symbolic or hard link, read-only, of another owner, or changed meanwhile. Nothing is written.
        SetupError: the write failed; the old content is still there.
    """
    info = os.lstat(path)
    if stat.S_ISLNK(info.st_mode):
        target = path.resolve()
        raise PatchError(
            f"{path} is a symbolic link",
            found=f"a link to {target}",
            expected="the file itself: others may use it through other links",
            action=f"megaresume patch {target}",
        )
    if info.st_nlink > 1:
        raise PatchError(
            f"{path} has {info.st_nlink} names (hard links)",
            found="one file under several names; replacing it would change one of them only",
            expected="a file with one name",
            action=f"cp {path} {path}.copy && mv {path}.copy {path}, and patch it then",
        )
    # The mode too: for root every file is writable, and it is still meant as a warning.
    if not info.st_mode & 0o222 or not os.access(path, os.W_OK):
        raise PatchError(
            f"{path} is read-only",
            found=f"mode {stat.filemode(info.st_mode)}",
            expected="a file that this user may write",
            action=f"chmod u+w {path}",
        )
    temporary = path.with_name(f".{path.name}.megaresume-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            write_all(descriptor, new)
            _copy_owner(descriptor, path, info)
            fsync_file(descriptor)
        finally:
            os.close(descriptor)
        if path.read_bytes() != old:
            raise PatchError(
                f"{path} was changed while it was being patched",
                found="other content than was read",
                expected="nobody else to write it",
                action="run the command again",
            )
        os.replace(temporary, path)
        fsync_dir(path.parent)
    except OSError as error:
        raise SetupError(
            f"cannot write {path}",
            found=f"{error.strerror or error}; the script is unchanged",
            expected=f"a folder that this user may write, with space for {len(new):,} bytes",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def _copy_owner(descriptor: int, path: Path, info: os.stat_result) -> None:
    if (info.st_uid, info.st_gid) != (os.geteuid(), os.getegid()):
        try:
            os.fchown(descriptor, info.st_uid, info.st_gid)
        except PermissionError as error:
            if info.st_uid != os.geteuid():
                raise PatchError(
                    f"{path} belongs to another user",
                    found=f"user {info.st_uid}; replacing it would make it user {os.geteuid()}'s",
                    expected="a file of this user's own",
                    action=f"let its owner patch it, or patch a copy: cp {path} my_{path.name}",
                ) from error
    with contextlib.suppress(OSError):  # filesystems without extended attributes
        for name in os.listxattr(path):
            os.setxattr(descriptor, name, os.getxattr(path, name))
    os.fchmod(descriptor, stat.S_IMODE(info.st_mode))
