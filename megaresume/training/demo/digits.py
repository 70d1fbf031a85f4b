"""Pictures of handwritten digits as tar shards: real images that an ordinary package has, with their answers.

    scikit-learn's 1797 digits  --shuffled once-->  digits for training | digits held out
    1 to 4 of them side by side, at a size drawn from 16 to 48 pixels  -->  00000042.png
    a conversation about the picture, or about two of them             -->  00000042.json

    user: <image>which digits?        assistant: 3 1 4

No picture for training holds a digit that is held out.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ENCODER", "HELD_OUT", "TRAIN", "Pictures", "digits_of", "write_pictures"]

#: For ``megaresume prepare``: bytes as tokens; squares of 16 pixels, 4 patches of 8, become one token.
ENCODER: dict[str, Any] = {
    "tokenizer": None,
    "template": {"kind": "chat", "style": {"user": {"after": " "}, "assistant": {"end": "\n"}}},
    "processor": {
        "kind": "native",
        "patch_size": 8,
        "merge": 2,
        "temporal_patch_size": 1,
        "min_pixels": 256,
        "max_pixels": 16384,
        "normalize": "siglip",
    },
}

#: heights of pictures, pixels, least and most; shares of records with the least, with one digit alone, with two
#: pictures. What is small and alone is learned first: the demo has minutes.
_HEIGHTS = (16, 48)
_SMALL, _ALONE, _TWO_PICTURES = 0.65, 0.4, 0.06
#: of the 1797 digits.
_HELD_OUT_DIGITS = 360


@dataclass(frozen=True, kw_only=True, slots=True)
class Pictures:
    """Some shards."""

    #: file names are ``<name>-000000.tar`` and so on.
    name: str
    records: int
    shards: int
    held_out: bool


TRAIN = Pictures(name="digits", records=6000, shards=4, held_out=False)
HELD_OUT = Pictures(name="held_out", records=400, shards=1, held_out=True)


def write_pictures(directory: Path, pictures: Pictures) -> list[Path]:
    """Write the shards; always the same bytes."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    records = _records(digits.images, digits.target, digits_of(pictures, len(digits.images)), pictures)
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{pictures.name}-{k:06d}.tar" for k in range(pictures.shards)]
    for k, path in enumerate(paths):
        first, stop = (pictures.records * i // pictures.shards for i in (k, k + 1))
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, members in zip(range(first, stop), records, strict=False):
                for extension, content in members.items():
                    info = tarfile.TarInfo(f"{number:08d}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return paths


def digits_of(pictures: Pictures, total: int) -> npt.NDArray[np.int64]:
    """Which of the ``total`` digits its pictures may hold."""
    order = np.random.default_rng(0).permutation(total)
    return order[:_HELD_OUT_DIGITS] if pictures.held_out else order[_HELD_OUT_DIGITS:]


def _records(images: Any, answers: Any, which: Any, pictures: Pictures) -> Iterator[dict[str, bytes]]:
    """The members of each record."""
    rng = np.random.default_rng([1, pictures.held_out])
    for _ in range(pictures.records):
        num_pictures = 2 if rng.random() < _TWO_PICTURES else 1
        chosen = [rng.choice(which, _num_digits(rng)) for _ in range(num_pictures)]
        members = {
            "png" if num_pictures == 1 else f"{k}.png": _png(np.concatenate(images[ids], axis=1), rng)
            for k, ids in enumerate(chosen)
        }
        answer = ", ".join(" ".join(map(str, answers[ids])) for ids in chosen)
        question = "<image>" * num_pictures + "which digits?"
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield members | {"json": json.dumps({"messages": turns}).encode()}


def _num_digits(rng: np.random.Generator) -> int:
    return 1 if rng.random() < _ALONE else int(rng.integers(1, 5))


def _png(strip: Any, rng: np.random.Generator) -> bytes:
    """Digits of 8 x 8 values from 0 to 16, side by side, enlarged."""
    from PIL import Image

    height = _HEIGHTS[0] if rng.random() < _SMALL else int(rng.integers(_HEIGHTS[0], _HEIGHTS[1] + 1))
    image = Image.fromarray((strip * (255 / 16)).astype(np.uint8))
    image = image.resize((height * strip.shape[1] // 8, height), Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    image.save(buffer, format="png")
    return buffer.getvalue()
