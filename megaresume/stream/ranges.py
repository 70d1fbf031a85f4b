"""Ranges of samples, and the two numbers of a sample where some are left out.

    absolute   0 1 2 3 4 5 6 7 8 9 ...      the number when nothing is skipped
    left out         x x x
    trained    0 1         2 3 4 5 ...      what steps, ledgers and states count

A range is [first, stop). A set of ranges is ascending, and no two of them touch. What is left out at a place is left
out just before the next sample that is trained: where two were trained the stream still stands at absolute number 2,
and sample 2 is absolute 5.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

Range = tuple[int, int]
Ranges = tuple[Range, ...]


def union(*sets: Iterable[Range]) -> Ranges:
    """All of them, joined where they touch."""
    result: list[Range] = []
    for first, stop in sorted(r for ranges in sets for r in ranges):
        if result and first <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        elif first < stop:
            result.append((first, stop))
    return tuple(result)


def minus(ranges: Iterable[Range], other: Iterable[Range]) -> Ranges:
    """What of the first is not in the second."""
    result = list(union(ranges))
    for low, high in union(other):
        result = [
            part
            for first, stop in result
            for part in ((first, min(stop, low)), (max(first, high), stop))
            if part[0] < part[1]
        ]
    return tuple(result)


def common(ranges: Iterable[Range], other: Iterable[Range]) -> Ranges:
    """What is in both."""
    ranges = union(ranges)
    return minus(ranges, minus(ranges, other))


def length(ranges: Iterable[Range]) -> int:
    """Samples in ranges that do not overlap."""
    return sum(stop - first for first, stop in ranges)


def _begin(skipped: Sequence[Range]) -> list[int]:
    """The trained number at which each range is left out."""
    begins, before = [], 0
    for first, stop in skipped:
        begins.append(first - before)
        before += stop - first
    return begins


def left_out(skipped: Sequence[Range], samples: int) -> int:
    """Samples left out when so many were trained; what is left out right there is still to come."""
    return length(skipped[: bisect_left(_begin(skipped), samples)])


def reached(skipped: Sequence[Range], samples: int) -> int:
    """The absolute number at which the stream stands when so many samples were trained."""
    return samples + left_out(skipped, samples)


def absolute(skipped: Sequence[Range], sample: int) -> int:
    """The absolute number of a trained sample."""
    return sample + length(skipped[: bisect_right(_begin(skipped), sample)])


def trained(skipped: Sequence[Range], number: int) -> int:
    """Samples that are trained before an absolute number."""
    return number - sum(min(stop, number) - first for first, stop in skipped if first < number)
