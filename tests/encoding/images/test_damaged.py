"""Pages with a damaged image: the rest of the page is kept, at its places and with its pixels."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from megaresume.encoding.images.document import encode_as_indexed
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.errors import CorpusError
from tests.encoding.images.kit import KEY, file, picture, record

PROCESSOR = {"kind": "native", "patch_size": 4, "merge": 2, "min_pixels": 64, "max_pixels": 4096}
PAGE = {"texts": ["ab", None, "cd", None, None, "ef"], "images": [None, "0.jpg", None, "1.jpg", "2.jpg", None]}


def build(**options):
    template = {"kind": "interleaved", "damaged_images": True, **options}
    encoder = ImageTextEncoder.from_options({"processor": PROCESSOR, "template": template, "image_start": "<"})
    return encoder.augmented([{"crop": {"scale": [0.3, 0.9]}}, {"flip": 0.5}])


def page(cut=None, end=None):
    """Three images, of one only its first bytes."""
    images = {f"_{n}_jpg": file(picture(40 + 8 * n, 32, seed=n), "JPEG") for n in range(3)}
    if cut is not None:
        images[f"_{cut}_jpg"] = images[f"_{cut}_jpg"][:end]
    return record(json=PAGE, **images)


@pytest.mark.parametrize("cut", range(3))
def test_an_image_that_is_cut_keeps_its_place_and_nothing_else_moves(cut):
    encoder = build()
    whole, damaged = encoder.encode(page(), KEY), encoder.encode(page(cut, -40), KEY)
    assert len(damaged.tokens) == len(whole.tokens) == encoder.measures(page(cut, -40))[0].tokens
    lost = whole.images[cut]
    places = slice(lost.offset, whole.end(lost))
    expected = whole.tokens.copy()
    expected[places] = encoder.filler
    assert damaged.tokens.tolist() == expected.tolist() and (damaged.trained == whole.trained).all()
    assert not damaged.trained[places].any()
    kept = [image for k, image in enumerate(whole.images) if k != cut]
    assert [(i.offset, i.num_tokens, i.grid, i.number) for i in damaged.images] == [
        (i.offset, i.num_tokens, i.grid, i.number) for i in kept
    ]
    assert all(np.array_equal(a.pixels, b.pixels) for a, b in zip(damaged.images, kept, strict=True))
    assert whole.fault is None and damaged.fault.policy == "mask"
    assert f"record 'dir/000123': {cut}.jpg is truncated or damaged" in damaged.fault.reason


def test_an_image_without_a_header_is_left_out_and_counted():
    encoder = build()
    for end in (0, 3, 20):
        (measure,) = encoder.measures(page(1, end))
        document = encoder.encode(page(1, end), KEY)
        assert (measure.num_images, measure.missing_images) == (2, 1)
        assert measure.tokens == len(document.tokens) and document.fault is None
        assert measure.image_tokens == (document.tokens == encoder.image_token_id).sum()


def test_prepare_counts_cut_images_if_it_decodes_and_the_lengths_are_the_same():
    encoder = build()
    (plain,), (decoded,) = encoder.measures(page(1, -40)), encoder.measures(page(1, -40), decoded=True)
    assert (plain.missing_images, decoded.missing_images) == (0, 1)
    assert (plain.tokens, plain.num_images, plain.image_tokens) == (
        decoded.tokens,
        decoded.num_images,
        decoded.image_tokens,
    )


@pytest.mark.parametrize("end", [0, 20, -40])
def test_without_the_option_it_is_an_error_of_the_record(end):
    encoder = build(damaged_images=False)
    with pytest.raises(CorpusError):
        encoder.encode(page(1, end), KEY)
    with pytest.raises(CorpusError):
        encoder.measures(page(1, end), decoded=True)


@pytest.mark.parametrize("split", [None, 32])
def test_wherever_a_file_is_cut_the_document_is_as_long_as_its_index_says(split):
    encoder = build(split=split)
    length = len(page().members["1.jpg"])
    for end in [*range(0, length, 37), length - 1]:
        cut = page(1, end)
        for decoded in (False, True):
            lengths = [measure.tokens for measure in encoder.measures(cut, decoded=decoded)]
            documents = [encoder.encode(cut, KEY, part) for part in range(len(lengths))]
            assert [len(document.tokens) for document in documents] == lengths
        for document in documents:
            assert (document.tokens == encoder.image_token_id).sum() == sum(i.num_tokens for i in document.images)
        tokens = [token for document in documents for token in document.tokens.tolist()]
        for text in ("ab", "cd", "ef"):
            assert any(tokens[k : k + 2] == list(text.encode()) for k in range(len(tokens)))


def test_it_is_a_fault_that_is_logged_and_no_policy_is_asked(caplog):
    encoder = build()
    cut = page(1, -40)
    key = type(KEY)(seed=1, source="damaged pages", document=5, epoch=0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            tokens = encoder.measures(cut)[0].tokens
            document = encode_as_indexed(encoder, cut, key, tokens=tokens, policy="error")
    assert len(document.images) == 2 and document.fault is not None
    assert len(caplog.messages) == 1 and "1.jpg is truncated or damaged" in caplog.messages[0]
