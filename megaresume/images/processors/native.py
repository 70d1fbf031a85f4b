"""Processor ``native``: an image keeps about its size; the number of patches follows (Qwen2-VL and its successors).

    W x H --smart_resize--> edges that are multiples of P * merge, min_pixels to max_pixels
          --> patches, merge x merge neighbours together:    1 2 | 5 6
                                                             3 4 | 7 8
          --> [rows * columns, 3 * T * P * P], grid (1, rows, columns)  -->  rows * columns / merge^2 tokens

After `Qwen2VLImageProcessor` of Hugging Face transformers; a still image fills all T frames of its patches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

import numpy as np

from megaresume.images.processors.base import Grid, Pixels
from megaresume.images.processors.pixels import (
    CLIP,
    Backend,
    Levels,
    Normalize,
    check_backend,
    cut_patches,
    new_levels,
    resized,
)
from megaresume.images.processors.resample import Resampling
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.schema import Options, Within

if TYPE_CHECKING:
    from PIL.Image import Image

#: largest ratio of the longer edge to the shorter one, as in the original.
_MAX_RATIO = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Native(Options):
    """Patches by size. The defaults are those published with Qwen2-VL: 4 to 16384 tokens an image.

    Raises:
        ConfigError: ``min_pixels`` is larger than ``max_pixels``, or ``max_pixels`` less than one token.
    """

    kind: ClassVar[str] = "native"

    #: edge of a patch, pixels.
    patch_size: Annotated[int, Within(1, 1024)] = 14
    #: patches along each axis that become one token.
    merge: Annotated[int, Within(1, 64)] = 2
    #: frames in a patch.
    temporal_patch_size: Annotated[int, Within(1, 64)] = 2
    #: of the resized image.
    min_pixels: Annotated[int, Within(1, 2**31)] = 56 * 56
    max_pixels: Annotated[int, Within(1, 2**31)] = 28 * 28 * 16384
    #: bicubic, bilinear or lanczos.
    resample: Resampling = "bicubic"
    normalize: Normalize = CLIP
    #: whose pixels: pillow or torchvision (`megaresume.images.processors.pixels`).
    backend: Backend = "pillow"

    def __post_init__(self) -> None:
        check_backend(self.backend, self.resample)
        token = (self.patch_size * self.merge) ** 2
        if not max(self.min_pixels, token) <= self.max_pixels:
            raise ConfigError(
                "the sizes of images leave no room",
                found=f"min_pixels {self.min_pixels}, max_pixels {self.max_pixels}, {token} pixels a token",
                expected=f"min_pixels <= max_pixels, and max_pixels at least {token}",
                action="correct processor.min_pixels or processor.max_pixels",
            )

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """(3 * temporal_patch_size * patch_size^2,)."""
        return (3 * self.temporal_patch_size * self.patch_size**2,)

    @property
    def levels(self) -> Levels:
        """How 8-bit values become the pixels."""
        return Levels(self.normalize, self.backend, self.pixel_shape, self.temporal_patch_size)

    def num_tokens(self, width: int, height: int) -> int:
        """Of the resized image. Raises CorpusError for an image more than 200 times as long as wide."""
        width, height = self.target(width, height)
        return (width // (self.patch_size * self.merge)) * (height // (self.patch_size * self.merge))

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """Of the grid of patches."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def most_rows(self, num_tokens: int) -> int:
        """Patches of as many tokens."""
        return num_tokens * self.merge**2

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """float32[rows * columns, 3 * T * P * P], and (1, rows, columns) of patches. Draws nothing."""
        width, height = self.target(*image.size)
        rows, columns = height // self.patch_size, width // self.patch_size
        levels = new_levels((rows * columns, *self.levels.shape))
        values = resized(image, width, height, self.resample, self.backend)
        cut_patches(values, 0, 0, self.merge, levels.reshape(rows, columns, 3, self.patch_size, self.patch_size))
        return self.levels.answer(levels), (1, rows, columns)

    def target(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) that an image of this size is resized to: `smart_resize` of the original.

        Raises:
            CorpusError: an image more than 200 times as long as wide.
        """
        if max(width, height) / min(width, height) > _MAX_RATIO:
            raise CorpusError(
                "an image too narrow for its length",
                found=f"{width} x {height} pixels",
                expected=f"at most {_MAX_RATIO} times as long as wide",
                action="see on_fault, or leave the record out",
            )
        factor = self.patch_size * self.merge
        new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt((height * width) / self.max_pixels)
            new_height = max(factor, math.floor(height / shrink / factor) * factor)
            new_width = max(factor, math.floor(width / shrink / factor) * factor)
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height = math.ceil(height * grow / factor) * factor
            new_width = math.ceil(width * grow / factor) * factor
        return new_width, new_height
