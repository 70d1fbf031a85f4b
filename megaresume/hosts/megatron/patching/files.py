"""Reads a script, and replaces it in one step, with its mode and owner; refuses where that would surprise."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path

from megaresume.files import fsync_dir, fsync_file
from megaresume.hosts.megatron.patching.errors import PatchError
from megaresume.stream.errors import SetupError, UsageError

#: no training script is larger; a file that is was given by mistake.
MAX_BYTES = 16 << 20


def read_script(path: Path) -> bytes:
    """The bytes of a script. Raises UsageError if it cannot be one."""
    try:
        info = path.stat()
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_BYTES:
            kind = "a directory" if path.is_dir() else f"no plain file, or {info.st_size:,} bytes"
            expected = f"a Python file of at most {MAX_BYTES:,} bytes, as pretrain_gpt.py"
            raise UsageError("not a script", found=f"{path} is {kind}", expected=expected)
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
    _refuse_special_files(path, info)
    temporary = path.with_name(f".{path.name}.megaresume-{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        shutil.copy2(path, temporary)
        with contextlib.suppress(PermissionError):  # of another group of this user's: it becomes the default one
            os.chown(temporary, info.st_uid, info.st_gid)
        with temporary.open("r+b") as file:
            file.truncate()
            file.write(new)
            file.flush()
            fsync_file(file.fileno())
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


def _refuse_special_files(path: Path, info: os.stat_result) -> None:
    refusal: tuple[str, str, str] | None = None
    if stat.S_ISLNK(info.st_mode):
        refusal = "is a symbolic link", f"a link to {path.resolve()}", f"megaresume patch {path.resolve()}"
    elif info.st_nlink > 1:
        action = f"cp {path} {path}.copy && mv {path}.copy {path}, and patch it then"
        refusal = f"has {info.st_nlink} names (hard links)", "one file under several names", action
    elif not info.st_mode & 0o222 or not os.access(path, os.W_OK):
        # The mode too: for root every file is writable, and it is still meant as a warning.
        refusal = "is read-only", f"mode {stat.filemode(info.st_mode)}", f"chmod u+w {path}"
    elif info.st_uid != os.geteuid() != 0:
        found = f"user {info.st_uid}; replacing it would make it user {os.geteuid()}'s"
        refusal = "belongs to another user", found, f"let its owner patch it, or patch a copy: cp {path} my_{path.name}"
    if refusal is not None:
        what, found, action = refusal
        expected = "a plain file of this user's own, with one name, that may be written"
        raise PatchError(f"{path} {what}", found=found, expected=expected, action=action)
