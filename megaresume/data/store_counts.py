"""`StoreCounts`: how often this process, and the worker processes that read for it, tried a store again or found a
record in the cache.

Each worker process adds to a slot of its own in memory that it shares with the process that started it. So its counts
are seen while it waits for a store, and stay when it dies. A process that is forked gets its slot by itself; one that
is spawned is given a `Share`.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from multiprocessing.sharedctypes import RawArray
from typing import Any, Literal

Kind = Literal["retries", "hits", "misses"]
#: requests to a store that were tried again; records found in the cache on the disk, and looked for in vain.
KINDS: tuple[Kind, ...] = ("retries", "hits", "misses")

#: processes that add to one memory. With more, the slots of the first ones are used again: they have ended by then.
SLOTS = 1024


@dataclass(frozen=True, slots=True)
class Share:
    """Slots for some worker processes. Can be pickled while one of them is spawned."""

    #: int64[SLOTS * kinds], in shared memory.
    memory: Any
    first: int

    def add(self, worker: int, kind: int, number: int = 1) -> None:
        """Count some in the slot of a worker."""
        self.memory[(self.first + worker) % SLOTS * len(KINDS) + kind] += number


class StoreCounts:
    """Safe to use from threads, and to fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._own = [0] * len(KINDS)
        #: where a worker adds its counts, and which of the slots is its own; None in the parent.
        self._above: tuple[Share, int] | None = None
        #: shared with the workers of this process, and how many slots were given away.
        self._memory: Any = None
        self._given = 0
        #: the counts for a process that is about to be forked.
        self._forked: Share | None = None

    def add(self, kind: Kind) -> None:
        """Count one request or hit."""
        place = KINDS.index(kind)
        with self._lock:
            self._own[place] += 1
            if self._above is not None:
                share, worker = self._above
                share.add(worker, place)

    def total(self, kind: Kind) -> int:
        """How many this process and its workers have counted since it began."""
        place, memory = KINDS.index(kind), self._memory
        return self._own[place] + (0 if memory is None else sum(memory[place :: len(KINDS)]))

    def share(self, workers: int) -> Share:
        """Slots for so many worker processes."""
        if self._memory is None:
            self._memory = RawArray("q", SLOTS * len(KINDS))
        share = Share(self._memory, self._given)
        self._given += workers
        return share

    def begin_worker(self, share: Share, worker: int) -> None:
        """Count as a worker from now on, with what was counted since this process was started."""
        with self._lock:
            for place, number in enumerate(self._own):  # it may have opened its data already
                share.add(worker, place, number)
            self._above = share, worker

    def before_fork(self) -> None:
        """A slot for the process that comes."""
        self._forked = self.share(1)

    def after_fork(self) -> None:
        """Begin to count in a forked process."""
        forked = self._forked
        assert forked is not None
        self.__init__()  # type: ignore[misc]  # what the parent has counted is the parent's; and the lock may be held
        self._above = forked, 0


#: The counts of this process.
store_counts = StoreCounts()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=store_counts.before_fork, after_in_child=store_counts.after_fork)
