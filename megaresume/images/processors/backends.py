"""Resizing and normalising, bit for bit as the two back-ends of Hugging Face transformers do it.

    pillow        `...ImageProcessorPil`        resized by Pillow; (v / 255 - mean) / std
    torchvision   `...ImageProcessor`, the      resized by torch, antialiased; (v - 255 mean) / (255 std)
                  default of transformers 5

Both resize in 8 bits, but with other weights: values differ by up to 7 of 255, most by none. Pixels of ``pillow`` need
no torch; those of ``torchvision`` need no torchvision, which calls the same function of torch.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from megaresume.images.processors.statistics import Statistics
from megaresume.stream.errors import ConfigError, SetupError

if TYPE_CHECKING:
    from PIL.Image import Image

#: ``backend``: whose pixels.
Backend = Literal["pillow", "torchvision"]
#: ``resample``: the filter that images are resized with.
Resampling = Literal["bicubic", "bilinear", "lanczos"]


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
    image: Image, width: int, height: int, resample: Resampling, backend: Backend, *, square: int | None = None
) -> npt.NDArray[np.uint8]:
    """The RGB image, antialiased, as uint8[height, width, 3]; as it is if it has the size.

    Args:
        image: of any size.
        width, height: wanted, pixels.
        resample: the filter.
        backend: whose pixels.
        square: of the resized image only a square of so many pixels an edge, cut from its centre.

    Raises:
        SetupError: torch is missing, for ``torchvision``.
    """
    top, left = (0, 0) if square is None else ((height - square) // 2, (width - square) // 2)
    bottom, right = (height, width) if square is None else (top + square, left + square)
    if backend == "pillow" or image.size == (width, height):
        from PIL.Image import Resampling

        if image.size != (width, height):
            image = image.resize((width, height), Resampling[resample.upper()])
        return np.asarray(image if square is None else image.crop((left, top, right, bottom)))
    try:
        import torch
    except ImportError as error:
        raise SetupError(
            "the library torch is missing",
            found=str(error),
            expected="it resizes the images: backend: torchvision",
            action="pip install 'megaresume[torch]', or backend: pillow",
        ) from error
    channels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    made = torch.nn.functional.interpolate(channels, size=(height, width), mode=resample, antialias=True)
    values: npt.NDArray[np.uint8] = made[0, :, top:bottom, left:right].permute(1, 2, 0).numpy()
    return values


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
