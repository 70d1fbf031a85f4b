"""Outer steps of torchft's LocalSGD and DiLoCo: `megaresume.hosts.torchft_lanes`.

The manager is a stand-in: what the other replicas say is added to a vote, and their weights stay out of it. Under
torchft itself: `test_torchft.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.hosts.torchft import TorchftHost
from megaresume.hosts.torchft_lanes import LaneVote
from megaresume.hosts.torchft_local_sgd import attach
from megaresume.stream.errors import MegaresumeError, StateError, UsageError
from tests.hosts.torchft.stand_in import StandIn

#: inner steps of an outer one, samples of an inner step, of a micro-batch, and of an outer step.
INNER, SIZE, MICRO = 3, 4, 1
OUTER = INNER * SIZE


class Manager(StandIn):
    """Replica 0 of as many as `replicas` says; the others have trained as many lanes as `others` says."""

    _use_async_quorum, _init_sync = False, False

    def __init__(self) -> None:
        super().__init__()
        self.others = 0
        self.votes: list[LaneVote] = []
        self.factors: list[float] = []

    def start_quorum(self) -> None:
        self.error, self._quorum_id = None, self._quorum_id + 1

    def wait_quorum(self) -> None:
        return

    def allreduce(self, tensor: torch.Tensor, reduce_op: Any = None) -> Any:
        if reduce_op is None:
            self.factors.append(float(tensor.flatten()[0]))
            return SimpleNamespace(wait=lambda: None)
        mine = LaneVote(*(int(number) for number in tensor.tolist()))
        self.votes.append(mine)
        others, lane = self.replicas - 1, OUTER // 2
        tensor += torch.tensor(
            [lane, 1, mine.memberships, mine.squares, *[0] * 8] if self.others else [0] * 12, dtype=torch.float64
        )
        alike = mine.position, mine.weights, mine.weight_squares, mine.votes, mine.rules, mine.rule_squares
        tensor += torch.tensor([0] * 6 + [number * others for number in alike], dtype=torch.float64)
        return SimpleNamespace(wait=lambda: None)

    def should_commit(self) -> bool:
        self.committed += self.error is None
        return self.error is None


class LocalSGD:
    """As torchft's."""

    def __init__(self, manager: Manager) -> None:
        torch.manual_seed(1)
        self._manager, self._sync_every, self._local_step, self._hooks = manager, INNER, 0, [None]
        self._model = torch.nn.Linear(1, 1, bias=False)
        self._local_optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9)
        self._local_optimizer.register_step_post_hook(self._step_post_hook)

    def _step_post_hook(self, *_: Any) -> None:
        self._local_step += 1
        if self._local_step < self._sync_every:
            return
        self._manager.start_quorum()
        self._manager.allreduce(torch.ones(1))
        self._manager.should_commit()
        self._local_step = 0


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], tuple[Manager, LocalSGD, Any]]:
    monkeypatch.setattr(TorchftHost, "package", "torch")  # torchft need not be installed

    def attached() -> tuple[Manager, LocalSGD, Any]:
        manager = Manager()
        outer = LocalSGD(manager)
        checkpoints = megaresume.Checkpoints(save_dir=tmp_path / "run")
        return manager, outer, attach(outer, data(MICRO), global_batch_size=SIZE, checkpoints=checkpoints)

    return attached


def data(batch_size: int, **options: Any) -> megaresume.DataLoader:
    return megaresume.DataLoader(
        torch.arange(60.0)[:, None], batch_size=batch_size, seed=5, dp_rank=0, dp_size=1, **options
    )


def order() -> list[float]:
    return [item for batch in data(OUTER) for item in batch.flatten().tolist()]


def train(outer: LocalSGD, loop: Any) -> list[list[float]]:
    """The items of each inner step."""
    made: list[list[float]] = [[]]
    for batch in loop:
        made[-1] += batch.flatten().tolist()
        (outer._model(batch).mean() * loop.weight).backward()
        if loop.ends_step:
            outer._local_optimizer.step()
            outer._local_optimizer.zero_grad()
            made.append([])
    return [items for items in made if items]


def test_lanes_are_dealt_where_the_run_begins(make: Callable[[], tuple[Manager, LocalSGD, Any]]) -> None:
    """Nothing is committed, and nothing is trained for nothing."""
    manager, outer, loop = make()
    assert train(outer, loop) == [] and (loop.step, loop.samples, manager.committed) == (0, 0, 0)
    assert manager.votes[-1].lanes == 0
    for step in range(2):
        made = train(outer, loop)
        assert [len(items) for items in made] == [SIZE] * INNER
        assert [item for items in made for item in items] == order()[step * OUTER :][:OUTER]
        assert (loop.step, loop.samples) == (step + 1, (step + 1) * OUTER)


def test_a_lane_is_lost(make: Callable[[], tuple[Manager, LocalSGD, Any]]) -> None:
    """The weights and the momentum are those before the step, and its samples come again, in other lanes."""
    manager, outer, loop = make()
    manager.replicas = 2
    train(outer, loop)
    before = outer._model.weight.detach().clone()
    half = [item for items in train(outer, loop) for item in items]
    assert half == [item for k, item in enumerate(order()[:OUTER]) if k % 2 == 0]
    assert manager.votes[-1].samples == OUTER // 2 and (loop.step, manager.committed) == (0, 0)
    assert torch.equal(outer._model.weight, before) and not outer._local_optimizer.state_dict()["state"]
    manager.replicas = 1
    train(outer, loop)  # in lanes of two again, as the other one was there: it is lost again
    assert loop.step == 0 and torch.equal(outer._model.weight, before)
    made = train(outer, loop)
    assert [item for items in made for item in items] == order()[:OUTER] and loop.step == 1
    momentum = outer._local_optimizer.state_dict()["state"]
    manager.replicas = 2
    train(outer, loop)
    assert loop.step == 2 and momentum  # the other one has joined: it has no lane
    weight, kept = outer._model.weight.detach().clone(), outer._local_optimizer.state[outer._model.weight]
    kept = kept["momentum_buffer"].clone()
    train(outer, loop)
    assert loop.step == 2 and torch.equal(outer._model.weight, weight)
    assert torch.equal(outer._local_optimizer.state[outer._model.weight]["momentum_buffer"], kept)


def test_all_lanes_are_there(make: Callable[[], tuple[Manager, LocalSGD, Any]]) -> None:
    manager, outer, loop = make()
    manager.replicas = 2
    train(outer, loop)
    manager.others = 1
    train(outer, loop)
    assert loop.step == 1 and manager.factors[-1] == 1.0
    manager.replicas = 3  # one joins: torchft divides by three, and two have trained
    train(outer, loop)
    assert loop.step == 2 and manager.factors[-1] == 1.5


@pytest.mark.parametrize(
    ("vote", "whole"),
    [
        (LaneVote(samples=12, lanes=2, memberships=14, squares=98), True),
        (LaneVote(samples=12, lanes=1, memberships=7, squares=49), True),
        (LaneVote(samples=6, lanes=1, memberships=7, squares=49), False),
        (LaneVote(), False),
        (LaneVote(samples=12, lanes=2, memberships=15, squares=49 + 64), False),
    ],
    ids=["two lanes", "one", "one is lost", "none", "of two memberships"],
)
def test_all_replicas_decide_alike(vote: LaneVote, whole: bool) -> None:
    """By the sums alone."""
    assert vote.is_whole(12) == whole


@pytest.mark.parametrize(
    ("number", "words"),
    [(7, "begin with different weights"), (10, "deal out different steps")],
    ids=["weights", "rule"],
)
def test_replicas_that_differ(make: Callable[[], tuple[Manager, LocalSGD, Any]], number: int, words: str) -> None:
    manager, outer, loop = make()
    manager.replicas = 2
    reduce = manager.allreduce

    def other(tensor: torch.Tensor, **more: Any) -> Any:
        work = reduce(tensor, **more)
        tensor[number] += 1
        return work

    manager.allreduce = other
    with pytest.raises(StateError, match=f"the replicas {words}"):
        train(outer, loop)


def test_a_loop_that_makes_inner_steps_by_itself(make: Callable[[], tuple[Manager, LocalSGD, Any]]) -> None:
    _, outer, loop = make()
    train(outer, loop)
    for batch in loop:
        (outer._model(batch).mean() * loop.weight).backward()
        with pytest.raises(StateError, match="an inner step is made in the wrong place"):
            outer._local_optimizer.step()
        break
    with pytest.raises(StateError, match="an inner step is made in the wrong place"):
        train(outer, loop)


def test_a_sum_over_all_replicas(make: Callable[[], tuple[Manager, LocalSGD, Any]]) -> None:
    _, outer, loop = make()
    train(outer, loop)
    with pytest.raises(UsageError, match=r"loop\.total\(\) cannot be used with LocalSGD and DiLoCo"):
        loop.total(1)


def test_it_is_not_entered(make: Callable[[], tuple[Manager, LocalSGD, Any]]) -> None:
    _, outer, loop = make()
    outer._hooks = []
    with pytest.raises(UsageError, match="LocalSGD is not entered"):
        next(iter(loop))


@pytest.mark.parametrize(
    ("of_manager", "of_outer", "words"),
    [
        ({"_use_async_quorum": True}, {}, "use_async_quorum=True cannot be used"),
        ({"_init_sync": True}, {}, "init_sync=True cannot be used"),
        ({}, {"_fragments": 2, "_fragment_sync_delay": 0}, "model_fragments cannot be used"),
        ({}, {"_fragments": 1, "_fragment_sync_delay": 1}, "fragment_sync_delay cannot be used"),
        ({}, {"_fragments": 1, "_fragment_sync_delay": 0, "alpha": 0.5}, "fragment_update_alpha cannot be used"),
        ({}, {"_hooks": None}, "this is not torchft's LocalSGD"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_refused(of_manager: dict[str, Any], of_outer: dict[str, Any], words: str, tmp_path: Path) -> None:
    manager = Manager()
    for name, value in of_manager.items():
        setattr(manager, name, value)
    outer, alpha = LocalSGD(manager), of_outer.pop("alpha", 0.0)
    fragment = SimpleNamespace(_fragment_update_alpha=alpha, original_parameters={})
    for name, value in of_outer.items():
        if value is None:
            delattr(outer, name)
        else:
            setattr(outer, name, [fragment] * value if name == "_fragments" else value)
    checkpoints = megaresume.Checkpoints(save_dir=tmp_path)
    with pytest.raises(MegaresumeError, match=words):
        attach(outer, data(MICRO), global_batch_size=SIZE, checkpoints=checkpoints)
