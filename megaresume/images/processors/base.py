"""What an image processor promises, and the arithmetic that all of them share.

    PIL image, RGB, W x H  --processor-->  float32[k, ...] normalised, (frames, rows, columns)
    W, H                   --num_tokens->  tokens that the image takes in the sequence

A processor is a declared, stateless function of (image, generator): `megaresume.images.checks` holds it
to that when an encoder is built.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

from megaresume.stream.compiled import compiled
from megaresume.stream.schema import Items, Options, Within, refused

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


Mean = Annotated[float, Within(-10, 10)]
Deviation = Annotated[float, Within(1e-6, 10)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics(Options):
    """Mean and standard deviation of red, green, blue, of values from 0 to 1."""

    mean: Annotated[tuple[Mean, Mean, Mean], Items()] = (0.5, 0.5, 0.5)
    std: Annotated[tuple[Deviation, Deviation, Deviation], Items()] = (0.5, 0.5, 0.5)


#: what published vision encoders were trained with.
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
Normalize = Annotated[Statistics, BeforeValidator(_statistics)]
#: ``resample``: the filter that images are resized with.
Resampling = Literal["bicubic", "bilinear", "lanczos"]


@functools.lru_cache(maxsize=16)
def normalized(by: Statistics) -> Pixels:
    """(value / 255 - mean) / std of every channel and 8-bit value, as one multiplication and one subtraction: [3, 256].

    Rounded once from float64, then computed in float32 by NumPy, which contracts no multiplication and subtraction:
    the same bits on every machine.
    """
    table = np.empty((3, 256), np.float32)
    for channel in range(3):
        table[channel] = np.arange(256)
        table[channel] *= np.float32(1 / (255 * by.std[channel]))
        table[channel] -= np.float32(by.mean[channel] / by.std[channel])
    return table


def resized(image: Image, width: int, height: int, resample: str) -> Image:
    """Resized by Pillow, antialiased, in 8 bits, as the originals do it; the image itself if it has the size."""
    from PIL.Image import Resampling

    return image if image.size == (width, height) else image.resize((width, height), Resampling[resample.upper()])
