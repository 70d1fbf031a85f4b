"""An image in 8 bits, resized and cut; the normalised pixels that it becomes; and where the batch will hold them.

    image --resized--> uint8[H, W, 4] --cut_patches--> levels uint8[k, 3, s] --normalize_levels--> float32[k, ...]

Resized and normalised bit for bit as the two back-ends of Hugging Face transformers do it:

    pillow        `...ImageProcessorPil`        resized by Pillow; (v / 255 - mean) / std
    torchvision   `...ImageProcessor`, the      resized by torch, antialiased; (v - 255 mean) / (255 std)
                  default of transformers 5

Both resize in 8 bits, but with weights of other precision, and Pillow some images first in height: values differ by up
to 7 of 255, most by none. Neither needs the library whose pixels it makes, nor depends on its version.

Levels are a quarter of the pixels, or an eighth where pixels show two equal frames. Between processes they travel in
their place (`megaresume.batches.loader`), and become the same pixels, bit for bit, in the one that trains.

Pixels are written where the batch will hold them, instead of copied there:

    batch     [ image 0 | image 1 | image 2 |   .   .   . ]      one array, rows enough for the tokens of the batch
                          ^ a processor asks `new_rows` for 3 rows, and gets the next ones

Without a room, or where it is full, a processor gets memory of its own, and the batch copies: nothing but time
depends on it. A packed batch is hundreds of megabytes, and copying it takes a quarter of the time of making it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megaresume.encoding.images.processor import Pixels
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Before, Items, Options, Within, refused

if TYPE_CHECKING:
    from PIL.Image import Image


Mean = Annotated[float, Within(-10, 10)]
Deviation = Annotated[float, Within(1e-6, 10)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics(Options):
    """Mean and standard deviation of red, green, blue, of values from 0 to 1."""

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
    """The normalised value of every channel and 8-bit value, float32[3, 256].

    Each operation rounds once, and NumPy contracts none with the next: the same bits on every machine.
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
        width, height: wanted, pixels.
        resampling: the filter.
        backend: whose pixels.
        square: of the resized image only a square of so many pixels an edge, cut from its centre.
    """
    old_width, old_height = image.size
    # Four bytes are how Pillow itself has a pixel: three would have to be picked out.
    values = np.frombuffer(image.tobytes("raw", "RGBX"), np.uint8).reshape(old_height, old_width, 4)
    narrow = backend == "torchvision"
    columns = None if width == old_width else weights_of(old_width, width, resampling, narrow=narrow)
    rows = None if height == old_height else weights_of(old_height, height, resampling, narrow=narrow)
    if square is not None:
        left, top = (width - square) // 2, (height - square) // 2
        values = values if columns else np.ascontiguousarray(values[:, left : left + square])
        values = values if rows else values[top : top + square]
        columns, rows = columns and columns.part(left, square), rows and rows.part(top, square)
    # As Pillow does since version 13: if the height shrinks by more than twice what the width does.
    rows_first = backend == "pillow" and old_height - height > max(0, 2 * (old_width - width))
    return resample(values, columns, rows, rows_first=rows_first)


def check_backend(backend: Backend, resample: Resampling) -> None:
    """Refuse what torch cannot do: it would be another filter under the same name.

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
        """`new_rows` takes from here, in this thread."""
        token = _ROOM.set(self)
        try:
            yield
        finally:
            _ROOM.reset(token)

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[Any] | None:
        """The next rows; None if there are too few, or they are shaped otherwise."""
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


def new_rows(shape: tuple[int, ...], dtype: type[np.float32] | type[np.uint8] = np.float32) -> npt.NDArray[Any]:
    """Pixels, or levels (uint8): C-contiguous, not initialised; of the room that is given, if it takes them, or new."""
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
    #: equal frames of one row of the pixels.
    frames: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of one row of the levels: (3, values of a channel)."""
        return 3, math.prod(self.pixel_shape) // (3 * self.frames)

    def new(self, count: int) -> npt.NDArray[np.uint8]:
        """Memory for levels: uint8[count, *shape], to be written."""
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
        """The answer of a processor: pixels, in the room that is given; or the levels, if it takes those."""
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
        values: uint8[H, W, 4], of which the fourth is left out.
        top, left: of the part that is cut, pixels.
        merge: patches along each axis whose places follow one another: m x m of them, row by row.
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


# Resizing, compiled: three to five times as fast as Pillow.
#
#     weights    of each row or column of the result: where its taps begin, how many, and integers for them
#     columns    uint8[h, w, 4] -> uint8[h, W, 4]    16 rows at a time, turned so that they lie beside each other
#     rows       uint8[h, W, 4] -> uint8[H, W, 4]
#
# Both libraries compute the same weights in double precision, after Pillow's ``Resample.c``, round them to integers,
# and round to 8 bits after columns and again after rows. Pillow's integers have 22 bits after the point, torch's as
# many as fit into 16 bits. Everything after the weights is arithmetic of integers, the same on every machine.


#: ``resample``: the filter that images are resized with.
Resampling = Literal["bicubic", "bilinear", "lanczos"]

#: half the width of each filter, in pixels of the smaller image.
_REACH = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
_NUMBERS = {"bilinear": 0, "bicubic": 1, "lanczos": 2}
#: bits after the point of Pillow's weights, and the most that torch takes.
_MOST_BITS = 22
#: rows that `_columns` resizes together: 64 bytes of one column.
_TOGETHER = 16
#: bytes of a row that `_rows` resizes together, so that their sums stay in the nearest cache.
_SPAN = 1024


class Weights(NamedTuple):
    """The weights of which each of n rows (or columns) is made."""

    #: int64[n]: the first row that it is made of.
    first: npt.NDArray[np.int64]
    #: int64[n]: how many rows it is made of.
    taps: npt.NDArray[np.int64]
    #: int32[n, most taps]: their weights; they sum to about 2^bits.
    weights: npt.NDArray[np.int32]
    bits: int

    def part(self, begin: int, count: int) -> Weights:
        """Only some of the rows."""
        cut = slice(begin, begin + count)
        return Weights(self.first[cut], self.taps[cut], self.weights[cut], self.bits)


@functools.lru_cache(maxsize=64)
def weights_of(size: int, new_size: int, resample: Resampling, *, narrow: bool) -> Weights:
    """The weights that resize ``size`` rows to ``new_size``.

    Args:
        size, new_size: pixels.
        resample: the filter.
        narrow: in 16 bits, as torch has them; otherwise as Pillow.
    """
    scale = size / new_size
    most = math.ceil(_REACH[resample] * max(scale, 1.0)) * 2 + 1
    first, taps = np.empty((2, new_size), np.int64)
    exact = np.zeros((new_size, most))
    _weigh(size, scale, _REACH[resample], _NUMBERS[resample], first, taps, exact)
    bits = _MOST_BITS
    if narrow:
        largest = float(exact.max())
        bits = next((b for b in range(_MOST_BITS) if int(0.5 + largest * (1 << (b + 1))) >= 1 << 15), _MOST_BITS)
    rounded = np.trunc(exact * (1 << bits) + np.where(exact < 0, -0.5, 0.5)).astype(np.int32)
    return Weights(first, taps, rounded, bits)


def resample(
    values: npt.NDArray[np.uint8], columns: Weights | None, rows: Weights | None, *, rows_first: bool
) -> npt.NDArray[np.uint8]:
    """Resize an image.

    Args:
        values: uint8[h, w, 4], C-contiguous.
        columns, rows: of the result; None: as they are.
        rows_first: which of the two comes first: it is rounded to 8 bits between them.

    Returns:
        uint8[H, W, 4], C-contiguous.
    """
    if rows is not None and rows_first:
        values = _with_rows(values, rows)
    if columns is not None:
        made = np.empty((len(values), len(columns.first)), np.uint32)
        _columns(values.view(np.uint32)[..., 0], *columns, made)
        values = made.view(np.uint8).reshape(*made.shape, 4)
    if rows is not None and not rows_first:
        values = _with_rows(values, rows)
    return values


def _with_rows(values: npt.NDArray[np.uint8], rows: Weights) -> npt.NDArray[np.uint8]:
    out = np.empty((len(rows.first), values.shape[1] * 4), np.uint8)
    _rows(values.reshape(len(values), -1), *rows, out)
    return out.reshape(len(out), -1, 4)


@compiled
def _weigh(size, scale, reach, number, first, taps, exact):  # type: ignore[no-untyped-def]
    """Weights in double precision; each operation in the order in which Pillow has it.

    Args:
        size: rows that there are.
        scale: rows that each new row stands for.
        reach, number: of the filter.
        first, taps: int64[n], written.
        exact: float64[n, most taps], zeros, written.
    """
    stretch = max(scale, 1.0)
    support, shrink = reach * stretch, 1.0 / stretch
    for i in range(first.size):
        center = (i + 0.5) * scale
        first[i] = max(int(center - support + 0.5), 0)
        taps[i] = min(int(center + support + 0.5), size) - first[i]
        total = 0.0
        for k in range(taps[i]):
            x = abs((k + first[i] - center + 0.5) * shrink)
            weight = 0.0
            if number == 0 and x < 1.0:
                weight = 1.0 - x
            elif number == 1 and x < 1.0:
                weight = (1.5 * x - 2.5) * x * x + 1
            elif number == 1 and x < 2.0:
                weight = (((x - 5) * x + 8) * x - 4) * -0.5
            elif number == 2 and x == 0.0:
                weight = 1.0
            elif number == 2 and x < 3.0:
                whole, third = x * math.pi, x / 3 * math.pi
                weight = math.sin(whole) / whole * (math.sin(third) / third)
            exact[i, k] = weight
            total += weight
        for k in range(taps[i]):
            if total != 0.0:
                exact[i, k] /= total


@compiled
def _columns(values, first, taps, weights, bits, out):  # type: ignore[no-untyped-def]
    """Resize each row; in groups of rows, so that one weight meets 64 bytes that lie beside each other.

    Args:
        values: uint32[h, w]: four bytes a pixel.
        first, taps, weights, bits: as `Weights` has them, of W columns.
        out: uint32[h, W], written.
    """
    height, width = values.shape
    turned = np.zeros((width, _TOGETHER), np.uint32)
    flat = turned.view(np.uint8).reshape(-1)
    pixels = np.empty(_TOGETHER, np.uint32)
    made = pixels.view(np.uint8)
    sums = np.empty(64, np.int32)
    half = np.int32(1 << (bits - 1))
    for top in range(0, height, _TOGETHER):
        together = min(_TOGETHER, height - top)
        for left in range(0, width, _TOGETHER):
            for y in range(together):
                row = values[top + y, left : left + _TOGETHER]
                for x in range(row.size):
                    turned[left + x, y] = row[x]
        for column in range(first.size):
            begin, num, weight = first[column] * 64, taps[column], weights[column]
            if num == 4:  # nearly all columns, if the width changes little: no sum leaves its register
                part = flat[begin : begin + 256]
                w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
                for j in range(64):
                    near = w0 * np.int32(part[j]) + w1 * np.int32(part[j + 64])
                    far = w2 * np.int32(part[j + 128]) + w3 * np.int32(part[j + 192])
                    made[j] = min(max(np.int32(half + near + far) >> bits, 0), 255)
            else:
                for j in range(64):
                    sums[j] = half
                for k in range(0, num - 3, 4):  # four at a time: their sums are read and written once
                    part = flat[begin + k * 64 : begin + k * 64 + 256]
                    w0, w1, w2, w3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
                    for j in range(64):
                        near = w0 * np.int32(part[j]) + w1 * np.int32(part[j + 64])
                        far = w2 * np.int32(part[j + 128]) + w3 * np.int32(part[j + 192])
                        sums[j] += near + far
                for k in range(num // 4 * 4, num):
                    part, w0 = flat[begin + k * 64 : begin + k * 64 + 64], weight[k]
                    for j in range(64):
                        sums[j] += w0 * np.int32(part[j])
                for j in range(64):
                    made[j] = min(max(sums[j] >> bits, 0), 255)
            for y in range(together):
                out[top + y, column] = pixels[y]


@compiled
def _rows(values, first, taps, weights, bits, out):  # type: ignore[no-untyped-def]
    """Resize each column.

    Args:
        values: uint8[h, n].
        first, taps, weights, bits: as `Weights` has them, of H rows.
        out: uint8[H, n], written.
    """
    sums = np.empty(_SPAN, np.int32)
    for row in range(first.size):
        for begin in range(0, values.shape[1], _SPAN):
            made = out[row, begin : begin + _SPAN]
            for j in range(made.size):
                sums[j] = 1 << (bits - 1)
            for k in range(taps[row]):
                weight = weights[row, k]
                part = values[first[row] + k, begin : begin + _SPAN]
                for j in range(made.size):
                    sums[j] += weight * np.int32(part[j])
            for j in range(made.size):
                made[j] = min(max(sums[j] >> bits, 0), 255)
