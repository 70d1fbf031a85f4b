"""The order of the items of one source in one epoch, in one level or in two.

Items are what is permuted: see ``order.py``.

Without a `ShuffleConfig` the permutation of ``permutation.py`` alone: any item may follow any other. With one, the
order keeps close what lies close, for shards on storage where a seek is dear:

    items              0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13       blocks of 4, the last one shorter
    blocks permuted    8 9 10 11 | 0 1 2 3 | 12 13 | 4 5 6 7
    windows of 2       10 1 8 3 0 9 2 11 | 5 13 6 4 12 7           permuted inside a window of 2 * 4 items

At any time items of ``window`` blocks are read (of two more where a window begins in the middle of a block). Both
levels are the Feistel permutation, so a seek is O(1) in both directions, whatever the number of items.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaresume.stream.config import ShuffleConfig
from megaresume.stream.documents.permutation import permute, permute_range, round_keys, unpermute_index

Int64Array = npt.NDArray[np.int64]


def items_at(
    indices: Int64Array,
    num_items: int,
    seed: int,
    source: str,
    epoch: int,
    shuffle: ShuffleConfig | None,
    part: str = "",
) -> Int64Array:
    """The items at some indices of an epoch.

    Args:
        indices: int64[n], in ``[0, num_items)``.
        num_items: in the epoch, or in the part of it.
        seed, source, epoch, part: what the order is keyed by; see `round_keys`.
        shuffle: in two levels.

    Returns:
        int64[n].
    """
    if shuffle is None:
        return permute(indices, num_items, round_keys(seed, source, epoch, part))
    blocks = _Blocks(num_items, seed, source, epoch, shuffle, part)
    windows, out = indices // blocks.window_size, np.empty(len(indices), np.int64)
    for window in np.unique(windows).tolist():
        here = windows == window
        out[here] = blocks.items(window, indices[here] - window * blocks.window_size)
    return out


def index_of(
    item: int, num_items: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig | None, part: str = ""
) -> int:
    """The index at which an item comes: the inverse of `items_at`."""
    if shuffle is None:
        return unpermute_index(item, num_items, round_keys(seed, source, epoch, part))
    return _Blocks(num_items, seed, source, epoch, shuffle, part).index(item)


class _Blocks:
    """The blocks of one epoch in their order. A *place* is an index into the items with whole blocks permuted."""

    def __init__(
        self, num_items: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig, part: str = ""
    ) -> None:
        self.num_items, self.size = num_items, shuffle.block
        self.window_size = shuffle.block * shuffle.window
        self.num = -(-num_items // shuffle.block)
        self._key = seed, source, epoch
        self._part = f"{part} " if part else ""
        self._keys = round_keys(*self._key, f"{self._part}blocks")
        #: items in the last block, and how many blocks come before it.
        self._last_size = num_items - (self.num - 1) * self.size
        self._last_at = unpermute_index(self.num - 1, self.num, self._keys)

    def items(self, window: int, indices: Int64Array) -> Int64Array:
        """Items at some indices of a window: int64[n] to int64[n]."""
        first, size, keys = self._window(window)
        places = first + permute(indices, size, keys)
        # After the shorter block every place counts as if that one were full.
        places += np.where(places >= self._last_at * self.size + self._last_size, self.size - self._last_size, 0)
        turns, offsets = np.divmod(places, self.size)
        # turns: int64[n], of few blocks that follow each other.
        lowest = int(turns.min())
        blocks = permute_range(lowest, int(turns.max()) - lowest + 1, self.num, self._keys)
        return np.asarray(blocks[turns - lowest] * self.size + offsets, np.int64)

    def index(self, item: int) -> int:
        """Where an item comes in the epoch."""
        block, offset = divmod(item, self.size)
        turn = unpermute_index(block, self.num, self._keys)
        place = turn * self.size + offset
        if turn > self._last_at:
            place -= self.size - self._last_size
        window = place // self.window_size
        first, size, keys = self._window(window)
        return first + unpermute_index(place - first, size, keys)

    def _window(self, window: int) -> tuple[int, int, npt.NDArray[np.uint64]]:
        """Its first place, its items, its keys."""
        first = window * self.window_size
        size = min(self.window_size, self.num_items - first)
        return first, size, round_keys(*self._key, f"{self._part}window {window}")
