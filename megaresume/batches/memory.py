"""Where a batch lies that comes from a worker process: all of it in one piece of shared memory; and where pixels lie.

torch passes every tensor of a batch in a file of its own, through a socket, and both processes map it anew: for text
that takes several times as long as reading it.

    worker            collate -> Outbox     copy all tensors into the room that was used longest ago
    training process  Inbox -> batch        copy them out of it, and mark it as free

A room is memory of a worker that is sent until the training process knows it. The mark that it is free is not all that
keeps the two apart, which would need a memory barrier: a room rests until the worker has been asked for as many
batches as it may be ahead, each through a pipe, and all of that after the training process has copied what was in the
room, or has thrown it away unseen. A batch of `LARGE` bytes gets a room of its own and is not copied out.

A packed batch of images is hundreds of megabytes: that the system hands out so much memory anew, page by page, takes
as long as writing the pixels. They lie

    in the process that trains   float32, in memory that an earlier batch has left, if there is some
    page-locked                  float32
    in a worker process          shared memory: float32, or levels in 8 bits for `shown` to make pixels of
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data

from megaresume.batches.documents import DocumentReader, Images
from megaresume.stream.planning.plan import Plan

#: bytes that every tensor's place is a multiple of: a line of the cache.
ALIGN = 64
#: bytes from which a batch is not copied out of its room.
LARGE = 8 << 20
#: bytes at the beginning of a room: whether a batch waits in it, and whether the training process knows it.
_FULL, _KNOWN = 0, 1


class Place(NamedTuple):
    """Where a tensor lies in a room."""

    #: bytes.
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Bytes."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


class Parcel(NamedTuple):
    """A batch on its way."""

    #: process and number of a room that is used again; None: ``room`` belongs to this batch.
    key: tuple[int, int] | None
    #: uint8[n], in shared memory; None: the training process knows it.
    room: torch.Tensor | None
    #: bytes of the room that are used.
    end: int
    #: the batch, with places instead of tensors.
    contents: Any


class Outbox:
    """A ``collate_fn`` for worker processes, which packs what another one gives.

    Tensors are packed that lie on the CPU, in dicts, lists and tuples; everything else is sent as torch sends it.

    Args:
        collate_fn: gives a batch.
        ahead: batches that a worker may be ahead (``prefetch_factor``); None: never use a room again.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, ahead: int | None) -> None:
        self._collate_fn = collate_fn
        self._ahead = ahead
        #: (number, room), the one that was used longest ago first.
        self._rooms: deque[tuple[int, torch.Tensor]] = deque()

    def __call__(self, items: Any) -> Parcel:
        """Collate, and pack."""
        packed = _Packed()
        contents = packed.add(self._collate_fn(items))
        if self._ahead is None or packed.end >= LARGE:
            key, room = None, _shared(packed.end)
        else:
            number, room = self._room(packed.end, self._ahead)
            key = os.getpid(), number
        for place, tensor in packed.tensors.values():
            _view(room, place).copy_(tensor)
        room[_FULL] = 1
        return Parcel(key, None if room[_KNOWN] else room, packed.end, contents)

    def _room(self, size: int, ahead: int) -> tuple[int, torch.Tensor]:
        rests = len(self._rooms) > ahead
        if rests and not (self._rooms[0][1][_FULL] and self._rooms[0][1][_KNOWN]):
            number, room = self._rooms.popleft()
        else:
            number, room = len(self._rooms), torch.empty(0)
        if len(room) < size:
            room = _shared(size + size // 4)
        self._rooms.append((number, room))
        return number, room


class Inbox:
    """The training process's side.

    Args:
        pin_memory: put batches into page-locked memory, if there is a GPU.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        #: whether it does.
        self.pin_memory = pin_memory and getattr(torch, "accelerator", torch.cuda).is_available()
        self._rooms: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self) -> None:
        """Before workers begin anew: the batches that they have on their way will be thrown away."""
        for room in self._rooms.values():
            room[_FULL] = 0

    def unpack(self, parcel: Parcel) -> Any:
        """The batch that was packed. Its tensors share one piece of memory."""
        room = parcel.room
        if parcel.key is not None and room is not None:
            self._rooms[parcel.key] = room
            room[_KNOWN] = 1
        elif parcel.key is not None:
            room = self._rooms[parcel.key]
        assert room is not None
        if parcel.key is None and not self.pin_memory:
            return _unpacked(parcel.contents, room)
        copy = torch.empty(parcel.end, dtype=torch.uint8, pin_memory=self.pin_memory).copy_(room[: parcel.end])
        room[_FULL] = 0
        return _unpacked(parcel.contents, copy)


class _Packed:
    """The tensors of a batch, one after another."""

    def __init__(self) -> None:
        self.end = ALIGN
        #: by identity, so that one that is in a batch twice is so after it.
        self.tensors: dict[int, tuple[Place, torch.Tensor]] = {}

    def add(self, part: Any) -> Any:
        """A part of a batch, with places instead of tensors."""
        if type(part) is dict:
            return {key: self.add(value) for key, value in part.items()}
        if type(part) in (list, tuple):
            return type(part)(self.add(value) for value in part)
        if not _can_be_packed(part):
            return part
        if id(part) not in self.tensors:
            place = Place(-(-self.end // ALIGN) * ALIGN, part.dtype, tuple(part.shape))
            self.tensors[id(part)] = place, part
            self.end = place.end
        return self.tensors[id(part)][0]


def _can_be_packed(part: Any) -> bool:
    return (
        type(part) is torch.Tensor
        and part.layout is torch.strided
        and part.device.type == "cpu"
        and not part.requires_grad
        and not part.is_quantized
        # Otherwise it lies where the training process can read it.
        and not (part.nbytes >= LARGE and part.is_shared())  # type: ignore[no-untyped-call]
    )


def _unpacked(part: Any, room: torch.Tensor) -> Any:
    if type(part) is Place:
        return _view(room, part)
    if type(part) is dict:
        return {key: _unpacked(value, room) for key, value in part.items()}
    if type(part) in (list, tuple):
        return type(part)(_unpacked(value, room) for value in part)
    return part


def _shared(num_bytes: int) -> torch.Tensor:
    """uint8[n] in shared memory, as torch's own collation asks for it."""
    storage = torch.UntypedStorage._new_shared(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _view(room: torch.Tensor, place: Place) -> torch.Tensor:
    return room[place.offset : place.end].view(place.dtype).view(place.shape)


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
    return _shared(dtype.itemsize * math.prod(shape)).view(dtype).view(shape)
