"""Passes a batch from a worker process to the training process in one piece of shared memory.

torch passes each tensor of a batch in a file of its own, through a socket, and both processes map it again: for text,
that takes several times as long as reading it.

    worker            collate -> Outbox     copy all tensors into the room used longest ago
    training process  Inbox -> batch        copy them out, and mark the room as free

A room is memory of a worker; it is sent until the training process knows it. The free mark alone would need a memory
barrier. So a room also rests until the worker was asked for as many batches as it may be ahead, each through a pipe:
by then the training process has copied the room's content, or discarded it unread. A batch of `LARGE` bytes gets a
room of its own and is not copied out.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

#: alignment of tensors in bytes: a cache line.
ALIGN = 64
#: bytes from which a batch is not copied out of its room.
LARGE = 8 << 20
#: bytes at the beginning of a room: whether a batch waits in it, and whether the training process knows it.
_FULL, _KNOWN = 0, 1


class TensorPlace(NamedTuple):
    """The place of a tensor in a room."""

    #: where the tensor begins, in bytes.
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """Where the tensor ends, in bytes."""
        return self.offset + self.dtype.itemsize * math.prod(self.shape)


class Parcel(NamedTuple):
    """A batch on its way."""

    #: process and number of a reused room; None: ``room`` belongs to this batch alone.
    key: tuple[int, int] | None
    #: uint8[n], in shared memory; None if the training process knows it.
    room: torch.Tensor | None
    #: bytes of the room that are used.
    end: int
    #: the batch, with places instead of tensors.
    contents: Any


class Outbox:
    """A ``collate_fn`` for worker processes, which packs the result of another one.

    Packs CPU tensors in dicts, lists and tuples; everything else is sent as torch sends it.

    Args:
        collate_fn: gives a batch.
        ahead: batches that a worker may be ahead (``prefetch_factor``); None: never reuse a room.
    """

    def __init__(self, collate_fn: Callable[[Any], Any], *, ahead: int | None) -> None:
        self._collate_fn = collate_fn
        self._ahead = ahead
        #: (number, room), the one used longest ago first.
        self._rooms: deque[tuple[int, torch.Tensor]] = deque()

    def __call__(self, items: Any) -> Parcel:
        """Collate items, and pack the batch."""
        packed = _Packed()
        contents = packed.add(self._collate_fn(items))
        if self._ahead is None or packed.end >= LARGE:
            key, room = None, shared_memory(packed.end)
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
            room = shared_memory(size + size // 4)
        self._rooms.append((number, room))
        return number, room


class Inbox:
    """The training process's side.

    Args:
        pin_memory: put batches into page-locked memory, if there is a GPU.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        #: whether batches are copied to page-locked memory.
        self.pin_memory = pin_memory and getattr(torch, "accelerator", torch.cuda).is_available()
        self._rooms: dict[tuple[int, int], torch.Tensor] = {}

    def begin(self) -> None:
        """Note that workers were restarted: batches on their way will be discarded."""
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
        #: the tensors by identity, so that one that occurs twice is packed once.
        self.tensors: dict[int, tuple[TensorPlace, torch.Tensor]] = {}

    def add(self, part: Any) -> Any:
        """A part of a batch, with places instead of tensors."""
        if type(part) is dict:
            return {key: self.add(value) for key, value in part.items()}
        if type(part) in (list, tuple):
            return type(part)(self.add(value) for value in part)
        if not _can_be_packed(part):
            return part
        if id(part) not in self.tensors:
            place = TensorPlace(-(-self.end // ALIGN) * ALIGN, part.dtype, tuple(part.shape))
            self.tensors[id(part)] = place, part
            self.end = place.end
        return self.tensors[id(part)][0]


def _can_be_packed(part: Any) -> bool:
    return (
        type(part) is torch.Tensor
        and part.layout is torch.strided
        and part.is_cpu
        and not part.requires_grad
        and not part.is_quantized
        # Otherwise it is already in memory that the training process can read.
        and not (part.nbytes >= LARGE and part.is_shared())  # type: ignore[no-untyped-call]
    )


def _unpacked(part: Any, room: torch.Tensor) -> Any:
    if type(part) is TensorPlace:
        return _view(room, part)
    if type(part) is dict:
        return {key: _unpacked(value, room) for key, value in part.items()}
    if type(part) in (list, tuple):
        return type(part)(_unpacked(value, room) for value in part)
    return part


def _view(room: torch.Tensor, place: TensorPlace) -> torch.Tensor:
    return room[place.offset : place.end].view(place.dtype).view(place.shape)


def shared_memory(num_bytes: int) -> torch.Tensor:
    """A block of shared memory, uint8[n], allocated as torch's own collation does."""
    storage = torch.UntypedStorage._new_shared(num_bytes, device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.uint8).set_(storage)
