"""Every kind of file: its size from the header, its colours, and every file that is refused."""

from __future__ import annotations

import io
import struct
import warnings
import zlib

import numpy as np
import PIL.Image
import PIL.ImageFile
import pytest

from megaresume.encoding.images.rgb import ImageOptions, decode, size_of
from megaresume.stream.errors import ConfigError, CorpusError
from tests.encoding.images.kit import file, picture

DEFAULT = ImageOptions()


def both(content, options=DEFAULT):
    """The decoded image, after its size from the header was the same."""
    image = decode(content, options, "image")
    assert size_of(content, options, "image") == image.size
    assert image.mode == "RGB"
    return image


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF", "WEBP", "JPEG"])
def test_formats(form):
    options = {"lossless": True} if form == "WEBP" else {}
    content = file(picture(61, 37), form, **options)
    image = both(content)
    assert image.size == (61, 37)
    if form in ("PNG", "BMP", "WEBP"):
        assert np.array_equal(image, picture(61, 37))


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_turns_size_and_pixels_alike(form, orientation):
    import PIL.ImageOps

    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    content = file(picture(61, 37), form, exif=exif)
    with PIL.Image.open(__import__("io").BytesIO(content)) as raw:
        expected = PIL.ImageOps.exif_transpose(raw).convert("RGB")
    assert np.array_equal(both(content), expected)
    assert both(content, ImageOptions(orientation="ignore")).size == (61, 37)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_tiff_which_pillow_turns_itself_is_turned_once(orientation):
    exif = PIL.Image.Exif()
    exif[0x0112] = orientation
    content = file(picture(61, 37), "TIFF", exif=exif)
    with PIL.Image.open(io.BytesIO(content)) as raw:
        expected = PIL.ImageOps.exif_transpose(raw).convert("RGB")
    assert np.array_equal(both(content, ImageOptions(formats=("TIFF",))), expected)


@pytest.mark.parametrize("mode", ["L", "1", "P", "CMYK"])
def test_modes_become_rgb(mode):
    image = picture(20, 20, mode)
    form = "JPEG" if mode == "CMYK" else "PNG"
    options = {"quality": 100} if form == "JPEG" else {}
    assert np.abs(np.int16(both(file(image, form, **options))) - np.int16(image.convert("RGB"))).mean() < 2


def test_sixteen_bits_keep_their_high_byte():
    values = np.arange(64, dtype=np.uint16).reshape(8, 8) * 1024
    image = np.asarray(both(file(PIL.Image.fromarray(values))))
    assert np.array_equal(image, (values >> 8).astype(np.uint8)[..., None].repeat(3, 2))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_shows_the_background(mode):
    image = PIL.Image.new("RGBA", (8, 8), (200, 10, 10, 0))
    image.paste((50, 50, 50, 255), (0, 0, 4, 8))
    content = file(image.convert(mode))
    colours = np.asarray(both(content, ImageOptions(background=(1, 2, 3))))
    assert np.array_equal(colours[0, 7], [1, 2, 3])
    assert np.array_equal(colours[0, 0], [50, 50, 50])
    half = PIL.Image.new("RGBA", (1, 1), (0, 0, 0, 128))
    assert np.array_equal(np.asarray(both(file(half)))[0, 0], [127] * 3)


def test_colour_declared_transparent():
    image = PIL.Image.new("RGB", (4, 4), (9, 9, 9))
    assert np.array_equal(np.asarray(both(file(image, transparency=(9, 9, 9))))[0, 0], [255] * 3)


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animated(form):
    frames = [picture(24, 24, seed=seed) for seed in (0, 1)]
    content = file(frames[0], form, save_all=True, append_images=frames[1:], lossless=True)
    assert np.abs(np.int16(both(content)) - np.int16(frames[0])).mean() < 20
    for function in (size_of, decode):
        with pytest.raises(CorpusError, match="is animated"):
            function(content, ImageOptions(animated="error"), "image")


def bomb(width, height):
    """A PNG of a header that announces so many pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = b"IDAT" + zlib.compress(b"\0" * 1000)
    chunks = [struct.pack(">I", len(c) - 4) + c + struct.pack(">I", zlib.crc32(c)) for c in (header, pixels, b"IEND")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize("size", [(10_000, 9_000), (13_000, 13_000), (100_000, 100_000)])
def test_decompression_bomb_is_an_error_whatever_python_does_with_warnings(size):
    for action in ("ignore", "error"):
        for function in (size_of, decode):
            with warnings.catch_warnings():
                warnings.simplefilter(action)
                with pytest.raises(CorpusError, match="larger than images may be"):
                    function(bomb(*size), DEFAULT, "image")


def test_own_limit_of_pixels():
    content = file(picture(100, 100))
    assert both(content, ImageOptions(max_pixels=10_000)).size == (100, 100)
    with pytest.raises(CorpusError, match="larger") as caught:
        size_of(content, ImageOptions(max_pixels=9_999), "image")
    assert "100 x 100 = 10000 pixels" in str(caught.value)


JPEG, PNG = file(picture(200, 150), "JPEG"), file(picture(200, 150))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"<html>404</html>", "not an image of a known format"),
        (JPEG[: len(JPEG) // 2], "truncated or damaged"),
        (PNG[: len(PNG) // 2], "truncated or damaged"),
        (PNG[:60] + b"\0" * 100 + PNG[160:], "truncated or damaged"),
        (file(picture(), "GIF")[:-200], "truncated or damaged"),
        (file(picture(), "TIFF"), "not an image of a known format"),
    ],
)
def test_damaged_files_are_named_the_same_way_every_time(content, words):
    reasons = set()
    for _ in range(2):
        with pytest.raises(CorpusError, match=words) as caught:
            decode(content, DEFAULT, "record 'k': jpg")
        assert caught.value.headline.startswith("record 'k': jpg")
        reasons.add((caught.value.headline, caught.value.found))
    assert len(reasons) == 1
    assert "0x7" not in str(reasons)


def test_every_cut_of_a_file_is_refused():
    for content in (JPEG, PNG):
        for length in range(1, len(content) - 60, 211):
            with pytest.raises(CorpusError):
                decode(content[:length], DEFAULT, "image")


def test_filling_of_truncated_images_is_refused(monkeypatch):
    monkeypatch.setattr(PIL.ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ConfigError, match="grey"):
        decode(JPEG, DEFAULT, "image")


def test_formats_can_be_declared():
    content = file(picture(20, 10), "TIFF")
    assert both(content, ImageOptions(formats=("TIFF",))).size == (20, 10)
    with pytest.raises(ConfigError, match="does not know an image format"):
        size_of(content, ImageOptions(formats=("TIF",)), "image")
