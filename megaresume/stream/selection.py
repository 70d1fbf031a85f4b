"""The choice of the source that a blend draws next, and of the waiting documents that make up the next sample.

The source is found by a tournament, in which a draw changes two paths, whatever the number of sources:

    row 1                     root              of the sources below it, each row has the earliest
    rows 2, 3           0 1        2 3            release of those not released yet, and whose
    rows 4 .. 7        0   1      2   3           deadline of those released, and whose

A source has a *place*: its number in the order of names. Of two with the same deadline the lower place wins. No
processor foresees who wins a match, so there is no branch in one: a mask chooses.

The documents (``packing: knapsack``) are the ones that fill a sample best:

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

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from megaresume.stream.compiled import compiled

#: Later than any release or deadline.
NEVER = np.int64(0x7FFFFFFFFFFFFFFF)
# Columns of a row. WAITING and READY are always places of sources, also if nobody waits or is ready.
RELEASE, WAITING, DEADLINE, READY = 0, 1, 2, 3


@compiled(inline="always")
def _winner(time, place, other_time, other_place, on_tie):  # type: ignore[no-untyped-def]
    """The earlier time, and whose; ``on_tie``: 1 if the other one wins a tie, else 0."""
    other = (other_time - on_tie - time) >> 63  # times are not negative: all ones if the other one wins, else zeros
    return time ^ ((time ^ other_time) & other), place ^ ((place ^ other_place) & other)


@compiled
def tournament(release, deadline, now):  # type: ignore[no-untyped-def]
    """All matches played: int64[rows, 4].

    Args:
        release, deadline: int64[n], by place; a source that is not drawn has the release NEVER.
        now: units drawn.
    """
    leaves = 1
    while leaves < release.size:
        leaves *= 2
    rows = np.full((2 * leaves, 4), NEVER, np.int64)
    for place in range(release.size):
        leaf = leaves + place
        rows[leaf, WAITING] = rows[leaf, READY] = place
        if release[place] <= now:
            rows[leaf, DEADLINE] = deadline[place]
        else:
            rows[leaf, RELEASE] = release[place]
    for k in range(leaves - 1, 0, -1):
        a, b = 2 * k, 2 * k + 1
        for time, place in ((RELEASE, WAITING), (DEADLINE, READY)):
            rows[k, time], rows[k, place] = _winner(rows[a, time], rows[a, place], rows[b, time], rows[b, place], 0)
    return rows


@compiled
def play(rows, place, release, deadline, now):  # type: ignore[no-untyped-def]
    """Play the matches of one source again, with its next release and deadline."""
    k = rows.shape[0] // 2 + place
    if release > now:
        deadline = NEVER
    else:
        release = NEVER
    waiting = ready = place
    while True:
        rows[k, RELEASE], rows[k, WAITING], rows[k, DEADLINE], rows[k, READY] = release, waiting, deadline, ready
        if k == 1:
            break
        other, on_tie = k ^ 1, k & 1
        release, waiting = _winner(release, waiting, rows[other, RELEASE], rows[other, WAITING], on_tie)
        deadline, ready = _winner(deadline, ready, rows[other, DEADLINE], rows[other, READY], on_tie)
        k >>= 1


@compiled
def select(rows, deadline, now):  # type: ignore[no-untyped-def]
    """The place of the released source with the earliest deadline, or -1; sources that are due are released first."""
    while rows[1, RELEASE] <= now:
        place = rows[1, WAITING]
        play(rows, place, np.int64(0), deadline[place], now)
    return rows[1, READY] if rows[1, DEADLINE] != NEVER else -1


@intrinsic
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Ask for the line of the cache that ``array[index]`` begins in, a tuple; past its end, nothing happens.

    The pieces ahead of a thousand sources do not fit into the cache, and which source comes next is known too late.
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
