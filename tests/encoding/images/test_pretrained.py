"""Presets and models' own files, against what transformers makes of the same files."""

from __future__ import annotations

import json

import numpy as np
import pytest

from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.processors import processor_from_options
from megaresume.encoding.images.spec import PUBLISHED, resolved
from megaresume.stream.errors import ConfigError
from tests.encoding.images.transformers_kit import BACKENDS, picture, pixels_of, write_model

SIZES = [(1500, 1000), (640, 480), (300, 900), (70, 50)]
#: tokens of these images by the formulas of the models' processors in transformers.
TOKENS = {
    "qwen2-vl": [1944, 391, 352, 4],
    "qwen2.5-vl": [1944, 391, 352, 4],
    "qwen3-vl": [1457, 300, 252, 70],
    "llava-1.5": [576] * 4,
    "siglip-so400m-384": [729] * 4,
    "siglip2-so400m-384": [729] * 4,
    "internvl": [1792, 3328, 1024, 3328],
    "gemma-3": [256] * 4,
}


def build(processor, base_dir="."):
    return ImageTextEncoder.from_options({"processor": processor}, base_dir)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_is_what_transformers_reads_from_its_files(name, backend, tmp_path):
    transformers = pytest.importorskip("transformers")
    if backend == "torchvision":
        pytest.importorskip("torchvision")
    directory = write_model(tmp_path / "model", *PUBLISHED[name])
    theirs = transformers.AutoImageProcessor.from_pretrained(directory, backend=backend.replace("pillow", "pil"))
    if name == "internvl":  # as its processor asks of it
        theirs.crop_to_patches = True
    mine = processor_from_options(resolved({"preset": name, "backend": backend}))
    for size in SIZES[1:]:
        pixels, grid = mine(picture(*size), np.random.default_rng(0))
        assert np.array_equal(pixels, pixels_of(theirs, picture(*size)))
        assert mine.tokens_of(pixels, grid) == mine.num_tokens(*size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_tokens_of_a_preset(name):
    mine = processor_from_options(resolved({"preset": name}))
    assert [mine.num_tokens(*size) for size in SIZES] == TOKENS[name]


def test_a_directory_says_what_the_preset_says_and_the_spec_holds_values(tmp_path):
    directory = write_model(tmp_path / "model", *PUBLISHED["qwen3-vl"])
    encoder = build({"model": "model"}, tmp_path)
    assert encoder.fingerprint == build({"preset": "qwen3-vl"}).fingerprint
    processor = encoder.to_spec()["processor"]
    assert not {"model", "preset"} & set(processor)
    assert (processor["min_pixels"], processor["max_pixels"], processor["patch_size"]) == (65536, 16777216, 16)
    (directory / "preprocessor_config.json").unlink()
    assert ImageTextEncoder(encoder.to_spec()).fingerprint == encoder.fingerprint


def test_values_beside_a_model_take_precedence_and_back_ends_are_told_apart():
    plain, smaller, other = (
        build({"preset": "qwen3-vl", **more}) for more in ({}, {"max_pixels": 131072}, {"backend": "torchvision"})
    )
    assert smaller.processor.num_tokens(1500, 1000) == 117
    assert len({plain.fingerprint, smaller.fingerprint, other.fingerprint}) == 3


def test_transformers_5_nests_the_image_processor_and_that_file_goes_first(tmp_path):
    directory = write_model(tmp_path / "model", *PUBLISHED["qwen2-vl"])
    nested = {"processor_class": "Qwen3VLProcessor", "image_processor": PUBLISHED["qwen3-vl"][0]}
    (directory / "processor_config.json").write_text(json.dumps(nested))
    assert build({"model": str(directory)}).fingerprint == build({"preset": "qwen3-vl"}).fingerprint


@pytest.mark.parametrize(
    ("name", "config", "model", "words"),
    [
        ("qwen3-vl", {"image_processor_type": "PixtralImageProcessor"}, {}, ["none of our processors", "Pixtral"]),
        ("qwen3-vl", {"image_processor_type": None}, {}, ["none of our processors"]),
        ("qwen3-vl", {"do_resize": False}, {}, ["do_resize", "False"]),
        ("qwen3-vl", {"rescale_factor": 1 / 127.5}, {}, ["rescale_factor"]),
        ("qwen3-vl", {"resample": 0}, {}, ["resample", "bicubic"]),
        ("qwen3-vl", {"size": {"height": 4, "width": 4}}, {}, ["size", "shortest_edge"]),
        ("qwen3-vl", {"size": {"shortest_edge": 65536}}, {}, ["size", "longest_edge"]),
        ("qwen3-vl", {"sharpen": 2}, {}, ["sharpen is not what our processors follow"]),
        ("qwen3-vl", {"patch_size": "16"}, {}, ["patch_size"]),
        ("llava-1.5", {"do_center_crop": False}, {}, ["crop_size", "do_center_crop False"]),
        ("llava-1.5", {"crop_size": 224}, {}, ["crop_size 224"]),
        ("llava-1.5", {"size": {"height": 336, "width": 336}}, {}, ["size", "shortest_edge"]),
        ("llava-1.5", {}, {"vision_config": {}}, ["how large a patch is"]),
        ("siglip-so400m-384", {"do_center_crop": True}, {}, ["do_center_crop"]),
        ("siglip-so400m-384", {"size": {"height": 384, "width": 378}}, {}, ["size", "a square"]),
        ("gemma-3", {"do_pan_and_scan": True}, {}, ["do_pan_and_scan"]),
        ("internvl", {"processor_class": None}, {}, ["crop_to_patches"]),
        ("llava-1.5", {}, {"model_type": "internvl_chat"}, ["model's own code", "preset: internvl"]),
    ],
)
def test_what_our_processors_do_not_follow_is_refused(name, config, model, words, tmp_path):
    files = PUBLISHED[name]
    directory = write_model(tmp_path / "model", files[0] | config, files[1] | model)
    with pytest.raises(ConfigError) as caught:
        build({"model": str(directory)})
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"preset": "qwen3vl"}, ["unknown preset", "did you mean 'qwen3-vl'?"]),
        ({"preset": ["qwen3-vl"]}, ["unknown preset"]),
        ({"preset": "qwen3-vl", "model": "a"}, ["names a model twice"]),
        ({"preset": "qwen3-vl", "kind": "tiles"}, ["processor.kind", "native"]),
        ({"preset": "qwen3-vl", "size": 3}, ["unknown key 'size'"]),
        ({"model": "nowhere"}, ["no values of an image processor in", "nowhere"]),
    ],
)
def test_bad_options_are_refused(options, words):
    with pytest.raises(ConfigError) as caught:
        build(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


@pytest.mark.parametrize("content", ["{", "[]", "[" * 100_000, b"\xff"])
def test_a_damaged_file_is_refused_by_name(content, tmp_path):
    directory = write_model(tmp_path / "model", *PUBLISHED["qwen3-vl"])
    file = directory / "preprocessor_config.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=r"preprocessor_config\.json"):
        build({"model": str(directory)})
