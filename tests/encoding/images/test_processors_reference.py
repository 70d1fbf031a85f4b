"""Processors against the ones they follow, bit for bit: transformers' of both back-ends, and Megatron-LM's tiling."""

from __future__ import annotations

import numpy as np
import PIL.Image
import pytest
import xxhash

from megaresume.encoding.images.processors import processor_from_options
from megaresume.stream.errors import ConfigError, CorpusError
from tests.encoding.images.transformers_kit import BACKENDS, picture, pixels_of, theirs

pytest.importorskip("transformers")


def sizes(count: int, largest: int) -> list[tuple[int, int]]:
    generator = np.random.default_rng(5)
    return [tuple(map(int, np.exp(generator.uniform(np.log(8), np.log(largest), 2)))) for _ in range(count)]


def ours(options, image):
    return processor_from_options(options)(image, np.random.default_rng(0))


SIDE = {"height": 112, "width": 112}
#: what is compared: our options; their class and its values.
PAIRS = {
    "crop": (
        {"kind": "patches"},
        ("CLIPImageProcessor", {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}),
    ),
    "pad": ({"kind": "patches", "size": 224, "fit": "pad"}, ("LlavaImageProcessor", {"do_pad": True})),
    "stretch": (
        {"kind": "patches", "size": 384, "patch_size": 16, "fit": "stretch", "normalize": "siglip"},
        ("SiglipImageProcessor", {"size": {"height": 384, "width": 384}}),
    ),
    "bilinear": (
        {"kind": "patches", "size": 224, "fit": "stretch", "normalize": "siglip", "resample": "bilinear"},
        ("Gemma3ImageProcessor", {"size": {"height": 224, "width": 224}}),
    ),
    "not normalised": (
        {"kind": "patches", "size": 112, "fit": "stretch", "normalize": "none"},
        ("SiglipImageProcessor", {"size": SIDE, "do_normalize": False}),
    ),
    "tiles": (
        {"kind": "tiles", "tile_size": 112, "max_tiles": 6, "normalize": "clip"},
        ("GotOcr2ImageProcessor", {"crop_to_patches": True, "min_patches": 1, "max_patches": 6, "size": SIDE}),
    ),
    "native": (
        {"kind": "native", "max_pixels": 28 * 28 * 500},
        ("Qwen2VLImageProcessor", {"size": {"shortest_edge": 3136, "longest_edge": 28 * 28 * 500}}),
    ),
}
#: larger and smaller than asked for, narrow, of the very size, odd.
SIZES = [(640, 480), (97, 301), (336, 336), (50, 50), (112, 112), (20, 700), (800, 555)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PAIRS)
def test_pixels_are_theirs_bit_for_bit(name, backend):
    options, (cls, values) = PAIRS[name]
    processor = theirs(cls, backend, **values)
    digest = xxhash.xxh3_64()
    for size in SIZES:
        pixels, grid = ours(options | {"backend": backend}, picture(*size))
        expected = pixels_of(processor, picture(*size))
        digest.update(expected)
        assert pixels.dtype == np.float32
        assert np.array_equal(pixels, expected), (size, np.abs(pixels - expected).max())
        if name == "tiles":
            assert len(pixels) == grid[1] * grid[2] + (len(pixels) > 1)
        if name == "native":
            assert [list(grid)] == processor(picture(*size))["image_grid_thw"].tolist()
    assert backend == "pillow" or digest.hexdigest() == DIGESTS[name]


#: of the pixels that transformers' default classes made of these images: torchvision 0.28, transformers 5.23.
DIGESTS = {
    "crop": "11827782bf1dd7de",
    "pad": "2ebba9d569283471",
    "stretch": "2e4e13abece51c1d",
    "bilinear": "8669ccd9445a253d",
    "not normalised": "5ec18375fd9728c7",
    "tiles": "407e12e3d47f7fb6",
    "native": "26573d2f67fd1856",
}


@pytest.mark.parametrize("name", PAIRS)
def test_pixels_of_torchvision_without_torchvision(name):
    options = PAIRS[name][0] | {"backend": "torchvision"}
    digest = xxhash.xxh3_64()
    for size in SIZES:
        digest.update(ours(options, picture(*size))[0])
    assert digest.hexdigest() == DIGESTS[name]


def test_how_far_the_back_ends_are_apart():
    """What docs/images.md says: few values differ, by 1 or 2 of 255."""
    generator, most = np.random.default_rng(0), []
    for width, height in [(640, 480), (200, 300), (1500, 1000)]:
        noise = PIL.Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))
        one, other = (
            ours({"kind": "patches", "fit": "stretch", "normalize": "none", "backend": backend}, noise)[0]
            for backend in BACKENDS
        )
        apart = np.round(np.abs(one - other) * 255)
        most.append(apart.max())
        assert np.mean(apart > 0) < 0.03
    assert 1 <= max(most) <= 2


def test_a_filter_that_torch_has_not_is_refused():
    with pytest.raises(ConfigError, match="backend: pillow"):
        processor_from_options({"kind": "native", "resample": "lanczos", "backend": "torchvision"})


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
    values = {names.get(key, key): value for key, value in {"max_pixels": mine.max_pixels, **options}.items()}
    theirs = Qwen2VLImageProcessorPil(**values)
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
