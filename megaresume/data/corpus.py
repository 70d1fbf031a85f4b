"""A corpus of text, opened: by its .bin, or from its raw files."""

from __future__ import annotations

from pathlib import Path

from megaresume.data.indexed_documents import IndexedDocuments
from megaresume.data.indexed_source import IndexedSource
from megaresume.data.layout import bin_path, prefix_of
from megaresume.data.places import places_path
from megaresume.data.row_source import RowSource
from megaresume.stream.errors import CorpusError


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
