"""A corpus of text, opened: by its .bin, through memory maps, or, if it has none, from its raw files.

The ``.bin`` is mapped when the first token is read, so that a process that only plans holds no descriptor for it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.data.files import changed, map_file, opened_file
from megaresume.data.indexed_documents import REBUILD, IndexedDocuments
from megaresume.data.layout import bin_path, prefix_of
from megaresume.data.record_index import places_path
from megaresume.data.row_source import RowSource
from megaresume.data.scan import Windows, hash_tokens
from megaresume.stream.errors import CorpusError

Int64Array = npt.NDArray[np.int64]


class IndexedSource(IndexedDocuments):
    """Documents of a Megatron corpus; see `IndexedDocuments`.

    Raises:
        CorpusError: a file is missing, or damaged in a way that shows without a scan.
        SetupError: no permission, or too many open files.
    """

    suffix = ".bin"

    def __init__(self, path: str | Path) -> None:
        super().__init__(path)
        self._token_view: npt.NDArray[Any] | None = None
        bin_, size, end = self.tokens_path, self._identity.bin.size, self._token_bytes
        if size != end:
            relation = "shorter" if size < end else "longer"
            raise CorpusError(
                f"{bin_} is {relation} than its index says",
                found=f"{size} bytes",
                expected=f"{end} bytes",
                cause="a copy was interrupted, or the .bin and the .idx are of two different builds",
                action=REBUILD,
            )

    @property
    def token_view(self) -> npt.NDArray[Any]:
        """All tokens, read-only and memory-mapped: shape (num_tokens,), dtype as stored.

        Raises:
            CorpusError: the .bin is gone, or is not the one that was there when the corpus was opened.
        """
        if self._token_view is None:
            path = self.tokens_path
            data, identity = map_file(path)
            if not identity.is_the_file(self._identity.bin):
                raise changed(path, identity, self._identity.bin)
            self._token_view = np.frombuffer(data, self.dtype)
        return self._token_view

    def token_starts(self, ids: Int64Array) -> Int64Array:
        """Where each document starts in `token_view`: int64[n] to int64[n], in tokens; 0 for an empty one.

        ``token_view[start : start + length]`` lies within the view for what this returns.

        Raises:
            IndexError: an id is not in [0, len).
            CorpusError: the .idx is damaged at one of them, or its sequences do not follow each other.
        """
        from megaresume.data.kernels import document_starts

        ids = np.ascontiguousarray(ids, np.int64)
        out = np.empty(ids.shape, np.int64)
        bad = document_starts(
            ids,
            self._boundaries,
            self._lengths,
            self._pointers,
            self.dtype.itemsize.bit_length() - 1,
            self._token_bytes,
            out,
        )
        if bad >= 0:
            raise self._bad_document(int(ids[bad]))
        return out

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """`length` tokens of document i from token `offset` on: a read-only view, dtype as stored.

        Raises:
            IndexError: no such document, or the range leaves it.
            CorpusError: the corpus is damaged there.
        """
        self._check_range(i, offset, length)
        start = int(self.token_starts(np.array([i], np.int64))[0]) + offset
        return self.token_view[start : start + length]

    def _contents(self, start: int, stop: int) -> str:
        """By reads of a file that is not mapped: a process that only plans keeps no descriptor of the .bin."""
        windows = Windows.choose(stop - start, lambda ids: self.lengths(start + ids))
        width = self.dtype.itemsize
        starts = (self.token_starts(start + windows.documents) + windows.offsets) * width
        with opened_file(self.tokens_path) as file:
            places = zip(starts.tolist(), (windows.counts * width).tolist(), strict=True)
            read = (os.pread(file.fileno(), size, at) for at, size in places)
            return hash_tokens(np.frombuffer(tokens, self.dtype) for tokens in read)


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
