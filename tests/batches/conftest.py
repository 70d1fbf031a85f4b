"""Corpora for the loading tests: a real .bin/.idx written by megatron-core, a plain Python object, and images.

`blend` is every blend that the exactness tests run over: of text alone; of text and image-text documents in memory; of
text and prepared shards, with augmentation and with records that broke after they were indexed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megaresume.batches.open import open_stream
from megaresume.data.source import scan_fingerprint
from megaresume.encoding.images.document import EncodedDocument, EncodedImage, Fault, Key
from megaresume.stream.state import Fingerprint, StreamState
from megaresume.stream.stream import Stream

VOCABULARY = 50_000
IMAGE_TOKEN = VOCABULARY + 1
PIXEL_SHAPE = (6,)


def endless(loader: Any) -> Iterator[Any]:
    """The batches of epoch after epoch, up to one without any."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            return


class Documents:
    """A Python source: a list of arrays."""

    def __init__(self, documents: list[np.ndarray]) -> None:
        self.documents = documents

    def __len__(self) -> int:
        return len(self.documents)

    def length(self, i: int) -> int:
        return len(self.documents[i])

    def get(self, i: int) -> np.ndarray:
        return self.documents[i]


def random_documents(seed: int, num: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(3.5, 1.2, num).astype(int), 300)  # some are empty
    return [rng.integers(1, VOCABULARY, length).astype(np.uint16) for length in lengths]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[np.ndarray]]:
    """Name -> documents; the files are beside each other under the key's path."""
    # Here: workers that are spawned import this file for its sources, and this takes them seconds.
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    directory = tmp_path_factory.mktemp("corpora")
    documents = {str(directory / "web"): random_documents(1, 400), str(directory / "code"): random_documents(2, 150)}
    for prefix, texts in documents.items():
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
        for text in texts:
            builder.add_document(torch.from_numpy(text.astype(np.int32)), [len(text)])
        builder.finalize(f"{prefix}.idx")
    return documents


@pytest.fixture(scope="session")
def config(corpora: dict[str, list[np.ndarray]]) -> dict:
    """A blend of the two corpora and a Python object, in samples of 128 tokens."""
    web, code = (Path(prefix) for prefix in corpora)
    return {
        "seed": 7,
        "seq_length": 128,
        "packing": {"mode": "best_fit", "open_bins": 4},
        "sources": {
            "web": {"path": str(web), "weight": 0.6},
            "code": {"path": str(code), "weight": 0.3},
            "notes": {"weight": 0.1},
        },
    }


@pytest.fixture(scope="session")
def notes() -> Documents:
    return Documents(random_documents(3, 90))


@pytest.fixture(scope="session")
def texts(corpora: dict[str, list[np.ndarray]], notes: Documents) -> list[list[np.ndarray]]:
    """Documents of each source, in the order of the config."""
    return [*corpora.values(), notes.documents]


class Pictures:
    """Image-text documents: what they hold follows from their number, their pixels from the key's generator alone."""

    whole = True
    encoder = SimpleNamespace(image_token_id=IMAGE_TOKEN, pixel_shape=PIXEL_SHAPE)

    def __init__(self, num: int = 60) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def layout(self, i: int) -> list[tuple[int, tuple[int, int, int]]]:
        """(words before an image, its grid in patches, of which two by two make a token) of each image."""
        rng = np.random.default_rng([17, i])
        return [
            (int(rng.integers(0, 5)), (1, 2 * int(rng.integers(1, 4)), 2 * int(rng.integers(1, 4))))
            for _ in range(rng.integers(0, 4))
        ]

    def length(self, i: int) -> int:
        return sum(words + grid[1] * grid[2] // 4 for words, grid in self.layout(i)) + 3 + i % 11

    def lengths(self, ids: np.ndarray) -> np.ndarray:
        return np.array([self.length(int(i)) for i in ids], np.int64)

    def encoded(self, i: int, key: Key) -> EncodedDocument:
        assert key.document == i
        length = self.length(i)
        tokens = np.random.default_rng([18, i]).integers(1, VOCABULARY, length)
        if i % 7 == 0:
            fault = Fault(policy="mask", reason=f"document {i} is broken")
            return EncodedDocument(tokens=tokens * 0, trained=np.zeros(length, bool), fault=fault)
        trained = np.ones(length, bool)
        trained[0] = False
        images, at = [], 0
        for n, (words, grid) in enumerate(self.layout(i)):
            at += words
            num_tokens = grid[1] * grid[2] // 4
            tokens[at : at + num_tokens] = IMAGE_TOKEN
            trained[at : at + num_tokens] = False
            pixels = key.generator(n).standard_normal((grid[1] * grid[2], *PIXEL_SHAPE)).astype(np.float32)
            images.append(EncodedImage(offset=at, num_tokens=num_tokens, pixels=pixels, grid=grid))
            at += num_tokens
        return EncodedDocument(tokens=tokens, trained=trained, images=tuple(images))

    def get(self, i: int) -> np.ndarray:
        return self.encoded(i, Key(seed=0, source="", document=i, epoch=0)).tokens

    def read(self, i: int, offset: int, length: int) -> np.ndarray:
        return self.get(i)[offset : offset + length]

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        return scan_fingerprint(self.lengths, len(self), "pictures")


@dataclass
class Blend:
    """A data config with the objects in it."""

    config: dict[str, Any]
    objects: dict[str, Any]

    def open(self, state: StreamState | None = None, **changes: Any) -> Stream:
        return open_stream(self.config | changes, objects=self.objects, state=state)


@pytest.fixture(scope="session")
def text_blend(config: dict, notes: Documents) -> Blend:
    return Blend(config, {"notes": notes})


@pytest.fixture(scope="session")
def image_blend(config: dict, notes: Documents) -> Blend:
    sources = config["sources"] | {"pairs": {"weight": 0.3}, "figures": {"weight": 0.1}}
    return Blend(config | {"sources": sources}, {"notes": notes, "pairs": Pictures(), "figures": Pictures(23)})


@pytest.fixture(scope="session")
def shard_blend(config: dict, notes: Documents, tmp_path_factory: pytest.TempPathFactory) -> Blend:
    """The real thing: tar shards, images of varied sizes, random augmentation, two images that cannot be decoded."""
    from megaresume.data.prepare.shards import prepare_shards
    from megaresume.encoding.images.encoder import ImageTextEncoder
    from tests.batches.pages import page
    from tests.data.kit import write_shard

    directory = tmp_path_factory.mktemp("shards")
    processor = {"kind": "native", "patch_size": 4, "merge": 2, "min_pixels": 64, "max_pixels": 1024}
    encoder = ImageTextEncoder.from_options({"processor": processor, "template": "interleaved"})
    records = [(page(i).key, page(i).members) for i in range(50)]
    paths = [write_shard(directory / f"pages-{k}.tar", records[25 * k : 25 * k + 25]) for k in range(2)]
    prepare_shards(paths, directory / "pages", encoder)
    for path, i in zip(paths, (7, 33), strict=True):
        picture, content = records[i][1]["0.png"], path.read_bytes()
        path.write_bytes(content.replace(picture, picture[:60] + b"\0" * (len(picture) - 60)))
    augment = [{"flip": 0.5}, {"crop": {"scale": [0.6, 1.0]}}, {"color_jitter": {"brightness": 0.3}}]
    pages = {"kind": "webdataset", "index": str(directory / "pages.shards.idx"), "weight": 0.5}
    sources = config["sources"] | {"pages": pages | {"on_fault": "mask", "augment": augment}}
    return Blend(config | {"sources": sources}, {"notes": notes})


@pytest.fixture(scope="session", params=["text", "image", "shard"])
def blend(request: pytest.FixtureRequest) -> Blend:
    made: Blend = request.getfixturevalue(f"{request.param}_blend")
    return made
