"""A server in a process of its own, on cores of its own, so that it takes nothing from what is measured."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def served(serve: Callable[..., None], *args: Any, cores: set[int]) -> Iterator[Any]:
    """What the server says when it is there; it ends with the context.

    Args:
        serve: called there with ``args`` and a queue that it puts that into; a function of a module.
        args: picklable.
        cores: that the process may use.
    """
    context = multiprocessing.get_context("spawn")
    said = context.SimpleQueue()
    process = context.Process(target=_run, args=(serve, args, cores, said), daemon=True)
    process.start()
    try:
        yield said.get()
    finally:
        process.terminate()
        process.join()


def _run(serve: Callable[..., None], args: tuple[Any, ...], cores: set[int], said: Any) -> None:
    if hasattr(os, "sched_setaffinity"):  # not macOS, Windows
        os.sched_setaffinity(0, cores)
    serve(*args, said)
