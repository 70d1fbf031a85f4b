"""`megaresume.DataLoader`: any map-style dataset in the exact order of a stream.

What the ranks are handed is written down by this file's own loops, and put together by `merged`.
"""

from __future__ import annotations

import copy
import functools
import gc
import json
import multiprocessing.util
import os
import pickle
import random
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from enum import Enum
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import megaresume
from megaresume.batches.item_hash import item_hash
from megaresume.batches.rank_loader import RankLoader
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import CorpusError, StateError, UsageError
from tests.batches.conftest import endless

ITEMS = 37


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i is the number ``first + i``."""

    def __init__(self, items: int = ITEMS, first: int = 0) -> None:
        self.items, self.first = items, first

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> Any:
        return {"number": torch.tensor(self.first + i)}


def numbers(batch: Any) -> list[int]:
    return batch["number"].tolist()


def merged(loaders: list[Any], micro_batches: int) -> list[int]:
    """What the ranks were handed in so many micro-batches, over epochs, in the order of the stream."""
    of_ranks = [[numbers(batch) for batch in islice(endless(loader), micro_batches)] for loader in loaders]
    return [number for batches in zip_longest(*of_ranks, fillvalue=[]) for batch in batches for number in batch]


def ranks(dp: int, batch_size: int, state: Any = None, dataset: Any = None, **options: Any) -> list[Any]:
    dataset = Numbers() if dataset is None else dataset
    loaders = [megaresume.DataLoader(dataset, batch_size, dp_rank=rank, dp_size=dp, **options) for rank in range(dp)]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    return loaders


@pytest.fixture(scope="module")
def order() -> list[int]:
    """Three epochs of one rank, item by item."""
    return merged(ranks(1, 1), 3 * ITEMS)


def test_every_epoch_is_another_permutation(order: list[int]) -> None:
    epochs = [order[ITEMS * e : ITEMS * (e + 1)] for e in range(3)]
    assert all(sorted(epoch) == list(range(ITEMS)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != list(range(ITEMS))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_goes_on_by_itself(order: list[int], copied: Callable[[Any], Any]) -> None:
    (first,) = ranks(1, 4)
    begun = [numbers(batch) for batch in islice(first, 2)]
    second = copied(first)
    both = zip(islice(first, 6), islice(second, 6), strict=True)
    assert [(numbers(a), numbers(b)) for a, b in both] == [(order[k : k + 4],) * 2 for k in range(8, 32, 4)]
    assert [*begun[0], *begun[1]] == order[:8] and first.state_dict() == second.state_dict()
    assert (second.dataset is first.dataset) == (copied is copy.copy)


@pytest.mark.parametrize("before", [(1, 4, 1), (2, 3, 1), (3, 2, 2)])
@pytest.mark.parametrize("after", [(1, 4, 1), (4, 2, 1), (2, 5, 3)])
def test_ranks_batch_and_accumulation_change_between_save_and_resume(
    order: list[int], before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    dp, size, accumulation = before
    loaders = ranks(dp, size, accumulation=accumulation)
    first = merged(loaders, 8)  # in the second epoch, of most layouts
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)
    assert first == order[: 8 * dp * size]
    assert states[0]["batches"] == [[0, dp * size * accumulation]]

    dp, size, accumulation = after
    rest = merged(ranks(dp, size, json.loads(json.dumps(states[0])), accumulation=accumulation), 4)
    assert rest == order[len(first) : len(first) + 4 * dp * size]


def test_a_for_ends_with_the_step_that_reaches_the_end_of_the_epoch(order: list[int]) -> None:
    loader = megaresume.DataLoader(Numbers(), 5, accumulation=2)
    handed = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        handed.append([number for batch in loader for number in numbers(batch)])
    # 37 items in steps of 10: to 40, 80, 120
    assert [len(one) for one in handed] == [40, 40, 40]
    assert len(loader) == 8
    assert [number for one in handed for number in one][:111] == order


def test_max_epochs_end_with_a_batch_that_is_dealt_out_evenly(order: list[int]) -> None:
    loaders = ranks(2, 8, max_epochs=2)  # 74 items: four steps of 16, and 10
    assert merged(loaders, 100) == order[:74]
    assert [loader.samples for loader in loaders] == [74, 74]
    assert loaders[0].state_dict()["batches"] == [[0, 16], [64, 10]]
    assert loaders[0].epoch == 2
    assert merged(loaders, 1) == []


def test_drop_last_drops_the_short_step_alone(order: list[int]) -> None:
    assert merged(ranks(2, 8, max_epochs=2, drop_last=True), 100) == order[:64]
    assert merged(ranks(1, 5, max_epochs=1, drop_last=True), 100) == order[:35]


def test_fewer_items_than_ranks_at_the_end_are_said(order: list[int], caplog: pytest.LogCaptureFixture) -> None:
    assert merged(ranks(3, 4, max_epochs=1), 100) == order[:36]
    assert "the last 1 items of the stream are not trained: there are 3 ranks" in caplog.text


def test_blend_by_item_with_an_end_each() -> None:
    blend = {"small": (Numbers(10), 1), "large": (Numbers(90, first=100), 3)}
    handed = merged(ranks(1, 4, dataset=blend), 10)
    assert sum(number < 100 for number in handed) == 10
    ended = merged(ranks(2, 2, dataset=blend, max_epochs={"small": 2, "large": 1}), 1000)
    assert Counter(ended) == Counter([*range(10), *range(10), *range(100, 190)])


def test_a_blend_goes_on_exactly_and_its_weights_may_change() -> None:
    blend = {"a": (Numbers(50), 1), "b": (Numbers(50, first=100), 1)}
    order = merged(ranks(1, 1, dataset=blend), 100)
    loaders = ranks(2, 3, dataset=blend)
    assert merged(loaders, 5) == order[:30]
    state = loaders[0].state_dict()
    assert merged(ranks(1, 7, state, dataset=blend), 10) == order[30:100]
    heavy = {"a": (Numbers(50), 3), "b": (Numbers(50, first=100), 1)}
    with pytest.raises(StateError, match="weight"):
        ranks(1, 4, state, dataset=heavy)
    changed = merged(ranks(1, 4, state, dataset=heavy, on_change="stage"), 10)
    assert sum(number < 100 for number in changed) == 30
    assert not set(changed) & set(order[:30])


def test_a_for_that_was_left_goes_on(order: list[int]) -> None:
    loader = megaresume.DataLoader(Numbers(), 2)
    handed = []
    for batch in loader:
        handed += numbers(batch)
        if loader.samples == 6:
            break
    assert loader.state_dict()["samples"] == 6
    for batch in loader:
        handed += numbers(batch)
    assert handed == order[:38]


@pytest.mark.process
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing_and_what_they_read_ahead_does_not_count(order: list[int], persistent: bool) -> None:
    options: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3, "persistent_workers": persistent}
    loader = megaresume.DataLoader(Numbers(), 2, **options)
    handed = []
    for batch in loader:
        handed += numbers(batch)
        if len(handed) == 8:
            break
    state = loader.state_dict()
    assert state["samples"] == 8
    for batch in loader:  # left, and resumed
        handed += numbers(batch)
    assert handed == order[:38]
    assert merged(ranks(1, 2, state, num_workers=1), 20) == order[8:48]


def test_the_state_is_small_whatever_was_trained() -> None:
    loader = megaresume.DataLoader(Numbers(10_000), 100)
    sizes = [len(json.dumps(loader.state_dict())) for _ in loader]
    assert max(sizes) < 2000


@pytest.mark.parametrize("append", ["next_epoch", "now"])
def test_new_items_of_a_dataset_come_once(order: list[int], append: Any) -> None:
    loaders = ranks(1, 4)
    first = merged(loaders, 5)
    state = loaders[0].state_dict()
    with pytest.raises(StateError) as refused:
        ranks(1, 4, state, dataset=Numbers(41))
    assert "found:        41 items" in str(refused.value) and "4 items were added after the old ones" in str(
        refused.value
    )
    assert "DataLoader(..., append='next_epoch')" in str(refused.value)
    assert not any(word in str(refused.value) for word in ("corpus", "split", "data config"))
    rest = merged(ranks(1, 1, state, dataset=Numbers(41), append=append), 62)
    (grown,) = ranks(1, 1, state, dataset=Numbers(41), append=append)
    lengths = [(sum(1 for _ in grown), grown.epoch) for _ in range(2)]
    assert lengths == [(17 if append == "next_epoch" else 21, 1), (41, 2)]
    if append == "next_epoch":
        assert rest[:17] == order[20:37]
        assert sorted(rest[17:58]) == list(range(41))
    else:
        assert sorted(first + rest[:21]) == list(range(41))


def test_other_contents_and_fewer_items_are_refused() -> None:
    loaders = ranks(1, 4)
    state = loaders[0].state_dict()
    with pytest.raises(StateError, match=r"found: *contents(.|\n)*items hold something else"):
        ranks(1, 4, state, dataset=Numbers(first=1))
    with pytest.raises(StateError, match=r"36 items(.|\n)*1 item was removed"):
        ranks(1, 4, state, dataset=Numbers(36))
    for options in ({}, {"append": "now"}):  # not at the end
        with pytest.raises(StateError, match=r"4 items were added, and the first 37 are not(.|\n)*append='next_epoch'"):
            ranks(1, 4, state, dataset=Numbers(41, first=-4), **options)


class Random(Numbers):
    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i) | {"noise": torch.rand(3) + np.random.rand() + random.random()}


def test_a_dataset_that_draws_is_compared_and_draws_nothing_before_training() -> None:
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    loaders = ranks(1, 4, dataset=Random())
    drawn = torch.rand(1).item(), np.random.rand(), random.random()
    torch.manual_seed(1), np.random.seed(1), random.seed(1)
    assert drawn == (torch.rand(1).item(), np.random.rand(), random.random())
    ranks(1, 4, loaders[0].state_dict(), dataset=Random())
    with pytest.raises(StateError, match="36 items"):
        ranks(1, 4, loaders[0].state_dict(), dataset=Random(36))
    with pytest.raises(StateError, match="items hold something else"):
        ranks(1, 4, loaders[0].state_dict(), dataset=Random(first=1))


class Lines(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(10))


@pytest.mark.parametrize(
    ("arguments", "options", "words"),
    [
        ((Lines(),), {}, r"Lines, an IterableDataset\n(.|\n)*attach\(engine, loader\)"),
        (((n for n in range(3)),), {}, r"generator, an iterator\n(.|\n)*attach\(engine, loader\)"),
        (
            (torch.utils.data.DataLoader(Numbers()),),
            {},
            r"DataLoader, a loader\n(.|\n)*pass its dataset: megaresume\.DataLoader\(loader\.dataset, ",
        ),
        (
            ("data.yaml",),
            {},
            r"'data\.yaml', a path\n(.|\n)*open_stream\('data\.yaml'\)(.|\n)*attach\(engine, 'data\.yaml'\)",
        ),
        ((b"data.yaml",), {}, "is a path"),
        ((Path("data.yaml"),), {}, "is a path"),
        (({"web": ("web.jsonl", 1)},), {}, "dataset 'web' is a path"),
        ((Numbers(),), {"sampler": torch.utils.data.RandomSampler(Numbers())}, "sampler"),
        ((Numbers(),), {"batch_sampler": [[0]]}, "batch_sampler"),
        ((Numbers(),), {"shuffle": False}, "always shuffled"),
        ((Numbers(),), {"in_order": False}, "in_order"),
        ((Numbers(), 38), {}, "a step is larger than the dataset"),
        ((Numbers(), 0), {}, r"bad batch_size(.|\n)*next action: +pass batch_size=1, or more"),
        (({"train": Numbers()},), {}, "without weights"),
        ((Numbers(0),), {}, r"is empty(.|\n)*next action: +check the path"),
    ],
)
def test_refused(arguments: Any, options: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        megaresume.DataLoader(*arguments, **options)


@pytest.mark.parametrize("name", ["dataset", "batch_size", "accumulation", "drop_last"])
def test_what_the_order_was_made_of_cannot_be_assigned(name: str) -> None:
    loader = megaresume.DataLoader(Numbers(), 4)
    with pytest.raises(AttributeError, match=name):
        setattr(loader, name, getattr(loader, name))


def test_another_epoch_than_the_next_is_refused() -> None:
    loader = megaresume.DataLoader(Numbers(), 4)
    next(iter(loader))
    loader.set_epoch(0)
    with pytest.raises(UsageError, match="epoch 1 is not the next one"):
        loader.set_epoch(1)


def test_two_loops_at_a_time_are_refused() -> None:
    loader = megaresume.DataLoader(Numbers(), 4)
    one, other = iter(loader), iter(loader)
    next(one), next(other)
    with pytest.raises(StateError, match="moved while it was being read"):
        next(one)
    next(other)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="moved while it was being read"):
        next(other)


@pytest.mark.process
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_loop_that_is_refused_takes_no_batch_of_the_other(persistent_workers: bool) -> None:
    alone = [batch["number"].tolist() for batch in megaresume.DataLoader(Numbers(), 4)]
    loader = megaresume.DataLoader(Numbers(), 4, num_workers=1, persistent_workers=persistent_workers)
    one, other = iter(loader), iter(loader)
    found = [next(one), next(other)]
    with pytest.raises(StateError, match="moved while it was being read"):
        next(one)
    assert [batch["number"].tolist() for batch in [*found, *other]] == alone


class Unfound(Numbers):
    """``next`` finds nothing for one item, once it is told."""

    armed = False

    def __getitem__(self, i: int) -> Any:
        return next(iter(())) if self.armed and i == 17 else super().__getitem__(i)


@pytest.mark.process
@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_of_a_dataset_does_not_end_the_epoch(num_workers: int) -> None:
    dataset = Unfound()
    loader = megaresume.DataLoader(dataset, 4, num_workers=num_workers, max_epochs=1)
    dataset.armed = True
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(loader)


def test_a_collate_fn_that_drops_a_batch_is_refused() -> None:
    with pytest.raises(UsageError, match="collate_fn gave nothing"):
        next(iter(megaresume.DataLoader(Numbers(), 4, collate_fn=lambda items: None)))


def without_some(items: list[Any]) -> Any:
    return torch.utils.data.default_collate([item for item in items if item["number"] % 16])


def pairs(items: list[Any]) -> Any:
    return {"pairs": torch.zeros((len(items) + 1) // 2, 2)}


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.process)])
@pytest.mark.parametrize(("collate_fn", "drops"), [(without_some, True), (pairs, False), (None, False)])
def test_a_collate_fn_that_drops_items_is_named(
    caplog: pytest.LogCaptureFixture, collate_fn: Any, drops: bool, num_workers: int
) -> None:
    for _ in megaresume.DataLoader(Numbers(), 4, collate_fn=collate_fn, num_workers=num_workers, max_epochs=1):
        pass
    assert caplog.text.count("collate_fn made 3 rows of 4 items") == drops


class Batched(Numbers):
    """Reads many at once, as a table of Hugging Face does."""

    lost = 0

    def __getitems__(self, items: list[int]) -> list[Any]:
        return [self[i] for i in items][self.lost :]


def test_a_dataset_that_reads_many_at_once(order: list[int]) -> None:
    assert merged(ranks(2, 3, dataset=Batched()), 4) == order[:24]
    dataset = Batched()
    dataset.lost = 1
    with pytest.raises(CorpusError, match="a different number of items"):
        next(iter(megaresume.DataLoader(dataset, 4)))


class Table(Mapping[Any, Any]):
    """Columns by name, and rows by number, as in a TensorDict: it is a mapping, and a dataset by itself."""

    def __init__(self, columns: dict[str, torch.Tensor]) -> None:
        self.columns = columns

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self.columns[key]
        return Table({name: column[key] for name, column in self.columns.items()})

    def __iter__(self) -> Any:
        return iter([self[row] for row in range(len(self))])

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))  # a row has none: TypeError

    def keys(self) -> Any:
        return self.columns.keys()

    def __bool__(self) -> bool:
        raise RuntimeError("neither true nor false")


def test_a_mapping_with_items_by_number_is_a_dataset(order: list[int]) -> None:
    table = Table({"number": torch.arange(ITEMS), "twice": 2 * torch.arange(ITEMS)})
    options: dict[str, Any] = {"batch_size": 4, "collate_fn": lambda rows: [int(row["number"]) for row in rows]}
    loader = megaresume.DataLoader(table, max_epochs=1, **options)
    batches = iter(loader)
    first, state = next(batches), loader.state_dict()
    assert [*first, *(number for batch in batches for number in batch)] == order[:ITEMS]
    other = Table({"number": torch.arange(ITEMS), "twice": 3 * torch.arange(ITEMS)})
    with pytest.raises(StateError, match="data"):
        megaresume.DataLoader(other, max_epochs=1, **options).load_state_dict(state)


def test_a_dict_that_makes_what_it_lacks_has_datasets_by_name() -> None:
    datasets = defaultdict(list, all=(Numbers(), 1))
    loaders = [megaresume.DataLoader(one, 4, max_epochs=1) for one in (datasets, dict(datasets))]
    made, plain = ([numbers(batch) for batch in loader] for loader in loaders)
    assert made == plain and list(datasets) == ["all"]


def test_a_damaged_state_is_refused_and_the_loader_stays(order: list[int]) -> None:
    loaders = ranks(1, 4)
    first = merged(loaders, 2)
    state = loaders[0].state_dict()
    with pytest.raises(StateError, match="damaged"):
        loaders[0].load_state_dict(state | {"samples": 4})
    assert first + merged(loaders, 2) == order[:16]


class Colour(Enum):
    RED = 1
    BLUE = 2


def test_the_hash_of_an_item_sees_what_it_holds() -> None:
    items: list[Any] = [
        {"a": 1, "b": "x"},
        {"a": 1, "b": "y"},
        {"a": [1], "b": "x"},
        {"a": 1.0, "b": "x"},
        {"a": torch.tensor(1), "b": "x"},
        {"a": torch.tensor(1.0, dtype=torch.bfloat16), "b": "x"},
        {"a": torch.tensor([1]), "b": "x"},
        {"a": np.array([1]), "b": "x"},
        {"a": b"1", "b": "x"},
        {"a": None, "b": "x"},
        Numbers(3),
        Numbers(4),
        Colour.RED,
        Colour.BLUE,
    ]
    assert len({item_hash(item) for item in items}) == len(items)
    assert item_hash({"b": "x", "a": 1}) == item_hash(items[0])
    assert item_hash(items[0]) == 772195177145917370  # in every process, on every machine


def epochs_from_zero(loader: Any, *, set_epoch: Callable[[int], None] | None = None) -> list[int]:
    """What a loop of three epochs trains that does not know of a resume."""
    handed = []
    for epoch in range(3):
        if set_epoch is not None:
            set_epoch(epoch)
        handed += [number for batch in loader for number in numbers(batch)]
    return handed


def test_a_loop_from_epoch_zero_ends_with_max_epochs() -> None:
    (whole,) = ranks(1, 4, max_epochs=3)
    order = epochs_from_zero(whole)
    (loader,) = ranks(1, 4, max_epochs=3)
    first = [number for batch in islice(endless(loader), 13) for number in numbers(batch)]
    (resumed,) = ranks(1, 4, loader.state_dict(), max_epochs=3)
    assert first + epochs_from_zero(resumed) == order


def test_a_loop_from_epoch_zero_that_says_its_epochs_passes_over_those_that_are_trained() -> None:
    (whole,) = ranks(1, 4)
    order = epochs_from_zero(whole)
    (loader,) = ranks(1, 4)
    first = [number for batch in islice(endless(loader), 13) for number in numbers(batch)]
    (resumed,) = ranks(1, 4, loader.state_dict())
    assert first + epochs_from_zero(resumed, set_epoch=resumed.sampler.set_epoch) == order
    with pytest.raises(UsageError, match="epoch 0 is not the next one"):
        whole.set_epoch(0)


def test_a_loop_that_does_not_ask_in_which_epoch_it_is_is_warned_once(caplog: pytest.LogCaptureFixture) -> None:
    (loader,) = ranks(1, 4)
    epochs_from_zero(loader)
    assert caplog.text == ""
    state = loader.state_dict()
    (resumed,) = ranks(1, 4, state)
    epochs_from_zero(resumed)
    assert caplog.text.count("the run continues in epoch 3, and the loop did not ask") == 1
    caplog.clear()
    for options, ask in (({}, lambda one: one.epoch), ({"max_epochs": 4}, lambda one: None)):
        (resumed,) = ranks(1, 4, state, **options)
        ask(resumed)
        next(iter(resumed))
    assert "did not ask" not in caplog.text


def test_one_more_epoch_after_the_last() -> None:
    (loader,) = ranks(1, 4, max_epochs=2)
    two = [number for batch in endless(loader) for number in numbers(batch)]
    (more,) = ranks(1, 4, loader.state_dict(), max_epochs=3)
    third = [number for batch in endless(more) for number in numbers(batch)]
    assert (len(two), sorted(third)) == (2 * ITEMS, list(range(ITEMS)))


def test_one_more_epoch_of_packed_items() -> None:
    options: dict[str, Any] = {"dataset": [{"input_ids": [n] * (1 + n % 7)} for n in range(50)], "seq_length": 16}
    (loader,) = ranks(1, 4, max_epochs=2, **options)
    assert sum(1 for _ in endless(loader))
    (more,) = ranks(1, 4, loader.state_dict(), max_epochs=3, **options)
    third = Counter(token for batch in endless(more) for row in batch["input_ids"].tolist() for token in row)
    assert {n: third[n] for n in range(1, 50)} == {n: 1 + n % 7 for n in range(1, 50)}


def test_other_epochs_of_one_of_two_datasets_are_refused() -> None:
    two = {"a": (Numbers(), 1), "b": (Numbers(), 1)}
    (loader,) = ranks(1, 4, dataset=two, max_epochs={"a": 2})
    with pytest.raises(StateError, match=r"sources\.a\.max_epochs 3"):
        ranks(1, 4, loader.state_dict(), dataset=two, max_epochs={"a": 3})


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.process)])
def test_an_error_of_the_planning_comes_after_the_batches_before_it(
    order: list[int], monkeypatch: pytest.MonkeyPatch, num_workers: int
) -> None:
    """Workers are asked for batches far ahead."""
    (loader,) = ranks(1, 2, num_workers=num_workers)
    deal = RankLoader.deal

    def damaged(self: Any, samples: range, step: int) -> Any:
        yield from islice(deal(self, samples, step), 5)
        raise CorpusError("damaged")

    monkeypatch.setattr(RankLoader, "deal", damaged)
    handed: list[int] = []
    with pytest.raises(CorpusError, match="damaged"):
        for batch in loader:
            handed += numbers(batch)
    assert (handed, loader.samples) == (order[:10], 10)


@pytest.mark.process
@pytest.mark.parametrize("copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_has_workers_of_its_own(copied: Callable[[Any], Any]) -> None:
    """Persistent workers belong to one loader; their copies begin at the same sample."""
    first = megaresume.DataLoader(Numbers(), 4, num_workers=1, persistent_workers=True)
    expected = [numbers(batch) for batch in megaresume.DataLoader(Numbers(), 4)]
    batches = iter(first)
    assert [numbers(batch) for batch in islice(batches, 3)] == expected[:3]
    second = copied(first)
    assert [numbers(batch) for batch in second] == expected[3:]
    assert [numbers(batch) for batch in batches] == expected[3:]


def note_the_end(directory: Path, worker: int) -> None:
    """Have this worker write a file if it ends as it was told to: one that is killed does not come to that."""
    multiprocessing.util.Finalize(None, (directory / str(worker)).touch, exitpriority=0)


@pytest.mark.process
def test_workers_that_are_kept_hear_that_they_are_to_end(tmp_path: Path) -> None:
    """Also when the collector finds their loader: it takes the queues by which they hear it apart first."""
    loader = megaresume.DataLoader(
        Numbers(), 4, num_workers=2, persistent_workers=True, worker_init_fn=functools.partial(note_the_end, tmp_path)
    )
    next(iter(loader))
    loader.itself = loader  # type: ignore[attr-defined]  as a trainer does that has the loader, and that it has
    del loader
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


def set_first(_worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Numbers)
    info.dataset.first = 100


@pytest.mark.process
@pytest.mark.parametrize("keyed", [False, True])
def test_a_worker_knows_the_dataset(keyed: bool) -> None:
    """As with torch's loader: programs set their dataset up in a worker, or change it there."""
    loader = megaresume.DataLoader(Numbers(), ITEMS, num_workers=1, worker_init_fn=set_first, keyed=keyed)
    assert sorted(numbers(next(iter(loader)))) == list(range(100, 100 + ITEMS))


class Mortal(Numbers):
    """Its worker is killed at the eleventh item that it reads in its life, if that file is there."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.file = file

    def __getitem__(self, i: int) -> Any:
        if self.file.exists() and self.file.stat().st_size == 10:
            self.file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.file.exists():
            with self.file.open("a") as file:
                file.write("x")
        return super().__getitem__(i)


@pytest.mark.process
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_worker_that_is_killed(tmp_path: Path, persistent_workers: bool) -> None:
    """The error says how to go on, and a new ``for`` continues where the batches ended."""
    dataset = Mortal(tmp_path / "reads")
    loader = megaresume.DataLoader(dataset, 4, num_workers=1, prefetch_factor=1, persistent_workers=persistent_workers)
    reference = megaresume.DataLoader(Numbers(), 4)
    expected, later = ([numbers(batch) for batch in reference] for _ in range(2))
    dataset.file.touch()
    found = []
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid\D*\d+\)(.|\n)*a new `for` starts other workers"):
        for batch in loader:
            found.append(numbers(batch))  # noqa: PERF401  what came before the error counts
    assert 0 < len(found) < len(expected)
    found += [numbers(batch) for batch in loader]
    assert found == expected
    assert [numbers(batch) for batch in loader] == later


def test_a_step_is_that_of_the_schedule_which_a_trainer_sets() -> None:
    """torchft's is of all replicas together, however many there are."""
    loader = megaresume.DataLoader(list(range(64)), batch_size=2)
    loader.schedule = loader.stream.schedule = BatchSchedule.constant(8)
    assert loader.step_samples == 8
    assert loader.state_at(16).batches == ((0, 8),)
    assert loader.state_at(12).batches == ((0, 8), (8, 4))
