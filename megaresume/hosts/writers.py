"""Processes that write a checkpoint for a rank end with it.

megatron-core writes from processes that it forks, and asynchronously from one that it keeps. They outlive a rank that
is killed, and what one of them still writes, after a filesystem that hung, goes into the checkpoint that the next start
has made of the same step meanwhile. Those that are done keep their memory.

    with ending_with_us():         while a rank saves: what it forks or spawns in its main thread ends with it
    written_with_us(write)         for a process that is there already: it does so from its next write on

Linux alone can do so; elsewhere, nothing is done.
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

#: of linux/prctl.h: the signal that the kernel sends to this process when the thread that made it ends.
_PR_SET_PDEATHSIG = 1
#: in the environment of what is spawned meanwhile: the process that it ends with.
VARIABLE = "MEGARESUME_ENDS_WITH"

#: whether what is forked now ends with its parent: also in what was forked, which forks in turn.
_is_active = False
_is_registered = False
#: who forks, in its main thread; 0: another thread, which may end first.
_parent = 0
#: by a thread: those that this process writes for, and is no child of.
_watched: set[int] = set()


@contextlib.contextmanager
def ending_with_us() -> Iterator[None]:
    """See above."""
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
    """The same function, for another process, which ends with this one from its call on. Can be pickled if it can."""
    return functools.partial(_write, os.getpid(), write)


def end_with_parent_of_spawned() -> None:
    """In what multiprocessing has spawned meanwhile, when it starts; not in its tracker, which cleans up after us."""
    parent = os.environ.pop(VARIABLE, "")
    if "--multiprocessing-fork" in sys.orig_argv and parent == str(os.getppid()):
        _end_with(os.getppid())


def _write(owner: int, write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if owner == os.getpid():
        return write(*args, **kwargs)
    _end_with(os.getppid())
    if os.getppid() != owner and owner not in _watched:  # a fork server, which outlives it too, or nobody any more
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
    """Be killed when this parent ends, or end now if it has."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has ended before that
        os._exit(1)
