"""`StoreCounts`: how often this process and its worker processes retried a store request, or hit or missed the cache.

Each worker adds to its own slot in memory shared with the process that started it. So its counts are visible while it
waits for a store, and survive it. A forked process gets its slot by itself; a spawned one is given a `Share`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any, Literal

Kind = Literal["retries", "hits", "misses"]
#: retried store requests; records found in the disk cache, and not found there.
KINDS: tuple[Kind, ...] = ("retries", "hits", "misses")

#: processes per block of memory. With more, the first slots are reused: their processes have ended by then.
SLOTS = 1024


@dataclass(frozen=True, slots=True)
class Share:
    """Slots for some worker processes. Can be pickled while one of them is being spawned."""

    #: int64[SLOTS * kinds], in shared memory.
    memory: Any
    first: int

    def add(self, worker: int, kind: int, number: int = 1) -> None:
        """Add to the count of a worker."""
        self.memory[(self.first + worker) % SLOTS * len(KINDS) + kind] += number


class StoreCounts:
    """Safe to use from threads, and to fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own = [0] * len(KINDS)
        #: the slot of a worker, in its parent's memory; None in the parent.
        self._above: tuple[Share, int] | None = None
        #: the memory shared with the workers of this process, and how many slots are taken.
        self._memory: Any = None
        self._given = 0
        #: the slots for a process that is about to be forked.
        self._forked: Share | None = None

    def add(self, kind: Kind) -> None:
        """Count one request, hit or miss."""
        place = KINDS.index(kind)
        with self._lock:
            self._own[place] += 1
            if self._above is not None:
                share, worker = self._above
                share.add(worker, place)

    def total(self, kind: Kind) -> int:
        """The count of this process and its workers since it began."""
        place, memory = KINDS.index(kind), self._memory
        return self._own[place] + (0 if memory is None else sum(memory[place :: len(KINDS)]))

    def share(self, workers: int) -> Share:
        """Slots for this many worker processes."""
        if self._memory is None:
            self._memory = RawArray("q", SLOTS * len(KINDS))
        share = Share(self._memory, self._given)
        self._given += workers
        return share

    def begin_worker(self, share: Share, worker: int) -> None:
        """Count as a worker from now on, including the counts since this process started."""
        with self._lock:
            for place, number in enumerate(self._own):  # it may have opened its data already
                share.add(worker, place, number)
            self._above = share, worker

    def before_fork(self) -> None:
        """Reserve a slot for the new process."""
        self._forked = self.share(1)

    def after_fork(self) -> None:
        """Start counting in a forked process."""
        forked = self._forked
        assert forked is not None
        self.__init__()  # type: ignore[misc]  # what the parent has counted is the parent's; and the lock may be held
        self._above = forked, 0


#: The counts of this process.
store_counts = StoreCounts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=store_counts.before_fork, after_in_child=store_counts.after_fork)
