"""Blend weights as exact integers, so that ``0.6 0.3 0.1`` and ``6 3 1`` are one blend on every machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from math import gcd, isfinite, lcm

from megaresume.stream.errors import ConfigError

#: A blend has at most this many parts, so that `kernel.set_deadline` stays exact in 64 bits. Sixteen digits are exact;
#: what has to be rounded is off by less than a token of 10**15, with up to a thousand sources.
MAX_PARTS = 1 << 61


def parse_weight(value: object, source: str) -> Fraction:
    """A weight as written by a user (``3``, ``0.3``, ``"3/10"``) as an exact fraction.

    A float means the shortest decimal that reads back as it: 0.1 is one tenth.

    Raises:
        ConfigError: not a number, negative, infinite or not a number.
    """
    expected = "a non-negative number, for example 0.3, 3 or '3/10'"
    action = f"correct the weight of source '{source}'"
    weight: Fraction | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        weight = Fraction(value)
    elif isinstance(value, float) and isfinite(value):
        weight = Fraction(Decimal(repr(value)))
    elif isinstance(value, str):
        try:
            weight = Fraction(value.strip())
        except (ValueError, ZeroDivisionError):
            weight = None
    if weight is None or weight < 0:
        raise ConfigError(f"bad weight of source '{source}'", found=repr(value), expected=expected, action=action)
    return weight


def integer_weights(weights: Mapping[str, Fraction]) -> dict[str, int]:
    """The same proportions in the smallest integers: ``integer_weights`` of the outcome is the outcome.

    Proportions that need more than `MAX_PARTS` parts are rounded, each by itself, so that the order in which sources
    are written has no say; a positive weight stays positive.

    Raises:
        ConfigError: all weights are zero.
    """
    total = sum(weights.values())
    if total <= 0:
        raise ConfigError(
            "the blend is empty",
            found="every weight is 0" if weights else "no source",
            expected="at least one source with a positive weight",
            action="give a source a positive weight",
        )
    scale = lcm(*(w.denominator for w in weights.values()))
    parts = [int(w * scale) for w in weights.values()]
    divisor = gcd(*parts)
    parts = [p // divisor for p in parts]
    if sum(parts) > MAX_PARTS:
        parts = _rounded(parts)
    return dict(zip(weights, parts, strict=True))


def _rounded(parts: Sequence[int]) -> list[int]:
    """To half of `MAX_PARTS` parts (the rest is room for what is rounded up), in lowest terms."""
    total = sum(parts)
    rounded = [max((p * MAX_PARTS + total) // (2 * total), 1) if p > 0 else 0 for p in parts]
    divisor = gcd(*rounded)
    return [r // divisor for r in rounded]
