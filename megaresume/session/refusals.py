"""How a training process ends where megaresume refuses something: a message without a traceback, once a job.

The launcher catches the error itself; on the routes without one (`megaresume.provider` in a script) an exception hook
stands in its place. Exit status 1 on both.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from megaresume.stream.errors import MegaresumeError

#: Seconds that a rank waits for the others, where all of them should have found the same error.
PATIENCE = 30.0

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@functools.cache
def show_refusals() -> None:
    """From now on an uncaught error of megaresume ends the process as under the launcher. The second call does nothing.

    Every other exception goes to the ``sys.excepthook`` that was there at the first call.
    """
    sys.excepthook = _hook(sys.excepthook)


def _hook(before: _Hook) -> _Hook:
    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MegaresumeError):
            end(error)  # it returns where Python may end by itself, with exit status 1
        else:
            before(kind, error, trace)

    return show


def end(error: MegaresumeError) -> int:
    """Say once what is wrong, and end this rank so that its launcher ends the others.

    Returns:
        the exit status, where there is no process group; where there is one, the process ends here.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        say(error)
        return 1
    try:
        if getattr(error, "known_to_all_ranks", False):
            _say_together(error)
        else:
            say(error)
    finally:
        # A rank that waits for the others at its exit keeps the launcher from ending them.
        os._exit(1)


def _say_together(error: MegaresumeError) -> None:
    """All ranks are here. None may end before rank 0 has said why: its launcher would end rank 0."""
    from megaresume.session.ranks import on_rank_0  # deferred: torch

    said = threading.Event()

    def say_it() -> None:
        said.set()
        _print(error)

    def give_up() -> None:
        try:
            if not said.is_set():
                say(error)
        finally:
            os._exit(1)

    # A rank that was killed, or whose script caught the error, never comes: the group would wait for its own timeout.
    timer = threading.Timer(PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        on_rank_0(say_it)
    except Exception:  # noqa: BLE001  the group is broken, and what matters is the error that we came with
        if not said.is_set():
            say(error)


def say(error: MegaresumeError) -> None:
    """The first rank says it; one that is alone with its error says it a little later.

    Where all have found the same, their launcher has ended the others by then.
    """
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    if rank != 0:
        time.sleep(2 if local_rank == 0 else 4)
    _print(error, "" if rank == 0 else f"rank {rank}: ")


def _print(error: MegaresumeError, who: str = "") -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not cost us the message
        sys.stdout.flush()
    # torch's hook calls the one before it with a buffer for stderr, and we do not come back to it.
    stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    print(f"megaresume: error: {who}{error}", file=stream, flush=True)
