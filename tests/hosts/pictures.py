"""Image-text documents, some of them broken, for scenarios about what batches say of them."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from megaresume.data.source import scan_fingerprint
from megaresume.encoding.images.document import EncodedDocument, EncodedImage, Fault, Key
from megaresume.stream.state import Fingerprint

IMAGE_TOKEN = 60


class Pictures:
    """Two image tokens and ten of text each; every third document is broken."""

    whole = True
    encoder = SimpleNamespace(image_token_id=IMAGE_TOKEN, pixel_shape=(4,))

    def __len__(self) -> int:
        return 50

    def length(self, i: int) -> int:
        return 12

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.full(len(ids), 12, np.int64)

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        if i % 3 == 0:
            fault = Fault(policy="mask", reason=f"document {i} is broken")
            return EncodedDocument(tokens=np.zeros(12, np.int64), trained=np.zeros(12, bool), fault=fault)
        tokens = np.arange(12) + i % 40
        tokens[:2] = IMAGE_TOKEN
        pixels = key.generator().standard_normal((2, 4)).astype(np.float32)
        image = EncodedImage(offset=0, num_tokens=2, pixels=pixels, grid=(1, 1, 2))
        return EncodedDocument(tokens=tokens, trained=np.arange(12) > 1, images=(image,))

    def get(self, i: int) -> np.ndarray:
        return self.encoded(i, Key(seed=0, source="", document=i, epoch=0)).tokens

    def read(self, i: int, offset: int, length: int) -> np.ndarray:
        return self.get(i)[offset : offset + length]

    def fingerprint(self, *, recompute: bool = False) -> Fingerprint:
        return scan_fingerprint(self.lengths, len(self), "pictures")
