"""Pages of text and images in memory, through the real encoder: for the tests of what models make of batches."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import PIL.Image

from megaresume.data.source import scan_fingerprint
from megaresume.encoding.images.document import EncodedDocument, Key, Record
from megaresume.encoding.images.encoder import ImageTextEncoder
from megaresume.stream.state import Fingerprint


def page(i: int) -> Record:
    """Text and up to two images of varied sizes; every fifth page has none, every fourth begins with one."""
    rng = np.random.default_rng([5, i])
    texts: list[str | None] = [] if i % 4 == 0 else [_words(rng)]
    images: list[str | None] = [None] * len(texts)
    members: dict[str, bytes] = {}
    for n in range(0 if i % 5 == 0 else 1 + i % 2):
        name = f"{n}.png"
        width, height = rng.integers(16, 64, 2)
        file = io.BytesIO()
        PIL.Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8)).save(file, "PNG")
        members[name] = file.getvalue()
        texts += [None] if n == 0 and i % 3 == 0 else [None, _words(rng)]
        images += [name] if n == 0 and i % 3 == 0 else [name, None]
    texts.append(_words(rng))
    images.append(None)
    members["json"] = json.dumps({"texts": texts, "images": images}).encode()
    return Record(key=f"{i:04d}", path="pages.tar", members=members)


def _words(rng: np.random.Generator) -> str:
    return " ".join("abcdefgh"[: rng.integers(1, 8)] for _ in range(rng.integers(1, 4)))


class Pages:
    """Pages by number, encoded with a processor; `marks` stand before and behind every image."""

    whole = True

    def __init__(
        self,
        processor: dict[str, Any],
        num: int = 30,
        *,
        marks: str = "<>",
        eod: bool = True,
        most_images: int = 2,
        **options: Any,
    ) -> None:
        options |= {"processor": processor, "template": "interleaved", "eod": eod}
        options |= {"image_start": marks[:1], "image_end": marks[1:]}
        self.encoder = ImageTextEncoder.from_options(options).augmented([{"flip": 0.5}])
        records = [page(i) for i in range(num)]
        # one member is the JSON
        self.records = [record for record in records if len(record.members) - 1 <= most_images]
        self._lengths = [self.encoder.measures(record)[0].tokens for record in self.records]

    def __len__(self) -> int:
        return len(self.records)

    def length(self, i: int) -> int:
        return self._lengths[i]

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.array(self._lengths, np.int64)[ids]

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        return self.encoder.encode(self.records[i], key)

    def get(self, i: int) -> np.ndarray:
        return self.encoded(i, Key(seed=0, source="", document=i, epoch=0)).tokens

    def read(self, i: int, offset: int, length: int) -> np.ndarray:
        return self.get(i)[offset : offset + length]

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        return scan_fingerprint(self.lengths, len(self), "pages")
