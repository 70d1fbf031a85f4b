"""What an image processor promises.

    PIL image, RGB, W x H  --processor-->  float32[k, ...] normalised, (frames, rows, columns)
    W, H                   --num_tokens->  tokens that the image takes in the sequence

A processor is a declared, stateless function of (image, generator): `megaresume.images.checks` holds it
to that when an encoder is built.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL.Image import Image


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
