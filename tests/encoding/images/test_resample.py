"""Resizing bit for bit as Pillow and torch themselves do it: every filter, sizes of many shapes, and parts."""

from __future__ import annotations

import numpy as np
import PIL
import PIL.Image
import pytest
import torch

from megaresume.encoding.images.pixels import resized
from tests.encoding.images.transformers_kit import picture

#: width and height: of an image, and wanted. One direction as it is; enlarged, reduced, both; more rows than one group.
SIZES = [
    ((97, 301), (97, 56)),
    ((301, 97), (112, 97)),
    ((40, 30), (336, 252)),
    ((500, 333), (504, 336)),
    ((640, 480), (28, 28)),
    ((100, 100), (101, 99)),
    ((64, 200), (60, 150)),
    ((64, 200), (32, 140)),
    ((1, 1), (5, 3)),
    ((9, 2), (3, 7)),
]


def noise(width: int, height: int) -> PIL.Image.Image:
    """Black, white and all between, side by side: sums leave 0 to 255 on both sides."""
    values = np.random.default_rng(width * 1000 + height).choice([0, 255, 128, 3], (height, width, 3))
    return PIL.Image.fromarray(values.astype(np.uint8))


@pytest.mark.skipif(int(PIL.__version__.split(".")[0]) < 13, reason="before, Pillow always resized in width first")
@pytest.mark.parametrize("resample", ["bilinear", "bicubic", "lanczos"])
@pytest.mark.parametrize(("size", "wanted"), SIZES)
def test_as_pillow(size, wanted, resample):
    for image in (noise(*size), picture(*size)):
        expected = np.asarray(image.resize(wanted, PIL.Image.Resampling[resample.upper()]))
        assert np.array_equal(resized(image, *wanted, resample, "pillow")[..., :3], expected)


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("size", "wanted"), SIZES)
def test_as_torch(size, wanted, resample):
    for image in (noise(*size), picture(*size)):
        channels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
        made = torch.nn.functional.interpolate(channels, size=wanted[::-1], mode=resample, antialias=True)
        expected = made[0].permute(1, 2, 0).numpy()
        assert np.array_equal(resized(image, *wanted, resample, "torchvision")[..., :3], expected)


@pytest.mark.parametrize("backend", ["pillow", "torchvision"])
@pytest.mark.parametrize(("size", "wanted"), [((300, 200), (96, 64)), ((96, 300), (96, 64)), ((200, 64), (97, 64))])
def test_the_centre_alone_is_the_centre_of_the_whole(size, wanted, backend):
    whole = resized(picture(*size), *wanted, "bicubic", backend)
    left, top = (wanted[0] - 50) // 2, (wanted[1] - 50) // 2
    part = resized(picture(*size), *wanted, "bicubic", backend, square=50)
    assert np.array_equal(part, whole[top : top + 50, left : left + 50])
