"""Which of the documents that wait make up the next sample: the ones that fill it best.

    waiting   3900 3100 2500 2300 1700 900 400 ...   `lookahead` documents, as drawn; small ones in groups
    start     3900                                    the longest: what is hard to place later goes first
    room      4292 = 2500 + 900 + 892?  3100 + 1192?  the largest sum of others that fits, by dynamic programming

The exact subset sum is cheap here, since a sample is a few thousand tokens long: one bit for each sum that can be
reached, a machine word for 64 of them. It is the "minimum bin slack" of Gupta and Ho ("A new heuristic algorithm for
the one-dimensional bin-packing problem", Production Planning & Control 10, 1999) over a window: each sample is filled
as well as it can be. The start is one of the `STARTS` longest, whichever leaves least room, or the oldest document
once it has waited for ``max_age`` samples. Candidates are tried from the longest on, and sums from the fullest on, so
that a sample holds few long documents rather than many short ones, which fill the gaps of later samples.

Small documents that follow each other wait as one, of at most ``2 * seq_length / lookahead`` tokens: any two neighbours
have more, so that what waits fills more than a sample, however short documents are. Each stays whole.
"""

from __future__ import annotations

import numpy as np

from megaresume.stream.compiled import compiled

#: Longest documents that a sample is tried with.
STARTS = 8


@compiled
def _reachable(row, total):  # type: ignore[no-untyped-def]
    return (row[total >> 6] >> np.uint64(total & 63)) & np.uint64(1)


@compiled
def _add(sums, with_it, length, words):  # type: ignore[no-untyped-def]
    """``with_it`` = the sums, and each of them with ``length`` more. Bits above the room may be set: nobody asks."""
    whole, bits = length >> 6, np.uint64(length & 63)
    for w in range(words):
        with_it[w] = sums[w]
    if bits == 0:
        for w in range(whole, words):
            with_it[w] |= sums[w - whole]
        return
    if whole < words:
        with_it[whole] |= sums[0] << bits
    for w in range(whole + 1, words):
        with_it[w] |= (sums[w - whole] << bits) | (sums[w - whole - 1] >> (np.uint64(64) - bits))


@compiled
def choose(room, num_waiting, capacity, align, overdue, order, tried, sums, chosen):  # type: ignore[no-untyped-def]
    """Choose the documents of the next sample.

    Args:
        room: int64[K], tokens that a sample has left with each document alone, oldest first.
        num_waiting: documents that wait, at least 1 and at most K.
        capacity: tokens a sample, a multiple of ``align``.
        align: tokens that a document takes a multiple of.
        overdue: whether the oldest has waited long enough.
        order, tried: int64[K], to work in.
        sums: uint64[K + 1, capacity // align // 64 + 1], to work in.
        chosen: bool[K], out: the documents of the sample.
    """
    # order: from the longest on, ties to the oldest.
    for j in range(num_waiting):
        at = j
        while at > 0 and room[order[at - 1]] > room[j]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = j
    least = capacity + 1
    for turn in range(1 if overdue else min(STARTS, num_waiting)):
        start = 0 if overdue else order[turn]
        left = room[start] // align
        words = (left >> 6) + 1
        for w in range(words):
            sums[0, w] = 0
        sums[0, 0] = 1
        num_tried = 0
        for k in range(num_waiting):
            length = (capacity - room[order[k]]) // align
            if order[k] == start or length > left:
                continue
            tried[num_tried] = order[k]
            _add(sums[num_tried], sums[num_tried + 1], length, words)
            num_tried += 1
            if _reachable(sums[num_tried], left):
                break
        total = left
        while not _reachable(sums[num_tried], total):
            total -= 1
        if left - total >= least:
            continue
        least = left - total
        chosen[:num_waiting] = False
        chosen[start] = True
        for k in range(num_tried - 1, -1, -1):
            if not _reachable(sums[k], total):
                chosen[tried[k]] = True
                total -= (capacity - room[tried[k]]) // align
        if least == 0:
            break
