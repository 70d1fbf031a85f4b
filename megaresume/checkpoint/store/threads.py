"""`LastingThreads`: threads that keep working while Python exits. `senders`: those that send the parts of uploads."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

#: concurrent uploads of parts.
SENDERS = 8


class LastingThreads(ThreadPoolExecutor):
    """Threads that work while Python exits: it then waits for the last copies, and cannot start threads any more.

    Args:
        count: the number of threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        super().__init__(count)
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True).start()

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """See `ThreadPoolExecutor.submit`."""
        future: Future[T] = Future()
        self._waiting.put((future, functools.partial(function, *args, **kwargs)))
        return future

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the training has priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        while True:
            future, call = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:  # noqa: BLE001  whoever waits for it raises it
                future.set_exception(error)


@functools.lru_cache(maxsize=1)
def senders(process: int) -> LastingThreads:
    """This process's threads that send the parts of uploads: those of a parent do not survive a fork."""
    return LastingThreads(SENDERS, "megaresume-senders")
