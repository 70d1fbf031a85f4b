"""Levels: an image in 8 bits, cut and in the order of its pixels; and the normalised pixels that they become.

    image --resized--> uint8[H, W, 4] --cut_patches--> levels uint8[k, 3, s] --normalize_levels--> float32[k, ...]

Levels are a quarter of the pixels, or an eighth where pixels show two equal frames. Between processes they travel in
their place (`megaresume.batches.loader`), and become the same pixels, bit for bit, in the one that trains.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaresume.images.processors.backends import Backend, normalized
from megaresume.images.processors.base import Pixels
from megaresume.images.processors.statistics import Statistics
from megaresume.images.room import new_pixels, takes_levels
from megaresume.stream.compiled import compiled


@dataclass(frozen=True, slots=True)
class Levels:
    """How levels become pixels."""

    normalize: Statistics
    backend: Backend
    #: of one row of the pixels.
    pixel_shape: tuple[int, ...]
    #: equal frames of one row of the pixels.
    frames: int = 1

    @property
    def shape(self) -> tuple[int, int]:
        """Of one row of the levels: (3, values of a channel)."""
        return 3, math.prod(self.pixel_shape) // (3 * self.frames)

    def fill(self, levels: npt.NDArray[np.uint8], out: Pixels) -> None:
        """Normalise.

        Args:
            levels: uint8[k, *shape].
            out: float32[k, *pixel_shape], C-contiguous, written.
        """
        channels, size = self.shape
        table = normalized(self.normalize, self.backend)
        normalize_levels(levels, table, out.reshape(len(levels), channels, self.frames, size))

    def answer(self, levels: npt.NDArray[np.uint8]) -> Pixels:
        """What a processor returns: pixels, in the room that is given; or the levels, if they are what it takes."""
        if takes_levels():
            return levels  # type: ignore[return-value]
        pixels = new_pixels((len(levels), *self.pixel_shape))
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
    """Normalise.

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
