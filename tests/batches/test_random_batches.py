"""What a ``collate_fn`` draws, and a dataset in a worker: the same after a resume, and where else it is promised."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

import megaresume
from tests.batches.test_keyed_items import ITEMS, Noisy


class Numbers(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> Any:
        return {"item": i}


def masked(items: list[Any]) -> Any:
    """The items, and a number from each generator."""
    return items, (random.random(), float(np.random.rand()), torch.rand(1).item())


def batches(most: int, state: Any = None, dataset: Any = None, **options: Any) -> tuple[list[Any], Any]:
    """Batches in their order, and the state after them."""
    loader = megaresume.DataLoader(
        Numbers() if dataset is None else dataset, **{"batch_size": 4, "collate_fn": masked} | options
    )
    if state is not None:
        loader.load_state_dict(state)
    handed: list[Any] = []
    while len(handed) < most:
        handed += islice(loader, most - len(handed))
    return handed, loader.state_dict()


def test_keyed_masks_on_any_layout_and_after_a_resume() -> None:
    order, _ = batches(15, keyed=True)
    masks = [number for _, mask in order for number in mask]
    assert len(set(masks)) == len(masks) == 45
    first, state = batches(4, keyed=True)
    rest, _ = batches(11, state, keyed=True)
    assert first + rest == order
    two = [batches(5, keyed=True, batch_size=4, dp_rank=rank, dp_size=2)[0] for rank in range(2)]
    assert [batch for both in zip(*two, strict=True) for batch in both] == order[:10]
    assert {mask for _, mask in batches(5, keyed=True, seed=1)[0]}.isdisjoint(mask for _, mask in order)


@pytest.mark.process
def test_keyed_masks_are_the_same_in_workers() -> None:
    order, _ = batches(10, keyed=True, dataset=Noisy())
    first, state = batches(3, keyed=True, dataset=Noisy(), num_workers=2)
    rest, _ = batches(7, state, keyed=True, dataset=Noisy(), num_workers=1)
    assert first + rest == order


@pytest.mark.process
@pytest.mark.parametrize("dataset", [Numbers(), Noisy()], ids=["masks", "masks_and_augmentation"])
def test_what_workers_draw_is_the_same_after_a_resume(dataset: Any) -> None:
    order, _ = batches(10, dataset=dataset, num_workers=2)
    assert len({mask for _, mask in order}) == 10
    first, state = batches(3, dataset=dataset, num_workers=2)
    rest, _ = batches(7, state, dataset=dataset, num_workers=2)
    assert first + rest == order
    assert batches(7, state, dataset=dataset, num_workers=3)[0] == rest


def test_the_generators_of_training_are_left_alone() -> None:
    loader = iter(megaresume.DataLoader(Numbers(), 4, collate_fn=masked, keyed=True))
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]
    next(loader)
    assert before == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())  # type: ignore[index]


class Seeded:
    def __init__(self, **members: Any) -> None:
        self.__dict__.update(members)

    def __call__(self, items: list[Any]) -> Any:
        return items


@pytest.mark.parametrize("own", [{"seed": 5}, {"rng": np.random.default_rng(0)}, {"fn": Seeded(seed=5)}, {}])
def test_a_generator_of_its_own_is_said(own: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    megaresume.DataLoader(Numbers(), collate_fn=Seeded(seed=None) if not own else Seeded(**own))
    assert caplog.text.count("has a generator of its own") == bool(own)


def test_without_keys_the_process_draws() -> None:
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    ((_, drawn),), _ = batches(1)
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    assert drawn == masked([])[1]


@pytest.mark.process
def test_a_collate_fn_of_the_users_is_known_with_workers() -> None:
    assert not megaresume.DataLoader(Numbers(), num_workers=2).collates
    assert megaresume.DataLoader(Numbers(), num_workers=2, collate_fn=masked).collates
