"""The list of long documents that a large corpus keeps beside it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from benchmarks.corpora import write_corpus
from megaresume.data import sidecar
from megaresume.data.split import IndexedSource, range_of
from megaresume.stream.source import STRIDE, find_long
from megaresume.testing import LengthList

LENGTHS = np.random.default_rng(4).integers(0, 40, 2000).astype(np.int32)


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sidecar, "MIN_DOCUMENTS", 1)
    monkeypatch.setenv("MEGARESUME_CACHE", str(tmp_path / "cache"))
    return write_corpus(tmp_path / "web", LENGTHS, sparse=True)


def _same(prefix: Path, lengths: np.ndarray = LENGTHS, piece: int = 10) -> bool:
    found, expected = IndexedSource(prefix).long_documents(piece), find_long(LengthList(lengths.tolist()), piece)
    return all(getattr(found, name).tolist() == getattr(expected, name).tolist() for name in ("ids", "ends", "guide"))


def test_made_once(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _same(corpus) and _same(corpus, piece=7)
    assert {p.name for p in corpus.parent.iterdir() if "pieces" in p.name} == {
        "web.megaresume.10.pieces",
        "web.megaresume.7.pieces",
    }
    monkeypatch.setattr(IndexedSource, "lengths", None)  # nobody asks again
    assert _same(corpus)
    part = range_of(IndexedSource(corpus), 100, 300).long_documents(10)  # type: ignore[union-attr]
    expected = find_long(LengthList(LENGTHS[100:300].tolist()), 10)
    assert part.ids.tolist() == expected.ids.tolist() and part.ends.tolist() == expected.ends.tolist()


@pytest.mark.parametrize("damage", ["cut", "empty", "other", "end", "guide", "documents", "pieces"])
def test_a_file_that_is_damaged_is_made_again(corpus: Path, damage: str) -> None:
    """Also by one bit: by another number, pieces of a document would never be trained, or twice."""
    assert _same(corpus)
    path = corpus.with_name("web.megaresume.10.pieces")
    data = path.read_bytes()
    k = int(np.frombuffer(data, "<i8")[6])
    at = {"guide": 8, "documents": 8 + k // STRIDE + k // 2, "pieces": 8 + k // STRIDE + k + k // 2}.get(damage, 0)
    flipped = data[: 8 * at] + bytes([data[8 * at] ^ 1]) + data[8 * at + 1 :]
    path.write_bytes(
        {"cut": data[:-8], "empty": b"", "other": b"x" * len(data), "end": data[:-8] + bytes(8)}.get(damage, flipped)
    )
    assert _same(corpus) and path.read_bytes() == data


def test_no_document_is_long(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _same(corpus, piece=100) and corpus.with_name("web.megaresume.100.pieces").exists()
    monkeypatch.setattr(IndexedSource, "lengths", None)
    assert _same(corpus, piece=100)


def test_a_corpus_that_was_made_again(corpus: Path) -> None:
    assert _same(corpus)
    other = LENGTHS[::-1].copy()
    write_corpus(corpus, other, sparse=True)
    assert _same(corpus, other)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_corpus_that_cannot_be_written_to(corpus: Path) -> None:
    corpus.parent.chmod(0o500)
    assert _same(corpus) and list((corpus.parent / "cache").glob("*.10.pieces"))


def test_nowhere_to_write(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError

    monkeypatch.setattr(sidecar, "_write_pieces", refuse)
    assert _same(corpus) and not list(corpus.parent.glob("*.pieces"))
