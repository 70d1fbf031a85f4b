"""kind: transformers, against transformers' own processors and tokenizers: token by token, pixel by pixel."""

from __future__ import annotations

import pickle
import shutil

import numpy as np
import PIL.Image
import pytest

from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.processors import processor_from_options
from megaresume.encoding.images.spec import resolved
from megaresume.stream.errors import ConfigError, CorpusError, SetupError
from tests.encoding.images.kit import KEY, file, record
from tests.encoding.images.models_kit import IMAGE_TOKENS, tokenizer, write_processor
from tests.encoding.images.transformers_kit import BACKENDS, picture

SIZES = [(70, 50), (16, 16), (20, 61), (300, 40), (33, 34)]


def encoder_of(directory, family, **more):
    processor = {"kind": "transformers", "model": str(directory), **more.pop("processor", {})}
    options = {"processor": processor, "tokenizer": str(directory), "image_token": IMAGE_TOKENS[family]}
    return ImageTextEncoder.from_options({"template": {"kind": "caption", "text": "txt"}, **options, **more})


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", IMAGE_TOKENS)
def test_tokens_and_pixels_are_those_of_transformers(family, backend, tmp_path):
    if backend == "torchvision":
        pytest.importorskip("torchvision")
    theirs = write_processor(tmp_path / "model", family)
    transformers = pytest.importorskip("transformers")
    images = backend.replace("pillow", "pil")
    theirs.image_processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model", backend=images)
    encoder = encoder_of(tmp_path / "model", family, processor={"backend": backend})
    shutil.rmtree(tmp_path / "model")  # the index holds what it needs
    encoder = pickle.loads(pickle.dumps(ImageTextEncoder(encoder.to_spec())))
    for size in SIZES:
        pairs = record(png=file(picture(*size)), txt="a cat")
        document, (measure,) = encoder.encode(pairs, KEY), encoder.measures(pairs)
        expected = theirs(images=[picture(*size)], text=[theirs.image_token + "a cat"], return_tensors="np")
        assert document.tokens[:-1].tolist() == expected["input_ids"][0].tolist()
        assert measure.tokens == len(document.tokens)
        (image,) = document.images
        pixels = np.asarray(expected["pixel_values"], np.float32)
        if family in ("pixtral", "mistral3"):
            shown = np.zeros_like(pixels[0])
            columns = shown.shape[2] // 4
            for k, patch in enumerate(image.pixels.reshape(-1, 3, 4, 4)):
                y, x = k // columns * 4, k % columns * 4
                shown[:, y : y + 4, x : x + 4] = patch
            assert np.array_equal(shown, pixels[0])
            assert image.grid == (1, *shown.shape[1:]) == (1, *expected["image_sizes"][0])
        else:
            assert np.array_equal(image.pixels, pixels[0] if pixels.ndim == 5 else pixels)
            assert image.grid == (1, size[1], size[0])
        assert image.num_tokens == measure.image_tokens == (document.tokens == encoder.image_token_id).sum()


def test_an_index_of_other_lengths_than_the_processor_makes_is_refused(tmp_path):
    write_processor(tmp_path / "model", "idefics3")
    encoder = encoder_of(tmp_path / "model", "idefics3")
    theirs = encoder.processor._loaded_processor
    assert encoder.processor.num_tokens(40, 40) == 40
    theirs.patterns[40, 40] = ("<image>", 7)  # as another version of transformers might have announced
    with pytest.raises(CorpusError, match="two patterns for images of one size"):
        encoder.encode(record(png=file(picture(40, 40)), txt="a"), KEY)


def test_documents_of_several_images_are_refused_where_the_pattern_is_for_one(tmp_path):
    write_processor(tmp_path / "model", "llava_onevision")
    encoder = encoder_of(tmp_path / "model", "llava_onevision", template="interleaved")
    images = {f"_{n}_png": file(picture(30, 40)) for n in range(2)}
    pages = record(json={"texts": ["a", None, None], "images": [None, "0.png", "1.png"]}, **images)
    for call in (encoder.measures, lambda pages: encoder.encode(pages, KEY)):
        with pytest.raises(CorpusError, match="several images, and its processor is for one"):
            call(pages)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "transformers"}, ["needs a model"]),
        ({"kind": "transformers", "model": "nowhere"}, ["no processor of transformers in", "nowhere"]),
        ({"kind": "transformers", "files": {"processor_config.json": {"processor_class": "NoSuchProcessor"}}}, []),
    ],
)
def test_what_is_no_processor_is_refused(options, words):
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError) as caught:
        ImageTextEncoder.from_options({"processor": options})
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_image_token_of_the_encoder_must_be_one_that_the_processor_writes(tmp_path):
    write_processor(tmp_path / "model", "idefics3")
    with pytest.raises(ConfigError, match="image_token is not what Idefics3Processor writes"):
        encoder_of(tmp_path / "model", "idefics3", image_token="<|endoftext|>")


def test_a_model_that_is_not_given_images_as_tokens_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    words = tokenizer("<|image|>", "<|python_tag|>")
    words.bos_token = "<|endoftext|>"
    images = transformers.MllamaImageProcessorPil(size={"height": 16, "width": 16})
    transformers.MllamaProcessor(images, words).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="kind: transformers does not follow MllamaProcessor"):
        ImageTextEncoder.from_options({"processor": {"kind": "transformers", "model": str(tmp_path)}})


def test_a_processor_that_gives_more_than_tiles_is_refused(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torchvision")
    words = tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    parts = transformers.Qwen2VLImageProcessorPil(), words, transformers.Qwen2VLVideoProcessor()
    transformers.Qwen2VLProcessor(*parts).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="does not follow Qwen2VLProcessor") as caught:
        ImageTextEncoder.from_options({"processor": {"kind": "transformers", "model": str(tmp_path)}})
    assert "image_grid_thw" in str(caught.value) and "kind: native" in str(caught.value)


def test_a_back_end_that_is_not_installed_is_not_replaced_by_another(tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    write_processor(tmp_path / "model", "idefics3")
    pil = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", lambda *_, **__: pil)
    options = resolved({"kind": "transformers", "model": str(tmp_path / "model"), "backend": "torchvision"})
    with pytest.raises(SetupError, match="not have the image processor for this back-end"):
        processor_from_options(options).num_tokens(8, 8)


def test_an_image_that_transformers_does_not_take_is_an_error_of_its_record(tmp_path):
    write_processor(tmp_path / "model", "idefics3")
    encoder = encoder_of(tmp_path / "model", "idefics3")
    narrow = record(png=file(PIL.Image.new("RGB", (4000, 1))), txt="a")
    try:
        (measure,) = encoder.measures(narrow)
    except CorpusError as error:
        assert "does not take this image" in str(error)
    else:
        assert len(encoder.encode(narrow, KEY).tokens) == measure.tokens
