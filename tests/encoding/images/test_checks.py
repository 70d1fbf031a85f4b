"""Processors that break a promise are refused when the encoder is built, each by its own words."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.processor import check_processor
from megaresume.encoding.images.processors import processor_from_options
from megaresume.stream.errors import ConfigError

_calls = itertools.count()


class Honest:
    """One token for each 8 rows; noise from the generator given."""

    pixel_shape = (2,)

    def num_tokens(self, width, height):
        return -(-height // 8)

    def tokens_of(self, pixels, grid):
        return grid[1]

    def noise(self, generator):
        return float(generator.random())

    def __call__(self, image, generator):
        rows = self.num_tokens(*image.size)
        return np.full((rows, 2), self.noise(generator), np.float32), (1, rows, 1)


class DrawsFromRandom(Honest):
    def noise(self, generator):
        return random.random()


class DrawsFromNumpy(Honest):
    def noise(self, generator):
        return float(np.random.rand())


class DrawsFromTorch(Honest):
    def noise(self, generator):
        import torch

        return float(torch.rand(()))


class ReadsNumpy(Honest):
    """Puts the state back: nothing moves, yet the result depends on it."""

    def noise(self, generator):
        state = np.random.get_state()
        value = float(np.random.rand())
        np.random.set_state(state)
        return value


class Reseeds(Honest):
    def noise(self, generator):
        random.seed(3)
        return 0.0


class DrawsFromEntropy(Honest):
    def noise(self, generator):
        return float(np.random.default_rng().random())


class Counts(Honest):
    def noise(self, generator):
        return float(next(_calls))


class OtherLengths(Honest):
    def num_tokens(self, width, height):
        return height // 8

    def __call__(self, image, generator):
        rows = -(-image.height // 8)
        return np.zeros((rows, 2), np.float32), (1, rows, 1)


class OtherShape(Honest):
    pixel_shape = (3,)


class Doubles(Honest):
    def __call__(self, image, generator):
        pixels, grid = super().__call__(image, generator)
        return pixels.astype(np.float64), grid


class NotNumbers(Honest):
    def noise(self, generator):
        return float("nan")


class BadGrid(Honest):
    def __call__(self, image, generator):
        pixels, (_, rows, columns) = super().__call__(image, generator)
        return pixels, (np.int64(1), rows, columns)


class NoPickle(Honest):
    def __init__(self):
        self.function = lambda: None


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (DrawsFromRandom, ["moves a generator that belongs to the whole process", "random after one image"]),
        (DrawsFromNumpy, ["moves a generator that belongs to the whole process", "numpy.random after one image"]),
        (ReadsNumpy, ["not a function of image and generator", "draw only from the generator"]),
        (Reseeds, ["moves a generator"]),
        (DrawsFromEntropy, ["not a function of image and generator"]),
        (Counts, ["not a function of image and generator"]),
        (OtherLengths, ["announces different lengths", "12 for 301 x 97 pixels, and 13 tokens"]),
        (OtherShape, ["pixels other than promised", "float32[k, 3]"]),
        (Doubles, ["pixels other than promised", "float64"]),
        (NotNumbers, ["not plain numbers"]),
        (BadGrid, ["bad grid"]),
        (NoPickle, ["cannot be sent to a worker process", "lambda"]),
    ],
)
def test_broken_promises(broken, words):
    check_processor(Honest())
    options = {"processor": {"kind": "python", "factory": f"{__name__}:{broken.__name__}"}}
    with pytest.raises(ConfigError) as caught:
        ImageTextEncoder.from_options(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_torch_counts_once_it_is_imported():
    pytest.importorskip("torch")
    with pytest.raises(ConfigError, match="whole process") as caught:
        check_processor(DrawsFromTorch())
    assert caught.value.found.startswith("torch")


def test_generators_are_given_back_as_they_were():
    random.seed(1)
    np.random.seed(1)
    expected = random.random(), np.random.rand()
    random.seed(1)
    np.random.seed(1)
    check_processor(Honest())
    with pytest.raises(ConfigError):
        check_processor(DrawsFromRandom())
    assert (random.random(), np.random.rand()) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"kind": "patches", "size": 56, "fit": fit, "class_tokens": tokens}
        for fit in ("crop", "pad", "stretch")
        for tokens in (0, 1)
    ]
    + [{"kind": "tiles", "tile_size": 28, "extra_tokens": 5, "thumbnail": on} for on in (True, False)]
    + [{"kind": "native", "temporal_patch_size": 1, "patch_size": 16}],
)
def test_ours_keep_them(options):
    check_processor(processor_from_options(options))


@pytest.mark.parametrize("factory", ["", "nowhere:build", "json:nothing", "json"])
def test_a_factory_that_is_not_there(factory):
    with pytest.raises(ConfigError, match="factory of the image processor cannot be imported"):
        ImageTextEncoder.from_options({"processor": {"kind": "python", "factory": factory}})


def test_arguments_that_no_spec_can_hold():
    options = {"kind": "python", "factory": f"{__name__}:Honest", "kwargs": {"size": (1, 2)}}
    with pytest.raises(ConfigError, match=r"processor\.kwargs") as caught:
        ImageTextEncoder.from_options({"processor": options})
    assert "of JSON" in str(caught.value)


def test_a_factory_of_something_else():
    with pytest.raises(ConfigError, match="not an image processor") as caught:
        ImageTextEncoder.from_options({"processor": {"kind": "python", "factory": "collections:Counter"}})
    assert "num_tokens" in str(caught.value)
