"""`Anchors`: snapshots of the past, dense near the front and ever sparser behind it.

Going back by d blocks then costs planning about d / `DENSITY` of them again, wherever the front is, and the number kept
grows only with the logarithm of the distance.
"""

from __future__ import annotations

from bisect import bisect_right

from megaresume.stream import kernel
from megaresume.stream.kernel import Arrays

__all__ = ["Anchors"]

#: The i-th snapshot is kept until the front is this many times 2**(trailing zeros of i) snapshots ahead of it.
DENSITY = 8
#: Snapshots added between two clean-ups.
CLEAN_UP = 8


class Anchors:
    """Snapshots by position. The first one is kept for ever."""

    def __init__(self, base: Arrays) -> None:
        # (running number, position in samples, snapshot), ascending
        self._kept: list[tuple[int, int, Arrays]] = [(0, _position(base), base)]

    def __len__(self) -> int:
        """Snapshots kept."""
        return len(self._kept)

    def add(self, snapshot: Arrays) -> None:
        """Keep a snapshot further on than all others; one that is not is passed over."""
        number, position, _ = self._kept[-1]
        if _position(snapshot) <= position:
            return
        self._kept.append((number + 1, _position(snapshot), snapshot))
        if number % CLEAN_UP == 0:
            front = number + 1
            self._kept = [a for a in self._kept if not a[0] or front - a[0] <= DENSITY * (a[0] & -a[0])]

    def before(self, sample: int) -> Arrays:
        """The last snapshot at or before ``sample``, which must not lie before the first."""
        return self._kept[bisect_right(self._kept, sample, key=lambda a: a[1]) - 1][2]


def _position(snapshot: Arrays) -> int:
    return kernel.trained_samples(snapshot)
