"""Worker processes of a prepare: work in order, results as they are done, errors in the order of the work."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from megaresume.stream.errors import SetupError, UsageError

T = TypeVar("T")


def check_workers(wanted: int) -> None:
    """Refuse a number of workers that is none.

    Raises:
        UsageError: it is below 1.
    """
    if wanted < 1:
        raise UsageError("bad --workers", found=wanted, expected="1 or more", action="correct --workers")


def run_in_processes(
    work: Iterable[tuple[Any, ...]],
    function: Callable[..., T],
    done: Callable[[T], object],
    *,
    workers: int,
    initializer: Callable[[Any], object],
    spec: Any,
) -> None:
    """Call ``function(*item)`` for every item in worker processes.

    Args:
        work: items; taken a few ahead of what is done, so that they may be large.
        function: of a module, as it is sent to a new process.
        done: called here with each result, in the order of the work.
        workers: processes.
        initializer: called in each worker first, with ``spec``.
        spec: what a worker needs to know.

    Raises:
        SetupError: a worker died.
        MegaresumeError: what ``function`` raised, for the first item that failed.
    """
    pending: deque[Future[T]] = deque()
    # spawn: a fork of a process with threads (tqdm, tokenizers) may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(initializer, spec))
    try:
        for item in work:
            pending.append(pool.submit(function, *item))
            while len(pending) > 2 * workers:
                done(pending.popleft().result())
        while pending:
            done(pending.popleft().result())
    except BrokenProcessPool as error:
        raise SetupError(
            "a worker process died",
            found=str(error),
            expected="workers that finish their work",
            cause="out of memory (see dmesg), or it was killed",
            action="run the same command again, with fewer --workers: it continues where it stopped",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start(initializer: Callable[[Any], object], spec: Any) -> None:
    # One process a core: threads inside the tokenizer would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    parent = multiprocessing.parent_process()

    def die_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    # A parent that was killed says nothing: without this its workers would wait for work for ever.
    threading.Thread(target=die_with_parent, daemon=True).start()
    initializer(spec)
