"""`Fields`: turns a planner's arrays into the fields of a `StreamState` that say where the stream is.

This happens after every step, so fields that a step did not change are reused; and the waiting segments, several
hundred of which about half change in a step, are written straight to text by a compiled loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream import kernel
from megaresume.stream.arrays import Int64Array
from megaresume.stream.compiled import compiled
from megaresume.stream.feed import pending_segments, tail_segments
from megaresume.stream.kernel import LENGTH, OFFSET, POSITION, SOURCE, Arrays
from megaresume.stream.order import SourceOrder
from megaresume.stream.stages import Course
from megaresume.stream.state import Bin, Segment, SourceCursor
from megaresume.stream.state_text import LazyTuple

#: With at least this many sources it is quicker to find out which have changed.
MANY = 32


class Fields:
    """Makes the fields of one state after another. Not thread-safe.

    Args:
        course: the stages of the stream.
    """

    def __init__(self, course: Course) -> None:
        self._course = course
        #: rows, orders and cursors of the previous state.
        self._last: tuple[Int64Array, Sequence[SourceOrder], list[SourceCursor]] = np.zeros((0, 0), np.int64), (), []

    def of(self, arrays: Arrays) -> dict[str, Any]:
        """The fields for a planner's arrays, which are read and not kept."""
        scalars = arrays.scalars.tolist()
        stage = scalars[kernel.STAGE]
        names = (source.name for source in self._course.config(stage).sources)
        cursors = self._cursors(arrays.sources, self._course.orders[stage])
        return {
            "samples": scalars[kernel.SAMPLES] - scalars[kernel.LEFT_OUT_SAMPLES],
            "documents": scalars[kernel.DOCUMENTS],
            "tokens": scalars[kernel.TOKENS],
            "sources": dict(zip(names, cursors, strict=True)),
            "bins": _bins(arrays),
            "pending": _segments(pending_segments(arrays)),
            "tails": _segments(tail_segments(arrays)),
            "stages": self._course.records(stage),
            "digest": f"{int(arrays.digest[0]):016x}",
        }

    def _cursors(self, rows: Int64Array, orders: Sequence[SourceOrder]) -> list[SourceCursor]:
        """The cursors of all sources. A step changes few; the others are the previous state's objects."""
        before, of_orders, cursors = self._last
        if len(rows) < MANY or orders is not of_orders or rows.shape != before.shape:
            cursors = list(map(_source_cursor, rows.tolist(), orders))
        else:
            cursors, changed = cursors.copy(), np.flatnonzero((rows != before).any(axis=1))
            for i, row in zip(changed.tolist(), rows[changed].tolist(), strict=True):
                cursors[i] = _source_cursor(row, orders[i])
        self._last = rows.copy(), orders, cursors
        return cursors


def comparable(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `Fields`, or the same fields of a state, so that the two can be compared."""
    names = ("samples", "documents", "tokens", "sources", "bins", "pending", "tails", "stages", "digest")
    return {name: fields[name] for name in names}


def _source_cursor(row: Sequence[int], order: SourceOrder) -> SourceCursor:
    position = row[kernel.NEXT]
    return SourceCursor(  # by position, which takes half the time
        position,
        order.epoch_of(position),
        row[kernel.DRAWN_DOCUMENTS],
        row[kernel.DRAWN_TOKENS],
        position - row[kernel.DRAWN_PIECES],
        row[kernel.DRAWN_IN_STAGE],
        bool(row[kernel.IS_EXHAUSTED]),
        row[kernel.LEFT_OUT_DOCUMENTS],
        row[kernel.LEFT_OUT_TOKENS],
        order.eras,
    )


def _bins(arrays: Arrays) -> Sequence[Bin]:
    num_open, num_waiting = arrays.scalars[[kernel.NUM_OPEN, kernel.NUM_WAITING]].tolist()
    if not num_open:
        return ()
    text = np.empty(num_open * BIN_TEXT + num_waiting * SEGMENT_TEXT + 2, np.uint8)
    size = _write_bins(text, arrays.opened[:num_open], arrays.head, arrays.segments, arrays.link)
    return LazyTuple(_decode(text, size), _bin)


def _segments(rows: Int64Array) -> Sequence[Segment]:
    if not len(rows):
        return ()
    text = np.empty(len(rows) * SEGMENT_TEXT + 2, np.uint8)
    return LazyTuple(_decode(text, _write_segments(text, rows)), Segment._make)


def _bin(item: tuple[int, list[list[int]]]) -> Bin:
    opened_at, segments = item
    return Bin(opened_at, tuple(map(Segment._make, segments)))


def _decode(text: npt.NDArray[np.uint8], size: int) -> str:
    return text[:size].tobytes().decode("ascii")


#: The most characters of a number; of a segment; and of a bin without its segments.
NUMBER_TEXT = 19
SEGMENT_TEXT, BIN_TEXT = 4 * NUMBER_TEXT + 6, NUMBER_TEXT + 6
_OPEN, _CLOSE, _COMMA = map(ord, "[],")
_ZERO, _TEN = np.uint64(ord("0")), np.uint64(10)


@compiled
def _write_bins(text, opened, head, segments, link):  # type: ignore[no-untyped-def]
    """Write ``[[opened,[segment,...]],...]``, at least one; return the number of characters."""
    text[0] = _OPEN
    at = 1
    for b in range(opened.size):
        text[at] = _OPEN
        at = _write_number(text, at + 1, opened[b])
        text[at], text[at + 1] = _COMMA, _OPEN
        at += 2
        k = head[b]
        while k >= 0:
            at = _write_segment(text, at, segments, k)
            k = link[k]
        text[at - 1], text[at], text[at + 1] = _CLOSE, _CLOSE, _COMMA
        at += 2
    text[at - 1] = _CLOSE
    return at


@compiled
def _write_segments(text, rows):  # type: ignore[no-untyped-def]
    """Write ``[segment,...]``, at least one; return the number of characters."""
    text[0] = _OPEN
    at = 1
    for k in range(rows.shape[0]):
        at = _write_segment(text, at, rows, k)
    text[at - 1] = _CLOSE
    return at


@compiled
def _write_segment(text, at, rows, k):  # type: ignore[no-untyped-def]
    """Write ``[source,position,offset,length],`` at ``at``; return the end. The document follows from these."""
    text[at] = _OPEN
    for column in (SOURCE, POSITION, OFFSET, LENGTH):
        at = _write_number(text, at + 1, rows[k, column])
        text[at] = _COMMA
    text[at], text[at + 1] = _CLOSE, _COMMA
    return at + 2


@compiled
def _write_number(text, at, number):  # type: ignore[no-untyped-def]
    """Write a non-negative number; return the end."""
    rest, end, power = np.uint64(number), at + 1, _TEN
    while rest >= power:
        end, power = end + 1, power * _TEN
    for k in range(end - 1, at - 1, -1):
        text[np.uint64(k)], rest = _ZERO + rest % _TEN, rest // _TEN  # without signs: a third of the time
    return end
