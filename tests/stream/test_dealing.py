"""Balanced ranks: the same samples in every global batch, as many for every rank, and no rank with much more to do."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.balance import karmarkar_karp
from megaresume.stream.batches import Balance, Objective
from megaresume.stream.config import StreamConfig
from megaresume.stream.dealing import costs, deal, dealt_order, even_groups, in_parts
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.stream import Stream
from megaresume.testing import LengthList

OBJECTIVES: list[Objective] = ["step", "micro-step"]
LAYOUTS = [(2, 1), (2, 4), (4, 2), (8, 1), (8, 2), (1, 2), (16, 1)]
BATCH = 16


def stream(seq_length: int = 512) -> Stream:
    """Many short documents, and some that fill a sample."""
    lengths = [seq_length if i % 11 == 3 else 5 + 37 * i % 61 for i in range(900)]
    data = {"seed": 5, "seq_length": seq_length, "packing": "best_fit", "sources": {"web": {}}}
    return Stream(StreamConfig.from_dict(data), [LengthList(lengths)])


def dealt(sample: int, dp: int, micro: int, balance: Balance | None, of: Stream | None = None) -> list[list[list[int]]]:
    """By rank and micro-step, each rank with a stream of its own."""
    how: Any = {"micro_batch_size": micro, "dp_size": dp, "balance": balance}
    plans = [(of or stream()).plan(sample, sample + BATCH) for _ in range(dp)]
    return [[part.tolist() for part in deal(plan, dp_rank=rank, **how)] for rank, plan in enumerate(plans)]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize(("dp", "micro"), LAYOUTS)
def test_a_global_batch_keeps_its_samples_and_ranks_their_counts(objective: Objective, dp: int, micro: int) -> None:
    for sample in (0, 16, 48, 7):  # a run that changed its batch size has steps that begin anywhere
        ranks = dealt(sample, dp, micro, Balance(objective=objective))
        assert [[len(part) for part in rank] for rank in ranks] == [[micro] * (BATCH // dp // micro)] * dp
        assert sorted(n for rank in ranks for part in rank for n in part) == list(range(sample, sample + BATCH))
    assert dealt(16, dp, micro, None) == [
        [
            list(range(16 + k * dp * micro + r * micro, 16 + k * dp * micro + (r + 1) * micro))
            for k in range(len(ranks[0]))
        ]
        for r in range(dp)
    ]


def test_what_each_objective_makes_even() -> None:
    """Counted from the segments themselves."""
    made = stream()

    def cost(numbers: list[int]) -> int:
        return sum(s.length * (s.length + 64) for n in numbers for s in made.plan(n, n + 1).segments(n))

    def slowest(objective: Objective | None, by: str) -> float:
        """By how much more than the mean: of a step, or of its micro-steps one after the other."""
        balance = None if objective is None else Balance(objective=objective, token_cost=64)
        found = []
        for sample in range(0, 10 * BATCH, BATCH):
            ranks = np.array([[cost(part) for part in rank] for rank in dealt(sample, 2, 4, balance, made)])
            waited = ranks.sum(1).max() if by == "step" else ranks.max(0).sum()
            found.append(waited / ranks.sum(1).mean())
        return float(np.mean(found)) - 1

    assert slowest("step", "step") < slowest(None, "step") / 3
    assert slowest("micro-step", "micro-step") < slowest(None, "micro-step") / 2
    expected = [cost([n]) for n in range(32, 48)]
    assert costs(made.plan(32, 48), Balance(token_cost=64)).tolist() == expected


def test_micro_batches_that_cost_alike_are_in_one_micro_step() -> None:
    """With a sample a micro-batch nothing can be put together: what is left is who waits for whom."""
    ranks = dealt(0, 4, 1, Balance(objective="micro-step"))
    cost = dict(enumerate(costs(stream().plan(0, BATCH), Balance()).tolist()))
    by_step = [[cost[rank[k][0]] for rank in ranks] for k in range(4)]
    assert sorted(cost.values(), reverse=True) == [c for step in by_step for c in sorted(step, reverse=True)]


@pytest.mark.parametrize("dp", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("micro", [1, 2, 3, 8])
def test_a_short_step_trains_what_can_be_trained(dp: int, micro: int) -> None:
    """With n micro-batches, n * dp to n * dp * micro samples: some for every rank, and not too many."""
    for samples in range(1, 6 * dp * micro):
        parts = in_parts(samples, micro_batch_size=micro, dp_size=dp)
        assert all(dp <= part <= dp * micro for part in parts)
        fitting = range(1, -(-samples // (dp * micro)) + 1)
        assert sum(parts) == max((min(samples, n * dp * micro) for n in fitting if n * dp <= samples), default=0)


@pytest.mark.process
def test_another_process_deals_alike() -> None:
    """However far it had planned before."""
    code = "from tests.stream.test_dealing import *; s = stream(); s.plan(100, 110); "
    code += "print(dealt(48, 4, 2, Balance(), s))"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, str(dealt(48, 4, 2, Balance()))), done.stderr


def test_the_assignment_stays_what_it_is() -> None:
    """Who changes it changes `ALGORITHM`, or a trace of an older run names ranks that did not train a sample."""
    balance = Balance(token_cost=64, algorithm=1)
    assert dealt(32, 4, 2, balance) == GOLDEN["step"]
    assert dealt(32, 4, 2, Balance(objective="micro-step", token_cost=64, algorithm=1)) == GOLDEN["micro-step"]


GOLDEN = {
    "step": [[[34, 39], [44, 40]], [[35, 43], [33, 32]], [[36, 45], [46, 47]], [[38, 42], [41, 37]]],
    "micro-step": [[[34, 37], [42, 41]], [[35, 44], [45, 40]], [[36, 33], [43, 32]], [[38, 46], [39, 47]]],
}


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=60), st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_groups_of_any_numbers(numbers: list[int], groups: int) -> None:
    array = np.array(numbers[: len(numbers) // groups * groups] or [1] * groups, np.int64)
    order = np.argsort(-array, kind="stable")
    members, sums = even_groups(array, order, groups)
    assert sorted(members.ravel().tolist()) == list(range(len(array))) and members.shape == (
        groups,
        len(array) // groups,
    )
    assert sums.tolist() == array[members].sum(1).tolist()
    assert (np.diff(array[members], axis=1) <= 0).all()


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("groups", "size"), [(8, 64), (64, 8), (128, 4), (16, 2)])
def test_no_worse_than_karmarkar_and_karp(seed: int, groups: int, size: int) -> None:
    rng = np.random.default_rng(seed)
    numbers = (rng.pareto(1.3, groups * size) * 1000 + 3000).clip(0, 9000).astype(np.int64)
    _, sums = even_groups(numbers, np.argsort(-numbers, kind="stable"), groups)
    assert sums.max() <= 1.01 * karmarkar_karp(numbers.tolist(), groups)


def test_what_is_no_whole_number_of_micro_batches_stays_as_it_is() -> None:
    plan = stream().plan(0, 15)
    assert dealt_order(plan, Balance(), micro_batch_size=2, dp_size=4).tolist() == list(range(15))


def test_what_is_refused() -> None:
    plan = stream().plan(0, 16)
    with pytest.raises(StateError, match=r"algorithm 2(.|\n)*version of megaresume that the run was trained with"):
        dealt_order(plan, Balance(algorithm=2), micro_batch_size=2, dp_size=4)
    with pytest.raises(UsageError, match="bad value of objective"):
        Balance(objective="ranks")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a whole number"):
        Balance(token_cost=-1)
    with pytest.raises(UsageError, match="a whole number"):
        Balance(token_cost=1 << 40)
    assert Balance.from_dict(Balance(objective="micro-step").to_dict()) == Balance(objective="micro-step")
    for damaged in ({}, {"objective": "step"}, {"objective": "step", "token_cost": "1", "algorithm": 1}, None):
        with pytest.raises(ValueError, match="is not a balance"):
            Balance.from_dict(damaged)  # type: ignore[arg-type]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_stage_a_skip_and_a_global_batch_that_grows(objective: Objective) -> None:
    """Every rank plans for itself, in another layout in every step; together they have what comes without balance."""
    stages = [{"name": "late", "from_samples": 30, "weights": {"web": 1, "books": 3}}]
    data = {"seq_length": 256, "sources": {"web": {}, "books": {}}, "stages": stages, "skip": {"samples": ["20:27"]}}
    lengths = [[1 + i * i % 97 for i in range(400)], [256 if i % 5 == 0 else 11 for i in range(400)]]

    def again() -> Stream:
        return Stream(StreamConfig.from_dict(data), [LengthList(its) for its in lengths])

    plain = again().plan(0, 96)
    assert len({segment.source for sample in plain for segment in sample}) == 2
    sample, balance = 0, Balance(objective=objective)
    for size, dp, micro in [(8, 2, 2), (8, 4, 1), (16, 2, 4), (16, 8, 2), (16, 4, 2), (32, 8, 1)]:
        got: list[int] = []
        for rank in range(dp):
            mine = again()
            plan = mine.plan(sample, sample + size)
            for numbers in deal(plan, balance, micro_batch_size=micro, dp_rank=rank, dp_size=dp):
                for number in numbers.tolist():
                    assert mine.plan(number, number + 1).hashes[0] == plain.hashes[number]
                    got.append(number)
        assert sorted(got) == list(range(sample, sample + size))
        sample += size
    assert got != sorted(got)
