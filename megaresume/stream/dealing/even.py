"""`even_groups`: numbers in groups of equal size, so that the largest sum is small.

    longest first   each number, from the largest on, to the group with the smallest sum that has room
    exchanges       the group with the largest sum and the one with the smallest, the second largest and the second
                    smallest, ...: each pair exchanges the two numbers that make it most equal; again, until the largest
                    sum is within `GOAL` of what cannot be beaten, or nothing gets better

What cannot be beaten: the mean of the sums, and the largest number with the smallest ones beside it. Whole numbers
alone, and ties by place: every processor comes to the same groups.
"""

from __future__ import annotations

import numpy as np

from megaresume.stream.compiled import compiled
from megaresume.stream.planning.kernel import LENGTH

#: A largest sum that is so near to the best one is good enough: one part of so many.
GOAL = 400
#: Rounds of exchanges, at most: a few do most of it.
ROUNDS = 12


@compiled
def even_groups(numbers, order, groups):  # type: ignore[no-untyped-def]
    """The groups.

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
    """Groups with sums alike next to each other, and the sums of all ranks even, as far as that allows.

    Args:
        sums: int64[n], of the groups.
        ranks: of which each gets one of every so many groups.

    Returns:
        int64[n / ranks, ranks]: in a row those that cost alike, from the rows that cost most on; of a row, the rank
        that has least so far gets the largest.
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
    # A heap of the groups with room: the smallest sum first, of equal ones the first group.
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
    """A round of exchanges; if it changes nothing, the largest group with any other. Whether anything changed."""
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
    """Exchange the two numbers that make two groups most equal. Whether there are such two."""
    gap, size = sums[large] - sums[small], members.shape[1]
    best, one, other, j = gap, -1, -1, 0
    for i in range(size):
        number = numbers[members[large, i]]
        # Both groups descend: the number that halves the gap lies at or before the one found for the number before.
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
    """Put a number in the place of another one in a row that descends."""
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
