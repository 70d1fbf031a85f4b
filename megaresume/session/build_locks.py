"""Locks of torch's builds of extensions whose process is dead: every later start would wait for them, without a word.

DeepSpeed builds its operations when they are first used (`torch.utils.cpp_extension.load`): the process that makes the
file ``lock`` of an extension builds it, and all others wait until that file is gone (`torch.utils.file_baton`). That
process has the file open meanwhile; after a SIGKILL nobody has, and it stays.
"""

from __future__ import annotations

import glob
import multiprocessing
import os
import shlex
import sys
import time
from pathlib import Path

from megaresume.checkpoint.system import is_shared, mount_of

#: seconds without a change after which a build in a directory that other nodes see is taken for dead.
_QUIET = 600.0


def dead_locks() -> list[Path]:
    """Those of this user that no process of this machine holds; [] where there is no ``/proc``."""
    return [path for path in _locks() if _is_dead(path)] if os.path.isdir("/proc/self/fd") else []


def remedy(lock: Path) -> str:
    """What to do about one of them."""
    return f"rm {shlex.quote(str(lock))}, unless another node or container is building {lock.parent.name} now"


def warn_of_dead_locks() -> None:
    """Name them: of the first rank of a node, before it waits for one."""
    if multiprocessing.parent_process() is not None:
        return  # a worker of it
    for lock in dead_locks():
        print(
            f"megaresume: warning: no process holds {lock}: one was killed while it built {lock.parent.name}, and "
            f"every start that needs it waits for ever\n  next action: {remedy(lock)}",
            file=sys.stderr,
            flush=True,
        )


def _locks() -> list[Path]:
    """As torch places them: in TORCH_EXTENSIONS_DIR itself, or by version of Python and accelerator."""
    given = os.environ.get("TORCH_EXTENSIONS_DIR")
    if given is not None:
        return sorted(Path(given).glob("*/lock"))
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return sorted(Path(cache, "torch_extensions").glob("*/*/lock"))


def _is_dead(lock: Path) -> bool:
    try:
        state = lock.stat()
        if state.st_uid != os.getuid():
            return False  # what the processes of others have open is not shown
        quiet = time.time() - max(file.stat().st_mtime for file in (lock, *lock.parent.iterdir()))
        kind = mount_of(lock.parent, Path("/proc/self/mountinfo").read_text()).kind
    except OSError:
        return False  # gone by now
    if is_shared(kind) and quiet < _QUIET:
        return False
    return not _is_open(lock.name, (state.st_dev, state.st_ino)) and lock.exists()


def _is_open(name: str, file: tuple[int, int]) -> bool:
    """Whether a process of this user has it open, by whatever path."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        try:
            if os.readlink(descriptor).endswith(f"/{name}"):
                state = os.stat(descriptor)
                if (state.st_dev, state.st_ino) == file:
                    return True
        except OSError:
            continue  # the process, or its file, is gone
    return False
