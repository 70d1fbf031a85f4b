"""Images that are not one run of image tokens: rows with a token at their ends, of a processor of one's own."""

from __future__ import annotations

import numpy as np
import pytest

from megaresume.encoding.images.document import fit_document
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.processor import image_tokens, pattern_of, pattern_of_text
from megaresume.stream.errors import ConfigError
from tests.encoding.images.kit import KEY, file, picture, record

IMAGE = 257


class Rows:
    """Squares of 8 pixels, one token each; "|" after a row, "]" after the last one."""

    pixel_shape = (3, 8, 8)

    def pattern(self, width, height):
        runs = [part for _ in range(height // 8) for part in (width // 8, "|")]
        return (*runs[:-1], "]")

    def tokens_of(self, pixels, grid):
        return len(pixels)

    def __call__(self, image, generator):
        values = np.asarray(image, np.float32) / 255
        rows, columns = values.shape[0] // 8, values.shape[1] // 8
        cut = values[: rows * 8, : columns * 8].reshape(rows, 8, columns, 8, 3).transpose(0, 2, 4, 1, 3)
        return np.ascontiguousarray(cut).reshape(-1, 3, 8, 8), (1, rows, columns)


class Unusual(Rows):
    def __init__(self, pattern):
        self._pattern = pattern

    def pattern(self, width, height):
        return self._pattern


ROWS = {"kind": "python", "factory": "tests.encoding.images.test_patterns:Rows"}


def build(**options):
    return ImageTextEncoder.from_options({"processor": ROWS, **options})


def test_an_image_is_the_pattern_that_its_processor_says():
    encoder = build(image_start="[")
    image = record(png=file(picture(24, 16)), txt="ab")
    document = encoder.encode(image, KEY)
    expected = [ord("["), IMAGE, IMAGE, IMAGE, ord("|"), IMAGE, IMAGE, IMAGE, ord("]"), *b"ab", 256]
    assert document.tokens.tolist() == expected
    assert document.trained.tolist() == [False] * 9 + [True] * 3
    (shown,) = document.images
    assert (shown.offset, shown.num_tokens, shown.grid, len(shown.pixels)) == (1, 6, (1, 2, 3), 6)
    assert document.end(shown) == 8
    measure = encoder.measures(image)[0]
    assert (measure.tokens, measure.image_tokens, measure.num_images) == (len(expected), 6, 1)
    assert encoder.images(image) == [("png", 24, 16, 6)]


def test_a_page_is_split_by_all_tokens_of_a_pattern():
    members = {"_0_png": file(picture(24, 16)), "_1_png": file(picture(16, 16))}
    pages = record(json={"texts": ["ab", None, None, "c"], "images": [None, "0.png", "1.png", None]}, **members)
    encoder = build(template={"kind": "interleaved", "split": 10})
    lengths = [measure.tokens for measure in encoder.measures(pages)]
    # ab; the 8 tokens of the first image; the 6 of the second, c and the end of document
    assert lengths == [2, 8, 8]
    parts = [encoder.encode(pages, KEY, part).tokens.tolist() for part in range(len(lengths))]
    assert [len(part) for part in parts] == lengths
    whole = build(template="interleaved").encode(pages, KEY).tokens.tolist()
    assert [token for part in parts for token in part] == whole


@pytest.mark.parametrize("tokens", range(1, 22))
def test_a_document_that_is_cut_keeps_whole_images_alone(tokens):
    members = {"_0_png": file(picture(24, 16)), "_1_png": file(picture(16, 16))}
    pages = record(json={"texts": [None, "ab", None], "images": ["0.png", None, "1.png"]}, **members)
    whole = build(template="interleaved").encode(pages, KEY)
    document = fit_document(whole, tokens, 256)
    assert len(document.tokens) == tokens
    assert (document.tokens == IMAGE).sum() == sum(image.num_tokens for image in document.images)
    # their last image tokens are the 7th and the 15th of the document
    assert len(document.images) == (tokens >= 7) + (tokens >= 15)


@pytest.mark.parametrize(
    "pattern", [(), ("text",), (0,), (3, -1), (True,), (2.0,), [4], 4, "4", (4, None), (np.int64(4),), None]
)
def test_what_is_no_pattern_is_refused(pattern):
    with pytest.raises(ConfigError, match="announces no length"):
        pattern_of(Unusual(pattern), 8, 8)


def test_a_pattern_of_other_lengths_than_the_pixels_is_refused_when_the_encoder_is_built():
    options = {"kind": "python", "factory": "tests.encoding.images.test_patterns:Unusual", "kwargs": {"pattern": [3]}}
    with pytest.raises(ConfigError, match="announces no length"):  # a list, as JSON has it
        ImageTextEncoder.from_options({"processor": options})


@pytest.mark.parametrize(
    ("text", "pattern"),
    [
        ("<i><i>", (2,)),
        ("<i><i>|<i>]", (2, "|", 1, "]")),
        ("\n<i>\n", ("\n", 1, "\n")),
        ("text", ("text",)),
    ],
)
def test_the_pattern_of_a_text(text, pattern):
    assert pattern_of_text(text, "<i>") == pattern
    assert image_tokens(pattern) == text.count("<i>")
