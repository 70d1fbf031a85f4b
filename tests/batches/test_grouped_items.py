"""`megaresume.DataLoader` with ``group_by_length``: batches of like lengths, in one order for all layouts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import megaresume
from megaresume.batches.item_options import windows_of
from megaresume.stream.errors import StateError, UsageError

ITEMS = 500


class Texts(torch.utils.data.Dataset[Any]):
    """Item i has 1 to 400 tokens, the first of them i; `read` of them were asked for."""

    def __init__(self, items: int = ITEMS) -> None:
        self.lengths = np.random.default_rng(1).geometric(1 / 60, items).clip(1, 400)
        self.read = 0

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> Any:
        self.read += 1
        return {"input_ids": [i, *[0] * (int(self.lengths[i]) - 1)]}


def loader(dataset: Any = None, batch_size: int = 4, *, group: bool = True, **options: Any) -> Any:
    dataset = Texts() if dataset is None else dataset
    return megaresume.DataLoader(dataset, batch_size, group_by_length=group, collate_fn=list, **options)


def numbers(batch: Any) -> list[int]:
    return [item["input_ids"][0] for item in batch]


def padding(batches: list[list[int]]) -> float:
    """Part of the places of padded batches that hold no token."""
    lengths = Texts().lengths
    places = sum(len(batch) * max(lengths[batch]) for batch in batches)
    return float(1 - sum(lengths[batch].sum() for batch in batches) / places)


def ranks(count: int, **options: Any) -> list[Any]:
    return [loader(dp_rank=rank, dp_size=count, **options) for rank in range(count)]


def merged(loaders: list[Any], steps: int) -> list[list[int]]:
    """The next micro-batches of each rank, in the order of the stream."""
    of_ranks = zip(*(islice(one, steps) for one in loaders), strict=True)
    return [numbers(batch) for batches in of_ranks for batch in batches]


@pytest.fixture(scope="module")
def order() -> list[int]:
    one = loader(accumulation=2, max_epochs=2)
    return [number for _ in range(2) for batch in one for number in numbers(batch)]


def test_every_item_once_an_epoch_in_batches_that_need_little_padding(order: list[int]) -> None:
    assert sorted(order[:ITEMS]) == sorted(order[ITEMS:]) == list(range(ITEMS)) and order[:ITEMS] != order[ITEMS:]
    like, mixed = ([numbers(batch) for batch in loader(accumulation=2, group=group)] for group in (True, False))
    assert padding(like) < 0.12 and padding(mixed) > 0.45


@pytest.mark.parametrize("batch", [1, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_resumed_within_a_window_on_other_ranks(order: list[int], batch: int, count: int) -> None:
    first = ranks(2, batch_size=2, accumulation=2)
    begun = [number for part in merged(first, 10) for number in part]
    states = [one.state_dict() for one in first]
    assert states[0] == states[1] and begun == order[:40]
    group = states[0]["config"]["sources"]["data"]["group_by_length"]
    assert group == {"batch": 8, "window": 15}
    resumed = ranks(count, batch_size=batch)
    for one in resumed:
        one.load_state_dict(states[0])
    rest = [number for part in merged(resumed, 18) for number in part]
    assert rest == order[40 : 40 + 18 * batch * count]


def test_the_order_knows_nothing_of_ranks_of_the_same_step(order: list[int]) -> None:
    assert [number for part in merged(ranks(4, batch_size=2), 20) for number in part] == order[:160]


@pytest.mark.parametrize("append", ["next_epoch", "now"])
def test_more_items(order: list[int], append: Any) -> None:
    one = loader(accumulation=2)
    begun = [number for batch in islice(one, 50) for number in numbers(batch)]
    more = loader(Longer(), accumulation=2, append=append)
    more.load_state_dict(one.state_dict())
    rest = [number for _ in range(2) for batch in more for number in numbers(batch)]
    if append == "now":
        assert sorted(begun + rest[:360]) == list(range(560))
    else:
        assert rest[:300] == order[200:500] and sorted(rest[300:860]) == list(range(560))


class Longer(Texts):
    """The same, and 60 more."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths = np.concatenate([self.lengths, np.arange(60) * 5 + 1])


def test_lengths_of_a_column_a_list_and_kept(order: list[int], tmp_path: Path) -> None:
    counted = [int(length) for length in Texts().lengths]
    assert [number for batch in loader(accumulation=2, lengths=counted) for number in numbers(batch)] == order[:504]
    once = loader(lengths_dir=tmp_path, accumulation=2)
    again = Texts()
    assert loader(again, lengths_dir=tmp_path, accumulation=2).origin == once.origin
    assert again.read < ITEMS
    other = loader(lengths=[length % 7 for length in counted], accumulation=2)
    with pytest.raises(StateError, match="items have other lengths"):
        other.load_state_dict(once.state_dict())


def test_switched_on_or_off() -> None:
    for group in (True, False):
        one = loader(group=group)
        next(iter(one))
        with pytest.raises(StateError, match="group_by_length"):
            loader(group=not group).load_state_dict(one.state_dict())


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seq_length": 512}, "group_by_length cannot be used with seq_length"),
        ({"dataset": {"a": (Texts(), 1), "b": (Texts(), 1)}}, "several datasets"),
        ({"dataset": torch.arange(10)}, "cannot be counted"),
    ],
)
def test_refused(options: Any, words: str) -> None:
    with pytest.raises((UsageError, megaresume.MegaresumeError), match=words):
        loader(**options)


def test_windows() -> None:
    assert windows_of(10_000, 8)["window"] == 50 and windows_of(10, 8)["window"] == 1
