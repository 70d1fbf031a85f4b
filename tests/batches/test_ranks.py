"""Which rank a loader is of: looked at when it is made, and again whenever it is read or saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import megaresume
from megaresume import BatchSchedule, DataLoader, StreamLoader
from megaresume.stream.errors import StateError, UsageError


@contextmanager
def group(rank: int, size: int) -> Iterator[None]:
    """Within it, this process is one of so many, which need not be there: nothing is sent."""
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def of_items(**options: Any) -> DataLoader:
    return DataLoader(torch.arange(100), batch_size=4, **options)


@pytest.fixture
def of_stream(tmp_path: Any, corpora: Any) -> Callable[..., StreamLoader]:
    (path, *_) = corpora
    data = {"seed": 1, "seq_length": 64, "sources": {"web": {"path": path}}}

    def make(**options: Any) -> StreamLoader:
        return StreamLoader(megaresume.open_stream(data), BatchSchedule.constant(32), micro_batch_size=4, **options)

    return make


@pytest.fixture(params=["items", "stream"])
def make(request: pytest.FixtureRequest, of_stream: Callable[..., StreamLoader]) -> Callable[..., Any]:
    return of_items if request.param == "items" else of_stream


def test_made_before_the_process_group_of_a_launcher(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match=r"before the process group(.|\n)*WORLD_SIZE=2(.|\n)*init_process_group"):
        make()
    with pytest.raises(UsageError, match="before the process group"):
        make(dp_rank=1)
    assert (make(dp_rank=1, dp_size=2).dp_rank, make(dp_rank=0, dp_size=1).dp_size) == (1, 1)
    with group(1, 2):
        assert (make().dp_rank, make().dp_size) == (1, 2)


def test_made_before_a_process_group_that_no_variable_announces(make: Any) -> None:
    loader = make()
    next(iter(loader))
    with group(1, 2):
        with pytest.raises(StateError, match=r"made for ranks that do not exist(.|\n)*rank 1 of 2(.|\n)*rank 0 of 1"):
            next(iter(loader))
        if isinstance(loader, DataLoader):
            with pytest.raises(StateError, match="made for ranks that do not exist"):
                loader.state_dict()


def test_a_process_group_that_is_made_again(make: Any) -> None:
    with group(1, 2):
        loader = make()
    with group(0, 2), pytest.raises(StateError, match=r"rank 0 of 2(.|\n)*rank 1 of 2"):
        next(iter(loader))


def test_ranks_that_were_given_stay(make: Any) -> None:
    loader = make(dp_rank=0, dp_size=1)
    with group(0, 2):
        next(iter(loader))


@pytest.mark.parametrize(("rank", "size"), [(0, 4), (3, 4), (0, 8)])
def test_the_rank_of_another_process(make: Any, rank: int, size: int) -> None:
    with group(2, 4), pytest.raises(StateError, match=r"not the data-parallel rank(.|\n)*LOCAL_RANK"):
        next(iter(make(dp_rank=rank, dp_size=size)))


def test_fewer_data_parallel_ranks_than_processes() -> None:
    with group(3, 4):
        next(iter(of_items(dp_rank=1, dp_size=2)))
