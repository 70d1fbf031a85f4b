"""Which source the blend draws next: a tournament, in which a draw changes two paths, whatever the number of sources.

    row 1                     root              of the sources below it, each row has the earliest
    rows 2, 3           0 1        2 3            release of those not released yet, and whose
    rows 4 .. 7        0   1      2   3           deadline of those released, and whose

A source has a *place*: its number in the order of names. Of two with the same deadline the lower place wins. No
processor foresees who wins a match, so there is no branch in one: a mask chooses.
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
def prefetch(_: Any, array: Any, i: Any, k: Any) -> Any:
    """Ask for the line of the cache that ``array[i, k]`` is in; past the end of the array, nothing happens.

    The pieces ahead of a thousand sources do not fit into the cache, and which source comes next is known too late.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind, number = signature.args[0], ir.IntType(32)
        values = context.make_array(kind)(context, builder, arguments[0])
        indices = [*arguments[1:], *[context.get_constant(types.intp, 0)] * (kind.ndim - 2)]
        pointer = cgutils.get_item_pointer(context, builder, kind, values, indices)  # type: ignore[no-untyped-call]
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        returns_nothing = ir.FunctionType(ir.VoidType(), [pointer.type, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [pointer.type], returns_nothing)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # to read, soon, as data
        return context.get_dummy_value()

    return types.none(array, i, k), generate
