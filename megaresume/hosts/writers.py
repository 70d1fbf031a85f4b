"""Makes processes that write a checkpoint for a rank end with that rank.

megatron-core writes from processes that it forks, and asynchronously from one that it
keeps. They outlive a killed rank. If one of them hung on the filesystem and then goes on writing, it writes into the
checkpoint of the same step that the next start has made meanwhile. Those that are done keep their memory.

    with ending_with_us():         around a rank's save: what its main thread forks or spawns ends with it
    written_with_us(write)         for a process that already exists: it does so from its next write on

Works on Linux only; elsewhere, nothing is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

#: From linux/prctl.h: the signal that the kernel sends this process when the thread that created it ends.
_PR_SET_PDEATHSIG = 1
#: Environment variable for processes spawned within the block: the process that they end with.
VARIABLE = "MEGARESUME_ENDS_WITH"

#: Whether processes forked now end with their parent; inherited by forks, which fork in turn.
_is_active = False
_is_registered = False
#: The process that forks, if in its main thread; 0: in another thread, which may end first.
_parent = 0
#: Processes that this one writes for without being their child; a thread watches each.
_watched: set[int] = set()


@contextlib.contextmanager
def ending_with_us() -> Iterator[None]:
    """See the module."""
    global _is_active, _is_registered
    if not _is_registered:
        _is_registered = True
        os.register_at_fork(before=_note_parent, after_in_child=_end_with_parent)
    before, _is_active = _is_active, True
    os.environ[VARIABLE] = str(os.getpid())
    try:
        yield
    finally:
        _is_active = before
        os.environ.pop(VARIABLE, None)


def written_with_us(write: Callable[..., Any]) -> Callable[..., Any]:
    """A function for another process, which ends with this one once it has called it. Pickles if ``write`` does."""
    return functools.partial(_write, os.getpid(), write)


def end_with_parent_of_spawned() -> None:
    """Run at the start of processes spawned by multiprocessing; not for its tracker, which cleans up after us."""
    parent = os.environ.pop(VARIABLE, "")
    if "--multiprocessing-fork" in sys.orig_argv and parent == str(os.getppid()):
        _end_with(os.getppid())


def _write(owner: int, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if owner == os.getpid():
        return write(*args, **kwargs)
    _end_with(os.getppid())
    if os.getppid() != owner and owner not in _watched:  # the parent is a fork server (outlives the owner), or gone
        _watched.add(owner)
        threading.Thread(target=_end_after, args=(owner,), name="megaresume-owner", daemon=True).start()
    with ending_with_us():
        return write(*args, **kwargs)


def _end_after(owner: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(owner, 0)
            time.sleep(0.1)
    os.kill(os.getpid(), signal.SIGKILL)


def _note_parent() -> None:
    global _parent
    _parent = os.getpid() if threading.current_thread() is threading.main_thread() else 0


def _end_with_parent() -> None:
    if _is_active and _parent:
        _end_with(_parent)


def _end_with(parent: int) -> None:
    """Have this process killed when its parent ends, or end now if the parent already has."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)
