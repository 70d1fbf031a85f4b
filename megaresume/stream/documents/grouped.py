"""Documents of like lengths next to each other, so that a batch of them needs little padding.

What another order lays next to each other is laid again within windows of it, by lengths alone:

    order before     5 90 7 33 80 6 31 88 30 | 9 41 ...       lengths; a window of 3 batches of 3
    longest first    90 88 80   33 31 30   7 6 5              cut into batches
    batches permuted 33 31 30   7 6 5   90 88 80 | 44 ...

Windows and batches are counted from position 0 of the source, and end with an epoch or an era. A batch that they cut in
two is two short ones. Of equal lengths, what came first comes first. So it is a permutation of every epoch, which
follows from the order before, the lengths, and the numbers in a `GroupConfig`, which the run keeps whatever the size of
its batches becomes; and what comes at a position is known by looking at one window.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaresume.stream.data_yaml import GroupConfig
from megaresume.stream.documents.permutation import permute_range

Int64Array = npt.NDArray[np.int64]


def window_of(position: int, begin: int, end: int, group: GroupConfig) -> tuple[int, int]:
    """[first, stop) positions of the window of a position.

    Args:
        position: of the source.
        begin, end: positions of its epoch, or of its part of one.
        group: how long a window is.
    """
    size = group.batch * group.window
    first = position // size * size
    return max(first, begin), min(first + size, end)


def grouped(lengths: Int64Array, first: int, group: GroupConfig, keys: npt.NDArray[np.uint64]) -> Int64Array:
    """What comes at each place of a window.

    Args:
        lengths: int64[n], in the order before.
        first: position of the first.
        group: how long a batch is.
        keys: of the permutation of the batches.

    Returns:
        int64[n]: places in the order before.
    """
    cuts = np.arange(first - first % group.batch + group.batch, first + len(lengths), group.batch) - first
    begins, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(lengths)]])
    longest_first = np.argsort(-lengths, kind="stable")
    places, taken = np.empty(len(lengths), np.int64), 0
    for batch in permute_range(0, len(begins), len(begins), keys).tolist():
        begin, end = begins[batch], ends[batch]
        places[begin:end] = longest_first[taken : taken + end - begin]
        taken += end - begin
    return places
