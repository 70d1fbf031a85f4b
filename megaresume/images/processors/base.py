"""What an image processor promises, and the compiled loop that all of them share.

    PIL image, RGB, W x H  --processor-->  float32[k, ...] normalised, (frames, rows, columns)
    W, H                   --num_tokens->  tokens that the image takes in the sequence

A processor is a declared, stateless function of (image, generator): `megaresume.images.checks` holds it
to that when an encoder is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from megaresume.stream.compiled import compiled

if TYPE_CHECKING:
    from PIL.Image import Image


@compiled
def fill_patches(values, top, left, table, merge, out):  # type: ignore[no-untyped-def]
    """Cut patches from an image, normalised.

    Args:
        values: uint8[H, W, 3].
        top, left: of the part that is cut, pixels.
        table: float32[3, 256]: the normalised value of each channel and pixel value.
        merge: patches along each axis whose places follow one another: m x m of them, row by row.
        out: float32[rows, columns, 3, T, P, P], written; all T frames are the same.
    """
    num_rows, num_columns, num_channels, num_frames, size, _ = out.shape
    flat = out.reshape(num_rows * num_columns, num_channels, num_frames, size, size)
    groups = num_columns // merge
    for k in range(num_rows * num_columns):
        group, inside = k // (merge * merge), k % (merge * merge)
        y0 = top + (group // groups * merge + inside // merge) * size
        x0 = left + (group % groups * merge + inside % merge) * size
        for channel in range(num_channels):
            for y in range(size):
                for x in range(size):
                    flat[k, channel, 0, y, x] = table[channel, values[y0 + y, x0 + x, channel]]
            for frame in range(1, num_frames):
                flat[k, channel, frame] = flat[k, channel, 0]


Pixels = npt.NDArray[np.float32]
#: (frames, rows, columns) of patches; of tiles for tiled processors.
Grid = tuple[int, int, int]


class Processor(Protocol):
    """Picklable and without state; every random draw comes from the generator given."""

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of one row of the pixels: (3, H, W) of a tile, or (3 * T * P * P,) of a patch."""
        ...

    def num_tokens(self, width: int, height: int) -> int:
        """Tokens of an image of this size. Raises CorpusError for a size that it cannot take."""
        ...

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """Tokens that the vision model makes of this output: the other side of `num_tokens`."""
        ...

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """float32[k, *pixel_shape], C-contiguous, and the grid of an RGB image."""
        ...
