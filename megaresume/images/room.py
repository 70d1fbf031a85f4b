"""Pixels written where the batch will hold them, instead of copied there.

    batch     [ image 0 | image 1 | image 2 |   .   .   . ]      one array, rows enough for the tokens of the batch
                          ^ a processor asks `new_pixels` for 3 rows, and gets the next ones

Without a room, or where it is full, a processor gets memory of its own, and the batch copies: nothing but time
depends on it. A packed batch is hundreds of megabytes, and copying it takes a quarter of the time of making it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.float32]


class Room:
    """Rows to be filled from the first on.

    Args:
        rows: float32[n, ...], C-contiguous.
    """

    def __init__(self, rows: Pixels) -> None:
        self._rows = rows
        self._used = 0

    @contextmanager
    def given(self) -> Iterator[None]:
        """`new_pixels` takes from here, in this thread."""
        token = _ROOM.set(self)
        try:
            yield
        finally:
            _ROOM.reset(token)

    def take(self, shape: tuple[int, ...]) -> Pixels | None:
        """The next rows; None: there are too few, or they are shaped otherwise."""
        end = self._used + shape[0]
        if shape[1:] != self._rows.shape[1:] or end > len(self._rows):
            return None
        rows = self._rows[self._used : end]
        self._used = end
        return rows

    def holds(self, parts: Sequence[Pixels]) -> bool:
        """Whether these, one after another, are all that was taken: not where a document was dropped half done."""
        place = self._rows.ctypes.data
        for part in parts:
            if part.ctypes.data != place:
                return False
            place += part.nbytes
        return place == self._rows.ctypes.data + self._rows[: self._used].nbytes


_ROOM: ContextVar[Room | None] = ContextVar("megaresume_room", default=None)


def new_pixels(shape: tuple[int, ...]) -> Pixels:
    """float32[shape], C-contiguous, not initialised: of the room that is given, or new."""
    room = _ROOM.get()
    taken = None if room is None else room.take(shape)
    return np.empty(shape, np.float32) if taken is None else taken
