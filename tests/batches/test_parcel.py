from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import megaresume
from megaresume.batches.parcels import LARGE, Inbox, Outbox

TENSORS = {
    "plain": torch.arange(12).view(3, 4),
    "nothing": torch.empty(0, 4, dtype=torch.float32),
    "number": torch.tensor(7.5, dtype=torch.float64),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "bits": torch.tensor([[True], [False]]),
    "turned": torch.arange(6, dtype=torch.int32).view(2, 3).t(),
    "repeated": torch.tensor([1, 2]).expand(3, 2),
    "complex": torch.tensor([1 + 2j]),
}


def there_and_back(batch):
    return Inbox().unpack(Outbox(lambda items: items, ahead=2)(batch))


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_arrives_as_it_was_sent(name):
    found = there_and_back({"x": [TENSORS[name]]})["x"][0]
    assert found.dtype == TENSORS[name].dtype and found.shape == TENSORS[name].shape
    assert torch.equal(found, TENSORS[name])


def test_what_is_no_tensor_arrives_as_it_is():
    class Own(dict):
        pass

    own = Own(x=torch.ones(2))
    batch = {"names": ["a", None], "numpy": np.arange(3), "own": own, "pair": (torch.ones(1), 2), 5: True}
    found = there_and_back(batch)
    assert found["own"] is own and found["numpy"] is batch["numpy"]
    assert found["names"] == ["a", None] and found["pair"] == (torch.ones(1), 2) and found[5] is True
    assert list(found) == list(batch)


def test_a_tensor_that_is_in_a_batch_twice_is_so_after_it():
    ids = torch.arange(5)
    found = there_and_back({"input_ids": ids, "labels": ids})
    found["labels"][2] = -100
    assert found["input_ids"].tolist() == [0, 1, -100, 3, 4]


def collate(items):
    """Batches of very different sizes, also such that get a room of their own."""
    number = items[0]
    size = LARGE // 8 + number if number % 50 == 49 else 1 + number * number % 4000
    return {"number": items, "x": torch.full((size,), number), "y": [torch.full((3,), -number)] * 2}


def check(batch, number):
    assert batch["number"] == [number]
    assert len(batch["x"]) >= 1 and batch["x"].unique().tolist() == [number]
    assert [y.tolist() for y in batch["y"]] == [[-number] * 3] * 2


@pytest.mark.process
@pytest.mark.parametrize("ahead", [1, 3, None])
def test_batches_that_are_kept_stay_as_they_were(ahead):
    inbox = Inbox()
    loader = DataLoader(range(200), collate_fn=Outbox(collate, ahead=ahead), num_workers=2, prefetch_factor=ahead or 2)
    kept = []
    for number, parcel in enumerate(loader):
        kept.append(inbox.unpack(parcel))
        check(kept[-1], number)
    for number, batch in enumerate(kept):
        check(batch, number)


def first_of(items, num=4):
    return {"items": torch.tensor(items)[:num]}


@pytest.mark.process
@pytest.mark.parametrize("persistent_workers", [False, True])
def test_a_for_that_is_left_loses_nothing(persistent_workers):
    loader = megaresume.DataLoader(
        range(500),
        4,
        collate_fn=functools.partial(first_of),
        num_workers=2,
        persistent_workers=persistent_workers,
        prefetch_factor=4,
    )
    alone = megaresume.DataLoader(range(500), 4, collate_fn=functools.partial(first_of))
    expected = [batch["items"].tolist() for batch in alone]
    kept = []
    while len(kept) < len(expected):
        for batch in loader:
            kept.append(batch["items"])
            if len(kept) % 30 == 0:
                break
    assert [items.tolist() for items in kept] == expected
