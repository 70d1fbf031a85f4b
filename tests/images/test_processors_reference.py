"""Processors against the ones they follow: Hugging Face's own, and Megatron-LM's tiling, written down here."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest

from megaresume.images.processors import processor_from_options
from megaresume.stream.errors import CorpusError

pytest.importorskip("transformers")

#: one rounding of 8-bit values in the original, none in ours; float32 against float64 statistics.
CLOSE = {"rtol": 0, "atol": 2e-6}


def picture(width: int, height: int) -> PIL.Image.Image:
    """Smooth with noise: every place of the image is its own."""
    generator = np.random.default_rng(width * 10007 + height)
    x, y = np.linspace(0, 200, width)[None, :, None], np.linspace(0, 200, height)[:, None, None]
    values = (x + y * [0.3, 0.6, 0.9]) / 2 + generator.integers(0, 50, (height, width, 3))
    return PIL.Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))


def sizes(count: int, largest: int) -> list[tuple[int, int]]:
    generator = np.random.default_rng(5)
    return [tuple(map(int, np.exp(generator.uniform(np.log(8), np.log(largest), 2)))) for _ in range(count)]


def ours(options, image):
    return processor_from_options(options)(image, np.random.default_rng(0))


@pytest.mark.parametrize("size", [(640, 480), (97, 301), (336, 336), (50, 50), (1000, 337)])
def test_crop_is_clips(size):
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    theirs = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    pixels, grid = ours({"kind": "patches"}, picture(*size))
    np.testing.assert_allclose(pixels, theirs(picture(*size))["pixel_values"], **CLOSE)
    assert grid == (1, 24, 24)


@pytest.mark.parametrize("size", [(640, 480), (97, 301), (224, 224), (301, 100)])
def test_pad_is_llavas(size):
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil

    theirs = LlavaImageProcessorPil(do_pad=True)
    pixels, _ = ours({"kind": "patches", "size": 224, "fit": "pad"}, picture(*size))
    np.testing.assert_allclose(pixels, theirs(picture(*size))["pixel_values"], **CLOSE)


def test_stretch_is_siglips():
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    theirs = SiglipImageProcessorPil(size={"height": 384, "width": 384})
    options = {"kind": "patches", "size": 384, "patch_size": 16, "fit": "stretch", "normalize": "siglip"}
    pixels, _ = ours(options, picture(500, 200))
    np.testing.assert_allclose(pixels, theirs(picture(500, 200))["pixel_values"], **CLOSE)


def test_llava_tokens():
    # LlavaProcessor: (336 // 14)^2 + num_additional_image_tokens - 1 with the strategy "default".
    assert processor_from_options({"kind": "patches"}).num_tokens(10, 999) == 576
    full = processor_from_options({"kind": "patches", "class_tokens": 1})
    assert full.num_tokens(10, 999) == 577 == full.tokens_of(*full(picture(30, 40), np.random.default_rng(0)))


@pytest.mark.parametrize(("least", "most"), [(1, 12), (1, 6), (2, 9), (1, 1), (4, 4)])
def test_tile_counts_are_internvls(least, most):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    side = {"height": 448, "width": 448}
    theirs = GotOcr2ImageProcessorPil(crop_to_patches=True, min_patches=least, max_patches=most, size=side)
    mine = processor_from_options({"kind": "tiles", "min_tiles": least, "max_tiles": most})
    for width, height in [*sizes(2000, 4000), (448, 448), (896, 448), (1000, 800), (1344, 1344)]:
        assert mine.num_tokens(width, height) == 256 * theirs.get_number_of_image_patches(height, width)


@pytest.mark.parametrize("size", [(640, 480), (97, 301), (448, 448), (1000, 300)])
def test_tiles_are_internvls(size):
    from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

    side = {"height": 112, "width": 112}
    theirs = GotOcr2ImageProcessorPil(crop_to_patches=True, min_patches=1, max_patches=6, size=side)
    expected = np.stack(theirs(picture(*size))["pixel_values"])
    options = {"kind": "tiles", "tile_size": 112, "max_tiles": 6, "normalize": "clip"}
    pixels, grid = ours(options, picture(*size))
    np.testing.assert_allclose(pixels, expected, **CLOSE)
    assert len(pixels) == grid[1] * grid[2] + 1 > 2


def test_area_weighting_is_megatrons():
    """`find_closest_area_weighted_aspect_ratio` of examples/multimodal/image_processing.py, as it stands there."""

    def closest(aspect_ratio, target_ratios, width, height, image_size):
        best_factor, best_ratio, area = float("-inf"), (1, 1), width * height
        for ratio in target_ratios:
            target_aspect_ratio = ratio[0] / ratio[1]
            factor = min((ratio[0] * ratio[1] * image_size * image_size) / area, 0.6) * min(
                target_aspect_ratio / aspect_ratio, aspect_ratio / target_aspect_ratio
            )
            if factor > best_factor:
                best_factor, best_ratio = factor, ratio
        return best_ratio

    targets = {(i, j) for n in range(1, 13) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= 12}
    targets = sorted(targets, key=lambda x: x[0] * x[1])
    mine = processor_from_options({"kind": "tiles", "closest": "area"})
    for width, height in sizes(500, 4000):
        assert mine.shape(width, height) == closest(width / height, targets, width, height, 448)


@pytest.mark.parametrize(
    "options", [{}, {"max_pixels": 28 * 28 * 64}, {"patch_size": 16, "min_pixels": 65536}, {"merge": 1}]
)
def test_native_counts_are_qwens(options):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    mine = processor_from_options({"kind": "native", **options})
    names = {"merge": "merge_size"}
    theirs = Qwen2VLImageProcessorPil(**{names.get(key, key): value for key, value in options.items()})
    compared = 0
    for width, height in sizes(3000, 5000):
        try:
            expected = theirs.get_number_of_image_patches(height, width)
        except ValueError:
            with pytest.raises(CorpusError, match="too narrow"):
                mine.num_tokens(width, height)
        else:
            assert mine.num_tokens(width, height) == expected // mine.merge**2
            compared += 1
    assert compared > 2500


@pytest.mark.parametrize("size", [(640, 480), (97, 301), (20, 700), (1500, 1100)])
def test_native_patches_are_qwens(size):
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    theirs = Qwen2VLImageProcessorPil(max_pixels=28 * 28 * 500)(picture(*size))
    pixels, grid = ours({"kind": "native", "max_pixels": 28 * 28 * 500}, picture(*size))
    assert [list(grid)] == theirs["image_grid_thw"].tolist()
    assert pixels.shape == theirs["pixel_values"].shape
    np.testing.assert_allclose(pixels, theirs["pixel_values"], **CLOSE)
