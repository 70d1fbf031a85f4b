"""Pixels written in place: the same as elsewhere, and never taken for a whole batch when a document was dropped."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.encoding.images.pixels import Room, new_rows
from tests.encoding.images.kit import KEY, file, picture, record

PROCESSORS = [
    {"kind": "native", "patch_size": 4, "merge": 2, "min_pixels": 64},
    {"kind": "patches", "size": 32, "patch_size": 8},
    {"kind": "tiles", "tile_size": 32, "patch_size": 8},
]
RECORDS = [record(png=file(picture(60, 40 + 8 * i, seed=i)), txt=f"picture {i}") for i in range(3)]


@pytest.mark.parametrize("options", PROCESSORS, ids=lambda options: options["kind"])
def test_in_place_and_the_same_as_elsewhere(options):
    encoder = ImageTextEncoder.from_options({"processor": options})
    apart = [encoder.encode(item, KEY) for item in RECORDS]
    rows = np.full((encoder.most_rows(sum(len(d.tokens) for d in apart)), *encoder.pixel_shape), np.nan, np.float32)
    room = Room(rows)
    with room.given():
        together = [encoder.encode(item, KEY) for item in RECORDS]
    pixels = [image.pixels for document in together for image in document.images]
    assert room.holds(pixels)
    expected = np.concatenate([image.pixels for document in apart for image in document.images])
    assert rows[: len(expected)].tobytes() == expected.tobytes()
    assert np.isnan(rows[len(expected) :]).all()
    # A document whose first image was written before its second one failed: nothing may close the gap.
    assert not room.holds(pixels[:1] + pixels[2:]) and not room.holds(pixels[1:]) and not room.holds(pixels[:-1])


def test_what_does_not_fit_has_memory_of_its_own():
    rows = np.zeros((3, 4), np.float32)
    room = Room(rows)
    with room.given():
        first, large, other, last = (new_rows(shape) for shape in ((2, 4), (2, 4), (1, 5), (1, 4)))
        found = []
        thread = threading.Thread(target=lambda: found.append(new_rows((0, 4))))
        thread.start()
        thread.join()
    inside = [np.shares_memory(pixels, rows) for pixels in (first, large, other, last)]
    assert inside == [True, False, False, True]
    assert room.holds([first, last]) and not room.holds([first, large, last])
    assert found[0].base is None, "another thread has no room"
    assert new_rows((1, 4)).base is None, "it is over"
