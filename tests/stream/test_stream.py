"""Any sample, in any order, from any thread: always the one sequence."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from megaresume.stream.config import StreamConfig
from megaresume.stream.cursor import BLOCK, FIRST_BLOCK, KEPT_BLOCKS
from megaresume.stream.errors import MegaresumeError, StateError, StreamExhausted
from megaresume.stream.planner import Plan, Planner
from megaresume.stream.skips import SkipConfig
from megaresume.stream.stages import Course
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList, assert_same_samples

StreamOf = Callable[..., Stream]

DATA = {"seq_length": 64, "packing": "best_fit", "sources": {"a": {"weight": 2}, "b": {"weight": 1}}}
LENGTHS = {"a": [3, 40, 7, 0, 12, 64, 90, 1, 33], "b": [130, 5, 64, 20]}
ENDING = DATA | {"sources": {"a": {"max_epochs": 90}, "b": {"max_epochs": 40}}}


@pytest.fixture(scope="module")
def whole() -> Plan:
    """The first samples, planned in one go."""
    config = StreamConfig.from_dict(DATA)
    return Planner(Course.of(config), [LengthList(LENGTHS[s.name]) for s in config.sources]).advance(5000)


def test_in_any_order(stream_of: StreamOf, whole: Plan) -> None:
    rng = random.Random(1)
    stream = stream_of(DATA, LENGTHS)
    for _ in range(200):
        first = rng.randrange(4900)
        stop = min(first + rng.choice([0, 1, 3, BLOCK, 3 * BLOCK + 1]), 5000)
        assert_same_samples(stream.plan(first, stop), whole.slice(first, stop))
        assert stream.digest_at(stop) == (f"{int(whole.digests[stop - 1]):016x}" if stop else "0" * 16)


def test_across_blocks(stream_of: StreamOf, whole: Plan) -> None:
    assert_same_samples(stream_of(DATA, LENGTHS).plan(5, 5000), whole.slice(5, 5000))


def test_back_further_than_is_kept(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    first = stream.plan(0, 300)
    front = BLOCK * (KEPT_BLOCKS + 10)
    later, state = stream.plan(front, front + 300), stream.state_at(front)
    assert_same_samples(stream.plan(0, 300), first)
    assert stream.state_at(150) == stream_of(DATA, LENGTHS).state_at(150)
    assert_same_samples(stream.plan(front, front + 300), later)
    assert stream.state_at(front) == state


@pytest.mark.parametrize("error", [MegaresumeError("cannot be read"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_it_goes_on_after_an_error_in_the_middle_of_a_block(whole: Plan, error: BaseException) -> None:
    class Failing(LengthList):
        left = 1 << 62

        def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
            self.left -= 1
            if not self.left:
                raise error
            return super().lengths(ids)

    config = StreamConfig.from_dict(DATA)
    sources = [Failing(LENGTHS[s.name]) for s in config.sources]
    stream = Stream(config, sources)
    failures = 0
    for first in range(0, 1200, 40):
        sources[failures % 2].left = 1 + failures % 5
        for read in (lambda: stream.plan(first, first + 40), lambda: stream.state_at(first + 7)):  # noqa: B023
            try:
                read()
            except type(error):
                failures += 1
                sources[failures % 2].left = 1 + failures % 5
        sources[0].left = sources[1].left = 1 << 62
        assert_same_samples(stream.plan(first, first + 40), whole.slice(first, first + 40))
        assert stream.state_at(first + 7) == Stream(config, sources).state_at(first + 7)
    assert failures > 9


@pytest.mark.parametrize("back", [False, True], ids=["forward", "and back"])
def test_states_taken_step_by_step(stream_of: StreamOf, back: bool) -> None:
    stages = [{"from_samples": 37, "weights": {"a": 1, "b": 5}}, {"from_samples": 500, "packing": "split"}]
    data = DATA | {"stages": stages, "skip": {"samples": ["90:95", "601:640"]}}
    stream = stream_of(data, LENGTHS)
    stream.plan(0, 900)
    rng, sample = random.Random(3), 0
    while sample < 800:
        assert stream.state_at(sample).to_json() == stream_of(data, LENGTHS).state_at(sample).to_json()
        sample = max(sample + rng.choice([1, 1, 2, 8, 40, BLOCK + 1, *(back * [-1, -30])]), 0)


def test_a_seek_is_what_a_walk_is(stream_of: StreamOf) -> None:
    walked, sought = stream_of(DATA, LENGTHS), stream_of(DATA, LENGTHS)
    for sample in range(2000):
        walked.plan(sample, sample + 1)
    assert sought.state_at(2000).to_json() == walked.state_at(2000).to_json()
    restored = stream_of(DATA, LENGTHS, sought.state_at(2000))
    assert_same_samples(restored.plan(2000, 2400), walked.plan(2000, 2400))


def test_a_state_of_any_sample(stream_of: StreamOf) -> None:
    rng = random.Random(2)
    stream = stream_of(DATA, LENGTHS)
    for sample in rng.sample(range(3000), 60):
        assert stream.state_at(sample).to_json() == stream_of(DATA, LENGTHS).state_at(sample).to_json()


def test_nothing_before_the_restored_sample(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS, stream_of(DATA, LENGTHS).state_at(500))
    assert stream.start == 500
    for ask in (lambda: stream.plan(499, 600), lambda: stream.state_at(499), lambda: stream.digest_at(499)):
        with pytest.raises(StateError, match="sample 499 is before the state that the stream continues from"):
            ask()
    assert stream.plan(500, 501).first == 500


def test_an_end(stream_of: StreamOf) -> None:
    config = StreamConfig.from_dict(ENDING)
    everything = Planner(Course.of(config), [LengthList(LENGTHS[s.name]) for s in config.sources]).advance(10_000)
    n = len(everything)
    assert n > 32 * FIRST_BLOCK
    for ask in (lambda s: s.plan(n, n + 1), lambda s: s.plan(0, n + 1), lambda s: s.state_at(n + 1)):
        stream = stream_of(ENDING, LENGTHS)
        for _ in range(2):
            with pytest.raises(StreamExhausted, match="the stream has ended") as error:
                ask(stream)
            assert f"the stream has {n} samples" in str(error.value.found)
            assert error.value.cause == "sources with an end: a (90 epochs, drop), b (40 epochs, drop)"
        assert_same_samples(stream.plan(0, n), everything)
    # The state after the last sample does not depend on what was planned before.
    last = stream_of(ENDING, LENGTHS).state_at(n)
    assert stream.state_at(n).to_json() == last.to_json()
    assert all(c.exhausted for c in last.sources.values()) and not last.bins and not last.pending
    ended = stream_of(ENDING, LENGTHS, last)
    assert ended.state_at(n).to_json() == last.to_json() and len(ended.plan(n, n)) == 0
    with pytest.raises(StreamExhausted):
        ended.plan(n, n + 1)
    assert stream_of(ENDING, LENGTHS).digest_at(n) == ended.digest_at(n) == last.digest


def test_an_end_that_a_skip_brings_nearer(stream_of: StreamOf) -> None:
    """How far the stream reaches is remembered, and asked again."""
    data = {"seq_length": 8, "packing": "none", "sources": {"a": {"max_epochs": 1}}}
    stream = stream_of(data, {"a": [8] * 20})
    stream.check_reaches(20)
    stream.skip(SkipConfig(samples=((2, 5),)))
    stream.check_reaches(17)
    for stop in (18, 20):
        with pytest.raises(StreamExhausted, match="the stream has ended"):
            stream.check_reaches(stop)


def test_an_empty_range(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    for sample in (0, 5, 1000):
        plan = stream.plan(sample, sample)
        assert (plan.first, plan.stop, len(plan), plan.tokens().tolist(), list(plan)) == (sample, sample, 0, [], [])


def test_a_refused_state_changes_nothing(stream_of: StreamOf) -> None:
    state = stream_of(DATA, LENGTHS).state_at(30)
    stream = stream_of(DATA, LENGTHS, state)
    ahead = stream.plan(30, 400)
    other = stream_of(DATA | {"seed": 5}, LENGTHS).state_at(20)
    for bad in (other, state.replace(tokens=state.tokens + 1), state.replace(bins=())):
        with pytest.raises(StateError):
            stream.restore(bad)
        assert stream.start == 30 and stream.state_at(30) == state
        assert_same_samples(stream.plan(30, 400), ahead)


def test_restored_forward_and_back(stream_of: StreamOf, whole: Plan) -> None:
    stream = stream_of(DATA, LENGTHS)
    late, early = stream.state_at(700), stream.state_at(90)
    for state in (late, early, None, late):
        stream.restore(state)
        first = state.samples if state is not None else 0
        assert stream.start == first
        assert_same_samples(stream.plan(first, first + 300), whole.slice(first, first + 300))


def test_what_a_run_adds_to_the_state_stays(stream_of: StreamOf) -> None:
    state = stream_of(DATA, LENGTHS).state_at(12, batches=[(0, 4)], overrides=["accepted: seed"])
    stream = stream_of(DATA, LENGTHS, state)
    later = stream.state_at(20, batches=[(0, 4), (12, 2)], overrides=["accepted: weight"])
    assert later.batches == ((0, 4), (12, 2)) and later.overrides == ("accepted: seed", "accepted: weight")
    assert stream.state_at(20).batches == ((0, 4),) and stream.state_at(20).overrides == ("accepted: seed",)
    assert [(s.first, s.name, s.config) for s in later.stages] == [(0, "start", stream.config.to_dict())]


def test_two_threads(stream_of: StreamOf, whole: Plan) -> None:
    """A loader plans ahead in one thread while checkpoints are taken behind it in another."""
    stream = stream_of(DATA, LENGTHS)
    expected = {k: s.to_json() for k in range(0, 4000, 97) if (s := stream_of(DATA, LENGTHS).state_at(k))}
    errors: list[BaseException] = []

    def plan() -> None:
        try:
            for first in range(0, 4900, 50):
                assert_same_samples(stream.plan(first, first + 50), whole.slice(first, first + 50))
        except (AssertionError, MegaresumeError, IndexError, ValueError) as error:
            errors.append(error)

    def take() -> None:
        try:
            for sample, text in expected.items():
                assert stream.state_at(sample).to_json() == text
        except (AssertionError, MegaresumeError, IndexError, ValueError) as error:
            errors.append(error)

    threads = [threading.Thread(target=f) for f in (plan, take, plan, take)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors and not any(thread.is_alive() for thread in threads)


def test_a_plan_is_not_changed_by_what_follows(stream_of: StreamOf) -> None:
    stream = stream_of(DATA, LENGTHS)
    plan = stream.plan(0, 100)
    table, digests = plan.table.copy(), plan.digests.copy()
    stream.plan(0, 3000)
    stream.state_at(50)
    assert np.array_equal(plan.table, table) and np.array_equal(plan.digests, digests)


def test_other_streams_have_other_digests(stream_of: StreamOf) -> None:
    changes = [
        {},
        {"seed": 1},
        {"seq_length": 65},
        {"packing": "split"},
        {"packing": "none"},
        {"blend": {"unit": "documents"}},
        {"sources": {"a": {"weight": 2}, "c": {"weight": 1}}},
    ]
    digests = {stream_of(DATA | c, LENGTHS | {"c": LENGTHS["b"]}).digest_at(200) for c in changes}
    assert len(digests) == len(changes)


def test_a_source_that_is_never_drawn_changes_nothing(stream_of: StreamOf) -> None:
    more = DATA | {"sources": DATA["sources"] | {"c": {"weight": 0}}}
    a, b = stream_of(DATA, LENGTHS).plan(0, 200), stream_of(more, LENGTHS | {"c": []}).plan(0, 200)
    assert np.array_equal(a.table, b.table) and np.array_equal(a.digests, b.digests)
