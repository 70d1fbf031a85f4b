"""Where the pixels of a batch lie, and how they come from a worker process.

    in the process that trains   float32, in memory that an earlier batch has left, if there is some
    page-locked                  float32
    in a worker process          shared memory: float32, or levels in 8 bits for `shown` to make pixels of

A packed batch is hundreds of megabytes: that the system hands out so much memory anew, page by page, takes as long as
writing the pixels.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

if TYPE_CHECKING:
    from megaresume.batches.documents import DocumentReader, Images
    from megaresume.stream.planning.plan import Plan

#: memory of batches that nobody refers to any more; the two that were left last.
_LEFT: deque[npt.NDArray[np.uint8]] = deque(maxlen=2)


class _Loan:
    """Memory that is kept for a later batch as soon as no array or tensor lies in it."""

    def __init__(self, num_bytes: int) -> None:
        try:
            self._memory = _LEFT.pop()
        except IndexError:
            self._memory = np.empty(0, np.uint8)
        if len(self._memory) < num_bytes:
            # NumPy asks for large pages, PyTorch does not.
            self._memory = np.empty(num_bytes + num_bytes // 8, np.uint8)
        self.__array_interface__ = self._memory.__array_interface__

    def __del__(self) -> None:
        _LEFT.append(self._memory)


def left_memory(shape: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """float32[shape], not initialised."""
    num_bytes = 4 * math.prod(shape)
    return np.asarray(_Loan(num_bytes))[:num_bytes].view(np.float32).reshape(shape)


def room_of(plan: Plan, documents: DocumentReader, *, pin_memory: bool, levels: bool) -> torch.Tensor | None:
    """Rows for the pixels of a plan, where what is never written costs nothing; None: copy them together at the end."""
    rows = documents.most_rows(plan)
    if levels and documents.levels is not None:
        return _empty((rows, *documents.levels.shape), torch.uint8)
    if pin_memory or torch.utils.data.get_worker_info() is not None:
        return None
    return torch.from_numpy(left_memory((rows, *documents.pixel_shape)))


def pixels_of(
    images: Images, room: torch.Tensor | None, documents: DocumentReader, *, pin_memory: bool
) -> torch.Tensor:
    """The pixels (or levels) of the images of a batch, one image after another.

    Args:
        images: of the batch.
        room: what `room_of` gave.
        documents: which read them.
        pin_memory: put them into page-locked memory.
    """
    rows = sum(map(len, images.pixels))
    if room is not None and images.room is not None and images.room.holds(images.pixels):
        shared = room.is_shared()  # type: ignore[no-untyped-call]
        # By way of NumPy: the tensor's storage is these rows alone.
        return room[:rows] if shared else torch.from_numpy(room.numpy()[:rows])
    in_levels = documents.levels is not None and images.room is not None and images.room.takes_levels
    row = documents.levels.shape if in_levels and documents.levels is not None else documents.pixel_shape
    values = _empty((rows, *row), torch.uint8 if in_levels else torch.float32, pin_memory=pin_memory)
    if images.pixels:
        np.concatenate(images.pixels, out=values.numpy())
    return values


def shown(batch: Any, *, pin_memory: bool = False) -> Any:
    """A batch from a worker process, with pixels instead of levels if it has these."""
    levels = batch.pop("levels", None)
    if levels is not None:
        values = batch["pixel_values"]
        shape = len(values), *levels.pixel_shape
        pixels = torch.empty(shape, pin_memory=True) if pin_memory else torch.from_numpy(left_memory(shape))
        levels.fill(values.numpy(), pixels.numpy())
        batch["pixel_values"] = pixels
    return batch


def _empty(shape: tuple[int, ...], dtype: torch.dtype, *, pin_memory: bool = False) -> torch.Tensor:
    """Not initialised; in a worker process where the consumer reads it: a copy takes a fifth of its time."""
    if torch.utils.data.get_worker_info() is None or not shape[0]:
        return torch.empty(shape, dtype=dtype, pin_memory=pin_memory)
    # As torch's own collation does it.
    num_bytes = dtype.itemsize * math.prod(shape)
    shared = torch.UntypedStorage._new_shared(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=dtype).set_(shared).view(shape)
