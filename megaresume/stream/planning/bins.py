"""The open bins among the planner's arrays: one pool of segments, and a linked list through it for each bin.

    head  tail          segments, link                 a pool of 6
     0     3            0 -> 2 -> 3                    bin 0: three segments
     1     1            1                              bin 1: one
    FREE                4 -> 5                         rows that are free

So many tiny documents in one bin cost as much as they are many, whatever the number of bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream.compiled import compiled
from megaresume.stream.planning import kernel
from megaresume.stream.planning.kernel import Arrays

Int64Array = npt.NDArray[np.int64]

#: Rows that a pool begins with.
LEAST_ROWS = 64


def fresh_bins(num_bins: int) -> dict[str, Any]:
    """Arrays of ``num_bins`` bins that are all free, without a pool."""
    return {name: np.zeros(num_bins, np.int64) for name in ("room", "opened", "head", "tail")} | {
        "segments": np.zeros((0, kernel.SEGMENT_WIDTH), np.int64),
        "link": np.zeros(0, np.int64),
    }


def segments_of(arrays: Arrays) -> tuple[Int64Array, Int64Array]:
    """What lies in the open bins.

    Returns:
        int64[w, SEGMENT_WIDTH], bin after bin in opening order, each in the order in which it was filled; int64[b],
        the segments of each bin.
    """
    num_open, num_waiting = int(arrays.scalars[kernel.NUM_OPEN]), int(arrays.scalars[kernel.NUM_WAITING])
    rows, counts = np.empty((num_waiting, kernel.SEGMENT_WIDTH), np.int64), np.zeros(num_open, np.int64)
    _collect(arrays.head, arrays.link, arrays.segments, rows, counts)
    return rows, counts


@compiled
def _collect(head, link, segments, rows, counts):  # type: ignore[no-untyped-def]
    num = 0
    for b in range(counts.size):
        k = head[b]
        while k >= 0:
            for column in range(rows.shape[1]):
                rows[num, column] = segments[k, column]
            num += 1
            counts[b] += 1
            k = link[k]


def with_bins(
    arrays: Arrays, room: npt.ArrayLike, opened: npt.ArrayLike, rows: Int64Array, counts: Int64Array
) -> Arrays:
    """The arrays with these bins open and no others, in a pool of just their segments.

    Args:
        arrays: the others are kept; ``scalars`` is changed in place.
        room, opened: of each bin, in opening order.
        rows, counts: as of `segments_of`; no bin is empty.
    """
    num_open, stops = len(counts), np.cumsum(counts)
    link = np.arange(1, len(rows) + 1)
    link[stops - 1] = -1
    bins: dict[str, Any] = {name: np.zeros(len(arrays.room), np.int64) for name in ("room", "opened", "head", "tail")}
    bins["room"][:num_open], bins["opened"][:num_open] = room, opened
    bins["head"][:num_open], bins["tail"][:num_open] = stops - counts, stops - 1
    arrays.scalars[kernel.NUM_OPEN], arrays.scalars[kernel.NUM_WAITING] = num_open, len(rows)
    arrays.scalars[kernel.FREE] = -1
    return arrays._replace(**bins, segments=rows, link=link)


def grown(arrays: Arrays) -> Arrays:
    """The arrays with twice the pool, of which nothing is free; ``scalars`` is changed in place."""
    num = len(arrays.link)
    more = max(num, LEAST_ROWS)
    link = np.arange(num + 1, num + more + 1)
    link[-1] = -1
    arrays.scalars[kernel.FREE] = num
    segments = np.concatenate([arrays.segments, np.zeros((more, kernel.SEGMENT_WIDTH), np.int64)])
    return arrays._replace(segments=segments, link=np.concatenate([arrays.link, link]))


def waiting_segments(arrays: Arrays) -> Int64Array:
    """What was drawn and is not in a sample yet, in the order in which it was placed: int64[w, SEGMENT_WIDTH]."""
    return np.concatenate([segments_of(arrays)[0], tail_segments(arrays), pending_segments(arrays)])


def tail_segments(arrays: Arrays) -> Int64Array:
    """What packing ``split`` keeps back, the oldest first: int64[t, SEGMENT_WIDTH]."""
    first, num = arrays.scalars[kernel.FIRST_TAIL], arrays.scalars[kernel.NUM_TAILS]
    rows: Int64Array = arrays.tails[(first + np.arange(num)) % max(len(arrays.tails), 1)]
    return rows


def pending_segments(arrays: Arrays) -> Int64Array:
    """What waits to be placed: the document at hand, then those carried over: int64[w, SEGMENT_WIDTH]."""
    scalars = arrays.scalars
    at_hand = scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH]
    num = int(at_hand[kernel.LENGTH] > 0)
    return np.concatenate([at_hand[None][:num], arrays.carried[int(scalars[kernel.NEXT_CARRIED]) :]])
