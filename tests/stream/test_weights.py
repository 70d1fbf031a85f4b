"""Weights are exact integers, however they are spelled."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from megaresume.stream.errors import ConfigError
from megaresume.stream.weights import MAX_PARTS, integer_weights, parse_weight


def _integers(*weights: Any) -> list[int]:
    return list(integer_weights({f"s{i}": parse_weight(w, f"s{i}") for i, w in enumerate(weights)}).values())


@pytest.mark.parametrize(
    "spelling",
    [(0.6, 0.3, 0.1), (6, 3, 1), (60, 30, 10), ("3/5", "3/10", "1/10"), ("0.6", ".3", "1e-1"), (6e-7, 3e-7, 1e-7)],
)
def test_one_blend_many_spellings(spelling: tuple[Any, ...]) -> None:
    assert _integers(*spelling) == [6, 3, 1]


def test_a_float_is_its_shortest_decimal() -> None:
    assert parse_weight(0.1, "a") == Fraction(1, 10)
    assert _integers(1 / 3, 1 / 3, 1 / 3) == [1, 1, 1]
    assert _integers(1e-3, 1) == [1, 1000]


def test_zero_is_present_but_never_drawn() -> None:
    assert _integers(0, 2, 0.0, 4) == [0, 1, 0, 2]


def test_huge_denominators_are_rounded_to_what_fits() -> None:
    weights = (0.123456789012345, 0.3333333333333333, 1e-15, 0.9876543210987654)
    parts = _integers(*weights)
    assert sum(parts) <= MAX_PARTS and min(parts) >= 1  # a positive weight stays positive
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part / sum(parts) - weight / sum(weights)) < 4 / MAX_PARTS


def test_rounding_hands_out_every_part() -> None:
    parts = _integers(*(10**9 + 2 * i + 1 for i in range(1000)))
    assert sum(parts) == MAX_PARTS // 2 and max(parts) - min(parts) <= 2


def test_many_tiny_weights_beside_a_large_one() -> None:
    parts = _integers(10**30, *[1] * 1000)
    assert parts[1:] == [1] * 1000 and sum(parts) <= MAX_PARTS


@pytest.mark.parametrize(
    "bad", [-1, -0.5, "-1/2", float("nan"), float("inf"), "a lot", "", "1/0", None, True, [1], {"x": 1}, "0.6 0.4"]
)
def test_bad_weight(bad: Any) -> None:
    with pytest.raises(ConfigError, match="bad weight of source 'web'") as error:
        parse_weight(bad, "web")
    assert error.value.found == repr(bad) and "'web'" in str(error.value.action)


@pytest.mark.parametrize(("weights", "found"), [((0, 0), "every weight is 0"), ((), "no source")])
def test_empty_blend(weights: tuple[int, ...], found: str) -> None:
    with pytest.raises(ConfigError, match="the blend is empty") as error:
        _integers(*weights)
    assert error.value.found == found
