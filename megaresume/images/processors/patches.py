"""Processor ``patches``: every image becomes one square of fixed size (CLIP, LLaVA, SigLIP).

    W x H  --crop: shorter edge to S, centre cut out ---+
           --pad: squared with the mean colour, to S ---+-->  [1, 3, S, S]  -->  (S / P / merge)^2 + class tokens
           --stretch: to S x S -------------------------+

`crop` is `CLIPImageProcessor`, `pad` is LLaVA-1.5's (``image_aspect_ratio: pad``), `stretch` is SigLIP's and
Megatron-LM's (``examples/multimodal/image_processing.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import numpy as np
import numpy.typing as npt

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

#: of an image on its way to a square: 4 bytes each. Pillow itself opens no more.
MOST_PIXELS = 178_956_970


@dataclass(frozen=True, kw_only=True, slots=True)
class Patches(Options):
    """One square an image. Every image takes the same number of tokens.

    Raises:
        ConfigError: fewer than one patch, or patches that ``merge`` does not divide.
    """

    kind: ClassVar[str] = "patches"

    #: edge of the square, pixels.
    size: Annotated[int, Within(1, 8192)] = 336
    #: edge of a patch, pixels.
    patch_size: Annotated[int, Within(1, 1024)] = 14
    #: how the image comes to be a square: crop, pad or stretch.
    fit: Literal["crop", "pad", "stretch"] = "crop"
    #: patches along each axis that become one token (pixel shuffle of InternVL, scale 1 / merge).
    merge: Annotated[int, Within(1, 64)] = 1
    #: further tokens of the vision model that are kept (CLS); LLaVA drops CLIP's.
    class_tokens: Annotated[int, Within(0, 64)] = 0
    #: bicubic, bilinear or lanczos.
    resample: Resampling = "bicubic"
    normalize: Normalize = CLIP
    #: whose pixels: pillow or torchvision (`megaresume.images.processors.pixels`).
    backend: Backend = "pillow"

    def __post_init__(self) -> None:
        check_backend(self.backend, self.resample)
        # Pixels after the last whole patch are shown to the vision model, whose convolution passes over them.
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
        """(3, size, size)."""
        return (3, self.size, self.size)

    @property
    def levels(self) -> Levels:
        """How 8-bit values become the pixels."""
        return Levels(self.normalize, self.backend, self.pixel_shape)

    def num_tokens(self, width: int, height: int) -> int:
        """The same for every size.

        Raises:
            CorpusError: an image so narrow that the square, before it is cut or made small, would fill the memory.
        """
        self._check_room(width, height)
        return (self._side // self.merge) ** 2 + self.class_tokens

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """Of the grid of patches."""
        return grid[0] * grid[1] * grid[2] // self.merge**2 + self.class_tokens * len(pixels)

    def most_rows(self, num_tokens: int) -> int:
        """Squares of as many tokens."""
        return num_tokens // self.num_tokens(1, 1)

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """float32[1, 3, size, size], and (1, rows, columns) of patches. Draws nothing."""
        self._check_room(*image.size)
        levels = new_levels((1, *self.levels.shape))
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
        """uint8[size, size, 4]."""
        width, height = image.size
        if self.fit == "crop" and width != height:
            short = min(width, height)
            width, height = int(self.size * width / short), int(self.size * height / short)
            return resized(image, width, height, self.resample, self.backend, square=self.size)
        if self.fit == "pad" and width != height:
            import PIL.Image

            edge = max(width, height)
            # As LLaVA fills it: truncated, not rounded.
            colour = tuple(int(255 * mean) for mean in self.normalize.mean)
            square = PIL.Image.new("RGB", (edge, edge), colour)
            square.paste(image, ((edge - width) // 2, (edge - height) // 2))
            image = square
        return resized(image, self.size, self.size, self.resample, self.backend)
