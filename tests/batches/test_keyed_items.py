"""`megaresume.DataLoader(keyed=True)`: what a dataset draws follows from seed, dataset, epoch and item alone."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.data

import megaresume
from megaresume.stream.errors import ConfigError, StateError, UsageError
from megaresume.stream.state import StreamState

ITEMS = 20


class Noisy(torch.utils.data.Dataset[Any]):
    """Item i, and a number from each generator."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> Any:
        return {"item": i, "noise": (random.random(), float(np.random.rand()), torch.rand(1).item())}


class Batched(Noisy):
    def __getitems__(self, items: list[int]) -> list[Any]:
        raise AssertionError("one at a time")


def drawn(micro_batches: int, state: Any = None, dataset: Any = None, **options: Any) -> tuple[list[Any], Any]:
    """(item, what it drew), in order, and the state after them."""
    loader = megaresume.DataLoader(
        Noisy() if dataset is None else dataset, collate_fn=list, **{"keyed": True} | options
    )
    if state is not None:
        loader.load_state_dict(state)
    handed: list[Any] = []
    taken = 0
    while taken < micro_batches:
        for batch in islice(loader, micro_batches - taken):
            taken += 1
            handed += [(item["item"], item["noise"]) for item in batch]
    return handed, loader.state_dict()


@pytest.fixture(scope="module")
def order() -> list[Any]:
    return drawn(3 * ITEMS)[0]


def test_every_item_and_epoch_draws_other_numbers(order: list[Any]) -> None:
    numbers = [number for _, noise in order for number in noise]
    assert len(set(numbers)) == len(numbers) == 9 * ITEMS
    assert drawn(3 * ITEMS)[0] == order
    assert {noise for _, noise in drawn(ITEMS, seed=1)[0]}.isdisjoint(noise for _, noise in order)


def test_the_same_on_any_layout_and_after_a_resume(order: list[Any]) -> None:
    ranks = [drawn(5, batch_size=2, dp_rank=rank, dp_size=2) for rank in range(2)]
    first = [pair for k in range(5) for handed, _ in ranks for pair in handed[2 * k : 2 * k + 2]]
    assert first == order[:20]
    rest, _ = drawn(5, ranks[0][1], batch_size=7)
    assert rest == order[20:55]


@pytest.mark.process
def test_the_same_in_workers(order: list[Any]) -> None:
    first, state = drawn(5, batch_size=4, num_workers=2)
    assert first == order[:20]
    assert drawn(3, state, batch_size=4, num_workers=1)[0] == order[20:32]


def test_the_generators_of_training_are_left_alone() -> None:
    def seed() -> None:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)

    loader = iter(megaresume.DataLoader(Noisy(), keyed=True, batch_size=4, collate_fn=list))
    seed()
    next(loader)
    after = random.random(), np.random.rand(), torch.rand(1).item()
    seed()
    assert after == (random.random(), np.random.rand(), torch.rand(1).item())


def test_one_item_is_read_at_a_time_and_each_dataset_has_a_key(order: list[Any]) -> None:
    assert drawn(ITEMS, dataset=Batched())[0] == order[:ITEMS]
    two, _ = drawn(2 * ITEMS, dataset={"a": (Noisy(), 1), "b": (Noisy(), 1)})
    assert len({noise for _, noise in two}) == 2 * ITEMS
    renamed, _ = drawn(ITEMS, dataset={"new": (Noisy(), {"weight": 1, "was": "data"})})
    assert renamed == order[:ITEMS]


class NoisyTexts(Noisy):
    def __getitem__(self, i: int) -> Any:
        return {"input_ids": [i] * (1 + i % 7), **super().__getitem__(i)}


def test_packed_items_too(order: list[Any]) -> None:
    options = {"dataset": NoisyTexts(), "seq_length": 16, "max_epochs": 1}
    handed, _ = drawn(4, **options)
    assert len(handed) >= 8 and set(handed) <= set(order[:ITEMS])


def test_a_resume_without_keys_is_refused() -> None:
    _, state = drawn(5)
    with pytest.raises(
        StateError, match=r"found: +sources\.data\.keyed null(.|\n)*expected: +sources\.data\.keyed true"
    ):
        drawn(1, state, keyed=False)
    _, plain = drawn(5, keyed=False)
    with pytest.raises(StateError, match=r"found: +sources\.data\.keyed true(.|\n)*on_change='stage'"):
        drawn(1, plain)
    handed, _ = drawn(15, plain, on_change="stage")
    assert sorted(item for item, _ in handed) == sorted(
        {*range(ITEMS)} - {item for item, _ in drawn(5, keyed=False)[0]}
    )


class Shifted(Noisy):
    """Other items, which draw as much."""

    def __getitem__(self, i: int) -> Any:
        return super().__getitem__(i) | {"item": i + 100}


@pytest.mark.parametrize("keyed", [True, False])
def test_what_items_hold_is_compared_although_they_draw(keyed: bool, caplog: pytest.LogCaptureFixture) -> None:
    _, state = drawn(5, keyed=keyed)
    drawn(1, state, keyed=keyed)
    drawn(1, state, keyed=not keyed, on_change="stage")
    assert "a generator of their own" not in caplog.text
    for now in (keyed, not keyed):
        with pytest.raises(StateError, match="items hold something else"):
            drawn(1, state, keyed=now, on_change="stage", dataset=Shifted())


@pytest.mark.parametrize("keyed", [True, False])
def test_items_that_were_changed_on_purpose(keyed: bool, order: list[Any]) -> None:
    before, state = drawn(5, keyed=keyed)
    with pytest.raises(StateError) as refused:
        drawn(1, state, keyed=keyed, dataset=Shifted())
    contents = str(refused.value.found).split()[-1]
    assert f"DataLoader(..., contents='{contents}')" in str(refused.value.action)
    for wrong in ("0" * 16, str(refused.value.expected).split()[-1]):
        with pytest.raises(StateError, match="items hold something else"):
            drawn(1, state, keyed=keyed, dataset=Shifted(), contents=wrong)
    after, later = drawn(5, state, keyed=keyed, dataset=Shifted(), contents={"data": contents})
    last, _ = drawn(5, later, keyed=keyed, dataset=Shifted())
    items = [item for item, _ in before] + [item - 100 for item, _ in after + last]
    assert items == [item for item, _ in order[:15]]
    with pytest.raises(StateError, match="items hold something else"):
        drawn(1, later, keyed=keyed, contents=contents)
    (recorded,) = StreamState.from_json(later).overrides
    assert recorded.startswith("at sample 5: source 'data' holds something else") and recorded.endswith(contents)
    with pytest.raises(UsageError, match="dataset in contents"):
        drawn(1, state, contents={"text": contents})


@pytest.mark.parametrize("contents", [5, True, "4d9e2a66", ["0" * 16], {"data": 5}, b"0" * 16])
def test_contents_that_are_no_hash(contents: Any) -> None:
    """Refused although nothing has changed: by the time that it has, the option would not be read."""
    with pytest.raises(UsageError, match="contents is not a hash"):
        drawn(0, contents=contents)


class ManyShifted(Shifted):
    def __len__(self) -> int:
        return 2 * ITEMS


def test_items_that_were_changed_and_added_at_once(order: list[Any]) -> None:
    """One change at a start: the hash of the first items is not what the error names."""
    before, state = drawn(5)
    with pytest.raises(StateError, match="20 items were added, and the first 20 are not as before") as refused:
        drawn(1, state, dataset=ManyShifted(), append="next_epoch", contents="0" * 16)
    assert "or its transform was changed" in str(refused.value.cause)
    assert "start without the new ones first, with contents=" in str(refused.value.action)
    with pytest.raises(StateError) as refused:
        drawn(1, state, dataset=Shifted())
    middle, later = drawn(5, state, dataset=Shifted(), contents=str(refused.value.found).split()[-1])
    last, final = drawn(10, later, dataset=ManyShifted(), append="next_epoch")
    items = [item for item, _ in before] + [item - 100 for item, _ in middle + last]
    assert items == [item for item, _ in order[:20]]
    assert [line.split(" ", 3)[2] for line in StreamState.from_json(final).overrides] == ["5:", "10:"]


def test_several_datasets_that_were_changed() -> None:
    """Each error names what was accepted before, too."""
    _, state = drawn(4, dataset={"a": (Noisy(), 1), "b": (Shifted(), 1)})
    changed = {"a": (Shifted(), 1), "b": (Noisy(), 1)}
    contents: dict[str, str] = {}
    for name in ("a", "b"):
        with pytest.raises(StateError, match=f"dataset '{name}' is not the one") as refused:
            drawn(1, state, dataset=changed, contents=contents)
        contents[name] = str(refused.value.found).split()[-1]
        assert f"DataLoader(..., contents={contents!r})" in str(refused.value.action)
    assert len(StreamState.from_json(drawn(2, state, dataset=changed, contents=contents)[1]).overrides) == 2


class OwnGenerator(Noisy):
    def __init__(self) -> None:
        self._generator = np.random.default_rng(0)

    def __getitem__(self, i: int) -> Any:
        return {"item": i, "noise": self._generator.random()}


@pytest.mark.parametrize("keyed", [True, False])
def test_a_generator_that_keys_do_not_reach_is_said(keyed: bool, caplog: pytest.LogCaptureFixture) -> None:
    _, state = drawn(1, dataset=OwnGenerator(), keyed=keyed)
    assert "draw from a generator of their own, which no checkpoint holds" in caplog.text
    drawn(1, state, keyed=keyed)  # mended
    _, mended = drawn(1, keyed=keyed)
    with pytest.raises(StateError, match="items are different each time"):
        drawn(1, mended, keyed=keyed, dataset=OwnGenerator())


class OwnOrder(Noisy):
    """Batches that it makes and shuffles itself, as FlagEmbedding's: each reading gives the next one."""

    def __init__(self, order: range) -> None:
        self._order, self._step = order, 0

    def __len__(self) -> int:
        return len(self._order)

    def __getitem__(self, _: int) -> Any:
        self._step += 1
        return {"item": self._order[self._step - 1]}


@pytest.mark.parametrize("items", [20, 100])
def test_a_dataset_with_an_order_of_its_own_is_refused(items: int) -> None:
    """Also one that has fewer items than are read of it before the run."""
    with pytest.raises(UsageError, match="gives its items in an order of its own"):
        drawn(1, dataset=OwnOrder(range(items)))


class Damaged(Noisy):
    def __getitem__(self, i: int) -> Any:
        if i == 7:
            raise ValueError("damaged")
        return super().__getitem__(i)


def test_a_damaged_item_is_not_taken_for_an_order_of_its_own() -> None:
    with pytest.raises(ValueError, match="damaged"):
        drawn(1, dataset=Damaged())


def test_keyed_is_for_items_alone() -> None:
    from megaresume.batches.open import open_stream

    config = {"seq_length": 8, "sources": {"web": {"path": "web", "keyed": True}}}
    with pytest.raises(ConfigError, match="keyed"):
        open_stream(config)
