"""Policies: exactly the indexed length, the same result every time, an image never cut."""

from __future__ import annotations

import dataclasses
import logging

import numpy as np
import pytest

from megaresume.encoding.images.document import encode_as_indexed, fit_document
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import ConfigError, CorpusError
from tests.encoding.images.kit import KEY, file, picture, record

#: an image takes 4 tokens.
ENCODER = ImageTextEncoder.from_options({"processor": {"kind": "patches", "size": 28}, "template": "interleaved"})
IMAGE = file(picture())
#: tokens 0-2 "abc", 3-6 image, 7-8 "de", 9-12 image, 13 "f", 14 end.
GOOD = record(
    _0_png=IMAGE,
    _1_png=IMAGE,
    json={"texts": ["abc", None, "de", None, "f"], "images": [None, "0.png", None, "1.png", None]},
)
CUT = dataclasses.replace(GOOD, members={**GOOD.members, "1.png": IMAGE[: len(IMAGE) // 2]})
UNREADABLE = CorpusError("record 5 lies behind the end of the shard", found="3 bytes of 512", cause="a truncated tar")


@pytest.fixture(autouse=True)
def _nothing_reported(monkeypatch):
    monkeypatch.setattr("megaresume.encoding.images.document._reported", set())


def run(item, tokens, policy):
    return encode_as_indexed(ENCODER, item, KEY, tokens=tokens, policy=policy)


def text(document):
    """One character a token: # of an image, _ of a filler, upper case where it is trained on."""
    signs = ["#" if t == 257 else "_" if t == 256 else chr(t) for t in document.tokens]
    return "".join(s.upper() if on else s for s, on in zip(signs, document.trained, strict=True))


def test_a_good_record_has_no_fault():
    for policy in ("error", "mask", "truncate"):
        document = run(GOOD, 15, policy)
        assert text(document) == "ABC####DE####F_"
        assert document.trained[14]
        assert document.fault is None


@pytest.mark.parametrize("item", [CUT, UNREADABLE])
def test_what_cannot_be_encoded(item):
    with pytest.raises(CorpusError):
        run(item, 15, "error")
    for policy in ("mask", "truncate"):
        document = run(item, 15, policy)
        assert text(document) == "_" * 15
        assert not document.trained.any()
        assert document.images == ()
        assert document.fault.policy == policy


def test_reason_is_the_same_on_every_machine():
    reason = run(CUT, 15, "mask").fault.reason
    assert reason == "record 'dir/000123': 1.png is truncated or damaged; found PNG, 60 x 40 pixels by its header"
    assert run(CUT, 15, "mask").fault.reason == reason
    assert run(UNREADABLE, 15, "mask").fault.reason == f"{UNREADABLE.headline}; found 3 bytes of 512"
    # A library words its cause in each version anew.
    assert run(CorpusError("too dark", cause="at 0x7f00"), 15, "mask").fault.reason == "too dark"
    assert run(GOOD, 20, "mask").fault.reason.endswith("not as long as its index says; found 15 tokens")


@pytest.mark.parametrize("tokens", [1, 14, 16, 40])
def test_another_length(tokens):
    with pytest.raises(CorpusError, match="not as long") as caught:
        run(GOOD, tokens, "error")
    assert f"{tokens} tokens" in caught.value.expected
    masked = run(GOOD, tokens, "mask")
    assert text(masked) == "_" * tokens
    assert masked.images == ()


@pytest.mark.parametrize(
    ("tokens", "expected", "images"),
    [
        (0, "", 0),
        (2, "AB", 0),
        (3, "ABC", 0),
        (4, "ABC_", 0),
        (6, "ABC___", 0),
        (7, "ABC####", 1),
        (9, "ABC####DE", 1),
        (12, "ABC####DE___", 1),
        (13, "ABC####DE####", 2),
        (14, "ABC####DE####F", 2),
        (18, "ABC####DE####F____", 2),
    ],
)
def test_text_is_cut_and_images_never(tokens, expected, images):
    document = run(GOOD, tokens, "truncate")
    assert text(document) == expected
    assert (document.fault.policy, len(document.images)) == ("truncate", images)
    assert (document.tokens == 257).sum() == sum(image.num_tokens for image in document.images)
    # What stands for a part of an image, or behind the end, is not trained on.
    fillers = np.flatnonzero(document.tokens == 256)
    assert not document.trained[fillers[fillers != 14]].any()


def test_every_length_is_kept_exactly():
    whole = ENCODER.encode(GOOD, KEY)
    for tokens in range(25):
        document = fit_document(whole, tokens, ENCODER.filler)
        assert len(document.tokens) == len(document.trained) == tokens
        for image in document.images:
            assert (document.tokens[image.offset : image.offset + image.num_tokens] == 257).all()


def test_logged_once_a_document(caplog):
    with caplog.at_level(logging.WARNING):
        run(CUT, 15, "mask")
        run(CUT, 15, "mask")
        encode_as_indexed(ENCODER, CUT, dataclasses.replace(KEY, document=4), tokens=15, policy="mask")
    assert [("document 3 " in m, "document 4 " in m, "Pillow says" in m) for m in caplog.messages] == [
        (True, False, True),
        (False, True, True),
    ]


class Broken:
    """A processor with a mistake that it only makes for some images."""

    pixel_shape = (1,)

    def __init__(self, error):
        self.error = error

    def num_tokens(self, width, height):
        return 4

    def tokens_of(self, pixels, grid):
        return grid[2]

    def __call__(self, image, generator):
        if image.width == 60:
            if self.error is None:
                return np.zeros((1, 1), np.float32), (1, 1, 5)
            raise {"bug": ZeroDivisionError(), "image": CorpusError("too dark")}[self.error]
        return np.zeros((1, 1), np.float32), (1, 1, 4)


def broken(error):
    return ImageTextEncoder.from_options(
        {"processor": {"kind": "python", "factory": f"{__name__}:Broken", "kwargs": {"error": error}}}
    )


def test_a_processor_that_makes_other_lengths_follows_the_policy():
    encoder, item = broken(None), record(png=IMAGE, txt="abc")
    with pytest.raises(CorpusError, match="a different number of tokens than it announced"):
        encoder.encode(item, KEY)
    assert encode_as_indexed(encoder, item, KEY, tokens=8, policy="mask").fault is not None


def test_a_mistake_in_a_processor_is_not_taken_for_a_bad_record():
    item = record(png=IMAGE, txt="abc")
    with pytest.raises(ZeroDivisionError):
        encode_as_indexed(broken("bug"), item, KEY, tokens=8, policy="mask")
    own = encode_as_indexed(broken("image"), item, KEY, tokens=8, policy="mask")
    assert own.fault.reason == "record 'dir/000123': png: too dark"


def test_a_configuration_error_is_never_masked(monkeypatch):
    monkeypatch.setattr("PIL.ImageFile.LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ConfigError):
        run(GOOD, 15, "mask")
