"""What of `megaresume.attach` needs no VeRL: what a trainer iterates over, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.hosts.feeds import ItemFeed
from megaresume.hosts.steps import Steps
from megaresume.hosts.verl import CountedBatches, attach
from megaresume.stream.errors import UsageError


def batches(batch_size: int, epochs: int, state: Any = None, step: int = 0) -> tuple[CountedBatches, Steps]:
    """Of ten items an epoch, from a state on."""
    feed = ItemFeed(megaresume.DataLoader(torch.arange(10), batch_size=batch_size, drop_last=True))
    steps = Steps(feed)
    steps.session = SimpleNamespace(step_begins=lambda: None, clocks=Clocks())  # type: ignore[assignment]
    source = CountedBatches(steps, epochs)
    if state is not None:
        feed.loader.load_state_dict(state)
        steps.loaded(step, feed.loader.samples)
        source.end()
    return source, steps


def take(source: CountedBatches, steps: Steps, most: int = 100) -> list[int]:
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
