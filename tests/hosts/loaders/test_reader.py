"""One loader, killed again and again, against an uninterrupted run: every batch, in order, by its content."""

from __future__ import annotations

import functools
import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import energon_loader, seen, torchdata_loader
from lives import lives

import megaresume
from megaresume.hosts import loaders as module
from megaresume.hosts.loaders import EnergonAdapter, LoaderReader, adapter_of
from megaresume.stream.errors import StateError, UsageError
from tests.release import release


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["iterable", "map", "shuffle"])
def test_torchdata(kind: str, workers: int) -> None:
    make = functools.partial(torchdata_loader, kind, workers=workers)
    # 15 batches an epoch of the maps: stops in, at the end of, and right behind an epoch; twice in a row.
    stops = [7, 8, 15, 30, 31, 50]
    assert lives(make, stops) == lives(make, stops[-1:])


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_our_own_loader_over_epochs(workers: int) -> None:
    """It counts its epochs by itself, and the numbers of passes over it are not those of its epochs."""

    def make() -> megaresume.DataLoader:
        return megaresume.DataLoader(torch.arange(30.0)[:, None], batch_size=4, num_workers=workers)

    stops = [3, 8, 9, 15, 16, 30]  # of 7.5 batches an epoch
    whole = lives(make, stops[-1:])
    assert lives(make, stops) == whole
    items = [item for batch in whole for item in batch]
    assert [sorted(items[epoch * 30 : epoch * 30 + 30]) for epoch in range(3)] == [list(map(float, range(30)))] * 3


@pytest.mark.process
def test_torchdata_read_ahead() -> None:
    make = functools.partial(torchdata_loader, "iterable", workers=2)
    assert lives(make, [5, 40, 41, 60], ahead=3) == lives(make, [60])


RELEASE = release(
    "`[two]`, `[none]`: 60 lives of an Energon loader each",
    "the same, `[packing]`",
)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"workers": 2, "every": 60}, id="two", marks=RELEASE),
        pytest.param({"workers": 2, "packing": 9}, id="packing"),
        pytest.param({"workers": 0}, id="none", marks=RELEASE),
    ],
)
def test_energon(energon_dataset: Path, options: dict[str, Any]) -> None:
    make = functools.partial(energon_loader, energon_dataset, **options)
    # 7, 8, 9: fewer batches between two deaths than workers, where Energon alone forgets what to pass over. It keeps a
    # state a minute (`every`), and an offset since: that is what it forgets.
    stops = [7, 8, 9, 30]
    assert lives(make, stops) == lives(make, stops[-1:])


class Counter:
    """A loader of numbers whose state is what it would count next: it shows when a state is taken."""

    def __init__(self, length: int = 1 << 60) -> None:
        self.length, self.next, self.saves = length, 0, 0

    def __iter__(self) -> Iterator[int]:
        while self.next < self.length:
            self.next += 1
            yield self.next - 1
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        self.saves += 1
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


def reader_of(loader: Any, trained: Callable[[], int]) -> LoaderReader:
    return LoaderReader(adapter_of(loader), trained)


def test_state_is_of_the_trained_batches_and_not_of_those_handed_out() -> None:
    for handed, trained in itertools.product((0, 1, 31, 33, 70), (0, 1, 5, 32, 40, 70)):
        if trained > handed:
            continue
        done = 0
        reader = reader_of(Counter(), lambda: done)  # noqa: B023
        for step in range(handed):
            assert next(reader) == step
            done = min(step + 1, trained)
        state, skip = reader.state()
        assert skip < module.SNAPSHOT_EVERY + handed - trained
        again = reader_of(Counter(), lambda: done)  # noqa: B023
        again.restore(state, skip)
        assert [next(again) for _ in range(3)] == [trained, trained + 1, trained + 2]


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 2])
def test_an_order_that_the_loader_drew_itself_comes_back_though_batches_are_ahead(workers: int) -> None:
    """Torchdata draws the seed of a shuffle when the loader is made: the next start draws another one."""
    make = functools.partial(torchdata_loader, "drawn", workers=workers)
    done = 0
    reader = reader_of(make(), lambda: done)
    batches = [next(reader).tolist()]
    for done in (1, 2, 3):  # a loop that takes the next batch before it saves  # noqa: B007
        batches.append(next(reader).tolist())
    state, skip = reader.state()
    again = reader_of(make(), lambda: done)
    again.restore(state, skip)
    assert [next(again).tolist() for _ in range(5)] == [batches[3], *(next(reader).tolist() for _ in range(4))]


def test_nothing_ahead_takes_few_states_and_skips_nothing() -> None:
    loader, done = Counter(), 0
    reader = reader_of(loader, lambda: done)
    for _ in range(10):
        next(reader)
        done += 1
    assert reader.state()[1] == 0 and reader.state()[1] == 0
    assert loader.saves == 2  # after the first batch, and now


def test_an_ended_loader_begins_again_and_an_empty_one_is_refused() -> None:
    reader = reader_of(Counter(3), lambda: 0)
    assert [next(reader) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]
    with pytest.raises(UsageError, match="the loader has no batches"):
        next(reader_of(Counter(0), lambda: 0))


@pytest.mark.process
@pytest.mark.parametrize(("kind", "workers"), [("map", 0), ("iterable", 2), ("energon", 0), ("energon", 2)])
def test_a_restored_loader_draws_nothing_that_a_whole_run_did_not(
    energon_dataset: Path, kind: str, workers: int
) -> None:
    """A DataLoader draws the seed of its workers when it begins: dropout on a CPU would change."""

    def make() -> Any:
        if kind == "energon":
            return energon_loader(energon_dataset, workers=workers)
        return torchdata_loader(kind, workers=workers)

    done = 0
    reader = reader_of(make(), lambda: done)
    for _ in range(20):  # of torchdata's into the second epoch, which draws once more
        next(reader)
        done += 1
    state = reader.state()
    at_save = torch.get_rng_state()
    expected = [seen(next(reader)) for _ in range(15)], torch.rand(1)
    again = reader_of(make(), lambda: done)
    again.restore(*state)
    torch.set_rng_state(at_save)
    found = [seen(next(again)) for _ in range(15)], torch.rand(1)
    assert repr(found) == repr(expected)


class EndsAtItsBeginning(Counter):
    """As torchdata 0.11 with ``snapshot_every_n_steps``: it passes over batches while it begins, and there are none."""

    def __iter__(self) -> Iterator[int]:
        if self.next:
            raise StopIteration
        return super().__iter__()


def test_a_loader_that_cannot_go_on_does_not_end_the_loop() -> None:
    reader = reader_of(EndsAtItsBeginning(), lambda: 1)
    next(reader)
    again = reader_of(EndsAtItsBeginning(), lambda: 1)
    again.restore(*reader.state())
    with pytest.raises(StateError, match="does not take its state back"):
        next(again)


def test_refusals() -> None:
    reader = reader_of(Counter(), lambda: 2)
    next(reader)
    with pytest.raises(StateError, match="more batches were trained than this loader handed out"):
        reader.state()
    with pytest.raises(UsageError, match="restored after it has handed out batches"):
        reader.restore(*reader_of(Counter(), lambda: 0).state())
    with pytest.raises(StateError, match="does not take its state back"):
        state = pickle.dumps({"state": {"loader": {"other": 1}, "generator": None}, "handed": 1, "epoch": 0})
        reader_of(Counter(), lambda: 1).restore(state, 0)
    with pytest.raises(UsageError, match="no state that could be saved"):
        adapter_of([1, 2])


def test_a_state_of_energon_that_is_not_after_the_last_batch_is_refused(energon_dataset: Path) -> None:
    loader = energon_loader(energon_dataset, workers=0)
    adapter = adapter_of(loader)
    assert isinstance(adapter, EnergonAdapter)
    next(adapter.batches(0))
    assert adapter.save(1, 0) is not None
    with pytest.raises(StateError, match="is not the one after the batch that was handed out last"):
        adapter.save(2, 0)


class Prepared:
    """As DeepSpeed's, which ``deepspeed.initialize(training_data=...)`` returns."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (torch.utils.data.TensorDataset(torch.zeros(4)), r"megaresume\.DataLoader\(DATASET, "),
        (torch.utils.data.DataLoader(torch.zeros(4)), r"forgets its position(.|\n)*DataLoader\(LOADER\.dataset, "),
        (Prepared(torch.zeros(4)), r"megaresume\.DataLoader\(LOADER\.dataset, .*train_micro_batch_size_per_gpu"),
        (iter([]), r"StatefulDataLoader instead of"),
    ],
)
def test_the_way_out_for_a_loader_without_a_state(loader: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        adapter_of(loader)
