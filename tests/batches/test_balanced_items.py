"""`megaresume.DataLoader` with balanced ranks: each step trains the items that it trains without.

Items are told by their own tokens.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest

from megaresume import Balance
from megaresume.stream.dealing import dealt_order
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.kernel import DOCUMENT
from tests.batches.test_packed_items import Texts, texts
from tests.batches.test_packed_items import loaders as loaders_of_ranks

BALANCE = Balance(token_cost=8)
Step = list[list[list[int]]]  # by rank: the items of its micro-batches, by their first tokens


def loaders(dp: int, batch_size: int, accumulation: int, state: Any = None, **options: Any) -> list[Any]:
    options = {"accumulation": accumulation, "max_epochs": 1, "balance": BALANCE} | options
    return loaders_of_ranks(dp, batch_size, state, Texts(200), **options)


def steps(made: list[Any], count: int | None = None) -> list[Step]:
    """What the ranks were handed in their next steps; of the last one a part perhaps."""
    size = made[0].accumulation
    handed = [
        [[t[0] for t in texts(batch)] for batch in islice(loader, None if count is None else count * size)]
        for loader in made
    ]
    return [[rank[k : k + size] for rank in handed] for k in range(0, max(map(len, handed)), size)]


def items(step: Step) -> list[int]:
    return sorted(item for rank in step for micro_batch in rank for item in micro_batch)


LAYOUTS = [(2, 2, 2), (4, 1, 2), (2, 4, 1), (1, 2, 4), (8, 1, 1)]


@pytest.mark.parametrize("objective", ["step", "micro-step"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_items_in_each_step(objective: Any, layout: tuple[int, int, int]) -> None:
    plain = steps(loaders(*layout, balance=None))
    balance = Balance(objective=objective, token_cost=8)
    dealt = steps(loaders(*layout, balance=balance))
    assert [items(step) for step in dealt] == [items(step) for step in plain]
    if layout[0] > 1:
        assert dealt != plain


@pytest.mark.process
def test_worker_processes_deal_alike() -> None:
    assert steps(loaders(2, 2, 2, num_workers=1), 4) == steps(loaders(2, 2, 2), 4)


@pytest.mark.parametrize("after", LAYOUTS)
def test_a_resume_on_another_layout(after: tuple[int, int, int]) -> None:
    whole = steps(loaders(1, 8, 1, balance=None, drop_last=True))
    before = loaders(2, 2, 2, drop_last=True)
    handed = steps(before, 3)
    (state, *others) = [loader.state_dict() for loader in before]
    assert all(other == state for other in others)
    handed += steps(loaders(*after, state=state, drop_last=True))
    assert [items(step) for step in handed] == [items(step) for step in whole]


def test_another_balance_or_none_after_a_resume() -> None:
    whole = steps(loaders(1, 8, 1, balance=None))
    made, handed = loaders(2, 2, 2), []
    for balance in (None, Balance(objective="micro-step"), BALANCE):
        handed += steps(made, 1)
        made = loaders(2, 2, 2, state=made[1].state_dict(), balance=balance)
    handed += steps(made)
    assert [items(step) for step in handed] == [items(step) for step in whole]


def test_no_state_inside_a_step() -> None:
    """It would be one of samples that nobody has trained."""
    made = loaders(2, 2, 2)
    for loader in made:
        next(iter(loader))
    with pytest.raises(StateError, match=r"inside a step(.|\n)*after the optimizer step"):
        made[0].state_dict()


@pytest.mark.parametrize(("options", "handed"), [({}, 6), ({"drop_last": True}, 4)])
def test_a_state_after_a_short_step_that_leaves_items_out(options: dict[str, Any], handed: int) -> None:
    """Seven samples: a step of four, one of two, and one sample that cannot be dealt out to two ranks."""
    items = [{"input_ids": list(range(8))}] * 7
    made = loaders_of_ranks(2, 1, dataset=items, seq_length=8, accumulation=2, max_epochs=1, balance=BALANCE, **options)
    for loader in made:
        list(loader)
    assert [loader.state_dict()["samples"] for loader in made] == [handed, handed]


def test_items_of_unknown_length_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown length"):
        loaders(2, 2, 2, seq_length=None)


def test_a_short_step_is_dealt_as_its_record_says() -> None:
    """By the number of samples in the state, from which `trace` tells who got which: also if others are left over."""
    items = [{"input_ids": [n] * (1 + 5 * n % 13)} for n in range(19)]
    options: dict[str, Any] = {"dataset": items, "seq_length": 13, "packing": "none", "max_epochs": 1}
    balance = Balance(objective="micro-step", token_cost=8)
    made = loaders_of_ranks(5, 1, accumulation=2, balance=balance, **options)
    handed = [[t[0] for batch in loader for t in texts(batch)] for loader in made]
    state = made[0].state_dict()
    assert (state["samples"], state["batches"]) == (15, [[0, 10], [10, 5]])
    order = dealt_order(made[0].stream.plan(10, 15), balance, micro_batch_size=1, dp_size=5).tolist()
    documents = [made[0].stream.plan(sample, sample + 1).table[0, DOCUMENT] for sample in order]
    assert [rank[2] for rank in handed] == documents and order != sorted(order)
