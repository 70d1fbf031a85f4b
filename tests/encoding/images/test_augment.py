"""Augmentation: sizes stay, draws come from the generator alone, order is the declared one."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import PIL.Image
import pytest

from megaresume.encoding.images.rgb import STEPS, augmentation_from_options, augmentation_options
from megaresume.stream.errors import ConfigError
from tests.encoding.images.kit import KEY, picture

EVERY = [
    {"flip": 0.5},
    {"crop": {"scale": [0.3, 0.8]}},
    {"color_jitter": {"brightness": 0.4, "contrast": 0.3, "saturation": 0.5}},
    {"grayscale": 0.3},
    {"gaussian_blur": [0.1, 2]},
    {"gaussian_noise": 12},
]


def run(options, image, generator):
    for step in augmentation_from_options(options):
        image = step(image, generator)
    return image


@pytest.mark.parametrize("options", [*([step] for step in EVERY), EVERY])
def test_same_generator_same_bits_and_size(options):
    image = picture(61, 37)
    results = []
    for seed in range(8):
        one = run(options, image, KEY.generator(seed))
        random.seed(seed)
        np.random.seed(seed)
        again = run(options, image, KEY.generator(seed))
        assert np.array_equal(one, again)
        assert one.size == image.size
        assert one.mode == "RGB"
        results.append(np.asarray(one).tobytes())
    assert len(set(results)) > 1
    assert np.array_equal(image, picture(61, 37))


def test_every_step_is_tried_above():
    assert {next(iter(step)) for step in EVERY} == set(STEPS)


def test_an_epoch_draws_anew():
    image = picture()
    keys = [dataclasses.replace(KEY, epoch=epoch) for epoch in range(3)]
    assert len({run(EVERY, image, key.generator()).tobytes() for key in keys}) == 3


def test_order_is_the_declared_one():
    image = picture()
    one, other = [{"gaussian_noise": 30}, {"gaussian_blur": 2}], [{"gaussian_blur": 2}, {"gaussian_noise": 30}]
    with pytest.raises(ConfigError, match="a list of 2 values"):
        run(one, image, KEY.generator())
    one[1] = other[0] = {"gaussian_blur": {"radius": [2, 2], "p": 1}}
    assert not np.array_equal(run(one, image, KEY.generator()), run(other, image, KEY.generator()))


def test_a_crop_lies_anywhere():
    """Colour by place: red along x, green along y."""
    x, y = np.arange(100)[None, :] * 2, np.arange(100)[:, None] * 2
    image = PIL.Image.fromarray(np.stack([x + 0 * y, y + 0 * x, 0 * (x + y)], -1).astype(np.uint8))
    corners = []
    for seed in range(50):
        cropped = np.asarray(run([{"crop": [0.25, 0.25]}], image, KEY.generator(seed))).astype(int)
        # Half of each edge is kept.
        assert abs(cropped[50, -1, 0] - cropped[50, 0, 0] - 100) < 6
        assert abs(cropped[-1, 50, 1] - cropped[0, 50, 1] - 100) < 6
        corners.append(cropped[0, 0, :2] / 100)
    low, high = np.min(corners, axis=0), np.max(corners, axis=0)
    assert (low < 0.15).all()
    assert (high > 0.85).all()


def test_jitter_goes_both_ways_and_not_too_far():
    grey = PIL.Image.new("RGB", (8, 8), (100, 100, 100))
    jitter = [{"color_jitter": {"brightness": 0.3}}]
    values = [run(jitter, grey, KEY.generator(seed)).getpixel((0, 0))[0] for seed in range(60)]
    assert 70 <= min(values) < 75
    assert 125 < max(values) <= 130


def test_probabilities_and_ranges():
    image = picture()
    flipped = np.asarray(image)[:, ::-1]
    assert np.array_equal(run([{"flip": 1}], image, KEY.generator()), flipped)
    for kind in STEPS:
        assert np.array_equal(run([{kind: {"p": 0}}], image, KEY.generator()), image)
    generator = KEY.generator()
    share = np.mean([np.array_equal(run([{"flip": 0.25}], image, generator), flipped) for _ in range(400)])
    assert 0.18 < share < 0.32


def test_normal_form_is_read_back():
    steps = augmentation_from_options(["flip", {"crop": [0.5, 1]}, {"color_jitter": {"contrast": 0.1}}])
    options = augmentation_options(steps)
    assert options[:2] == [{"flip": {"p": 0.5}}, {"crop": {"scale": [0.5, 1.0], "p": 1.0}}]
    assert augmentation_from_options(options) == steps
    assert augmentation_from_options(None) == ()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"flip": 0.5}, "augment is not a list"),
        ([{"filp": 0.5}], "did you mean 'flip'?"),
        ([{"flip": 0.5, "crop": [0.5, 1]}], "names 2 steps"),
        ([{"flip": 1.5}], "a number from 0 to 1"),
        ([{"flip": float("nan")}], "a number from 0 to 1"),
        ([{"crop": {"scale": [1, 0.5]}}], "ends before it begins"),
        ([{"color_jitter": {"hue": 0.5}}], "unknown key 'hue' in augment[0].color_jitter"),
        ([3], "keys and values"),
    ],
)
def test_bad_options(options, words):
    with pytest.raises(ConfigError) as caught:
        augmentation_from_options(options)
    assert words in str(caught.value)
