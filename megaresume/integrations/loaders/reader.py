"""`LoaderReader`: the batches of a loader for ever, and its state at the last *trained* one.

A loader tells its state behind the batch that it handed out last. A training loop may hold batches that it has not
trained yet (it reads ahead, or saves in the middle of a step), and those must come again after a resume:

    handed out  0 ─────────── s ──────────── t ─────── h
                              │              │         └ where the loader is
                              │              └ trained: what the checkpoint is to name
                              └ the last state that was taken at or before t

    nothing ahead (t = h):   the state is taken now
    otherwise:               the state taken at s, and "pass over t - s batches": they are read again and dropped

States are taken every `SNAPSHOT_EVERY` batches, so that t - s stays small.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from megaresume.integrations.generators import kept
from megaresume.integrations.loaders.adapters import Adapter
from megaresume.stream.errors import StateError, UsageError

__all__ = ["SNAPSHOT_EVERY", "LoaderReader"]

#: Batches between two states that are taken though nothing is saved. Energon needs some 30 ms for one.
SNAPSHOT_EVERY = 32


class LoaderReader:
    """One data-parallel rank's loader.

    Args:
        adapter: of the loader.
        trained: batches of this loader that optimizer steps have trained, since the start of the run. Never more than
            were handed out.
    """

    def __init__(self, adapter: Adapter, trained: Callable[[], int]) -> None:
        self.adapter = adapter
        self._trained = trained
        self._batches: Iterator[Any] | None = None
        #: batches handed out, since the start of the run.
        self.handed = 0
        self._epoch = 0
        self._start = 0
        #: in the middle of what an earlier process began.
        self._is_restored = False
        #: (batches handed out, pickled state there).
        self._snapshots: deque[tuple[int, bytes]] = deque([(0, _pickled(None, 0, 0))])

    def __next__(self) -> Any:
        """The next batch; a loader that ends is begun again.

        Raises:
            UsageError: the loader has no batches at all.
        """
        since = self.handed - self._snapshots[-1][0]
        if since >= SNAPSHOT_EVERY:
            self._snapshots.append((self.handed, self._take()))
            self._forget()
        batch = self._next()
        self.handed += 1
        return batch

    def _next(self) -> Any:
        for _ in range(3):  # a restored iterator may be at the end of its epoch
            if self._batches is None:
                self._batches = self._begin()
            try:
                return next(self._batches)
            except StopIteration:
                self._batches, self._epoch = None, self._epoch + 1
        raise UsageError(
            "the loader has no batches",
            found=f"it ended three times in a row, after {self.handed} batches",
            expected="at least one batch in every pass over it",
            cause="fewer samples than a batch, with drop_last; or it can be iterated only once",
            action="look at the length of its dataset on this rank",
        )

    def _begin(self) -> Iterator[Any]:
        if not self._is_restored:
            return self.adapter.batches(self._epoch)
        self._is_restored = False
        # A DataLoader draws a number when it begins. A run that nobody stopped has drawn it long ago.
        with kept():
            return self.adapter.batches(self._epoch)

    def _take(self) -> bytes:
        if self._batches is None:  # nothing handed out since the beginning, or since a restore
            return self._snapshots[-1][1]
        return _pickled(self.adapter.save(self.handed, self._epoch), self.handed, self._epoch)

    def _forget(self) -> None:
        trained = self._trained()
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= trained:
            self._snapshots.popleft()

    @property
    def is_idle(self) -> bool:
        """Whether steps were trained in this process and none of their batches came from here."""
        return self.handed == self._start < self._trained()

    def state(self) -> tuple[bytes, int]:
        """The state for exactly the trained batches.

        Returns:
            it, pickled, and the batches to pass over behind it.

        Raises:
            StateError: more batches were trained than were handed out.
        """
        trained = self._trained()
        if trained > self.handed:
            raise StateError(
                "more batches were trained than this loader handed out",
                found=f"{trained} batches trained, {self.handed} handed out",
                expected="every micro-batch from this loader",
                cause="the engine was fed from somewhere else too",
                action="feed it from what megaresume returned, alone",
            )
        if trained == self.handed and self._snapshots[-1][0] != trained:
            self._snapshots.append((trained, self._take()))
        self._forget()
        at, state = self._snapshots[0]
        return state, trained - at

    def restore(self, pickled: bytes, skip: int) -> None:
        """Go on from what `state` gave; before the first batch.

        Args:
            pickled: the state.
            skip: batches to read and to drop.

        Raises:
            UsageError: batches were handed out already.
            StateError: the loader refuses the state.
        """
        if self._batches is not None:
            raise UsageError(
                "the loader is restored after it has handed out batches",
                found=f"{self.handed} batches handed out",
                expected="a loader at its beginning",
                action="load the checkpoint before the first next(data); to load another one, make a new loader",
            )
        state, handed, epoch = _unpickled(pickled)
        if state is not None:
            try:
                self.adapter.restore(state, handed, epoch)
            except (AssertionError, KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
                raise StateError(
                    "the loader does not take its state back",
                    found=f"{type(error).__name__}: {error}".rstrip(": "),
                    expected="a loader made with the same arguments over the same dataset",
                    cause="the dataset, the sampler or the library was changed between save and resume",
                    action="make the loader as it was made when the checkpoint was saved",
                ) from error
        self._is_restored = state is not None
        self.handed, self._epoch = handed, epoch
        self._start = handed + skip
        self._snapshots = deque([(handed, pickled)])
        for _ in range(skip):
            next(self)


def _pickled(state: Any, handed: int, epoch: int) -> bytes:
    return pickle.dumps({"state": state, "handed": handed, "epoch": epoch}, protocol=5)


def _unpickled(data: bytes) -> tuple[Any, int, int]:
    held = pickle.loads(data)
    return held["state"], int(held["handed"]), int(held["epoch"])
