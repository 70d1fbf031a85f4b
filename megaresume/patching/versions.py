"""Ranges of versions, as ``>=0.18,<0.19``: numbers and dots, nothing that needs a package."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable

__all__ = ["contains", "parse_range"]

Version = tuple[int, ...]

_PART = re.compile(r"(>=|<=|==|>|<)\s*(\d+(?:\.\d+)*)")
_OPERATORS: dict[str, Callable[[Version, Version], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}


def parse_range(text: str) -> list[tuple[str, Version]]:
    """The parts of a range; the empty text is any version. Raises ValueError."""
    parts = []
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        match = _PART.fullmatch(part)
        if match is None:
            raise ValueError(f"not a range of versions: {part}")
        parts.append((match[1], tuple(map(int, match[2].split(".")))))
    return parts


def contains(text: str, version: str) -> bool:
    """Whether a version as ``0.16.1`` lies in a range. Compared to the digits given: 0.17.3 is ``<=0.17``."""
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:3])
    return all(_OPERATORS[sign](_cut(numbers, len(bound)), bound) for sign, bound in parse_range(text))


def _cut(numbers: Version, length: int) -> Version:
    return (*numbers, 0, 0, 0)[:length]
