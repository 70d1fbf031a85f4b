"""What of `megaresume.attach` needs no VeRL: what a trainer iterates over, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.checkpoint.meter.clocks import Clocks
from megaresume.hosts.feeds import ItemFeed
from megaresume.hosts.steps import Steps
from megaresume.hosts.verl import Batches, Prompts, attach, attach_prompts
from megaresume.stream.errors import StateError, UsageError


def batches(batch_size: int, epochs: int, state: Any = None, step: int = 0) -> tuple[Batches, Steps]:
    """Of ten items an epoch, from a state on."""
    feed = ItemFeed(megaresume.DataLoader(torch.arange(10), batch_size=batch_size, drop_last=True))
    steps = Steps(feed)
    steps.session = SimpleNamespace(step_begins=lambda: None, clocks=Clocks())  # type: ignore[assignment]
    source = Batches(steps, epochs)
    if state is not None:
        feed.loader.load_state_dict(state)
        steps.loaded(step, feed.loader.samples)
        source.end()
    return source, steps


def take(source: Batches, steps: Steps, most: int = 100) -> list[int]:
    """What one ``for`` trains."""
    handed: list[int] = []
    for batch in source:
        handed += batch.tolist()
        steps.stepped()
        if steps.step == most:
            break
    return handed


def test_one_for_is_the_whole_run() -> None:
    source, steps = batches(3, 3)
    whole = take(source, steps)
    assert sorted(whole[:10]) == sorted(whole[10:20]) == sorted(whole[20:]) == list(range(10))
    assert source.total == steps.step == 10 and len(source) == 11
    assert take(source, steps) == []


def test_its_end_with_another_batch_size() -> None:
    source, steps = batches(3, 3)
    before = take(source, steps, 4)
    state = steps.feed.snapshot(12).to_dict()
    source, steps = batches(2, 3, state, 4)
    assert source.total == 4 + 9
    whole, _ = batches(3, 3)
    assert before + take(source, steps) == take(whole, whole.steps)
    source, steps = batches(4, 5, state, 4)
    assert source.total == 4 + 9 and len(take(source, steps)) == 36


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match=r"not a supervised trainer(.|\n)*without ckpt_handler, training_client"):
        attach(SimpleNamespace(train_dataset=None, fit=None))
    handler = SimpleNamespace(default_hdfs_dir="hdfs://there", max_ckpt_to_keep=None, default_local_dir="/save")
    trainer = SimpleNamespace(ckpt_handler=handler, training_client=None, train_dataset=None, fit=None)
    with pytest.raises(UsageError, match="default_hdfs_dir cannot be used"):
        attach(trainer)
    handler.default_hdfs_dir = None
    with pytest.raises(UsageError, match="keep_last cannot be used"):
        attach(trainer, checkpoints=megaresume.Checkpoints(keep_last=3))


class Driver:
    """As much of a trainer of reinforcement learning as is looked at; ten prompts, three epochs."""

    def __init__(self, batch_size: int, found: Any = None, step: int = 0, **data: Any) -> None:
        trainer = SimpleNamespace(total_epochs=3, total_training_steps=None)
        self.config = SimpleNamespace(data=Data(shuffle=True, train_batch_size=batch_size, **data), trainer=trainer)
        self.train_dataset: Any = torch.arange(10)
        self.train_dataloader: Any = torch.utils.data.DataLoader(self.train_dataset, batch_size)
        self.global_steps, self.steps_per_epoch, self.total_training_steps = 0, 10 // batch_size, 0
        self._found, self._step = found, step

    def _load_checkpoint(self) -> None:
        self.global_steps = self._step
        if self._found is not None and self._step % len(self.train_dataloader):
            self.train_dataloader.load_state_dict(self._found)

    def _save_checkpoint(self) -> None:
        """Looked for."""

    def hand_out(self, most: int = 100) -> list[int]:
        """The prompts of the next steps, to the end of the run."""
        self._load_checkpoint()
        handed: list[int] = []
        for batch in self.train_dataloader:
            handed += batch.tolist()
            self.global_steps += 1
            if self.global_steps in (most, self.total_training_steps):
                break
        return handed


class Data(SimpleNamespace):
    """A part of VeRL's config."""

    get = SimpleNamespace.__getattribute__


@pytest.mark.parametrize(("batch_size", "step"), [(2, 5), (3, 5), (5, 5), (10, 4)])
def test_prompts_go_on(batch_size: int, step: int) -> None:
    whole = Driver(2, seed=3)
    attach_prompts(whole)
    order = whole.hand_out()
    assert sorted(order[:10]) == sorted(order[10:20]) == sorted(order[20:]) == list(range(10))
    assert order[:10] != order[10:20]
    first = Driver(2, seed=3)
    attach_prompts(first)
    before, state = first.hand_out(step), first.train_dataloader.state_dict()
    # Step 5 is the end of an epoch of steps of 2; step 4 is one of this run to VeRL, with a step more than it has.
    second = Driver(batch_size, state, step, seed=3)
    attach_prompts(second)
    after = second.hand_out()
    left = (30 - 2 * step) // batch_size
    assert before + after == order[: 2 * step + left * batch_size]
    assert second.total_training_steps == step + left < second.steps_per_epoch


def test_prompts_that_are_refused() -> None:
    driver = Driver(2, seed=None)
    attach_prompts(driver)
    driver.hand_out(4)
    state = driver.train_dataloader.state_dict()
    for found, step, words in (
        (None, 4, "no data.pt in global_step_4"),
        ({"_num_yielded": 4}, 4, "written without megaresume"),
        (state, 6, r"from different steps(.|\n)*data.pt of step 4"),
    ):
        other = Driver(2, found, step, seed=None)
        attach_prompts(other)
        with pytest.raises(StateError, match=words):
            other.hand_out()
    other = Driver(2, state, 4, seed=1)
    attach_prompts(other)
    with pytest.raises(StateError, match="seed"):
        other.hand_out()
    assert isinstance(other.train_dataloader, Prompts)
    with pytest.raises(UsageError, match="has its data already"):
        attach_prompts(other)
    with pytest.raises(UsageError, match="not a reinforcement-learning trainer of VeRL's"):
        attach_prompts(SimpleNamespace())
    other = Driver(2, seed=1)
    other.train_dataset = SimpleNamespace(on_batch_end=None)
    with pytest.raises(UsageError, match="prompts that change"):
        attach_prompts(other)
