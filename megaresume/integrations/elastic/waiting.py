"""Rank 0 works for an hour, and no rank sits in a collective meanwhile: those end the job after ten or thirty minutes.

rank 0    beats: a number in the store of the process group, again and again     done
others    look at it every half second; no new number for five minutes: rank 0 is lost
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from megaresume.integrations.ranks import is_rank_0, on_rank_0, world_size
from megaresume.stream.errors import CheckpointError

__all__ = ["on_rank_0_for_long"]

T = TypeVar("T")

#: calls so far: every rank counts the same ones.
_calls = itertools.count()


def on_rank_0_for_long(
    function: Callable[[Callable[[], None]], T], *, poll_seconds: float = 0.5, patience_seconds: float = 300.0
) -> T:
    """Run on rank 0, however long it takes; every rank gets the result or raises the error. See `ranks.on_rank_0`.

    Args:
        function: is given a function that it must call every few seconds, as a sign of life.
        poll_seconds: how often the others look.
        patience_seconds: without a sign of life.

    Raises, besides what the function raises:
        CheckpointError: on the others: rank 0 gives no sign of life.
    """
    if world_size() == 1:
        return function(lambda: None)
    store, key = _store(), f"megaresume/wait/{next(_calls)}"
    if not is_rank_0():
        _wait(store, key, poll_seconds, patience_seconds)
        return on_rank_0(lambda: function(lambda: None))  # only receives

    last = 0.0

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= 1.0:
            last = time.monotonic()
            store.set(key, str(last))

    def work() -> T:
        try:
            return function(beat)
        finally:
            store.set(f"{key}/done", "1")

    return on_rank_0(work)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _wait(store: Any, key: str, poll_seconds: float, patience_seconds: float) -> None:
    seen, since = None, time.monotonic()
    while not store.check([f"{key}/done"]):
        now = store.get(key) if store.check([key]) else None
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since > patience_seconds:
            raise CheckpointError(
                "rank 0 gives no sign of life",
                found=f"none for {patience_seconds:.0f} s, while it converted a checkpoint",
                expected="one every few seconds",
                cause="its process was killed, or its filesystem hangs",
                action="look at the log of rank 0; start again: nothing is lost",
            )
        time.sleep(poll_seconds)
