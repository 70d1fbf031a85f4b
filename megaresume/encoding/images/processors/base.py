"""What an image processor promises.

    PIL image, RGB, W x H  --processor-->  float32[k, ...] normalised, (frames, rows, columns)
    W, H                   --num_tokens->  tokens that the image takes in the sequence

A processor is a declared, stateless function of (image, generator): `megaresume.encoding.images.checks` holds it
to that when an encoder is built.

What stands in a sequence for one image is its pattern: runs of the image token, and the text between and around them.

    (576,)                                                                   CLIP, Qwen2-VL: one run
    (4, "[IMG_BREAK]", 4, "[IMG_END]")                                       Pixtral: rows, 4 tokens each
    ("<fake><row_1_col_1>", 64, "\\n\\n<fake><global-img>", 64, "<fake>")      SmolVLM: tiles

A number is that many image tokens; a text is read with special tokens, and is not trained on. Only a processor whose
images are not one run has a method ``pattern``; for the others `num_tokens` says it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image


Pixels = npt.NDArray[np.float32]
#: (frames, rows, columns) of patches; of tiles for tiled processors.
Grid = tuple[int, int, int]
Pattern = tuple[int | str, ...]


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


@runtime_checkable
class Patterned(Protocol):
    """A processor of images that are not one run of image tokens."""

    def pattern(self, width: int, height: int) -> Pattern:
        """Of an image of this size, pixels. Raises CorpusError for a size that it cannot take."""
        ...


def pattern_of(processor: Processor, width: int, height: int) -> Pattern:
    """The pattern of an image of this size: that of the processor, or one run.

    Raises:
        CorpusError: the processor cannot take the size.
        ConfigError: what it returns is not a pattern.
    """
    if not isinstance(processor, Patterned):
        return (processor.num_tokens(width, height),)
    pattern = processor.pattern(width, height)
    runs = [part for part in pattern if type(part) is int] if isinstance(pattern, tuple) else []
    if not runs or min(runs) < 1 or not all(type(part) in (int, str) for part in pattern):
        raise ConfigError(
            "the image processor announces no length",
            found=f"{pattern!s:.200} for {width} x {height} pixels",
            expected="int, 1 or more; or a tuple of texts and such numbers, at least one number",
            action="correct num_tokens (or pattern) of the processor",
        )
    return pattern


def pattern_of_text(text: str, image_token: str) -> Pattern:
    """The pattern that a text spells: ``image_token`` over and over, and other text."""
    runs: list[int | str] = []
    for k, between in enumerate(text.split(image_token)):
        if k:
            if runs and isinstance(runs[-1], int):
                runs[-1] += 1
            else:
                runs.append(1)
        if between:
            runs.append(between)
    return tuple(runs)


def image_tokens(pattern: Pattern) -> int:
    """Image tokens of a pattern, without its text."""
    return sum(part for part in pattern if isinstance(part, int))
