"""The conformance test goes red for every way in which a stream may fail to resume."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError
from megaresume.stream.planner import Plan
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_exact_resume, assert_same_samples

CONFIG = StreamConfig.from_dict({"seq_length": 16, "packing": "best_fit", "sources": {"a": {}}})


def _source() -> LengthList:
    return LengthList([5, 9, 16, 3, 20, 1])


def _check(build: Callable[[StreamState | None], Stream]) -> None:
    assert_exact_resume(build, num_samples=30)


class _Forgetful(Stream):
    """A stream with one thing wrong: what it gives back depends on how it was begun."""

    def __init__(self, *args: Any, state: StreamState | None, wrong: str) -> None:
        super().__init__(*args, state=state)
        self.wrong = wrong if state is not None and state.samples == 20 else ""

    def state_at(self, sample: int, **options: Any) -> StreamState:
        state = super().state_at(sample, **options)
        return state.replace(tokens=state.tokens + 1) if self.wrong == "state" else state

    def plan(self, first: int, stop: int) -> Plan:
        plan = super().plan(first, stop)
        if self.wrong == "samples" and stop - first > 2:
            plan.table[-1, 3] += 1
        return plan


def test_a_good_stream_passes() -> None:
    _check(lambda state: Stream(CONFIG, [_source()], state=state))


def test_a_user_with_own_sources_passes_from_a_later_state() -> None:
    later = Stream(CONFIG, [_source()]).state_at(11)
    _check(lambda state: Stream(CONFIG, [_source()], state=state or later))


@pytest.mark.parametrize(
    ("wrong", "words"), [("state", "given back by the stream"), ("samples", "segments of sample 29")]
)
def test_a_forgetful_stream_fails(wrong: str, words: str) -> None:
    with pytest.raises(AssertionError, match=f"state before sample 20: {words}"):
        _check(lambda state: _Forgetful(CONFIG, [_source()], state=state, wrong=wrong))


def test_a_stream_that_ignores_its_state_fails() -> None:
    with pytest.raises(AssertionError, match="state before sample 1: "):
        _check(lambda state: _from_the_start(state))


def _from_the_start(state: StreamState | None) -> Stream:
    stream = Stream(CONFIG, [_source()])
    if state is not None:
        offset, plan, state_at = state.samples, stream.plan, stream.state_at
        stream.plan = lambda a, b: plan(a - offset, b - offset)  # type: ignore[method-assign]
        stream.state_at = lambda k, **o: state_at(k - offset, **o)  # type: ignore[method-assign]
    return stream


def test_a_source_that_changes_fails() -> None:
    calls = []

    def build(state: StreamState | None) -> Stream:
        calls.append(state)
        lengths = [5, 9, 16, 3, 20, 1] if len(calls) < 5 else [9, 5, 16, 3, 20, 1]
        return Stream(CONFIG, [LengthList(lengths)], state=state)

    with pytest.raises(StateError, match="is not the corpus"):
        _check(build)


def test_other_samples_are_named() -> None:
    a = Stream(CONFIG, [_source()]).plan(0, 9)
    other = StreamConfig.from_dict(CONFIG.to_dict() | {"seed": 5})
    with pytest.raises(AssertionError, match="mine: segments of sample"):
        assert_same_samples(Stream(other, [_source()]).plan(0, 9), a, "mine")
    with pytest.raises(AssertionError, match="range of samples"):
        assert_same_samples(a.slice(1, 9), a)
