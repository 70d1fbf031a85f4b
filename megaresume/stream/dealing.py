"""Deals the samples of a global batch to ranks and micro-steps so that no rank waits long for another.

A step takes as long as its slowest rank. The time for a sample depends on its documents: attention is quadratic in the
length of a document, so samples of equal length take different times. Every rank plans the lengths of all samples, and
so computes the assignment of all ranks without communication:

    samples of the global batch -> their costs -> groups of equal size and cost -> the slots of the usual assignment

A global batch keeps its samples. The assignment is a pure function of global batch and layout, so no state holds it,
and a resume may change ranks, micro-batches, or the balance itself.

The groups (`even_groups`):

    longest first   each number, from the largest down, goes to the group with the smallest sum that has room
    exchanges       pair the group of the largest sum with that of the smallest, the second largest with the second
                    smallest, ...: each pair swaps the two numbers that bring its sums closest. Repeat until the largest
                    sum is within `GOAL` of the lower bound, or nothing improves

The lower bound is the larger of the mean of the sums and the largest number together with the smallest ones. Only
integers, and ties by position: every processor computes the same groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from megaresume.stream.arrays import Int64Array
from megaresume.stream.batches import ALGORITHM, Balance
from megaresume.stream.compiled import compiled
from megaresume.stream.errors import StateError
from megaresume.stream.kernel import LENGTH
from megaresume.stream.planner import Plan

#: Stop when the largest sum exceeds the lower bound by less than one part in this many.
GOAL = 400
#: Most rounds of exchanges; the first few do most of the work.
ROUNDS = 12


def in_parts(samples: int, *, micro_batch_size: int, dp_size: int) -> list[int]:
    """Split a step of few samples into micro-batches: the size of each, over all ranks.

    Every rank must get samples in every micro-batch, since all ranks wait for each other. All micro-batches but the
    last are full. If the last would have fewer samples than there are ranks, it shares evenly with the one before it;
    with one sample per micro-batch there is nothing to share, and the samples are left over.
    """
    everybody = micro_batch_size * dp_size
    whole, rest = divmod(samples, everybody)
    parts = [everybody] * whole
    if rest >= dp_size:
        parts.append(rest)
    elif rest and whole and micro_batch_size > 1:
        last = (everybody + rest) // 2
        parts[-1:] = [everybody + rest - last, last]
    return parts


def in_even_parts(samples: int, *, micro_batch_size: int, dp_size: int) -> list[int]:
    """Split a step over any number of ranks: the size of each micro-batch, over all ranks.

    Uses as few micro-batches as possible, their sizes differing by at most one; every sample is dealt out. If the step
    divides evenly over the ranks, these are the micro-batches of `in_parts`. A micro-batch may have fewer samples than
    there are ranks; then some ranks get none of it.
    """
    count = -(-samples // (micro_batch_size * dp_size))
    return [samples * (j + 1) // count - samples * j // count for j in range(count)]


def places_of(sizes: Iterable[int], *, dp_rank: int, dp_size: int) -> Iterator[slice]:
    """Where the samples of one rank lie in a step: as many of each micro-batch as any other rank has, or one more.

    Args:
        sizes: of the micro-batches of all ranks: `in_parts`, `in_even_parts`.
    """
    first = 0
    for size in sizes:
        yield slice(first + size * dp_rank // dp_size, first + size * (dp_rank + 1) // dp_size)
        first += size


def deal(
    plan: Plan, balance: Balance | None, *, micro_batch_size: int, dp_rank: int, dp_size: int, evenly: bool = False
) -> list[Int64Array]:
    """The samples of each micro-batch of one rank for a step.

    Args:
        plan: of the step. See `dealt_order` for ``balance``.
        evenly: as `in_even_parts` says; else as `in_parts` does.

    Returns:
        int64[m] each: sample numbers in the stream; empty if this rank gets nothing of a micro-batch.
    """
    order = dealt_order(plan, balance, micro_batch_size=micro_batch_size, dp_size=dp_size)
    divide = in_even_parts if evenly else in_parts
    sizes = divide(len(plan), micro_batch_size=micro_batch_size, dp_size=dp_size)
    return [order[place] for place in places_of(sizes, dp_rank=dp_rank, dp_size=dp_size)]


def dealt_order(plan: Plan, balance: Balance | None, *, micro_batch_size: int, dp_size: int) -> Int64Array:
    """The samples of a global batch in the order in which they are dealt out, micro-batch by micro-batch and in each
    rank by rank: see `places_of`.

    Args:
        plan: of the global batch. If it is not a whole number of micro-batches for every rank (the last batch of a
            run), it stays in stream order.
        balance: None: stream order.
        micro_batch_size: samples.
        dp_size: data-parallel size.

    Returns:
        int64[samples]: numbers in the stream.

    Raises:
        StateError: the balance was set by a version of megaresume with another algorithm.
    """
    samples = np.arange(plan.first, plan.stop)
    if balance is None or len(plan) % (micro_batch_size * dp_size):
        return samples
    groups = dp_size if balance.objective == "step" else len(plan) // micro_batch_size
    if groups <= 1:
        return samples
    if balance.algorithm != ALGORITHM:
        raise StateError(
            "this version of megaresume does not know which rank got which samples",
            found=f"ranks balanced by algorithm {balance.algorithm}",
            expected=f"algorithm {ALGORITHM}",
            action="use the version of megaresume that the run was trained with",
        )
    cost = costs(plan, balance)
    members, sums = even_groups(cost, np.argsort(-cost, kind="stable"), groups)
    if balance.objective == "step":
        # Every rank begins with its largest samples, so that these share a micro-step.
        places = members.reshape(dp_size, -1, micro_batch_size).transpose(1, 0, 2)
    else:
        places = members[alike(sums, dp_size)]
    return np.asarray(samples[places.ravel()], np.int64)


def costs(plan: Plan, balance: Balance) -> Int64Array:
    """The cost of each sample: int64[samples]. Padding costs nothing."""
    return np.asarray(sums_of_squares(plan.table, plan.starts, balance.token_cost), np.int64)


@compiled
def even_groups(numbers, order, groups):  # type: ignore[no-untyped-def]
    """Group numbers so that all groups have about the same sum.

    Args:
        numbers: int64[n], not negative.
        order: int64[n], the places of the numbers from the largest number to the smallest.
        groups: how many; ``n`` is a multiple of it.

    Returns:
        int64[groups, n / groups]: places of the numbers of each group, from the largest to the smallest.
        int64[groups]: their sums.
    """
    members, sums = _longest_first(numbers, order, groups)
    size = members.shape[1]
    if groups == 1 or size == 1:
        return members, sums
    best = numbers[order[0]]
    for k in range(size - 1):
        best += numbers[order[order.size - 1 - k]]
    best = max(best, -(-sums.sum() // groups))
    for _ in range(ROUNDS):
        ascending = np.argsort(sums, kind="mergesort")
        if sums[ascending[-1]] - best <= best // GOAL or not _exchange_all(numbers, members, sums, ascending):
            break
    return members, sums


@compiled
def alike(sums, ranks):  # type: ignore[no-untyped-def]
    """Arrange groups so that those of similar sums are together, and the totals of the ranks are as even as that
    allows.

    Args:
        sums: int64[n], of the groups.
        ranks: each gets one group of every row.

    Returns:
        int64[n / ranks, ranks]: each row holds groups of similar cost, the most costly row first; within a row, the
        rank with the smallest total so far gets the largest.
    """
    descending = np.argsort(-sums, kind="mergesort").reshape(-1, ranks)
    so_far = np.zeros(ranks, np.int64)
    rows = np.empty_like(descending)
    for k in range(rows.shape[0]):
        rows[k][np.argsort(so_far, kind="mergesort")] = descending[k]
        so_far += sums[rows[k]]
    return rows


@compiled
def _longest_first(numbers, order, groups):  # type: ignore[no-untyped-def]
    size = order.size // groups
    members = np.empty((groups, size), np.int64)
    sums, held = np.zeros(groups, np.int64), np.zeros(groups, np.int64)
    # A heap of the groups with room, by sum, then by number.
    heap, room = np.arange(groups), groups
    for place in order:
        group = heap[0]
        members[group, held[group]] = place
        held[group] += 1
        sums[group] += numbers[place]
        if held[group] == size:
            room -= 1
            group = heap[room]
        at = 0
        while 2 * at + 1 < room:
            child = 2 * at + 1
            if child + 1 < room and _before(sums, heap[child + 1], heap[child]):
                child += 1
            if not _before(sums, heap[child], group):
                break
            heap[at] = heap[child]
            at = child
        heap[at] = group
    return members, sums


@compiled
def _before(sums, one, other):  # type: ignore[no-untyped-def]
    return sums[one] < sums[other] or (sums[one] == sums[other] and one < other)


@compiled
def _exchange_all(numbers, members, sums, ascending):  # type: ignore[no-untyped-def]
    """One round of exchanges; if it changes nothing, try the largest group with every other. Returns whether any
    changed."""
    groups, changed = sums.size, False
    for k in range(groups // 2):
        changed |= _exchange(numbers, members, sums, ascending[groups - 1 - k], ascending[k])
    k = 1
    while not changed and k < groups - 1:
        changed = _exchange(numbers, members, sums, ascending[groups - 1], ascending[k])
        k += 1
    return changed


@compiled
def _exchange(numbers, members, sums, large, small):  # type: ignore[no-untyped-def]
    """Swap the two numbers that bring the sums of two groups closest. Returns whether there are such two."""
    gap, size = sums[large] - sums[small], members.shape[1]
    best, one, other, j = gap, -1, -1, 0
    for i in range(size):
        number = numbers[members[large, i]]
        # Both groups descend: the number that halves the gap is never after the one found for the previous number.
        while j < size and 2 * (number - numbers[members[small, j]]) < gap:
            j += 1
        for near in range(max(j - 1, 0), min(j + 1, size)):
            left = abs(gap - 2 * (number - numbers[members[small, near]]))
            if left < best:
                best, one, other = left, i, near
    if one < 0:
        return False
    out, back = members[large, one], members[small, other]
    sums[large] -= numbers[out] - numbers[back]
    sums[small] += numbers[out] - numbers[back]
    _put(numbers, members[large], one, back)
    _put(numbers, members[small], other, out)
    return True


@compiled
def _put(numbers, row, at, place):  # type: ignore[no-untyped-def]
    """Replace a number in a descending row, keeping the order."""
    while at + 1 < row.size and numbers[row[at + 1]] > numbers[place]:
        row[at] = row[at + 1]
        at += 1
    while at and numbers[row[at - 1]] < numbers[place]:
        row[at] = row[at - 1]
        at -= 1
    row[at] = place


@compiled
def sums_of_squares(table, starts, token_cost):  # type: ignore[no-untyped-def]
    """The sum of length * (length + token_cost) over the segments of each sample: int64[samples].

    Args:
        table, starts: of a plan.
        token_cost: whole number.
    """
    sums = np.zeros(starts.size - 1, np.int64)
    for k in range(sums.size):
        for row in range(starts[k], starts[k + 1]):
            length = table[row, LENGTH]
            sums[k] += length * (length + token_cost)
    return sums
