"""Corpora for the tests, written byte by byte: independent of our own writer and of Megatron's."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaresume.data.prepare.shards import prepare_shards
from tests.data.kit import encoder, write_shards

CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def _write_corpus(
    prefix: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "int32", modes: Sequence[int] | None = None
) -> Path:
    """Write documents (each a list of sequences of tokens) byte by byte, as Megatron's format says."""
    sequences = [np.asarray(s, dtype) for document in documents for s in document]
    lengths = np.array([len(s) for s in sequences], "<i4")
    itemsize = np.dtype(dtype).itemsize
    pointers = np.zeros(len(sequences), "<i8")
    if len(sequences):
        pointers[1:] = np.cumsum(lengths[:-1].astype(np.int64) * itemsize)
    boundaries = np.cumsum([0, *(len(document) for document in documents)]).astype("<i8")
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(boundaries))
    body = lengths.tobytes() + pointers.tobytes() + boundaries.tobytes()
    tail = b"" if modes is None else np.asarray(modes, np.int8).tobytes()
    Path(f"{prefix}.idx").write_bytes(header + body + tail)
    Path(f"{prefix}.bin").write_bytes(b"".join(s.tobytes() for s in sequences))
    return prefix


def _simple_corpus(prefix: Path, lengths: Sequence[int], dtype: str = "int32") -> Path:
    """One sequence a document; token k of document d is (10 d + k) % 100."""
    return _write_corpus(prefix, [[[(10 * d + k) % 100 for k in range(n)]] for d, n in enumerate(lengths)], dtype)


@pytest.fixture(scope="session")
def write_corpus() -> Any:
    """``write_corpus(prefix, documents, dtype, modes) -> prefix``."""
    return _write_corpus


@pytest.fixture(scope="session")
def simple_corpus() -> Any:
    """``simple_corpus(prefix, lengths, dtype) -> prefix``."""
    return _simple_corpus


@pytest.fixture(autouse=True)
def cache_directory(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes into the cache of whoever runs it."""
    path = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("MEGARESUME_CACHE", str(path))
    return path


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """The index of three shards with 5, 3 and 7 captioned pictures."""
    write_shards(tmp_path / "shards", [5, 3, 7])
    prepare_shards([tmp_path / "shards/pairs-{000000..000002}.tar"], tmp_path / "pairs", encoder())
    return tmp_path / "pairs.shards.idx"
