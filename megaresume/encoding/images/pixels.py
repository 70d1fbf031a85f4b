"""Resizes and cuts an image in 8 bits, normalises it to pixels, and writes these directly into the batch.

    image --resized--> uint8[H, W, 4] --cut_patches--> levels uint8[k, 3, s] --normalize_levels--> float32[k, ...]

Resized and normalised bit for bit as the two back-ends of Hugging Face transformers do:

    pillow        `...ImageProcessorPil`        resized by Pillow; (v / 255 - mean) / std
    torchvision   `...ImageProcessor`, the      resized by torch, antialiased; (v - 255 mean) / (255 std)
                  default of transformers 5

Both resize in 8 bits, but with weights of different precision, and Pillow resizes some images in height first: values
differ by up to 7 of 255, most not at all. Neither needs the library that it reproduces, nor depends on its version.

Levels take a quarter of the memory of pixels, or an eighth if pixels have two equal frames. Processes exchange them
instead (`megaresume.batches.loader`), and the training process turns them into the same pixels, bit for bit.

Pixels are written to their place in the batch instead of being copied there:

    batch     [ image 0 | image 1 | image 2 |   .   .   . ]      one array, with enough rows for the tokens of the batch
                          ^ a processor asks `new_rows` for 3 rows, and gets the next ones

Without a room, or if it is full, a processor gets new memory, and the batch copies: only the time differs. A packed
batch is hundreds of megabytes, and copying it takes a quarter of the time of making it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt

from megaresume.encoding.images.processor import Pixels
from megaresume.encoding.images.resampling import Resampling, resample, weights_of
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Before, Items, Options, Within, refused

if TYPE_CHECKING:
    from PIL.Image import Image


Mean = Annotated[float, Within(-10, 10)]
Deviation = Annotated[float, Within(1e-6, 10)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics(Options):
    """Mean and standard deviation of red, green and blue, for values from 0 to 1."""

    mean: Annotated[tuple[Mean, Mean, Mean], Items()] = (0.5, 0.5, 0.5)
    std: Annotated[tuple[Deviation, Deviation, Deviation], Items()] = (0.5, 0.5, 0.5)


#: The statistics that published vision encoders were trained with.
CLIP = Statistics(mean=(0.48145466, 0.4578275, 0.40821073), std=(0.26862954, 0.26130258, 0.27577711))
IMAGENET = Statistics(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
STATISTICS = {
    "clip": CLIP,
    "imagenet": IMAGENET,
    "siglip": Statistics(),
    "none": Statistics(mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0)),
}


def _statistics(value: Any) -> Any:
    if isinstance(value, str) and value not in STATISTICS:
        raise refused(expected=f"one of {', '.join(STATISTICS)}, or mean and std")
    return STATISTICS.get(value) if isinstance(value, str) else value


#: ``normalize``: a name in `STATISTICS`, or {mean: [r, g, b], std: [r, g, b]}.
Normalize = Annotated[Statistics, Before(_statistics)]


#: The library whose pixels are reproduced: ``backend``.
Backend = Literal["pillow", "torchvision"]


@functools.lru_cache(maxsize=16)
def normalized(by: Statistics, backend: Backend) -> npt.NDArray[np.float32]:
    """The normalised value for each channel and 8-bit value, float32[3, 256].

    Each operation rounds once, and NumPy does not fuse operations: the same bits on every machine.
    """
    mean, std = np.array(by.mean, np.float32)[:, None], np.array(by.std, np.float32)[:, None]
    values = np.arange(256, dtype=np.float32)
    if backend == "pillow":
        values = (values.astype(np.float64) * (1 / 255)).astype(np.float32)
        pillow: npt.NDArray[np.float32] = (values - mean) / std
        return pillow
    if not any(by.mean) and set(by.std) == {1.0}:
        return np.tile(values * np.float32(1 / 255), (3, 1))  # rescaled, not normalised
    scale = np.float32(1 / (1 / 255))
    torchvision: npt.NDArray[np.float32] = (values - mean * scale) / (std * scale)
    return torchvision


def resized(
    image: Image, width: int, height: int, resampling: Resampling, backend: Backend, *, square: int | None = None
) -> npt.NDArray[np.uint8]:
    """The RGB image, antialiased, as uint8[height, width, 4]; the fourth byte of a pixel is unused.

    Args:
        image: of any size.
        width, height: of the result, in pixels.
        resampling: the filter.
        backend: the library to reproduce.
        square: only return a square with edges of this many pixels, cut from the centre of the resized image.
    """
    old_width, old_height = image.size
    # Four bytes, as in Pillow's memory: three would have to be picked out.
    values = np.frombuffer(image.tobytes("raw", "RGBX"), np.uint8).reshape(old_height, old_width, 4)
    narrow = backend == "torchvision"
    columns = None if width == old_width else weights_of(old_width, width, resampling, narrow=narrow)
    rows = None if height == old_height else weights_of(old_height, height, resampling, narrow=narrow)
    if square is not None:
        left, top = (width - square) // 2, (height - square) // 2
        values = values if columns else np.ascontiguousarray(values[:, left : left + square])
        values = values if rows else values[top : top + square]
        columns, rows = columns and columns.part(left, square), rows and rows.part(top, square)
    # As Pillow since version 13: if the height shrinks by more than twice what the width does.
    rows_first = backend == "pillow" and old_height - height > max(0, 2 * (old_width - width))
    return resample(values, columns, rows, rows_first=rows_first)


def check_backend(backend: Backend, resample: Resampling) -> None:
    """Refuse a filter that torch lacks: under the same name, it would have to be another one.

    Raises:
        ConfigError: ``lanczos`` with ``torchvision``.
    """
    if backend == "torchvision" and resample == "lanczos":
        raise ConfigError(
            "torch does not resize with this filter",
            found="resample: lanczos, backend: torchvision",
            expected="bicubic or bilinear",
            action="correct processor.resample, or backend: pillow",
        )


class Room:
    """Rows to be filled in order.

    Args:
        rows: float32[n, ...] for pixels or uint8[n, ...] for levels, C-contiguous.
    """

    def __init__(self, rows: npt.NDArray[Any]) -> None:
        self._rows = rows
        self.takes_levels = rows.dtype == np.uint8
        self._used = 0

    @contextmanager
    def given(self) -> Iterator[None]:
        """Make `new_rows` take rows from this room, in this thread."""
        token = _ROOM.set(self)
        try:
            yield
        finally:
            _ROOM.reset(token)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        """The next rows; None if there are too few, or they have another shape."""
        end = self._used + shape[0]
        if shape[1:] != self._rows.shape[1:] or end > len(self._rows):
            return None
        rows = self._rows[self._used : end]
        self._used = end
        return rows

    def holds(self, parts: Sequence[npt.NDArray[Any]]) -> bool:
        """Whether these, one after another, are all that was taken; false if a document was dropped half done."""
        place = self._rows.ctypes.data
        for part in parts:
            if part.ctypes.data != place:
                return False
            place += part.nbytes
        return place == self._rows.ctypes.data + self._rows[: self._used].nbytes


_ROOM: ContextVar[Room | None] = ContextVar("megaresume_room", default=None)


def new_rows(shape: tuple[int, ...], dtype: type[np.float32] | type[np.uint8] = np.float32) -> npt.NDArray[Any]:
    """Pixels, or levels (uint8): C-contiguous, uninitialised; from the current room if they fit, or new memory."""
    room = _ROOM.get()
    taken = room.take(shape) if room is not None and room.takes_levels == (dtype is np.uint8) else None
    return np.empty(shape, dtype) if taken is None else taken


@dataclass(frozen=True, slots=True)
class Levels:
    """The map from levels to pixels."""

    normalize: Statistics
    backend: Backend
    #: the shape of one row of the pixels.
    pixel_shape: tuple[int, ...]
    #: equal frames in one row of the pixels.
    frames: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one row of the levels: (3, values of a channel)."""
        return 3, math.prod(self.pixel_shape) // (3 * self.frames)

    def new(self, count: int) -> npt.NDArray[np.uint8]:
        """Uninitialised memory for levels: uint8[count, *shape]."""
        return new_rows((count, *self.shape), np.uint8)

    def fill(self, levels: npt.NDArray[np.uint8], out: Pixels) -> None:
        """Write normalised pixels.

        Args:
            levels: uint8[k, *shape].
            out: float32[k, *pixel_shape], C-contiguous, written.
        """
        channels, size = self.shape
        table = normalized(self.normalize, self.backend)
        normalize_levels(levels, table, out.reshape(len(levels), channels, self.frames, size))

    def answer(self, levels: npt.NDArray[np.uint8]) -> Pixels:
        """The result of a processor: pixels, from the current room if possible; or levels, if the caller takes them."""
        room = _ROOM.get()
        if room is not None and room.takes_levels:
            return levels  # type: ignore[return-value]
        pixels = new_rows((len(levels), *self.pixel_shape))
        self.fill(levels, pixels)
        return pixels


@compiled
def cut_patches(values, top, left, merge, out):  # type: ignore[no-untyped-def]
    """Cut patches from an image.

    Args:
        values: uint8[H, W, 4]; the fourth is ignored.
        top, left: of the part to cut, in pixels.
        merge: m x m neighbouring patches are adjacent in the output, row by row.
        out: uint8[rows, columns, 3, P, P], written.
    """
    num_rows, num_columns, _, size, _ = out.shape
    flat = out.reshape(num_rows * num_columns, 3, size, size)
    groups = num_columns // merge
    for k in range(num_rows * num_columns):
        group, inside = k // (merge * merge), k % (merge * merge)
        y0 = top + (group // groups * merge + inside // merge) * size
        x0 = left + (group % groups * merge + inside % merge) * size
        for y in range(size):
            pixels = values[y0 + y, x0 : x0 + size]
            red, green, blue = flat[k, 0, y], flat[k, 1, y], flat[k, 2, y]
            for x in range(size):
                red[x], green[x], blue[x] = pixels[x, 0], pixels[x, 1], pixels[x, 2]


@compiled
def normalize_levels(levels, table, out):  # type: ignore[no-untyped-def]
    """Write normalised pixels.

    Args:
        levels: uint8[n, 3, s].
        table: float32[3, 256]: the normalised value of each channel and level.
        out: float32[n, 3, T, s], written; all T frames are the same.
    """
    num, num_channels, num_frames, size = out.shape
    for k in range(num):
        for channel in range(num_channels):
            from_levels, by_level, first = levels[k, channel], table[channel], out[k, channel, 0]
            for i in range(size):
                first[i] = by_level[from_levels[i]]
            for frame in range(1, num_frames):
                other = out[k, channel, frame]
                for i in range(size):
                    other[i] = first[i]
