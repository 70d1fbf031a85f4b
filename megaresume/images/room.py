"""Pixels written where the batch will hold them, instead of copied there.

    batch     [ image 0 | image 1 | image 2 |   .   .   . ]      one array, rows enough for the tokens of the batch
                          ^ a processor asks `new_pixels` for 3 rows, and gets the next ones

Without a room, or where it is full, a processor gets memory of its own, and the batch copies: nothing but time
depends on it. A packed batch is hundreds of megabytes, and copying it takes a quarter of the time of making it.

A room of 8 bits takes levels instead of pixels (`megaresume.images.processors.levels`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.float32]


class Room:
    """Rows to be filled from the first on.

    Args:
        rows: float32[n, ...] for pixels or uint8[n, ...] for levels, C-contiguous.
    """

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._rows = rows
        self.takes_levels = rows.dtype == np.uint8
        self._used = 0

    @contextmanager
    def given(self) -> Iterator[None]:
        """`new_pixels` and `new_levels` take from here, in this thread."""
        token = _ROOM.set(self)
        try:
            yield
        finally:
            _ROOM.reset(token)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        """The next rows; None: there are too few, or they are shaped otherwise."""
        end = self._used + shape[0]
        if shape[1:] != self._rows.shape[1:] or end > len(self._rows):
            return None
        rows = self._rows[self._used : end]
        self._used = end
        return rows

    def holds(self, parts: Sequence[npt.NDArray[Any]]) -> bool:
        """Whether these, one after another, are all that was taken: not where a document was dropped half done."""
        place = self._rows.ctypes.data
        for part in parts:
            if part.ctypes.data != place:
                return False
            place += part.nbytes
        return place == self._rows.ctypes.data + self._rows[: self._used].nbytes


_ROOM: ContextVar[Room | None] = ContextVar("megaresume_room", default=None)


def takes_levels() -> bool:
    """Whether the room that is given takes levels, and no pixels."""
    room = _ROOM.get()
    return room is not None and room.takes_levels


def new_pixels(shape: tuple[int, ...]) -> Pixels:
    """float32[shape], C-contiguous, not initialised: of the room that is given, or new."""
    return _new(shape, np.float32)


def new_levels(shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """uint8[shape], C-contiguous, not initialised: of the room that is given, if it takes levels; or new."""
    return _new(shape, np.uint8)


def _new(shape: tuple[int, ...], dtype: type[np.float32] | type[np.uint8]) -> npt.NDArray[Any]:
    room = _ROOM.get()
    taken = room.take(shape) if room is not None and room.takes_levels == (dtype is np.uint8) else None
    return np.empty(shape, dtype) if taken is None else taken
