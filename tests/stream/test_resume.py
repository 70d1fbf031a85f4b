"""The state taken before every sample, and everything after it compared in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.stream.config import StreamConfig
from megaresume.stream.cursor import BLOCK
from megaresume.stream.data_yaml import MODES
from megaresume.stream.planner import Planner
from megaresume.stream.stages import Course
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume, assert_same_samples

Lengths = dict[str, list[int]]
Configs = Callable[..., st.SearchStrategy[tuple[dict[str, Any], Lengths]]]
StreamOf = Callable[..., Stream]

TWO = {"a": {"weight": 2}, "b": {"weight": 1}}
LENGTHS = {"a": [3, 40, 7, 0, 12, 64, 90, 1, 33], "b": [130, 5, 64, 20]}

CASES: dict[str, dict[str, Any]] = {
    "split": {"packing": "split", "sources": TWO},
    "split, aligned": {"packing": {"mode": "split", "align": 8}, "sources": TWO},
    "none": {"packing": "none", "sources": TWO},
    "best_fit": {"packing": "best_fit", "sources": TWO},
    "best_fit, one bin": {"packing": {"mode": "best_fit", "open_bins": 1}, "sources": TWO},
    "best_fit, short-lived": {
        "packing": {"mode": "best_fit", "open_bins": 4, "max_age": 3, "align": 4},
        "sources": TWO,
    },
    "knapsack": {"packing": {"mode": "knapsack", "lookahead": 4}, "sources": TWO},
    "knapsack, short-lived": {
        "packing": {"mode": "knapsack", "lookahead": 3, "max_age": 2, "align": 4},
        "sources": TWO,
    },
    "by documents": {"packing": "best_fit", "blend": {"unit": "documents"}, "sources": TWO},
    "repeat": {"packing": "split", "sources": TWO | {"b": {"max_epochs": 1, "on_exhausted": "repeat"}}},
}


def test_every_mode_has_a_case() -> None:
    packings = [StreamConfig.from_dict({"seq_length": 64} | case).packing.mode for case in CASES.values()]
    assert sorted(set(packings)) == sorted(MODES)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_before_every_sample(stream_of: StreamOf, case: dict[str, Any]) -> None:
    data = {"seed": 3, "seq_length": 64} | case
    assert_exact_resume(lambda state: stream_of(data, LENGTHS, state), num_samples=70)


@pytest.mark.parametrize("policy", ["drop", "stop"])
@pytest.mark.parametrize("mode", ["best_fit", "split", "none"])
def test_before_every_sample_to_the_very_end(stream_of: StreamOf, mode: str, policy: str) -> None:
    """Through sources that end, the flush of the open bins, and the state after the last sample."""
    sources = {"a": {"weight": 2, "max_epochs": 3}, "b": {"max_epochs": 2, "on_exhausted": policy}, "c": {"weight": 0}}
    data = {"seq_length": 64, "packing": mode, "sources": sources}
    lengths = LENGTHS | {"c": [5]}
    config = StreamConfig.from_dict(data)
    num_samples = len(Planner(Course.of(config), [LengthList(lengths[n]) for n in sources]).advance(10_000))
    assert num_samples > 10
    assert_exact_resume(lambda state: stream_of(data, lengths, state), num_samples)


@settings(max_examples=15)
@given(drawn=st.data())
def test_any_stream_before_every_sample(configs: Configs, drawn: st.DataObject) -> None:
    data, lengths = drawn.draw(configs())
    config = StreamConfig.from_dict(data)
    sources = [LengthList(lengths[s.name]) for s in config.sources]
    num_samples = len(Planner(Course.of(config), sources).advance(20))
    assert_exact_resume(lambda state: Stream(config, sources, state=state), num_samples)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_killed_after_every_single_sample(stream_of: StreamOf, case: dict[str, Any]) -> None:
    """Not two or three resumes with one sample between them, but a hundred."""
    data = {"seed": 5, "seq_length": 64} | case
    whole = stream_of(data, LENGTHS)
    state: StreamState | None = None
    for sample in range(100):
        stream = stream_of(data, LENGTHS, state)
        assert_same_samples(stream.plan(sample, sample + 1), whole.plan(sample, sample + 1))
        state = StreamState.from_json(stream.state_at(sample + 1).to_json())
    assert state == whole.state_at(100)


def test_killed_twice_before_a_single_sample(stream_of: StreamOf) -> None:
    data = {"seq_length": 64, "packing": "best_fit", "sources": TWO}
    first = stream_of(data, LENGTHS).state_at(33)
    second = stream_of(data, LENGTHS, first).state_at(33)
    assert_same_samples(stream_of(data, LENGTHS, second).plan(33, 90), stream_of(data, LENGTHS).plan(33, 90))


def test_with_an_overflowing_document_pending(stream_of: StreamOf) -> None:
    """A document that found no room waits outside of all bins, and what is left of a long one while it is cut."""
    data = {"seq_length": 64, "packing": {"mode": "best_fit", "open_bins": 2}, "sources": TWO}
    whole = stream_of(data, LENGTHS)
    pending = [(k, p) for k in range(80) if (p := whole.state_at(k).pending)]
    assert any(p.offset == 0 for _, (p,) in pending) and any(p.offset > 0 for _, (p,) in pending)
    for sample, _ in pending:
        state = StreamState.from_json(whole.state_at(sample).to_json())
        assert_same_samples(stream_of(data, LENGTHS, state).plan(sample, 120), whole.plan(sample, 120))


@pytest.mark.parametrize("sample", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 1000])
def test_at_points_that_are_no_block_boundary(stream_of: StreamOf, sample: int) -> None:
    data = {"seq_length": 64, "packing": "best_fit", "sources": TWO}
    whole = stream_of(data, LENGTHS)
    whole.plan(0, sample + 700)  # far ahead of what is trained, as a loader is
    state = whole.state_at(sample)
    assert state == stream_of(data, LENGTHS).state_at(sample)
    resumed = stream_of(data, LENGTHS, state)
    assert_same_samples(resumed.plan(sample, sample + 700), whole.plan(sample, sample + 700))
    assert resumed.digest_at(sample + 700) == whole.digest_at(sample + 700)


def test_many_segments_in_open_bins(stream_of: StreamOf) -> None:
    """More than a bin has room for at first."""
    data = {"seq_length": 400, "packing": {"mode": "best_fit", "open_bins": 3}, "sources": {"a": {}}}
    assert_exact_resume(lambda state: stream_of(data, {"a": [1] * 90 + [399] * 4 + [398]}, state), num_samples=20)


def test_three_hundred_sources(stream_of: StreamOf) -> None:
    sources = {f"s{i}": {"weight": 1 + i % 7} | ({"max_epochs": 1} if i % 3 else {}) for i in range(300)}
    lengths = {f"s{i}": [1 + (i * j) % 97 for j in range(1 + i % 4)] for i in range(300)}
    data = {"seq_length": 256, "packing": "best_fit", "sources": sources}
    whole = stream_of(data, lengths)
    for sample in (1, 40, 150):
        state = StreamState.from_json(whole.state_at(sample).to_json())
        resumed = stream_of(data, lengths, state)
        assert_same_samples(resumed.plan(sample, 200), whole.plan(sample, 200))
    assert sum(c.exhausted for c in state.sources.values()) > 50
