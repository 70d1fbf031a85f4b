"""A corpus without a .bin has the documents, the order and the fingerprint of one with it, in every format."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest

from megaresume.corpora import IndexedSource
from megaresume.corpora.layout import bin_path, idx_path
from megaresume.corpora.places import places_path
from megaresume.corpora.prepare.corpus import PrepareOptions, prepare
from megaresume.rows import RowSource, open_corpus
from tests.rows.conftest import EOD, FORMATS, texts, tokenizers, write

OPTIONS = {"block_bytes": 5000}


def make(directory: Path, files: tuple[str, ...], tokenizer: Path | None, count: int = 300):
    """Raw files, the corpora with and without a .bin, and what both hold."""
    raw = directory / "raw"
    raw.mkdir()
    rows = [texts(k, count) for k in range(len(files))]
    paths = [write(raw, name, some) for name, some in zip(files, rows, strict=True)]
    for output, index_only in (("full", False), ("rows", True)):
        prepare(paths, directory / output, PrepareOptions(tokenizer=tokenizer, index_only=index_only, **OPTIONS))
    expected = [[*text.encode(), 256] for some in rows for text in some if text]
    if tokenizer is not None:
        reader = tokenizers.Tokenizer.from_file(str(tokenizer))
        expected = [[*reader.encode(t).ids, reader.token_to_id(EOD)] for some in rows for t in some if t]
    return paths, expected


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_documents_of_the_bin(tmp_path, tokenizer_json, name):
    _, expected = make(tmp_path, FORMATS[name], tokenizer_json)
    full, rows = IndexedSource(tmp_path / "full"), open_corpus(tmp_path / "rows")
    assert isinstance(rows, RowSource)
    assert idx_path(tmp_path / "rows").read_bytes() == idx_path(tmp_path / "full").read_bytes()
    assert not bin_path(tmp_path / "rows").exists()
    order = np.random.default_rng(0).permutation(len(expected)).tolist()
    assert [rows.get(i).tolist() for i in order] == [expected[i] for i in order]
    assert [full.get(i).tolist() for i in order] == [expected[i] for i in order]
    assert rows.get(3).dtype == full.get(3).dtype
    assert rows.fingerprint() == full.fingerprint()
    assert rows.fingerprint(first=50) == full.fingerprint(first=50)
    again = pickle.loads(pickle.dumps(rows))
    assert again.read(7, 2, 3).tolist() == expected[7][2:5]
