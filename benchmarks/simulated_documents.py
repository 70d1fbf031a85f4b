"""Counts every document that ranks were handed: each exactly once an epoch, all of its tokens, in any order.

    segments of the samples that stay  ->  by source, by epoch, by document: tokens and ends so far
    an epoch is over long since        ->  every document of it is whole; what is missing is counted, to be compared
                                           with what was left out on purpose

The pieces of a document tile it exactly if their lengths sum to its length and every end of a piece but the last is
the beginning of another. The second is checked as a sum over hash(end) - hash(begin), modulo 2^64, which telescopes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, POSITION, SOURCE
from megaresume.stream.permutation import mix

#: Epochs of a source that may be under way at the same time: open bins hold documents of the one before.
WINDOW = 4


class Wrong(AssertionError):
    """The proof has failed: something was repeated, skipped or handed out in another order."""


class DocumentCounts:
    """What all ranks together were handed, document by document.

    Args:
        lengths: by source: int64[documents], tokens of each.
        names: of the sources.
        seq_length: tokens of a sample: longer documents are in more than one piece.
    """

    def __init__(self, lengths: Sequence[npt.NDArray[np.int64]], names: Sequence[str], seq_length: int) -> None:
        self._sources = [_Source(name, each, seq_length) for name, each in zip(names, lengths, strict=True)]

    def add(self, table: npt.NDArray[np.int64]) -> None:
        """Count segments that were trained for good.

        Args:
            table: int64[segments, 5], as in `Plan.table`.

        Raises:
            Wrong: a document that was whole comes again, or pieces of one that do not fit together.
        """
        for i, source in enumerate(self._sources):
            source.add(table[table[:, SOURCE] == i])

    @property
    def tokens(self) -> list[int]:
        """By source: tokens counted."""
        return [source.tokens for source in self._sources]

    @property
    def missing(self) -> list[int]:
        """By source: tokens that never came, in the epochs that are closed."""
        return [source.missing for source in self._sources]

    @property
    def epochs(self) -> list[int]:
        """By source: epochs that are closed."""
        return [source.oldest for source in self._sources]

    @property
    def documents(self) -> int:
        """Documents counted whole."""
        return sum(source.whole for source in self._sources)


class _Source:
    def __init__(self, name: str, lengths: npt.NDArray[np.int64], seq_length: int) -> None:
        self.name, self.lengths = name, lengths
        self._pieces = int(np.maximum(-(-lengths // seq_length), 1).sum())
        self.oldest = self.tokens = self.missing = self.whole = 0
        # By epoch modulo WINDOW, by document.
        self._got = np.zeros((WINDOW, len(lengths)), np.int64)
        self._ends = np.zeros((WINDOW, len(lengths)), np.uint64)
        self._whole_ends = _hash(lengths) - _hash(np.zeros_like(lengths))

    def add(self, table: npt.NDArray[np.int64]) -> None:
        if not len(table):
            return
        epochs = table[:, POSITION] // self._pieces
        newest = int(epochs.max())
        if newest - self.oldest >= WINDOW and int(epochs.min()) < newest - WINDOW + 1:
            # More than a window at a time: in the order of the epochs.
            for epoch in np.unique(epochs):
                self.add(table[epochs == epoch])
            return
        while newest - self.oldest >= WINDOW:
            self._close()
        if int(epochs.min()) < self.oldest:
            raise Wrong(f"source {self.name}: a document of epoch {int(epochs.min())}, long closed, came again")
        documents, lengths, begins = table[:, DOCUMENT], table[:, LENGTH], table[:, OFFSET]
        where = epochs % WINDOW, documents
        np.add.at(self._got, where, lengths)
        np.add.at(self._ends, where, _hash(begins + lengths) - _hash(begins))
        over = self._got[where] > self.lengths[documents]
        if over.any():
            first = int(np.flatnonzero(over)[0])
            raise Wrong(
                f"source {self.name}: document {int(documents[first])} came more than once in epoch "
                f"{int(epochs[first])}: {int(self._got[where][first])} of {int(self.lengths[documents[first]])} tokens"
            )
        self.tokens += int(lengths.sum())

    def _close(self) -> None:
        """The oldest epoch is over."""
        got, ends = self._got[self.oldest % WINDOW], self._ends[self.oldest % WINDOW]
        whole = got == self.lengths
        if (ends[whole] != self._whole_ends[whole]).any():
            document = int(np.flatnonzero(whole & (ends != self._whole_ends))[0])
            raise Wrong(f"source {self.name}: the pieces of document {document} in epoch {self.oldest} do not fit")
        self.whole += int(whole.sum())
        self.missing += int((self.lengths - got)[~whole].sum())
        got[:], ends[:] = 0, 0
        self.oldest += 1


def _hash(values: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """uint64 of the same shape."""
    mixed: npt.NDArray[np.uint64] = _mix(values.astype(np.uint64))
    return mixed


@numba.vectorize([numba.uint64(numba.uint64)])
def _mix(value: np.uint64) -> np.uint64:
    return mix(value)
