"""Lives of one loader without a framework: each in a process of its own, which ends without a word."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import kit

from megaresume.hosts.loaders import LoaderReader, adapter_of

State = tuple[bytes, int]


def live(
    make: Callable[[], Any], *, first: int, stop: int, state: State | None = None, ahead: int = 0
) -> tuple[list[Any], State]:
    """Train batches ``first`` to ``stop`` in a child process, take the state there, and be killed.

    Args:
        ahead: batches handed out beyond those that are trained.

    Returns:
        what the trained batches held, and the state.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # Energon's progress bars
        trained = first
        reader = LoaderReader(adapter_of(make()), lambda: trained)
        if state is not None:
            reader.restore(*state)
        found, pending = [], []
        while trained < stop:
            while len(pending) <= ahead:
                pending.append(kit.seen(next(reader)))
            found.append(pending.pop(0))
            trained += 1
        with os.fdopen(write, "wb") as pipe:
            pickle.dump((found, reader.state()), pipe)
        os.kill(os.getpid(), signal.SIGKILL)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        result: tuple[list[Any], State] = pickle.load(pipe)  # not to its end: orphaned workers hold it open for seconds
    os.waitpid(child, 0)
    return result


def lives(make: Callable[[], Any], stops: list[int], *, ahead: int = 0) -> list[Any]:
    """Train up to the last of ``stops``, with a death at every one of them."""
    found: list[Any] = []
    state: State | None = None
    for first, stop in zip([0, *stops], stops, strict=False):
        batches, state = live(make, first=first, stop=stop, state=state, ahead=ahead)
        found += batches
    return found
