"""Processor ``tiles``: an image becomes as many squares as its shape asks for, and a small picture of the whole.

    W x H --> columns x rows of tiles, closest in shape, min_tiles to max_tiles
          --> resized to (columns * S, rows * S), cut:      1 2 3
                                                            4 5 6   + thumbnail, if there is more than one tile
          --> [k, 3, S, S]  -->  k * ((S / P / merge)^2 + extra_tokens) tokens

After InternVL's `dynamic_preprocess` (github.com/OpenGVLab/InternVL, internvl_chat/internvl/train/dataset.py), as
Hugging Face's `GotOcr2ImageProcessor` and Megatron-LM's NVLM (examples/multimodal/image_processing.py) have it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np

from megaresume.images.processors.base import Grid, Pixels
from megaresume.images.processors.pixels import (
    IMAGENET,
    Backend,
    Levels,
    Normalize,
    check_backend,
    cut_patches,
    new_levels,
    resized,
)
from megaresume.images.processors.resample import Resampling
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Options, Truth, Within

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Options):
    """Tiles by shape. The defaults are InternVL's: 256 tokens a tile, 1 to 12 tiles and a thumbnail.

    Raises:
        ConfigError: ``tile_size`` is no multiple of ``patch_size * merge``, or more tiles at least than at most.
    """

    kind: ClassVar[str] = "tiles"

    #: edge of a tile, pixels.
    tile_size: Annotated[int, Within(1, 8192)] = 448
    #: edge of a patch, pixels.
    patch_size: Annotated[int, Within(1, 1024)] = 14
    #: patches along each axis that become one token (pixel shuffle, scale 1 / merge).
    merge: Annotated[int, Within(1, 64)] = 2
    #: without the thumbnail.
    min_tiles: Annotated[int, Within(1, 1000)] = 1
    max_tiles: Annotated[int, Within(1, 1000)] = 12
    #: the whole image once more, as one tile, after the others; not for an image of one tile.
    thumbnail: Truth = True
    #: which shape is closest: by ``ratio`` of the edges (InternVL), or with the ``area`` weighted in (Megatron-LM's
    #: ``--use-area-weighted-aspect-ratio``).
    closest: Literal["ratio", "area"] = "ratio"
    #: further tokens that the model makes of each tile (class tokens, tile tags of NVLM).
    extra_tokens: Annotated[int, Within(0, 64)] = 0
    #: bicubic, bilinear or lanczos.
    resample: Resampling = "bicubic"
    normalize: Normalize = IMAGENET
    #: whose pixels: pillow or torchvision (`megaresume.images.processors.pixels`).
    backend: Backend = "pillow"

    def __post_init__(self) -> None:
        check_backend(self.backend, self.resample)
        unit = self.patch_size * self.merge
        if self.tile_size % unit:
            raise ConfigError(
                "the size of a tile is not a multiple of its patches",
                found=f"tile_size {self.tile_size}, patch_size {self.patch_size}, merge {self.merge}",
                expected=f"a multiple of {unit}, such as {max(1, round(self.tile_size / unit)) * unit}",
                action="correct processor.tile_size",
            )
        if self.min_tiles > self.max_tiles:
            raise ConfigError(
                "an image cannot have so many tiles",
                found=f"min_tiles {self.min_tiles}, max_tiles {self.max_tiles}",
                expected="at least as many at most as at least",
                action="correct processor.min_tiles or processor.max_tiles",
            )

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """(3, tile_size, tile_size)."""
        return (3, self.tile_size, self.tile_size)

    @property
    def levels(self) -> Levels:
        """How 8-bit values become the pixels."""
        return Levels(self.normalize, self.backend, self.pixel_shape)

    @property
    def tokens_per_tile(self) -> int:
        """Tokens of each tile, the thumbnail too."""
        return (self.tile_size // (self.patch_size * self.merge)) ** 2 + self.extra_tokens

    def num_tokens(self, width: int, height: int) -> int:
        """Tiles of the closest shape, and the thumbnail."""
        columns, rows = self.shape(width, height)
        return (columns * rows + self._thumbnails(columns * rows)) * self.tokens_per_tile

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """Of the tiles that there are."""
        return len(pixels) * self.tokens_per_tile

    def most_rows(self, num_tokens: int) -> int:
        """Tiles of as many tokens."""
        return num_tokens // self.tokens_per_tile

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """float32[k, 3, S, S], tiles row by row, thumbnail last; and (1, rows, columns) of tiles. Draws nothing."""
        size = self.tile_size
        columns, rows = self.shape(*image.size)
        tiles = columns * rows
        thumbnails = self._thumbnails(tiles)
        levels = new_levels((tiles + thumbnails, *self.levels.shape))
        squares = levels.reshape(-1, 1, 1, *self.pixel_shape)
        whole = resized(image, columns * size, rows * size, self.resample, self.backend)
        for number in range(tiles):
            cut_patches(whole, number // columns * size, number % columns * size, 1, squares[number])
        if thumbnails:
            cut_patches(resized(image, size, size, self.resample, self.backend), 0, 0, 1, squares[tiles])
        return self.levels.answer(levels), (1, rows, columns)

    def shape(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of tiles of an image of this size."""
        return self._by_ratio(width, height) if self.closest == "ratio" else self._by_area(width, height)

    def _by_ratio(self, width: int, height: int) -> tuple[int, int]:
        ratio, area = width / height, width * height
        best, least = (1, 1), float("inf")
        for columns, rows in _shapes(self.min_tiles, self.max_tiles):
            difference = abs(ratio - columns / rows)
            # Of shapes equally close the one with more tiles, as long as they are not mostly enlargement.
            larger = difference == least and area > 0.5 * self.tile_size * self.tile_size * columns * rows
            if difference < least or larger:
                best, least = (columns, rows), difference
        return best

    def _by_area(self, width: int, height: int) -> tuple[int, int]:
        ratio, area = width / height, width * height
        best, most = (1, 1), float("-inf")
        for columns, rows in _shapes(self.min_tiles, self.max_tiles):
            target = columns / rows
            covered = min((columns * rows * self.tile_size * self.tile_size) / area, 0.6)
            score = covered * min(target / ratio, ratio / target)
            if score > most:
                best, most = (columns, rows), score
        return best

    def _thumbnails(self, tiles: int) -> int:
        return int(self.thumbnail and tiles != 1)


@functools.lru_cache(maxsize=16)
def _shapes(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """(columns, rows) of least to most tiles: fewer tiles first, then fewer columns."""
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most // x + 1) if least <= x * y]
    return tuple(sorted(shapes, key=lambda shape: shape[0] * shape[1]))
