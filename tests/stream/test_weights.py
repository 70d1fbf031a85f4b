"""Weights are exact integers, however they are spelled."""

from __future__ import annotations

import random
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megaresume.stream.data_yaml import MAX_PARTS, integer_weights, parse_weight
from megaresume.stream.errors import ConfigError


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


def test_sixteen_digits_are_exact() -> None:
    weights = (0.123456789012345, 0.3333333333333333, 1e-15, 0.9876543210987654)
    parts = _integers(*weights)
    exact = [Fraction(repr(w)) for w in weights]
    assert [Fraction(p, sum(parts)) for p in parts] == [w / sum(exact) for w in exact]
    assert Fraction(_integers(1.5, 1e-9)[1]) / sum(_integers(1.5, 1e-9)) == Fraction(1, 1_500_000_001)


def test_more_than_fits_is_rounded_and_stays_positive() -> None:
    weights = [Fraction(1), Fraction(1, 3**50), Fraction(1, 10**300), Fraction(7, 11**30)]
    parts = list(integer_weights({f"s{i}": w for i, w in enumerate(weights)}).values())
    assert sum(parts) <= MAX_PARTS and min(parts) >= 1
    for part, weight in zip(parts, weights, strict=True):
        assert abs(Fraction(part, sum(parts)) - weight / sum(weights)) < Fraction(16, MAX_PARTS)


FLOATS = st.floats(1e-12, 1e6).map(lambda x: float(f"{x:.16g}"))
TOKENS = st.integers(1, 10**13)
FRACTIONS = st.fractions(min_value=0, max_denominator=10**30)
TINY = st.integers(0, 400).map(lambda digits: Fraction(1, 10**digits))


@given(st.lists(st.one_of(FLOATS, TOKENS, FRACTIONS.map(str), TINY.map(str), st.just(0)), min_size=1, max_size=40))
def test_what_was_made_integers_stays_as_it_is(weights: list[Any]) -> None:
    assume(any(Fraction(w) for w in weights))
    parts = _integers(*weights)
    assert _integers(*parts) == parts and sum(parts) <= MAX_PARTS
    assert [p > 0 for p in parts] == [Fraction(w) > 0 for w in weights]


@pytest.mark.parametrize("num", [2, 3, 30, 1000])
@pytest.mark.parametrize("digits", [16, 17, 40])
def test_many_sources_stay_as_they_are(num: int, digits: int) -> None:
    rng = random.Random(num)
    for _ in range(20):
        parts = _integers(*(f"{rng.randrange(1, 10**digits)}/{10**digits}" for _ in range(num)))
        assert _integers(*parts) == parts


@given(st.lists(FRACTIONS, min_size=2, max_size=8).filter(any), st.randoms())
def test_the_order_of_writing_says_nothing(weights: list[Fraction], rng: random.Random) -> None:
    by_name = {f"s{i}": w for i, w in enumerate(weights)}
    names = list(by_name)
    rng.shuffle(names)
    assert integer_weights({name: by_name[name] for name in names}) == integer_weights(by_name)


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
