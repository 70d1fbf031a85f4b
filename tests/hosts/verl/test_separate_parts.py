"""What of `megaresume.attach` for VeRL's trainers that roll out beside the training needs neither VeRL nor Ray."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import megaresume
from megaresume.hosts.verl_separate import attach
from megaresume.runs.prompts import prove
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.verl.test_prompt_parts import Part

ROLLOUTS, STEP = 2, 3


class Rollouter:
    """As much of VeRL's as is looked at: 20 prompts, two epochs, three prompts a step."""

    def __init__(self, directory: Path, most: int | None = None, items: int = 20) -> None:
        trainer = Part(total_epochs=2, default_local_dir=str(directory))
        self.config = Part(
            data=Part(shuffle=True, seed=7),
            trainer=trainer,
            actor_rollout_ref=Part(rollout=Part(n=ROLLOUTS)),
            rollout=Part(total_rollout_steps=most),
            async_training=Part(trigger_parameter_sync_step=1),
        )
        self.required_samples, self.global_steps = STEP, 1
        self._create_dataloader(items)
        self.total_rollout_steps = len(self.train_dataloader) * 2

    def _create_dataloader(self, items: int) -> None:
        self.train_dataset = torch.arange(items)
        self.train_dataloader: Any = torch.utils.data.DataLoader(self.train_dataset, 1)

    def _create_continuous_iterator(self) -> Any:
        """Replaced."""

    def load_checkpoint(self, found: Any, version: int) -> None:
        """As VeRL does: the position is what the versions of the weights have taken; nothing without a data.pt."""
        self.global_steps = version * STEP + 1
        if found is not None:
            self.train_dataloader.load_state_dict(found)

    def _feed_samples(self) -> Any:
        for epoch, batch in self._create_continuous_iterator():
            yield f"uid_sample_{epoch}_{self.global_steps}", int(batch[0])
            if self.global_steps >= self.total_rollout_steps:
                break
            self.global_steps += 1

    def _fit_update_actor(self, batch: Any) -> Any:
        """Inherited, and not called."""


class Called:
    """A handle of Ray's, whose actor is in this process."""

    def __init__(self, actor: Any) -> None:
        self.__ray_call__ = SimpleNamespace(remote=lambda function, *args: function(actor, *args))


class Trainer:
    """As much of VeRL's as is looked at."""

    def __init__(self, rollouter: Any) -> None:
        self.rollouter, self.current_param_version = Called(rollouter), 0
        self._rollouter, self.saved = rollouter, None
        self._init_worker_groups()

    def _init_worker_groups(self) -> None:
        """After this it is attached."""

    def _get_samples_from_queue(self) -> None:
        """Looked for."""

    async def fit_step(self, rows: list[tuple[str, int]]) -> None:
        """A step of these rows."""
        fields = {"uid": np.array([uid for uid, _ in rows], dtype=object), "min_global_steps": [v for _, v in rows]}
        self._fit_update_actor(SimpleNamespace(non_tensor_batch=fields))
        self.current_param_version += 1

    def _fit_update_actor(self, batch: Any) -> Any:
        return batch

    def _save_checkpoint(self) -> None:
        self.saved = self._rollouter.train_dataloader.state_dict()

    def step(self, *rows: tuple[str, int]) -> None:
        """See `fit_step`."""
        asyncio.run(self.fit_step([row for row in rows for _ in range(ROLLOUTS)]))


@pytest.fixture(autouse=True)
def ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a handle returns is there already."""
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda found: found))


def started(directory: Path, found: Any = None, version: int = 0, **more: Any) -> tuple[Rollouter, Trainer]:
    """Both, attached by their base class, with a checkpoint loaded."""
    base = type("SeparateRayPPOTrainer", (), {"__module__": "verl.experimental.separation.ray_trainer"})
    for name in ("_create_dataloader", "_init_worker_groups"):
        setattr(base, name, getattr(Rollouter if name == "_create_dataloader" else Trainer, name))
    megaresume.attach(base)
    hidden = {"_create_dataloader": base._create_dataloader}  # type: ignore[attr-defined]
    rollouter = type("FullyAsyncRollouter", (Rollouter,), hidden)(directory, **more)
    hidden = {"_init_worker_groups": base._init_worker_groups}  # type: ignore[attr-defined]
    trainer = type("FullyAsyncTrainer", (Trainer,), hidden)(rollouter)
    trainer.current_param_version = version
    if found is not None or version:
        rollouter.load_checkpoint(found, version)
    return rollouter, trainer


def test_what_was_in_flight_is_fed_first(tmp_path: Path) -> None:
    rollouter, trainer = started(tmp_path)
    feed = rollouter._feed_samples()
    fed = deque(next(feed) for _ in range(10))
    order = [item for _, item in fed]
    out = [fed[k] for k in (4, 0, 7, 2, 1, 9)]
    trainer.step(*[(uid, 0) for uid, _ in out[:3]])
    trainer.step(*[(uid, 0) for uid, _ in out[3:]])
    trainer._save_checkpoint()
    assert (tmp_path / "global_step_2" / "prompts.json").is_file()
    trainer.step(*[(next(feed)[0], 1) for _ in range(3)])  # a step that is lost
    again, other = started(tmp_path, trainer.saved, 2)
    feed = again._feed_samples()
    left = list(feed)
    assert [item for _, item in left[:4]] == [order[k] for k in (3, 5, 6, 8)]
    assert len(left) == 40 - 6 and again.global_steps == 40
    times = np.bincount([item for _, item in left] + [item for _, item in out], minlength=20)
    assert times.tolist() == [2] * 20
    for at in range(0, 33, 3):
        other.step(*[(uid, 2) for uid, _ in left[at : at + 3]])
    other._save_checkpoint()
    proof = prove(tmp_path)
    assert proof.holds, proof.problems
    assert (proof.trained, proof.in_flight) == (39, 1)
    assert proof.steps == dict.fromkeys(range(1, 14), 3)


def test_as_many_are_fed_as_the_run_has(tmp_path: Path) -> None:
    rollouter, trainer = started(tmp_path, most=7)
    fed = list(rollouter._feed_samples())
    assert len(fed) == 7
    for at in (0, 3):
        trainer.step(*[(uid, 0) for uid, _ in fed[at : at + 3]])
    trainer._save_checkpoint()
    again, other = started(tmp_path, trainer.saved, 2, most=7)
    left = list(again._feed_samples())
    assert [item for _, item in left] == [fed[6][1]]
    other.step((left[0][0], 2))
    other._save_checkpoint()
    # Nothing is left; more epochs, or prompts, are.
    assert list(started(tmp_path, other.saved, 3, most=7)[0]._feed_samples()) == []
    assert len(list(started(tmp_path, other.saved, 3, most=9)[0]._feed_samples())) == 2


def test_what_is_refused(tmp_path: Path) -> None:
    rollouter, trainer = started(tmp_path)
    uid, _ = next(rollouter._feed_samples())
    trainer.step((uid, 0))
    with pytest.raises(StateError, match="was not wanted"):
        trainer.step((uid, 0))
    trainer._save_checkpoint()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("1")
    # In the trainer, as VeRL's rollouter would only end.
    for found, version, words in (
        (None, 1, "no data.pt in global_step_1"),
        (None, 0, "no state was loaded"),  # trainer.resume_mode=disable
    ):
        _, other = started(tmp_path, found, version)
        with pytest.raises(StateError, match=words):
            other.step(("uid_sample_0-x-y_1", 0))
    with pytest.raises(StateError, match="different steps"):
        started(tmp_path, trainer.saved, 2)
    with pytest.raises(UsageError, match="is attached already"):
        attach(trainer)
    with pytest.raises(UsageError, match="is attached already"):
        attach(rollouter)
    with pytest.raises(UsageError, match="not a trainer of VeRL's that rolls out beside the training"):
        attach(SimpleNamespace())
    with pytest.raises(StateError, match="was never issued"):
        trainer.step(("1b4e28ba-2fa1-11d2-883f-0016d3cca427", 0))


class OneStep:
    """As much of VeRL's as is looked at: batches of two; one rolls out while the one before trains."""

    def __init__(self, directory: Path, found: Any = None, step: int = 0) -> None:
        self._found, self._step = found, step
        trainer = Part(total_epochs=2, total_training_steps=None, default_local_dir=str(directory))
        rollout = Part(rollout=Part(n=ROLLOUTS))
        data = Part(shuffle=True, seed=7, train_batch_size=2)
        self.config = Part(data=data, trainer=trainer, actor_rollout_ref=rollout)
        self.train_dataset = torch.arange(20)
        self.train_dataloader: Any = torch.utils.data.DataLoader(self.train_dataset, 2)
        self.global_steps, self.total_training_steps = 0, 0

    def _create_continuous_iterator(self) -> Any:
        for epoch in range(2):
            for batch in self.train_dataloader:
                yield epoch, batch

    def _async_gen_next_batch(self) -> None:
        """Looked for."""

    def _load_checkpoint(self) -> None:
        self.global_steps = self._step
        if self._found is not None:
            self.train_dataloader.load_state_dict(self._found)

    def _fit_update_actor(self, batch: Any) -> Any:
        return batch

    def fit(self, most: int) -> tuple[list[int], Any]:
        """What was trained, and the state after it."""
        iterator, trained = self._create_continuous_iterator(), []
        _, ahead = next(iterator)
        while self.global_steps < most:
            self.global_steps += 1
            batch = ahead
            if self.global_steps < self.total_training_steps:
                _, ahead = next(iterator)
            trained += self._fit_update_actor(batch).tolist()
        return trained, self.train_dataloader.state_dict()


def test_a_batch_that_rolls_out_ahead_is_not_lost(tmp_path: Path) -> None:
    first = OneStep(tmp_path)
    attach(first)
    first._load_checkpoint()
    trained, state = first.fit(4)
    assert len(first._megaresume.in_flight) == 2  # type: ignore[attr-defined]
    again = OneStep(tmp_path, state, 4)
    attach(again)
    again._load_checkpoint()
    assert again.total_training_steps == 20
    left, _ = again.fit(20)
    assert sorted(trained + left) == sorted([*range(20), *range(20)])
    proof = prove(tmp_path)
    assert proof.holds, proof.problems
    assert (proof.trained, proof.in_flight, proof.steps) == (40, 0, dict.fromkeys(range(1, 21), 2))
