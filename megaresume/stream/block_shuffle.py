"""The order of the documents of one source in one epoch, in one level or in two.

Without a `ShuffleConfig` the permutation of ``permutation.py`` alone: any document may follow any other. With one, the
order keeps close what lies close, for shards on storage where a seek is dear:

    documents          0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13       blocks of 4, the last one shorter
    blocks permuted    8 9 10 11 | 0 1 2 3 | 12 13 | 4 5 6 7
    windows of 2       10 1 8 3 0 9 2 11 | 5 13 6 4 12 7           permuted inside a window of 2 * 4 documents

At any time documents of ``window`` blocks are read (of two more where a window begins in the middle of a block). Both
levels are the Feistel permutation, so a seek is O(1) in both directions, whatever the number of documents.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaresume.stream.config import ShuffleConfig
from megaresume.stream.permutation import permute_range, round_keys, unpermute_index

__all__ = ["document_at", "documents_at", "position_of"]


def documents_at(
    start: int, num: int, num_documents: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig | None
) -> npt.NDArray[np.int64]:
    """Documents at indices ``start .. start + num`` of an epoch, which lie in ``[0, num_documents)``: int64[num]."""
    if shuffle is None:
        return permute_range(start, num, num_documents, round_keys(seed, source, epoch))
    blocks = _Blocks(num_documents, seed, source, epoch, shuffle)
    parts, stop = [], start + num
    while start < stop:
        window, index = divmod(start, blocks.window_size)
        here = min(stop - start, blocks.window_size - index)
        parts.append(blocks.documents(window, index, here))
        start += here
    return np.concatenate(parts) if parts else np.zeros(0, np.int64)


def document_at(
    position: int, num_documents: int, seed: int, source: str, shuffle: ShuffleConfig | None
) -> tuple[int, int]:
    """Epoch and document at an absolute position of a source."""
    epoch, index = divmod(position, num_documents)
    return epoch, int(documents_at(index, 1, num_documents, seed, source, epoch, shuffle)[0])


def position_of(
    document: int, num_documents: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig | None
) -> int:
    """The absolute position at which ``document`` comes in ``epoch``."""
    if shuffle is None:
        index = unpermute_index(document, num_documents, round_keys(seed, source, epoch))
    else:
        index = _Blocks(num_documents, seed, source, epoch, shuffle).index(document)
    return epoch * num_documents + index


class _Blocks:
    """The blocks of one epoch in their order. A *place* is an index into the documents with whole blocks permuted."""

    def __init__(self, num_documents: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig) -> None:
        self.num_documents, self.size = num_documents, shuffle.block
        self.window_size = shuffle.block * shuffle.window
        self.num = -(-num_documents // shuffle.block)
        self._seed, self._source, self._epoch = seed, source, epoch
        self._keys = round_keys(seed, source, epoch, "blocks")
        #: documents in the last block, and how many blocks come before it.
        self._last_size = num_documents - (self.num - 1) * self.size
        self._last_at = unpermute_index(self.num - 1, self.num, self._keys)

    def documents(self, window: int, index: int, num: int) -> npt.NDArray[np.int64]:
        """Documents at indices ``index .. index + num`` of a window: int64[num]."""
        first, size, keys = self._window(window)
        places = first + permute_range(index, num, size, keys)
        # Behind the shorter block every place counts as if that one were full.
        places += np.where(places >= self._last_at * self.size + self._last_size, self.size - self._last_size, 0)
        turns, offsets = np.divmod(places, self.size)
        # turns: int64[num], of few blocks that follow each other.
        lowest = int(turns.min())
        blocks = permute_range(lowest, int(turns.max()) - lowest + 1, self.num, self._keys)
        return np.asarray(blocks[turns - lowest] * self.size + offsets, np.int64)

    def index(self, document: int) -> int:
        """Where a document comes in the epoch."""
        block, offset = divmod(document, self.size)
        turn = unpermute_index(block, self.num, self._keys)
        place = turn * self.size + offset
        if turn > self._last_at:
            place -= self.size - self._last_size
        window = place // self.window_size
        first, size, keys = self._window(window)
        return first + unpermute_index(place - first, size, keys)

    def _window(self, window: int) -> tuple[int, int, npt.NDArray[np.uint64]]:
        """Its first place, its documents, its keys."""
        first = window * self.window_size
        size = min(self.window_size, self.num_documents - first)
        return first, size, round_keys(self._seed, self._source, self._epoch, f"window {window}")
