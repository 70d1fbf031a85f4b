"""Documents of text that stay in their raw files: JSON lines, Parquet, Arrow, text; tokens are made when they are read.

raw files -- megaresume prepare --index-only --> .idx, .places -- data.yaml --> RowSource -- one row --> tokens

source.py    `RowSource`: rows as documents, each compared with the index
raw_files.py a row by its place, wherever the files lie
"""

from __future__ import annotations

from pathlib import Path

from megaresume.corpora.index import IndexedDocuments
from megaresume.corpora.indexed import IndexedSource
from megaresume.corpora.layout import bin_path, prefix_of
from megaresume.corpora.places import places_path
from megaresume.rows.source import RowSource
from megaresume.stream.errors import CorpusError

__all__ = ["RowSource", "open_corpus"]


def open_corpus(path: str | Path, *, inputs: str | None = None) -> IndexedDocuments:
    """A corpus of text: by its .bin, or, if it has none, from its raw files.

    Args:
        path: prefix of the corpus.
        inputs: directory or URL of the raw files, if it is not the one of the index.

    Raises:
        CorpusError: it has a .bin and .places, of which one is not of the .idx.
        CorpusError, SetupError: see `IndexedSource` and `RowSource`.
    """
    prefix = prefix_of(path)
    places, tokens = places_path(prefix), bin_path(prefix)
    if not places.is_file():
        return IndexedSource(prefix)
    if tokens.is_file():
        raise CorpusError(
            f"{prefix} has two kinds of tokens",
            found=f"{tokens.name} and {places.name}",
            expected="the one that belongs to the .idx: megaresume prepare removes the other",
            cause="a corpus that was copied over an older one, or was made by another program",
            action=f"delete the older of the two: ls -l {prefix}.*",
        )
    return RowSource(prefix, inputs=inputs)
