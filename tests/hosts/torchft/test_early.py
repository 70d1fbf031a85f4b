"""The first micro-batch of a step, trained while the quorum is being found: `megaresume.hosts.torchft_steps`.

The manager here is a stand-in whose quorum comes when the test says so; the others that it counts train what an
uninterrupted loader gives them. Under torchft itself: `test_torchft.py`, whose runs are asynchronous by half.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.checkpoint.lock.lock import holder_of
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.hosts.torchft import TorchftHost, attach
from megaresume.hosts.torchft_dealing import Contributors
from megaresume.stream.errors import UsageError
from tests.hosts.torchft.stand_in import StandIn

#: samples of a step, and of a micro-batch.
SIZE, MICRO = 8, 2


class Manager(StandIn):
    """Replica 0 of as many as `begin` says, of an asynchronous quorum that is there once `is_there` is set."""

    _use_async_quorum = True

    def __init__(self) -> None:
        super().__init__()
        self.is_there = threading.Event()
        self.replicas = 0
        #: of the others, in the order of the all-reduces.
        self.reduced: list[str] = []

    def begin(self, replicas: int) -> None:
        """The quorum of the next step will have so many."""
        self.is_there.clear()
        self._quorum_id += replicas != self.replicas
        self.is_new, self.replicas = replicas != self.replicas, replicas
        self.start_quorum()

    def start_quorum(self) -> None:
        self.error = None

    def wait_quorum(self) -> None:
        assert self.is_there.wait(60)

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any = None) -> Any:
        """What the other replicas say is added, if it is a vote."""
        self.wait_quorum()
        self.reduced.append("vote" if len(tensor) == 7 else "gradient")
        if len(tensor) == 7:
            rule = tensor[4:].clone()
            for other in range(1, self.replicas):
                among = Contributors(tuple(range(self.replicas)), other, self.replicas, 1, SIZE)
                tensor += torch.tensor(
                    [among.samples_here(MICRO), SIZE * self.committed, 0, self.is_new and self._use_async_quorum, *rule]
                )
        return SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        self.committed += self.error is None
        return self.error is None


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Manager, Any]]:
    monkeypatch.setattr(TorchftHost, "package", "torch")  # torchft need not be installed

    def attached() -> tuple[Manager, Any]:
        manager = Manager()
        data = megaresume.DataLoader(list(range(40)), batch_size=MICRO, seed=5, dp_rank=0, dp_size=1)
        checkpoints = megaresume.Checkpoints(save_dir=tmp_path / "run")
        loop = attach(manager, data, global_batch_size=SIZE, checkpoints=checkpoints)
        return manager, loop

    return attached


def of_replica_0(step: int, replicas: int) -> list[list[int]]:
    """The items of its micro-batches, by an uninterrupted loader of the whole step."""
    data = megaresume.DataLoader(list(range(40)), batch_size=SIZE, seed=5, dp_rank=0, dp_size=1)
    items: list[int] = []
    while len(items) <= step * SIZE:
        items += [int(item) for batch in data for item in batch]
    whole, each = items[step * SIZE : (step + 1) * SIZE], MICRO * replicas
    return [whole[first : first + MICRO] for first in range(0, SIZE, each)]


def train(manager: Manager, loop: Any, replicas: int) -> Iterator[tuple[list[int], bool, float]]:
    """A step: of each micro-batch its items, whether the quorum was there before it, and its weight."""
    manager.begin(replicas)
    for number, batch in enumerate(loop):
        was_there = manager.is_there.is_set()
        if not was_there:
            manager.is_there.set()
        yield batch.tolist(), was_there or bool(number), loop.weight
        manager.allreduce(torch.zeros(1))
    assert manager.should_commit()


def first_steps(manager: Manager, loop: Any) -> None:
    """Of two replicas, so that it is known who is there."""
    manager.is_there.set()
    manager._use_async_quorum = False  # what step 0 asks is torchft's
    manager.begin(2)
    manager.is_there.set()
    for _ in loop:
        assert loop.weight == 0.5
    assert manager.should_commit()
    manager._use_async_quorum = True


def test_it_comes_before_the_quorum_and_counts(make: Callable[[], tuple[Manager, Any]]) -> None:
    manager, loop = make()
    first_steps(manager, loop)
    for step in (1, 2):
        manager.reduced.clear()
        made = list(train(manager, loop, 2))
        assert made == [(items, bool(k), 0.5) for k, items in enumerate(of_replica_0(step, 2))]
        assert manager.reduced == ["vote", "gradient", "gradient"]
    assert (loop.step, loop.samples) == (3, 3 * SIZE)


@pytest.mark.parametrize("replicas", [1, 4])
def test_others_are_there(replicas: int, make: Callable[[], tuple[Manager, Any]]) -> None:
    """It has no weight, and the step is dealt to those who are there: whole, in order."""
    manager, loop = make()
    first_steps(manager, loop)
    (items, was_there, weight), *made = train(manager, loop, replicas)
    assert (items, was_there, weight) == (of_replica_0(1, 2)[0], False, 0.0)
    assert [items for items, _, _ in made] == of_replica_0(1, replicas)
    assert sum(weight for _, _, weight in made) == 1.0 and loop.step == 2
    made = list(train(manager, loop, replicas))
    assert [items for items, _, _ in made] == of_replica_0(2, replicas)


def test_a_gradient_waits_for_the_vote(make: Callable[[], tuple[Manager, Any]]) -> None:
    """Also of a loop that does not read the weight first: whatever is all-reduced comes after it on every replica."""
    manager, loop = make()
    first_steps(manager, loop)
    manager.reduced.clear()
    manager.begin(2)
    for _ in loop:
        manager.is_there.set()
        manager.allreduce(torch.zeros(1))
        assert loop.weight == 0.5
    assert manager.should_commit() and manager.reduced == ["vote", "gradient", "gradient"]


def test_a_loop_that_does_not_ask_for_the_weight(make: Callable[[], tuple[Manager, Any]]) -> None:
    """With the gradients of a micro-batch that is dealt anew, samples would count twice: nothing more is trained."""
    manager, loop = make()
    first_steps(manager, loop)
    manager.begin(4)
    batches = iter(loop)
    next(batches)
    manager.is_there.set()
    with pytest.raises(UsageError, match="a micro-batch of weight 0 was not weighed"):
        next(batches)
    with pytest.raises(UsageError, match="a micro-batch of weight 0 was not weighed"):
        manager.start_quorum()
    assert loop.step == 1


def test_the_end_of_a_step_is_known_before_it_is_trained(make: Callable[[], tuple[Manager, Any]]) -> None:
    """``ends_step`` does not wait where the step has several micro-batches, whoever is there; else it does."""
    manager, loop = make()
    first_steps(manager, loop)
    manager.begin(2)
    ends = []
    for _ in loop:
        ends.append((loop.ends_step, manager.is_there.is_set()))
        manager.is_there.set()
        assert loop.weight
    assert ends == [(False, False), (True, True)] and manager.should_commit()
    manager.begin(4)
    manager.is_there.set()
    assert [(loop.ends_step, loop.weight) for _ in loop] == [(False, 0.0), (True, 1.0)] and manager.should_commit()
    manager.begin(4)
    timer = threading.Timer(0.1, manager.is_there.set)
    timer.start()
    for _ in loop:
        assert loop.ends_step and manager.is_there.is_set() and loop.weight
    assert manager.should_commit() and loop.step == 4


def test_the_end_is_in_the_ledger(make: Callable[[], tuple[Manager, Any]], tmp_path: Path) -> None:
    """By which launch scripts know that nothing is left to train; and others may write there."""
    manager, loop = make()
    first_steps(manager, loop)
    loop.finish()
    kinds = [(entry.kind, entry.iteration) for entry in read_ledger(ledger_path(tmp_path / "run")).entries]
    assert kinds == [("membership", 1), ("finished", 1)]
    assert (holder := holder_of(tmp_path / "run")) is not None and holder.status == "released"
