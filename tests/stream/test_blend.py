"""The blend: how far any source ever is from its share, in exact integers, at every step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaresume.stream import kernel
from megaresume.stream.config import StreamConfig
from megaresume.stream.data_yaml import MAX_PARTS
from megaresume.stream.planner import Planner
from megaresume.stream.stages import Course
from megaresume.testing import LengthList

Drawn = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]


def _config(unit: str, weights: Sequence[Any], **options: Any) -> StreamConfig:
    """Every sample is one document: samples come in the order of the blend."""
    sources = {f"s{i}": {"weight": w} | options for i, w in enumerate(weights)}
    data = {"seq_length": 1 << 30, "packing": "none", "blend": {"unit": unit}, "sources": sources}
    return StreamConfig.from_dict(data)


def _draw(config: StreamConfig, lengths: Sequence[Sequence[int]], num: int) -> Drawn:
    """Source and length of the documents drawn: int64[num], int64[num]."""
    plan = Planner(Course.of(config), [LengthList(n) for n in lengths]).advance(num)
    return plan.table[:, 0], plan.table[:, 4]


def _errors(
    weights: npt.NDArray[np.int64], sources: npt.NDArray[np.int64], units: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Largest c * W - w * T and smallest, over all steps: [n] each, parts of 1 / W units."""
    n, total_weight = len(weights), int(weights.sum())
    if total_weight > 1 << 40:
        weights = weights.astype(object)  # Python's integers: the products leave 64 bits
    counts, total = np.zeros(n, np.int64), 0
    ahead, behind = np.zeros(n, weights.dtype), np.zeros(n, weights.dtype)
    for first in range(0, len(sources), 512):
        part = sources[first : first + 512]
        drawn = np.zeros((len(part), n), np.int64)  # (steps, sources)
        drawn[np.arange(len(part)), part] = units[first : first + 512]
        steps = counts + np.cumsum(drawn, axis=0)
        totals = total + np.cumsum(units[first : first + 512])
        error = steps.astype(weights.dtype) * total_weight - totals[:, None].astype(weights.dtype) * weights
        ahead, behind = np.maximum(ahead, error.max(axis=0)), np.minimum(behind, error.min(axis=0))
        counts, total = steps[-1], int(totals[-1])
    return ahead, behind


def _fibonacci(n: int) -> list[int]:
    series = [1, 2]
    while len(series) < n:
        series.append(series[-1] + series[-2])
    return series


RANDOM = random.Random(2)
WEIGHTS: dict[str, list[Any]] = {
    "two equal": [1, 1],
    "two, one a billionth": [10**9, 1],
    "three, as usual": [0.6, 0.3, 0.1],
    # The case that "always the largest deficit" gets wrong by 1.8 documents.
    "a hundred equal beside a large one": [100, *[1] * 100],
    "a large one at the end": [*[1] * 50, 1000],
    "a thousand equal": [1] * 1000,
    "a thousand, one holding half": [999, *[1] * 999],
    "powers of two": [2**i for i in range(25)],
    "fibonacci": _fibonacci(35),
    "nearly equal primes": [97, 101, 103, 107, 109, 113],
    "as many parts as allowed": [MAX_PARTS // 2 - 1, MAX_PARTS // 4 + 1, MAX_PARTS // 4 - 1],
    "sixteen digits": [0.8147236863931789, 0.9057919370756192, 0.1269868162935061, 0.0000000123456789],
    "zeros between": [0, 3, 0, 1, 0],
    **{f"random {n}": [RANDOM.choice([1, 5, RANDOM.randint(1, 10**6)]) for _ in range(n)] for n in (2, 3, 7, 30, 300)},
    "random 1000": [RANDOM.randint(1, 1000) for _ in range(1000)],
    "log-normal 200": [int(RANDOM.lognormvariate(5, 2)) + 1 for _ in range(200)],
}


@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_documents_strictly_below_one(weights: list[Any]) -> None:
    config = _config("documents", weights)
    parts = np.array([s.weight for s in config.sources], np.int64)
    sources, lengths = _draw(config, [[5, 1, 9]] * len(weights), 6000)
    ahead, behind = _errors(parts, sources, np.ones_like(lengths))
    assert ahead.max() < parts.sum() and behind.min() > -parts.sum()


@pytest.mark.parametrize("num_sources", [2, 3, 4, 5, 8, 13, 33, 100, 257, 1000])
def test_documents_over_whole_periods_are_exact(num_sources: int) -> None:
    rng = random.Random(num_sources)
    config = _config("documents", [rng.randint(1, 9) for _ in range(num_sources)])
    parts = np.array([s.weight for s in config.sources])
    sources, _ = _draw(config, [[1]] * num_sources, 3 * int(parts.sum()))
    for period in np.split(sources, 3):
        assert np.bincount(period, minlength=num_sources).tolist() == parts.tolist()


def _lengths(kind: str, num_sources: int, rng: random.Random) -> list[list[int]]:
    if kind == "log-normal":
        return [[int(rng.lognormvariate(6, 1.2)) + 1 for _ in range(40)] for _ in range(num_sources)]
    if kind == "one source long, the others short":
        return [[1000 if i == num_sources // 2 else 1] for i in range(num_sources)]
    if kind == "each source its own length":
        return [[1 + 37 * i % 211] for i in range(num_sources)]
    return [[1, 1, 1, 1, rng.choice([2, 5000])] for _ in range(num_sources)]  # "rarely long"


KINDS = ["log-normal", "one source long, the others short", "each source its own length", "rarely long"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", WEIGHTS.values(), ids=WEIGHTS.keys())
def test_tokens_below_the_longest_document(weights: list[Any], kind: str) -> None:
    """Ahead: strictly less than the longest document of the source itself. Behind: than the longest of all.

    A document is drawn at c * W / w < T + 1, so that afterwards its source is ahead by less than
    (c + l) - w * (T + l) / W <= l. And a document ends at most as much later than in the ideal blend as the longest
    document that could have been begun before it was released (the bound of WF2Q).
    """
    lengths = _lengths(kind, len(weights), random.Random(len(weights)))
    config = _config("tokens", weights)
    parts = np.array([s.weight for s in config.sources], np.int64)
    sources, units = _draw(config, lengths, 3000)
    ahead, behind = _errors(parts, sources, units)
    longest = np.array([max(n) for n in lengths], object)
    drawn = parts > 0
    assert np.all(ahead[drawn] < longest[drawn] * int(parts.sum()))
    assert np.all(behind > -int(longest[drawn].max()) * int(parts.sum()))


def test_the_bound_for_tokens_is_the_least_possible() -> None:
    """Some source comes within a token of a whole document behind: no smaller bound would be true."""
    config = _config("tokens", [1] * 100)
    lengths = [[100]] * 100
    sources, units = _draw(config, lengths, 100)
    _, behind = _errors(np.ones(100, np.int64), sources, units)
    assert behind.min() == -99 * 100  # 99 tokens, in parts of a hundredth


@pytest.mark.parametrize("unit", ["documents", "tokens"])
def test_after_a_drop_the_bound_holds_for_the_rest(unit: str) -> None:
    rng = random.Random(5)
    lengths = [[rng.randint(1, 50) for _ in range(rng.randint(1, 60))] for _ in range(12)]
    config = _config(unit, [rng.randint(1, 9) for _ in lengths], max_epochs=2, on_exhausted="drop")
    sources, tokens = _draw(config, lengths, 2 * sum(map(len, lengths)))
    units = tokens if unit == "tokens" else np.ones_like(tokens)
    longest = max(map(max, lengths)) if unit == "tokens" else 1
    parts = np.array([s.weight for s in config.sources], np.int64)
    left = np.array([2 * len(n) for n in lengths])
    first, num_stages = 0, 0
    for i, source in enumerate(sources.tolist()):
        left[source] -= 1
        if left[source] == 0:  # its last document: the others start from zero after it
            stage = slice(first, i + 1)
            ahead, behind = _errors(parts, sources[stage], units[stage])
            assert ahead.max() < longest * parts.sum() and behind.min() > -longest * parts.sum()
            parts[source], first, num_stages = 0, i + 1, num_stages + 1
    assert num_stages == 12 and len(sources) == 2 * sum(map(len, lengths)) and not left.any()


@pytest.mark.parametrize("names", [["a", "b", "c"], ["c", "a", "b"], ["b", "c", "a"]])
def test_ties_go_by_name(names: list[str]) -> None:
    sources = {name: {"weight": 1} for name in names}
    data = {"seq_length": 8, "packing": "none", "blend": {"unit": "documents"}, "sources": sources}
    drawn, _ = _draw(StreamConfig.from_dict(data), [[1]] * 3, 6)
    assert "".join(names[i] for i in drawn) == "abcabc"


@given(
    weights=st.lists(st.integers(1, 1 << 60), min_size=1, max_size=4).filter(lambda w: sum(w) < MAX_PARTS),
    units=st.lists(
        st.one_of(st.integers(0, (1 << 31) - 1), st.sampled_from([1, (1 << 31) - 1])), min_size=1, max_size=20
    ),
    data=st.data(),
)
def test_deadlines_are_exact(weights: list[int], units: list[int], data: st.DataObject) -> None:
    """The loop's 64-bit arithmetic against Python's integers, document by document, from any of them on."""
    total, weight = sum(weights), weights[0]
    sources = np.zeros((len(weights), kernel.SOURCE_WIDTH), np.int64)
    sources[:, kernel.WEIGHT], sources[:, kernel.ACTIVE] = weights, 1
    kernel.set_shares(sources)
    pieces = np.zeros((len(units), kernel.AHEAD_WIDTH), np.int64)
    pieces[:, kernel.UNITS] = units
    first = data.draw(st.integers(0, len(units) - 1))
    sources[0, kernel.DRAWN_IN_STAGE] = drawn = sum(units[:first])
    kernel.set_dues(sources[0], pieces[first:])
    times = [sources[0, kernel.RELEASE], *pieces[first:, kernel.RELEASES]]
    for time, length in zip(times, [0, *units[first:]], strict=True):
        drawn += length
        quotient, rest = min(divmod(drawn * total, weight), (kernel.LATE, 0))
        assert time == 2 * quotient + (rest > 0)
    assert sources[0, kernel.DUE] == times[1]


def test_a_weight_of_zero_is_never_drawn_even_without_documents() -> None:
    sources, _ = _draw(_config("tokens", [0, 1]), [[], [3]], 50)
    assert set(sources.tolist()) == {1}
