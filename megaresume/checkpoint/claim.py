"""What a lock is on the disk: numbered directories, of which the highest holds the root. See `lock`.

<save>/megaresume/owner_0000007/
    owner.json          who (`owner`)
    alive               a counter that goes up while the owner lives; "released" at its end
    <token>/            drafts: what the owner is about to put in its place
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from pathlib import Path

from megaresume.checkpoint.atomic import leftover_name, write_atomic, write_error
from megaresume.checkpoint.layout import records_dir
from megaresume.checkpoint.owner import Owner
from megaresume.stream.errors import CheckpointError

__all__ = ["ALIVE", "OWNER", "RELEASED", "claim", "newest", "place", "read_alive", "remove", "write_alive"]

OWNER, ALIVE = "owner.json", "alive"
RELEASED = "released"

_NAME = re.compile(r"owner_([0-9]{7,18})")
#: bytes of the counter: every write replaces all of it.
_WIDTH = 20
#: what a rename says that finds somebody else's directory in its place.
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})


def place(root: Path, number: int) -> Path:
    """The directory of a number."""
    return records_dir(root) / f"owner_{number:07d}"


def newest(root: Path) -> int | None:
    """The number that holds a root, or did last; None: none ever did. Raises CheckpointError: it cannot be listed."""
    return max(_numbers(root), default=None)


def _numbers(root: Path) -> list[int]:
    try:
        names = os.listdir(records_dir(root))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"cannot see who writes to {root}",
            found=f"{records_dir(root)}: {error.strerror or error}",
            expected="a directory that can be listed",
            action="give this user the permission to read it",
        ) from error
    return [int(match[1]) for name in names if (match := _NAME.fullmatch(name))]


def write_alive(directory: Path, text: str) -> None:
    """Replace the counter in place: whoever reads it only asks whether it has changed.

    Raises:
        OSError: FileNotFoundError where the directory has been taken away.
    """
    descriptor = os.open(directory / ALIVE, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.ljust(_WIDTH).encode(), 0)
    finally:
        os.close(descriptor)


def read_alive(directory: Path) -> str | None:
    """The counter; None: it cannot be read. An NFS client asks its server whenever a file is opened."""
    try:
        return (directory / ALIVE).read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return None


def claim(root: Path, number: int, owner: Owner) -> bool:
    """Make the directory of a number in one step, and remove the lower ones.

    Returns:
        False: somebody else was faster.

    Raises:
        CheckpointError: the directory cannot be written.
    """
    draft = records_dir(root) / leftover_name("owner")
    try:
        (draft / owner.token).mkdir(parents=True)
        (draft / ALIVE).write_text("0".ljust(_WIDTH))
        write_atomic(draft / OWNER, owner.to_bytes(), sync_dir=False)
        os.rename(draft, place(root, number))
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno not in _TAKEN:
            raise write_error(draft, error) from error
        # A server whose answer was lost is asked again, and then refuses what it has done already.
        if not (place(root, number) / owner.token).is_dir():
            return False
    # Who had looked before the last owner came may have found a number that was free again: the highest one counts.
    others = [other for other in _numbers(root) if other != number]
    if any(other > number for other in others):
        remove(root, number)
        return False
    for other in others:
        remove(root, other)
    return True


def remove(root: Path, number: int) -> None:
    """Take a directory away from its owner. When this returns, nothing can be renamed out of it any more.

    Raises:
        CheckpointError: it cannot be removed.
    """
    away = records_dir(root) / leftover_name("owner")
    try:
        os.rename(place(root, number), away)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(place(root, number), error) from error
    for _ in range(20):
        # Its owner's NFS client knows the directory by another handle than its name, and may still write into it.
        shutil.rmtree(away, ignore_errors=True)
        if not away.exists():
            return
        time.sleep(0.05)
    raise CheckpointError("the lock of another job cannot be removed", found=str(away), action=f"rm -r {away}")
