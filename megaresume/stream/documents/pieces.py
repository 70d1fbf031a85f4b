"""What an epoch of a source is made of: pieces of at most a sample, so that a long document is spread over the epoch.

    documents           0   1 (of 2.5 samples)   2   3 (of 1.2 samples)   4
    first pieces        0   1                    2   3                    4        numbered as their documents
    later pieces            5  6                     7                             N.. , in the order of the documents

Only the documents longer than a piece are listed, so that memory grows with their number alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaresume.stream.source import LengthSource, chunks

#: long documents that a look-up in a guide leaves to be searched: a page of memory.
STRIDE = 512

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LongDocuments:
    """The documents of a source that are longer than a piece."""

    #: int64[k], ascending.
    ids: Int64Array
    #: int64[k]: later pieces of these documents, up to and with each.
    ends: Int64Array
    #: int64[k // STRIDE]: every so many of the ends, so that a look-up in a list on disk reads a page of it or two.
    guide: Int64Array

    @classmethod
    def of_lists(cls, ids: Int64Array, ends: Int64Array) -> LongDocuments:
        """From lists in memory."""
        return cls(ids, ends, ends[STRIDE - 1 :: STRIDE].copy())

    def later(self, num_documents: int) -> int:
        """Later pieces of the first so many documents."""
        if not len(self.ids) or self.ids[-1] < num_documents:
            k = len(self.ids)  # all of them, nearly always: no search through a list on disk
        else:
            k = int(self.ids.searchsorted(num_documents))
        return int(self.ends[k - 1]) if k else 0

    def between(self, start: int, stop: int) -> LongDocuments:
        """Those of documents ``start .. stop``, numbered from 0."""
        a, b = (int(k) for k in self.ids.searchsorted([start, stop]))
        if start == 0:
            return LongDocuments(self.ids[:b], self.ends[:b], self.guide[: b // STRIDE])
        before = int(self.ends[a - 1]) if a else 0
        return LongDocuments.of_lists(self.ids[a:b] - start, self.ends[a:b] - before)

    def of(self, document: int) -> range:
        """The later pieces of a document, counted from 0."""
        k = int(self.ids.searchsorted(document))
        if k == len(self.ids) or self.ids[k] != document:
            return range(0)
        return range(int(self.ends[k - 1]) if k else 0, int(self.ends[k]))


def find_long(
    source: LengthSource, piece: int, update: Callable[[int], object] = lambda documents: None
) -> LongDocuments:
    """Look through all lengths of a source, a chunk at a time; ``update`` is told how many."""
    ids, later = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for documents in chunks(source):
        lengths = source.lengths(documents)
        found = np.flatnonzero(lengths > piece)
        ids.append(documents[found])
        later.append((lengths[found] - 1) // piece)
        update(len(lengths))
    return LongDocuments.of_lists(np.concatenate(ids), np.concatenate(later).cumsum())


def may_be_cut(source: LengthSource) -> bool:
    """Whether its documents may be cut into pieces: not if they hold images."""
    return not getattr(source, "whole", False)


class PieceLists:
    """The long documents of one source, by the length of a piece; each list is made when it is first needed.

    Args:
        source: says them by ``long_documents(piece)`` if it can; or else every length is asked for.
    """

    def __init__(self, source: LengthSource) -> None:
        self.source = source
        self._lists: dict[int, LongDocuments] = {}

    def of(self, piece: int) -> LongDocuments:
        """The documents longer than a piece of so many tokens."""
        if piece not in self._lists:
            known = getattr(self.source, "long_documents", None)
            self._lists[piece] = find_long(self.source, piece) if known is None else known(piece)
        return self._lists[piece]

    def num_pieces(self, num_documents: int, piece: int) -> int:
        """Pieces of the first so many documents; of a piece length of 0, which is none, the documents."""
        return num_documents + (self.of(piece).later(num_documents) if piece else 0)
