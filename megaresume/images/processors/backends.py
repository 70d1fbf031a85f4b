"""Resizing and normalising, bit for bit as the two back-ends of Hugging Face transformers do it.

    pillow        `...ImageProcessorPil`        resized by Pillow; (v / 255 - mean) / std
    torchvision   `...ImageProcessor`, the      resized by torch, antialiased; (v - 255 mean) / (255 std)
                  default of transformers 5

Both resize in 8 bits, but with weights of other precision, and Pillow some images first in height: values differ by up
to 7 of 255, most by none. Neither needs the library whose pixels it makes, nor depends on its version
(`megaresume.images.processors.resample`).
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from megaresume.images.processors.resample import Resampling, resample, weights_of
from megaresume.images.processors.statistics import Statistics
from megaresume.stream.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

#: ``backend``: whose pixels.
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
