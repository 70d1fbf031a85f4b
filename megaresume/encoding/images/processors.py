"""Image processors by kind; this module implements ``patches``, ``tiles`` and ``native``.

    patches       one square of fixed size                   CLIP, LLaVA-1.5, SigLIP, Megatron-LM
    tiles         squares, as many as its shape asks for     InternVL, NVLM
    native        patches of about its own size              Qwen2-VL and its successors
    python        a user's own, from a factory               processor.py
    transformers  a model's own, from transformers           hugging_face.py: Idefics3, Pixtral, LLaVA-OneVision

Each of the first three resizes an image in 8 bits, cuts it into levels, and returns these or their pixels; none uses
randomness.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from megaresume.encoding.images.hugging_face import TransformersProcessor
from megaresume.encoding.images.pixels import (
    CLIP,
    IMAGENET,
    Backend,
    Levels,
    Normalize,
    check_backend,
    cut_patches,
    resized,
)
from megaresume.encoding.images.processor import Grid, Pixels, Processor, PythonProcessor
from megaresume.encoding.images.resampling import Resampling
from megaresume.stream.errors import ConfigError, CorpusError
from megaresume.stream.schema import Options, Truth, Within, read_kind

if TYPE_CHECKING:
    from PIL.Image import Image


#: The most pixels of an image that is being squared: 4 bytes each. Pillow's own limit for opening images.
MOST_PIXELS = 178_956_970
#: largest ratio of the longer edge to the shorter one of ``native``, as in the original.
_MAX_RATIO = 200


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches(Options):
    """Every image becomes one square of fixed size, and takes the same number of tokens.

        W x H  --crop: shorter edge to S, centre cut out ---+
               --pad: squared with the mean colour, to S ---+-->  [1, 3, S, S]  -->  (S / P / merge)^2 + class tokens
               --stretch: to S x S -------------------------+

    ``crop`` is ``CLIPImageProcessor``, ``pad`` is LLaVA-1.5's (``image_aspect_ratio: pad``), ``stretch`` is SigLIP's
    and Megatron-LM's (``examples/multimodal/image_processing.py``).

    Raises:
        ConfigError: fewer than one patch, or patches that ``merge`` does not divide.
    """

    kind: ClassVar[str] = "patches"

    #: edge of the square, pixels.
    size: Annotated[int, Within(1, 8192)] = 336
    #: edge of a patch, pixels.
    patch_size: Annotated[int, Within(1, 1024)] = 14
    #: how the image becomes a square: crop, pad or stretch.
    fit: Literal["crop", "pad", "stretch"] = "crop"
    #: patches along each axis that become one token (pixel shuffle of InternVL, scale 1 / merge).
    merge: Annotated[int, Within(1, 64)] = 1
    #: further tokens of the vision model that are kept (CLS); LLaVA drops CLIP's.
    class_tokens: Annotated[int, Within(0, 64)] = 0
    #: bicubic, bilinear or lanczos.
    resample: Resampling = "bicubic"
    normalize: Normalize = CLIP
    #: the library to reproduce: pillow or torchvision (`megaresume.encoding.images.pixels`).
    backend: Backend = "pillow"

    def __post_init__(self) -> None:
        check_backend(self.backend, self.resample)
        # Pixels after the last whole patch are passed to the vision model, whose convolution ignores them.
        if not self._side or self._side % self.merge:
            unit = self.patch_size * self.merge
            raise ConfigError(
                "the size of an image does not fit its patches",
                found=f"size {self.size}, patch_size {self.patch_size}: {self._side} a side, merge {self.merge}",
                expected=f"a multiple of {self.merge} patches, such as size {max(1, round(self.size / unit)) * unit}",
                action="correct processor.size",
            )

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """The shape of an image's pixels: (3, size, size)."""
        return (3, self.size, self.size)

    @property
    def levels(self) -> Levels:
        """The map from 8-bit values to pixels."""
        return Levels(self.normalize, self.backend, self.pixel_shape)

    def num_tokens(self, width: int, height: int) -> int:
        """The number of tokens, the same for images of any size.

        Raises:
            CorpusError: an image so narrow that the square would fill the memory before it is cut or shrunk.
        """
        self._check_room(width, height)
        return (self._side // self.merge) ** 2 + self.class_tokens

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """The number of tokens of a grid of patches."""
        return grid[0] * grid[1] * grid[2] // self.merge**2 + self.class_tokens * len(pixels)

    def most_rows(self, num_tokens: int) -> int:
        """The number of squares with this many tokens."""
        return num_tokens // self.num_tokens(1, 1)

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Process an image: float32[1, 3, size, size], and (1, rows, columns) of patches."""
        self._check_room(*image.size)
        levels = self.levels.new(1)
        cut_patches(self._square(image), 0, 0, 1, levels.reshape(1, 1, *self.pixel_shape))
        return self.levels.answer(levels), (1, self._side, self._side)

    @property
    def _side(self) -> int:
        """Patches along an edge."""
        return self.size // self.patch_size

    def _check_room(self, width: int, height: int) -> None:
        longer, shorter = max(width, height), min(width, height)
        needed = {"pad": longer**2, "crop": self.size**2 * longer // shorter}.get(self.fit, 0)
        if needed > MOST_PIXELS:
            raise CorpusError(
                "an image too narrow for its length",
                found=f"{width} x {height} pixels, {needed} on the way to a square",
                expected=f"at most {MOST_PIXELS}",
                cause=f"fit: {self.fit} makes the shorter edge as long as the square, or the square as the longer edge",
                action="fit: stretch needs no room; or see on_fault, or leave the record out",
            )

    def _square(self, image: Image) -> npt.NDArray[np.uint8]:
        """The image as a square: uint8[size, size, 4]."""
        width, height = image.size
        if self.fit == "crop" and width != height:
            short = min(width, height)
            width, height = int(self.size * width / short), int(self.size * height / short)
            return resized(image, width, height, self.resample, self.backend, square=self.size)
        if self.fit == "pad" and width != height:
            import PIL.Image

            edge = max(width, height)
            # LLaVA truncates the fill colour instead of rounding it.
            colour = tuple(int(255 * mean) for mean in self.normalize.mean)
            square = PIL.Image.new("RGB", (edge, edge), colour)
            square.paste(image, ((edge - width) // 2, (edge - height) // 2))
            image = square
        return resized(image, self.size, self.size, self.resample, self.backend)


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles(Options):
    """An image becomes a number of square tiles that depends on its shape, and a small picture of the whole.

        W x H --> columns x rows of tiles, closest in shape, min_tiles to max_tiles
              --> resized to (columns * S, rows * S), cut:      1 2 3
                                                                4 5 6   + thumbnail, if there is more than one tile
              --> [k, 3, S, S]  -->  k * ((S / P / merge)^2 + extra_tokens) tokens

    Follows InternVL's ``dynamic_preprocess`` (github.com/OpenGVLab/InternVL, internvl_chat/internvl/train/dataset.py),
    also used by Hugging Face's ``GotOcr2ImageProcessor`` and Megatron-LM's NVLM
    (examples/multimodal/image_processing.py). The defaults are InternVL's: 256 tokens a tile, 1 to 12 tiles and a
    thumbnail.

    Raises:
        ConfigError: ``tile_size`` is not a multiple of ``patch_size * merge``, or the least number of tiles exceeds the
            most.
    """

    kind: ClassVar[str] = "tiles"

    #: edge of a tile, pixels.
    tile_size: Annotated[int, Within(1, 8192)] = 448
    #: edge of a patch, pixels.
    patch_size: Annotated[int, Within(1, 1024)] = 14
    #: patches along each axis that become one token (pixel shuffle, scale 1 / merge).
    merge: Annotated[int, Within(1, 64)] = 2
    #: the fewest tiles, without the thumbnail.
    min_tiles: Annotated[int, Within(1, 1000)] = 1
    max_tiles: Annotated[int, Within(1, 1000)] = 12
    #: adds the whole image as one tile after the others, unless there is only one tile.
    thumbnail: Truth = True
    #: how the closest shape is chosen: by the ``ratio`` of the edges (InternVL), or also weighted by ``area``
    #: (Megatron-LM's ``--use-area-weighted-aspect-ratio``).
    closest: Literal["ratio", "area"] = "ratio"
    #: further tokens that the model adds to each tile (class tokens, tile tags of NVLM).
    extra_tokens: Annotated[int, Within(0, 64)] = 0
    #: bicubic, bilinear or lanczos.
    resample: Resampling = "bicubic"
    normalize: Normalize = IMAGENET
    #: the library to reproduce: pillow or torchvision (`megaresume.encoding.images.pixels`).
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
                expected="max_tiles no smaller than min_tiles",
                action="correct processor.min_tiles or processor.max_tiles",
            )

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """The shape of a tile's pixels: (3, tile_size, tile_size)."""
        return (3, self.tile_size, self.tile_size)

    @property
    def levels(self) -> Levels:
        """The map from 8-bit values to pixels."""
        return Levels(self.normalize, self.backend, self.pixel_shape)

    @property
    def tokens_per_tile(self) -> int:
        """The number of tokens of each tile, including the thumbnail."""
        return (self.tile_size // (self.patch_size * self.merge)) ** 2 + self.extra_tokens

    def num_tokens(self, width: int, height: int) -> int:
        """The number of tokens of the tiles of the closest shape, and of the thumbnail."""
        columns, rows = self.shape(width, height)
        return (columns * rows + self._thumbnails(columns * rows)) * self.tokens_per_tile

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """The number of tokens of these tiles."""
        return len(pixels) * self.tokens_per_tile

    def most_rows(self, num_tokens: int) -> int:
        """The number of tiles with this many tokens."""
        return num_tokens // self.tokens_per_tile

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Process an image: float32[k, 3, S, S], tiles row by row, thumbnail last; and (1, rows, columns) of tiles."""
        size = self.tile_size
        columns, rows = self.shape(*image.size)
        tiles = columns * rows
        thumbnails = self._thumbnails(tiles)
        levels = self.levels.new(tiles + thumbnails)
        squares = levels.reshape(-1, 1, 1, *self.pixel_shape)
        whole = resized(image, columns * size, rows * size, self.resample, self.backend)
        for number in range(tiles):
            cut_patches(whole, number // columns * size, number % columns * size, 1, squares[number])
        if thumbnails:
            cut_patches(resized(image, size, size, self.resample, self.backend), 0, 0, 1, squares[tiles])
        return self.levels.answer(levels), (1, rows, columns)

    def shape(self, width: int, height: int) -> tuple[int, int]:
        """(columns, rows) of the tiles of an image of this size."""
        return self._by_ratio(width, height) if self.closest == "ratio" else self._by_area(width, height)

    def _by_ratio(self, width: int, height: int) -> tuple[int, int]:
        ratio, area = width / height, width * height
        best, least = (1, 1), float("inf")
        for columns, rows in _shapes(self.min_tiles, self.max_tiles):
            difference = abs(ratio - columns / rows)
            # Among equally close shapes, the one with more tiles, unless they would be mostly enlargement.
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
    """(columns, rows) with least to most tiles: fewer tiles first, then fewer columns."""
    shapes = [(x, y) for x in range(1, most + 1) for y in range(1, most // x + 1) if least <= x * y]
    return tuple(sorted(shapes, key=lambda shape: shape[0] * shape[1]))


@dataclass(frozen=True, kw_only=True, slots=True)
class Native(Options):
    """An image keeps approximately its size, which determines the number of patches.

        W x H --smart_resize--> edges that are multiples of P * merge, min_pixels to max_pixels
              --> patches, merge x merge neighbours together:    1 2 | 5 6
                                                                 3 4 | 7 8
              --> [rows * columns, 3 * T * P * P], grid (1, rows, columns)  -->  rows * columns / merge^2 tokens

    Follows ``Qwen2VLImageProcessor`` of Hugging Face transformers; a still image fills all T frames of its patches. The
    defaults are those published with Qwen2-VL: 4 to 16384 tokens per image.

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
    #: the fewest pixels of the resized image.
    min_pixels: Annotated[int, Within(1, 2**31)] = 56 * 56
    max_pixels: Annotated[int, Within(1, 2**31)] = 28 * 28 * 16384
    #: bicubic, bilinear or lanczos.
    resample: Resampling = "bicubic"
    normalize: Normalize = CLIP
    #: the library to reproduce: pillow or torchvision (`megaresume.encoding.images.pixels`).
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
        """The shape of a patch's pixels: (3 * temporal_patch_size * patch_size^2,)."""
        return (3 * self.temporal_patch_size * self.patch_size**2,)

    @property
    def levels(self) -> Levels:
        """The map from 8-bit values to pixels."""
        return Levels(self.normalize, self.backend, self.pixel_shape, self.temporal_patch_size)

    def num_tokens(self, width: int, height: int) -> int:
        """The number of tokens of the resized image. Raises CorpusError if one edge is over 200 times the other."""
        width, height = self.target(width, height)
        return (width // (self.patch_size * self.merge)) * (height // (self.patch_size * self.merge))

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """The number of tokens of a grid of patches."""
        return grid[0] * grid[1] * grid[2] // self.merge**2

    def most_rows(self, num_tokens: int) -> int:
        """The number of patches with this many tokens."""
        return num_tokens * self.merge**2

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Process an image: float32[rows * columns, 3 * T * P * P], and (1, rows, columns) of patches."""
        width, height = self.target(*image.size)
        rows, columns = height // self.patch_size, width // self.patch_size
        levels = self.levels.new(rows * columns)
        values = resized(image, width, height, self.resample, self.backend)
        cut_patches(values, 0, 0, self.merge, levels.reshape(rows, columns, 3, self.patch_size, self.patch_size))
        return self.levels.answer(levels), (1, rows, columns)

    def target(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) after resizing: ``smart_resize`` of the original.

        Raises:
            CorpusError: one edge is over 200 times the other.
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


KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (Patches, Tiles, Native, PythonProcessor, TransformersProcessor)
}


def processor_from_options(options: object) -> Processor:
    """The processor that the options describe: ``{kind: native, max_pixels: 1003520}``.

    Raises:
        ConfigError: an unknown kind or option, or a bad value.
    """
    processor: Processor = read_kind(options, KINDS, "processor")
    return processor
