"""Corpora for the loading tests: a real .bin/.idx written by megatron-core, and a plain Python object."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCABULARY = 50_000


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


def random_documents(seed: int, num: int, *, longest: int = 300) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(3.5, 1.2, num).astype(int), longest)  # some are empty
    return [rng.integers(1, VOCABULARY, length).astype(np.uint16) for length in lengths]


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[np.ndarray]]:
    """Name -> documents; the files are beside each other under the key's path."""
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
