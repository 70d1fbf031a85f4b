"""Tokens, masks, places of images, lengths; the spec; what the tokenizer must have."""

from __future__ import annotations

import json
import multiprocessing
import pickle

import numpy as np
import pytest

from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import ConfigError, CorpusError
from tests.encoding.images.kit import KEY, file, picture, record

SMALL = {"kind": "native", "max_pixels": 28 * 28 * 16}
CAT = "ein Kätzchen"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Words and special tokens; "#" is an added token that is not special."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["<unk>", "<|endoftext|>", "<image>", "<s>", "a", "cat", "<", ">", "image", "|"]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    inner.add_special_tokens(["<|endoftext|>", "<image>", "<s>"])
    inner.add_tokens([tokenizers.AddedToken("#", special=False)])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    inner.save(str(path))
    return path


def build(**options):
    return ImageTextEncoder.from_options({"processor": SMALL, **options})


def test_tokens_mask_and_place_of_a_caption():
    encoder = build(template={"kind": "caption", "prompt": "P"})
    assert (encoder.image_token_id, encoder.vocab_size) == (257, 258)
    image = picture(84, 56)
    document = encoder.encode(record(png=file(image), txt=f" {CAT}\n"), KEY)
    expected = [257] * 6 + [ord("P"), *CAT.encode(), 256]
    assert document.tokens.tolist() == expected
    assert document.tokens.dtype == np.int64
    assert document.trained.tolist() == [False] * 7 + [True] * (len(CAT.encode()) + 1)
    (placed,) = document.images
    assert (placed.offset, placed.num_tokens, placed.grid) == (0, 6, (1, 4, 6))
    pixels, _ = encoder.processor(image, np.random.default_rng(0))
    assert np.array_equal(placed.pixels, pixels)


@pytest.mark.parametrize("processor", [SMALL, {"kind": "patches", "size": 28}, {"kind": "tiles", "tile_size": 28}])
@pytest.mark.parametrize("size", [(30, 30), (200, 50), (33, 170)])
def test_measure_is_what_encode_makes(processor, size):
    encoder = build(processor=processor, image_start="<a>", image_end="</a>")
    item = record(jpg=file(picture(*size), "JPEG"), txt=CAT)
    measure = encoder.measures(item)[0]
    document = encoder.encode(item, KEY)
    assert measure.tokens == len(document.tokens)
    assert measure.num_images == len(document.images) == 1
    assert measure.image_tokens == document.images[0].num_tokens == (document.tokens == encoder.image_token_id).sum()
    assert bytes(document.tokens[:3].astype(np.uint8)) == b"<a>"
    assert document.images[0].offset == 3


@pytest.mark.parametrize(
    ("fit", "size", "fits"),
    [
        ("crop", (3, 9000), False),
        ("crop", (3, 4000), True),
        ("pad", (14000, 1), False),
        ("pad", (2000, 1), True),
        ("stretch", (14000, 1), True),
    ],
)
def test_an_image_that_would_fill_the_memory_on_its_way_to_a_square_is_a_fault(fit, size, fits):
    """A few kilobytes of PNG, allowed by max_pixels: cut after enlarging, it would take gigabytes."""
    narrow = build(processor={"kind": "patches", "size": 336, "fit": fit})
    content = record(png=file(picture(*size)), txt="a")
    if fits:
        assert len(narrow.encode(content, KEY).tokens) == narrow.measures(content)[0].tokens
        return
    for call in (narrow.measures, lambda content: narrow.encode(content, KEY)):
        with pytest.raises(CorpusError, match=r"png: an image too narrow for its length[\s\S]*fit: stretch"):
            call(content)


def test_measure_decodes_no_pixel(monkeypatch):
    import PIL.ImageFile

    item = record(jpg=file(picture(300, 200), "JPEG")[:700], txt=CAT)
    monkeypatch.setattr(PIL.ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    assert build().measures(item)[0].num_images == 1


@pytest.mark.process
def test_another_process_makes_the_same_document():
    encoder = build().augmented([{"crop": [0.3, 0.9]}, {"flip": 0.5}, {"gaussian_noise": 20}])
    item = record(png=file(picture()), txt=CAT)
    document = encoder.encode(item, KEY)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        other = pool.apply(_encode, (pickle.dumps(encoder), item))
    assert np.array_equal(other.tokens, document.tokens)
    assert np.array_equal(other.images[0].pixels, document.images[0].pixels)


def _encode(pickled, item):
    np.random.seed(5)
    return pickle.loads(pickled).encode(item, KEY)


def test_spec_is_json_and_self_contained(tokenizer):
    encoder = ImageTextEncoder.from_options(
        {"tokenizer": tokenizer.name, "image_token": "<image>", "processor": SMALL, "template": "chat"},
        tokenizer.parent,
    )
    spec = encoder.to_spec()
    assert json.loads(json.dumps(spec)) == spec
    again = ImageTextEncoder(spec)
    assert again.fingerprint == encoder.fingerprint
    assert again.to_spec() == spec
    assert again.image_token_id == 2


def test_pickle_leaves_the_tokenizer_to_the_worker(tokenizer):
    encoder = build(tokenizer=str(tokenizer), image_token="<image>")
    encoder.measures(record(png=file(picture()), txt="a cat"))
    again = pickle.loads(pickle.dumps(encoder))
    assert "tokenizer" in vars(encoder)
    assert "tokenizer" not in vars(again)
    assert again.encode(record(png=file(picture(28, 28)), txt="a cat"), KEY).tokens.tolist()[-3:] == [4, 5, 1]


def test_fingerprint_follows_what_lengths_depend_on_and_not_augmentation(tokenizer):
    prints = [
        build().fingerprint,
        build(processor={**SMALL, "max_pixels": 28 * 28 * 17}).fingerprint,
        build(template={"kind": "caption", "prompt": " "}).fingerprint,
        build(tokenizer=str(tokenizer)).fingerprint,
        build(tokenizer=str(tokenizer), image_token="<image>").fingerprint,
        build(images={"orientation": "ignore"}).fingerprint,
    ]
    assert len(set(prints)) == len(prints)
    assert build().augmented(["flip"]).fingerprint == prints[0]
    assert build(template={}, images={}).fingerprint == prints[0]
    assert build(processor={**SMALL, "normalize": "clip"}).fingerprint == prints[0]


def test_text_of_a_record_never_becomes_a_special_token(tokenizer):
    encoder = build(tokenizer=str(tokenizer), image_token="<image>", image_start="<s>")
    document = encoder.encode(record(png=file(picture(28, 28)), txt="a <image> <|endoftext|>"), KEY)
    assert encoder.tokenizer.encode("a <image>", special=True) == [4, 2]
    # <s> and four tokens of the image, then the words of the text.
    assert document.tokens.tolist() == [3, 2, 2, 2, 2, 4, 6, 8, 7, 0, 0, 0, 1]


def test_text_that_spells_the_image_token_is_refused(tokenizer):
    encoder = build(tokenizer=str(tokenizer), image_token="#")
    with pytest.raises(CorpusError, match="spells the image token") as caught:
        encoder.encode(record(png=file(picture()), txt="a # cat"), KEY)
    assert "000123" in str(caught.value)


@pytest.mark.parametrize(("style", "learned"), [("chatml", False), ("plain", True)])
def test_end_of_document_is_trained_on_when_the_text_before_it_is(style, learned):
    turns = {"messages": [{"role": "user", "content": "<image>q"}, {"role": "assistant", "content": "answer"}]}
    encoder = build(template={"kind": "chat", "style": style})
    document = encoder.encode(record(png=file(picture(28, 28)), json=turns), KEY)
    assert document.tokens[-1] == 256
    assert bool(document.trained[-1]) == learned
    text = bytes(document.tokens[document.trained & (document.tokens < 256)].astype(np.uint8)).decode()
    assert text == {"chatml": "answer<|im_end|>", "plain": "answer\n"}[style]


def test_images_of_a_document_draw_from_generators_of_their_own():
    encoder = build(template="interleaved").augmented([{"crop": [0.2, 0.9]}])
    content = file(picture())
    item = record(_0_png=content, _1_png=content, json={"texts": ["a", None, None], "images": [None, "0.png", "1.png"]})
    one, two = encoder.encode(item, KEY).images
    assert not np.array_equal(one.pixels, two.pixels)
    plain, same = encoder.augmented(None).encode(item, KEY).images
    assert np.array_equal(plain.pixels, same.pixels)
    assert two.offset == one.offset + one.num_tokens == 1 + one.num_tokens


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"procesor": SMALL}, ["unknown key 'procesor'", "did you mean 'processor'?"]),
        ({}, ["no processor", "kind: patches"]),
        ({"processor": {"kind": "natve"}}, ["unknown kind of processor", "did you mean 'native'?"]),
        ({"processor": {"kind": "native", "max_pixel": 1}}, ["unknown key 'max_pixel'", "did you mean 'max_pixels'?"]),
        ({"processor": {"kind": "native", "merge": True}}, ["processor.merge", "an integer from 1 to 64"]),
        ({"processor": {"kind": "native", "max_pixels": 100}}, ["leave no room", "784 pixels a token"]),
        ({"processor": {"kind": "patches", "size": 330, "merge": 2}}, ["does not fit", "23 a side", "size 336"]),
        ({"processor": {"kind": "tiles", "min_tiles": 13}}, ["min_tiles 13, max_tiles 12"]),
        ({"processor": {"kind": "tiles", "normalize": "imagnet"}}, ["processor.normalize", "imagenet"]),
        ({"processor": SMALL, "template": {"kind": "chat", "style": "chatlm"}}, ["did you mean 'chatml'?"]),
        ({"processor": SMALL, "images": {"background": [0, 0]}}, ["images.background", "a list of 3 values"]),
        ({"processor": SMALL, "eod": "yes"}, ["bad value of eod", "true or false"]),
        ([], ["the encoder", "keys and values"]),
    ],
)
def test_bad_options_are_named(options, words):
    with pytest.raises(ConfigError) as caught:
        ImageTextEncoder.from_options(options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_tokens_that_the_tokenizer_has_not_are_refused(tokenizer, tmp_path):
    with pytest.raises(ConfigError, match="no token '<img>'"):
        build(tokenizer=str(tokenizer), image_token="<img>")
    without = json.loads(tokenizer.read_text())
    without["added_tokens"] = [token for token in without["added_tokens"] if token["content"] != "<|endoftext|>"]
    without["model"]["vocab"]["end"] = without["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(without))
    with pytest.raises(ConfigError, match="no known end-of-document token"):
        build(tokenizer=str(tmp_path))
    assert build(tokenizer=str(tmp_path), eod=False).filler == 0
    assert build(tokenizer=str(tmp_path), eod_token="end").filler == 1


def test_newer_spec_is_refused():
    spec = build().to_spec()
    with pytest.raises(ConfigError, match="version 2"):
        ImageTextEncoder({**spec, "version": 2})


@pytest.mark.parametrize("processor", [{"kind": kind} for kind in ("patches", "tiles", "native")])
@pytest.mark.parametrize("template", ["caption", "chat", "interleaved"])
def test_normal_form_is_read_back(processor, template):
    spec = build(processor=processor, template=template).to_spec()
    assert build(processor=spec["processor"], template=spec["template"], images=spec["images"]).to_spec() == spec
