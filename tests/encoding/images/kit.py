"""Records and images for the tests beside."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import PIL.Image

from megaresume.encoding.images.document import Key, Record

KEY = Key(seed=1, source="pairs", document=3, epoch=0)


def picture(width: int = 60, height: int = 40, mode: str = "RGB", seed: int = 0) -> PIL.Image.Image:
    """Blocks of 4 x 4 pixels of random colours."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (-(-height // 4), -(-width // 4), 3), np.uint8)
    image = PIL.Image.fromarray(blocks.repeat(4, 0).repeat(4, 1)[:height, :width])
    return image if mode == "RGB" else image.convert(mode)


def file(image: PIL.Image.Image, form: str = "PNG", **options: Any) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


def record(**members: Any) -> Record:
    """``record(png=..., txt="a cat", json={...})``; "_" in a name stands for a dot: ``_0_png``."""
    content = {}
    for name, value in members.items():
        value = json.dumps(value) if isinstance(value, dict | list) else value
        content[name.strip("_").replace("_", ".")] = value.encode() if isinstance(value, str) else value
    return Record(key="dir/000123", path="/data/pairs-000000.tar", members=content)
