"""Loaders that lose their order at a resume, each shown to do so by itself, and refused; those that keep it are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import pytest
import torch
import torch.utils.data as torch_data
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import RandomSampler, StatefulDistributedSampler

from megaresume.hosts.loaders import LoaderReader, adapter_of
from megaresume.stream.errors import UsageError

ITEMS = torch.arange(13)

pytestmark = pytest.mark.process


def stateful(sampler: Any = None, **options: Any) -> Any:
    return StatefulDataLoader(ITEMS, batch_size=2, sampler=sampler, **options)  # type: ignore[arg-type]


def of_nodes(sampler: Any) -> Any:
    return nodes.Loader(nodes.Batcher(nodes.MapStyleWrapper(ITEMS, sampler), 2))  # type: ignore[arg-type, var-annotated]


def streaming(*, buffer: int = 0) -> Any:
    dataset = datasets.Dataset.from_dict({"item": ITEMS.tolist()}).to_iterable_dataset(num_shards=2)
    return dataset.shuffle(seed=3, buffer_size=buffer) if buffer else dataset


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(4)


LOST: dict[str, Callable[[], Any]] = {
    "random": lambda: stateful(torch_data.RandomSampler(ITEMS, generator=seeded())),  # type: ignore[arg-type]
    "weighted": lambda: stateful(torch_data.WeightedRandomSampler([1.0] * 13, 13)),
    "subset": lambda: stateful(torch_data.SubsetRandomSampler(range(13))),
    "batch_sampler": lambda: StatefulDataLoader(
        ITEMS,  # type: ignore[arg-type]
        batch_sampler=torch_data.BatchSampler(torch_data.RandomSampler(ITEMS), 2, False),  # type: ignore[arg-type]
    ),
    "node of a distributed sampler": lambda: of_nodes(StatefulDistributedSampler(ITEMS, 1, 0, seed=4)),  # type: ignore[arg-type]
    "node of a random sampler": lambda: of_nodes(RandomSampler(ITEMS, generator=seeded())),  # type: ignore[arg-type]
    "buffer": lambda: StatefulDataLoader(streaming(buffer=6), batch_size=2),
}


def held(batch: Any) -> list[int]:
    """The items of a batch, or of an item."""
    return torch.as_tensor(batch["item"] if isinstance(batch, dict) else batch).flatten().tolist()


def read(loader: Any, count: int) -> list[list[int]]:
    """So many batches, from as many passes as they need."""
    found: list[list[int]] = []
    while len(found) < count:
        found += [held(batch) for _, batch in zip(range(count - len(found)), loader, strict=False)]
    return found


def lives(make: Callable[[], Any], stops: list[int]) -> list[list[int]]:
    """Train up to the last of ``stops``, with another loader from each of them on."""
    found: list[list[int]] = []
    state: tuple[bytes, int] | None = None
    for stop in stops:
        reader = LoaderReader(adapter_of(make()), lambda: len(found))
        if state is not None:
            reader.restore(*state)
        while len(found) < stop:
            found.append(held(next(reader)))
        state = reader.state()
    return found


@pytest.mark.parametrize("name", LOST)
def test_one_that_loses_its_order_is_refused(name: str) -> None:
    def resumed(taken: int) -> list[list[int]]:  # without us
        torch.manual_seed(5)
        before, after = LOST[name](), LOST[name]()
        first = read(before, taken)
        after.load_state_dict(before.state_dict())
        return first + read(after, 20 - taken)

    assert len({str(resumed(taken)) for taken in (3, 8, 9)}) > 1
    with pytest.raises(UsageError, match="does not hold its order"):
        adapter_of(LOST[name]())


@pytest.mark.parametrize(
    "loader",
    [
        lambda: stateful(torch_data.RandomSampler(ITEMS), num_workers=2, in_order=False),  # type: ignore[arg-type]
        lambda: stateful(num_workers=2, in_order=False),
        lambda: stateful(StatefulDistributedSampler(ITEMS, 1, 0), num_workers=2, snapshot_every_n_steps=4),  # type: ignore[arg-type]
        lambda: StatefulDataLoader(streaming(), batch_size=2, num_workers=2),
    ],
)
def test_so_are_those_whose_workers_lose_it(loader: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="does not hold its order"):
        adapter_of(loader())


def test_a_seeded_sampler_is_refused_with_the_one_to_use_instead() -> None:
    """Its first pass would be the same after a resume, and no other."""
    with pytest.raises(UsageError) as refused:
        adapter_of(stateful(torch_data.RandomSampler(ITEMS, generator=seeded())))  # type: ignore[arg-type]
    assert f"{RandomSampler.__module__}.{RandomSampler.__name__}" in str(refused.value.action)


@pytest.mark.parametrize(
    "loader",
    [
        lambda: stateful(shuffle=True, generator=seeded()),
        lambda: stateful(torch_data.DistributedSampler(ITEMS, 1, 0, seed=4)),  # type: ignore[arg-type]
        lambda: stateful(RandomSampler(ITEMS, generator=seeded())),  # type: ignore[arg-type]
        lambda: stateful(RandomSampler(ITEMS, replacement=True, generator=seeded())),  # type: ignore[arg-type]
        lambda: of_nodes(torch_data.DistributedSampler(ITEMS, 1, 0, seed=4)),  # type: ignore[arg-type]
        lambda: StatefulDataLoader(streaming(), batch_size=2),
        lambda: streaming().with_format("torch"),
    ],
)
def test_those_that_keep_it_resume_in_every_pass(loader: Callable[[], Any]) -> None:
    """A streaming dataset of Hugging Face's would begin each later pass where it was restored."""
    stops = [3, 4, 7, 14, 15, 30]
    assert lives(loader, stops) == lives(loader, stops[-1:])
