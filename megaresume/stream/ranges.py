"""Ranges of samples, as people write them; and the two numbers of a sample where some are left out.

    absolute   0 1 2 3 4 5 6 7 8 9 ...      the number when nothing is skipped
    left out         x x x
    trained    0 1         2 3 4 5 ...      what steps, ledgers and states count

A range is [first, stop). A set of ranges is ascending, and no two of them touch. What is left out at a place is left
out just before the next sample that is trained: where two were trained the stream still stands at absolute number 2,
and sample 2 is absolute 5.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from megaresume.stream.errors import ConfigError

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


def parse_range(text: object, where: str, most: int = (1 << 62) - 1) -> Range:
    """``A:B`` as [A, B).

    Raises:
        ConfigError: something else, backward, or beyond ``most``.
    """
    match = re.fullmatch(r"\s*(\d+)\s*:\s*(\d+)\s*", text) if isinstance(text, str) else None
    first, stop = map(int, match.groups()) if match else (0, 0)
    if not first < stop or stop > most:
        raise ConfigError(
            f"bad range in {where}",
            found=repr(text),
            expected='"A:B" with A < B: from A to B-1, counted from 0 (quoted: YAML reads 1:30 as 90)',
            cause=None if not match else "it is backward or empty" if first >= stop else f"it ends after {most:,}",
            action=f'for example "{stop}:{first}"' if match and stop < first else 'for example "1000:1200"',
        )
    return first, stop


def parse_steps(entry: object, where: str) -> Range:
    """``101-200``, ``(101, 200)`` or ``101`` as (first, last), counted from 1, the last included.

    Raises:
        ConfigError: something else, or backward.
    """
    numbers = [int(n) for n in re.findall(r"\d+", entry)] if isinstance(entry, str) else entry
    well_formed = not isinstance(entry, str) or re.fullmatch(r"\s*\d+(\s*-\s*\d+)?\s*", entry)
    numbers = [numbers] if isinstance(numbers, int) else list(numbers) if isinstance(numbers, Iterable) else []
    if not well_formed or len(numbers) not in (1, 2) or not all(isinstance(n, int) for n in numbers):
        numbers = [1, 0]
    first, last = numbers[0], numbers[-1]
    if not 1 <= first <= last:
        raise ConfigError(
            f"bad range in {where}",
            found=repr(entry),
            expected="FIRST-LAST, steps counted from 1, the last one included",
            cause="it is backward" if first > last >= 1 else None,
            action="for example 101-200",
        )
    return first, last
