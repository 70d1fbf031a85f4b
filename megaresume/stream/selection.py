"""The choice of the source that a blend draws next, and of the waiting documents that make up the next sample.

Two tournaments find the source: one by release, of the sources that are not released yet; one by deadline, of those
that are. A draw changes two paths in each, whatever the number of sources:

    row 1                           root                   each row has the earliest of the four below it
    rows 4 .. 7         0-3    4-7    8-11    12-15
    rows 16 .. 31     0 1 2 3    4 5 6 7    ...            a source has the row 16 + its place

A source's *place* is its number in the order of names; of equal times the lower place wins. A row is one number: the
time since the tournament began, then the place in the low bits. Matches are computed without a branch, as no processor
can predict who wins.

For ``packing: knapsack``, the documents that fill a sample best are chosen:

    waiting   3900 3100 2500 2300 1700 900 400 ...   `lookahead` documents, as drawn; small ones in groups
    start     3900                                    the longest: what is hard to place later goes first
    room      4292 = 2500 + 900 + 892?  3100 + 1192?  the largest sum of others that fits, by dynamic programming

The exact subset sum is cheap here, since a sample is a few thousand tokens long: one bit for each sum that can be
reached, a machine word for 64 of them. It is the "minimum bin slack" of Gupta and Ho ("A new heuristic algorithm for
the one-dimensional bin-packing problem", Production Planning & Control 10, 1999) over a window: each sample is filled
as well as it can be. The start is one of the `STARTS` longest, whichever leaves least room, or the oldest document
once it has waited for ``max_age`` samples. Candidates are tried from the longest on, and sums from the fullest on, so
that a sample holds few long documents rather than many short ones, which fill the gaps of later samples.

Small documents that follow each other wait as one, of at most ``2 * seq_length / lookahead`` tokens: any two
neighbours have more, so that what waits fills more than a sample, however short documents are. Each stays whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megaresume.stream.compiled import compiled

#: Later than any release or deadline.
NEVER = np.int64(0x7FFFFFFFFFFFFFFF)
# The two tournaments.
WAITING, READY = 0, 1


class Scale(NamedTuple):
    """How to read the rows of the tournaments of n sources. Only numbers: passing a tuple with arrays in it would count
    a reference to each, at every draw."""

    #: the row of place 0, a power of four.
    leaves: int
    #: the number of bits of a place in a row.
    bits: int
    #: units drawn when they began; and the distance after which a time is `far`, ahead or behind.
    since: int
    far: int


@compiled(forceinline=True)
def select_of_few(release, deadline, now):  # type: ignore[no-untyped-def]
    """The place of the released source with the earliest deadline, or -1. Looks at every source: int64[n] twice."""
    best, earliest = -1, NEVER
    for place in range(release.size):
        # No branch, as no processor can predict which source is next.
        its = deadline[place] if release[place] <= now else NEVER
        best = place if its < earliest else best
        earliest = min(earliest, its)
    return best


@compiled
def tournaments(release, deadline, now):  # type: ignore[no-untyped-def]
    """Build the tournaments, with all matches played.

    Args:
        release, deadline: int64[n], by place; sources that are not drawn have a release far beyond all others.
        now: units drawn.

    Returns:
        int64[2, rows], of `WAITING` and `READY`, NEVER in empty rows; and their `Scale`.
    """
    leaves, bits = 4, 2
    while leaves < release.size:
        leaves *= 4
        bits += 2
    rows = np.full((2, 2 * leaves), NEVER, np.int64)
    scale = Scale(leaves, bits, now, 1 << (61 - bits))
    for place in range(release.size):
        time, which = (deadline[place], READY) if release[place] <= now else (release[place], WAITING)
        rows[which, leaves + place] = _number(scale, place, time)
    for which in (WAITING, READY):
        for k in range(2 * leaves - 1, 3, -1):
            rows[which, k >> 2] = min(rows[which, k >> 2], rows[which, k])
    return rows, scale


@compiled(forceinline=True)
def _number(scale, place, time):  # type: ignore[no-untyped-def]
    """A time and a place as one number; times far from now are clipped."""
    return (max(-scale.far, min(time - scale.since, scale.far)) << scale.bits) + place


@compiled(forceinline=True)
def _play(rows, scale, which, place, number):  # type: ignore[no-untyped-def]
    """Play the matches of one source again."""
    k = np.uint64(scale.leaves + place)
    while True:
        rows[which, k] = number
        if k == 1:
            break
        others = min(rows[which, k ^ np.uint64(1)], min(rows[which, k ^ np.uint64(2)], rows[which, k ^ np.uint64(3)]))
        number = min(number, others)
        k >>= np.uint64(2)


@compiled(forceinline=True)
def play(rows, scale, place, release, deadline, now):  # type: ignore[no-untyped-def]
    """Play the matches of one source again, with its next release and deadline."""
    is_released = release <= now
    _play(rows, scale, WAITING, place, NEVER if is_released else _number(scale, place, release))
    _play(rows, scale, READY, place, _number(scale, place, deadline) if is_released else NEVER)


@compiled(forceinline=True)
def is_due(rows, scale, now):  # type: ignore[no-untyped-def]
    """Whether the release of a source that waits has come."""
    return rows[WAITING, 1] >> scale.bits <= now - scale.since < scale.far


@compiled(forceinline=True)
def release_first(rows, scale, deadline):  # type: ignore[no-untyped-def]
    """Release the first waiting source; return its place."""
    place = rows[WAITING, 1] & ((1 << scale.bits) - 1)
    _play(rows, scale, WAITING, place, NEVER)
    _play(rows, scale, READY, place, _number(scale, place, deadline[place]))
    return place


@compiled(forceinline=True)
def winner(rows, scale, now):  # type: ignore[no-untyped-def]
    """The same as `select_of_few`, once all due sources are released; also -1 if clipped times leave the order open."""
    first = rows[READY, 1]
    is_known = -scale.far < first >> scale.bits < scale.far and now - scale.since < scale.far
    return first & ((1 << scale.bits) - 1) if is_known else -1


@intrinsic
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line in which ``array[index]`` (a tuple) begins; past its end, do nothing.

    The pieces ahead of a thousand sources exceed the cache, and the next source is known too late.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, number = signature.args[0], ir.IntType(32)
        values = context.make_array(kind)(context, builder, arguments[0])
        places = cgutils.unpack_tuple(builder, arguments[1])  # type: ignore[no-untyped-call]
        indices = [*places, *[context.get_constant(types.intp, 0)] * (kind.ndim - len(places))]
        pointer = cgutils.get_item_pointer(context, builder, kind, values, indices)  # type: ignore[no-untyped-call]
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        returns_nothing = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], returns_nothing)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, soon, as data
        return context.get_dummy_value()

    return types.none(array, index), generate


#: Each sample is tried with this many of the longest documents.
STARTS = 8


@compiled
def _reachable(row, total):  # type: ignore[no-untyped-def]
    return (row[total >> 6] >> np.uint64(total & 63)) & np.uint64(1)


@compiled
def _add(sums, with_it, length, words):  # type: ignore[no-untyped-def]
    """``with_it`` = the sums, and each of them plus ``length``. Bits above the room may be set; they are ignored."""
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
        room: int64[K], tokens left in a sample that has only this document, oldest first.
        num_waiting: documents that wait, at least 1 and at most K.
        capacity: tokens a sample, a multiple of ``align``.
        align: each document takes a multiple of this many tokens.
        overdue: whether the oldest has waited long enough.
        order, tried: int64[K], scratch.
        sums: uint64[K + 1, capacity // align // 64 + 1], scratch.
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
