"""Steps, batch sizes and slices, against Megatron's own."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megaresume.stream.batches import BatchSchedule, check_divides
from megaresume.stream.dealing import in_parts, places_of
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.megatron.conftest import ramp_calculator


def _steps(schedule: BatchSchedule, num: int) -> list[tuple[int, int]]:
    """(first sample, batch size) of the first steps."""
    steps, sample = [], 0
    for _ in range(num):
        steps.append((sample, schedule.size_at(sample)))
        sample += steps[-1][1]
    return steps


def _megatron_steps(start: int, increment: int, ramp_samples: int, final: int, num: int) -> list[tuple[int, int]]:
    """The same from Megatron's calculator, asked as its training loop asks it."""
    calculator = ramp_calculator(final, 1, 1, False, 1, start, increment, ramp_samples)
    steps, sample = [], 0
    for _ in range(num):
        calculator.update(sample, consistency_check=True)
        steps.append((sample, calculator.get_current_running_global_batch_size()))
        sample += steps[-1][1]
    return steps


def _ramps() -> Iterator[tuple[int, int, int, int]]:
    yield from [
        (16, 16, 1_000_000, 1536),
        (32, 32, 48_828, 1024),
        (1, 1, 1, 2),
        (4, 4, 7, 64),
        (192, 192, 977_539, 1920),
    ]
    yield from [(8, 8, 1, 800), (2, 3, 10, 302), (1, 1, 1000, 4), (7, 7, 10**6 + 3, 70)]
    rng = random.Random(3)
    for _ in range(60):
        increment, start = rng.randint(1, 40), rng.randint(1, 60)
        yield (
            start,
            increment,
            rng.choice([rng.randint(1, 100), rng.randint(1, 50_000)]),
            start + increment * rng.randint(1, 50),
        )


def test_ramp_up_is_megatrons() -> None:
    for ramp in _ramps():
        num = 1500
        schedule = BatchSchedule.ramp_up(*ramp)
        assert _steps(schedule, num) == _megatron_steps(*ramp, num), ramp
        assert schedule.segments[-1][1] == ramp[-1]


@pytest.mark.parametrize("ramp", [(8, 4, 100, 8), (8, 4, 0, 64)])
def test_no_ramp(ramp: tuple[int, int, int, int]) -> None:
    assert BatchSchedule.ramp_up(*ramp) == BatchSchedule.constant(ramp[-1])


@pytest.mark.parametrize("ramp", [(8, 4, 100, 63), (8, 4, 100, 4), (0, 4, 100, 64), (8, 0, 100, 64), (8, 4, -1, 64)])
def test_bad_ramp(ramp: tuple[int, int, int, int]) -> None:
    with pytest.raises(UsageError, match="bad --rampup-batch-size") as error:
        BatchSchedule.ramp_up(*ramp)
    assert f"start {ramp[0]}, increment {ramp[1]}" in str(error.value.found)


@pytest.mark.parametrize(
    "segments",
    [
        (),
        ((1, 4),),
        ((0, 4), (0, 8)),
        ((0, 4), (9, 2), (8, 1)),
        ((0, 0),),
        ((0, 4), (8, -2)),
        8,
        ((0, "8"),),
        (0, 8),
        None,
    ],
)
def test_bad_segments(segments: Any) -> None:
    with pytest.raises(UsageError, match=r"bad schedule of batch sizes(.|\n)*BatchSchedule\.constant\(SIZE\)"):
        BatchSchedule(segments)


@pytest.mark.parametrize("segments", [[[0, 8], [16, 16]], np.array([[0, 8], [16, 16]]), iter([(0, 8), (16, 16)])])
def test_pairs_of_any_kind(segments: Any) -> None:
    """Those that JSON or YAML give are lists."""
    schedule = BatchSchedule(segments)
    assert schedule == BatchSchedule(((0, 8), (16, 16)))
    assert [schedule.size_at(sample) for sample in (0, 15, 16, 17)] == [8, 8, 16, 16]
    assert schedule.until(17) == ((0, 8), (16, 16)) and type(schedule.segments[0][0]) is int


schedules = st.builds(
    lambda gaps, sizes: BatchSchedule(tuple((sum(gaps[:i]), size) for i, size in enumerate(sizes[: len(gaps) + 1]))),
    st.lists(st.integers(1, 200), max_size=5),
    st.lists(st.integers(1, 50), min_size=6, max_size=6),
)


@settings(max_examples=50)
@given(schedule=schedules, num=st.integers(1, 60))
def test_steps_and_samples_are_inverse(schedule: BatchSchedule, num: int) -> None:
    steps = _steps(schedule, num)
    boundaries = [*(first for first, _ in steps), sum(steps[-1])]
    for k, sample in enumerate(boundaries):
        assert schedule.after(0, k) == sample
        assert schedule.steps_before(sample) == k
        if k < num:
            size, alike = schedule.steps_at(sample)
            assert size == steps[k][1] and {each for _, each in steps[k : k + (alike or num)]} == {size}
            last = schedule.segments[-1][0]
            assert sample >= last if alike is None else schedule.after(sample, alike - 1) < last
            assert schedule.step_of(sample) == schedule.step_of(boundaries[k + 1] - 1) == (sample, boundaries[k + 1])
        for j in (0, k // 2, k):
            assert schedule.after(boundaries[j], k - j) == sample
    for sample in set(range(boundaries[-1])) - set(boundaries):
        with pytest.raises(StateError, match=f"sample {sample} is inside a step"):
            schedule.steps_before(sample)


@settings(max_examples=100)
@given(old=schedules, new=schedules, num=st.integers(1, 30))
def test_resumed_keeps_the_past_and_takes_the_future(old: BatchSchedule, new: BatchSchedule, num: int) -> None:
    sample = old.after(0, num)
    resumed = new.resumed(old.until(sample), sample)
    assert _steps(resumed, num) == _steps(old, num)
    assert resumed.steps_before(sample) == num
    position = sample
    for k in range(20):
        assert resumed.size_at(position) == new.size_at(position)
        assert resumed.after(sample, k) == position
        position += new.size_at(position)
    # A resume with the same schedule changes nothing, however often.
    once = old.resumed(old.until(sample), sample)
    twice = once.resumed(once.until(sample), sample)
    assert _steps(twice, num + 20) == _steps(once, num + 20) == _steps(old, num + 20)


def test_resumed_by_hand() -> None:
    old = BatchSchedule(((0, 4), (8, 8)))
    assert old.until(8) == ((0, 4),) and old.until(9) == ((0, 4), (8, 8)) and old.until(0) == ()
    assert BatchSchedule.constant(2).resumed(old.until(24), 24).segments == ((0, 4), (8, 8), (24, 2))
    assert BatchSchedule.constant(8).resumed(old.until(24), 24).segments == ((0, 4), (8, 8))
    assert BatchSchedule.constant(6).resumed((), 0).segments == ((0, 6),)
    # What the past had planned from this sample on is no past.
    assert BatchSchedule.constant(2).resumed(old.segments, 8).segments == ((0, 4), (8, 2))


def _megatron_slices(first: int, stop: int, micro: int, dp_rank: int, dp_size: int) -> list[list[int]]:
    """What ``MegatronPretrainingSampler`` yields: of every micro * dp samples, those of one rank, in one piece."""
    samples = list(range(first, stop))
    chunks = [samples[k : k + micro * dp_size] for k in range(0, len(samples), micro * dp_size)]
    return [chunk[dp_rank * micro : (dp_rank + 1) * micro] for chunk in chunks]


@pytest.mark.parametrize(
    ("dp_size", "micro"), [(d, m) for d in (1, 2, 3, 4, 8) for m in (1, 2, 3, 4, 6, 12, 24) if 24 % (d * m) == 0]
)
def test_slices_are_megatrons_and_the_global_batch_is_the_same(dp_size: int, micro: int) -> None:
    size, first = 24, 72
    sizes, samples = in_parts(size, micro_batch_size=micro, dp_size=dp_size), range(first, first + size)
    ranks = [[samples[place] for place in places_of(sizes, dp_rank=r, dp_size=dp_size)] for r in range(dp_size)]
    for rank, batches in enumerate(ranks):
        assert [list(b) for b in batches] == _megatron_slices(first, first + size, micro, rank, dp_size)
    # In the order in which they are trained: micro-step by micro-step, rank by rank.
    assert [i for step in zip(*ranks, strict=True) for batch in step for i in batch] == list(range(first, first + size))


def test_a_batch_that_does_not_divide() -> None:
    with pytest.raises(UsageError, match="the global batch does not divide over the ranks") as error:
        check_divides(24, micro_batch_size=5, dp_size=2)
    assert error.value.action == "--global-batch-size 20 or 30 or --micro-batch-size 4"
    with pytest.raises(UsageError) as error:
        check_divides(3, micro_batch_size=1, dp_size=4)
    assert error.value.action == "--global-batch-size 4"
