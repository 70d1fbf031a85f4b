"""What of `megaresume.attach` needs no Megatron-Bridge: what is read, counted, carried and refused."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import megaresume
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.hosts.feeds import ItemFeed
from megaresume.hosts.megatron_bridge import BridgeHost, Carrying, attach
from megaresume.hosts.steps import Steps
from megaresume.stream.errors import StateError, UsageError


def config(**changes: Any) -> SimpleNamespace:
    """As much of Bridge's as is looked at."""
    checkpoint = SimpleNamespace(
        save="/save",
        load="/save",
        most_recent_k=-1,
        custom_manager_class=None,
        ckpt_format="torch_dist",
        async_save=False,
        non_persistent_save_interval=None,
        save_optim=True,
        load_optim=True,
        save_interval=2,
    )
    model = SimpleNamespace(seq_length=8, virtual_pipeline_model_parallel_size=None)
    train = SimpleNamespace(num_epochs=None, train_iters=5, global_batch_size=4, micro_batch_size=2)
    whole = SimpleNamespace(
        checkpoint=checkpoint, model=model, train=train, dataset=None, validation=SimpleNamespace(eval_iters=0)
    )
    for name, value in changes.items():
        owner, _, name = name.partition("__")
        setattr(getattr(whole, owner), name, value)
    return whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"checkpoint__save": None}, "needs checkpoint.save\n"),
        ({"checkpoint__save": "msc://there"}, "a remote checkpoint.save"),
        ({"checkpoint__custom_manager_class": "theirs.Manager"}, "checkpoint.custom_manager_class"),
        ({"checkpoint__ckpt_format": "fsdp_dtensor"}, "checkpoint.ckpt_format"),
        ({"checkpoint__async_save": True}, "checkpoint.async_save"),
        ({"checkpoint__non_persistent_save_interval": 5}, "checkpoint.non_persistent_save_interval"),
        ({"checkpoint__load_optim": False}, "checkpoint.load_optim=False"),
        ({"train__num_epochs": 2.0}, "train.num_epochs"),
        ({"model__virtual_pipeline_model_parallel_size": 2}, "a virtual pipeline"),
        ({"model__megatron_mimo_parallelism_config": {}}, "MegatronMIMO"),
        ({"validation__eval_iters": 3}, r"validation.eval_iters(.|\n)*and no validation"),
    ],
)
def test_settings_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attach(config(**changes), lambda rank, ranks: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UsageError, match=r"not a config of Megatron-Bridge(.|\n)*without train, model"):
        attach(SimpleNamespace(), lambda rank, ranks: None)  # type: ignore[arg-type, return-value]


def test_copies_in_a_store_are_refused() -> None:
    host = BridgeHost(config(), lambda rank, ranks: None, None)
    with pytest.raises(UsageError, match="stage_to cannot be a URL with Megatron-Bridge"):
        host.settings(megaresume.Checkpoints(stage_to="s3://runs/run"))
    assert host.settings(megaresume.Checkpoints(stage_to="/shared/run")).stage_to == "/shared/run"


def loader(**options: Any) -> megaresume.DataLoader:
    """Of ten items."""
    return megaresume.DataLoader(torch.arange(10), **{"batch_size": 2, "accumulation": 2} | options)


def feed_of(made: Any) -> Any:
    """As rank 0 of 1 makes it."""
    host = BridgeHost(config(), lambda rank, ranks: made, None)
    host.ranks = (0, 1)
    return host.feed()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dp_rank": 1, "dp_size": 2, "accumulation": 1}, "disagree about dp_rank"),
        ({"dp_size": 2, "accumulation": 1}, "disagree about dp_size"),
        ({"batch_size": 1, "accumulation": 4}, "disagree about micro-batches"),
        ({"accumulation": 1}, r"disagree about samples of a step(.|\n)*accumulation=2"),
        ({"max_epochs": 2}, "the last step of the data may be short"),
        ({"max_epochs": 1, "drop_last": True}, "the data ends before the run does"),
    ],
)
def test_loaders_that_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        feed_of(loader(**options))
    with pytest.raises(UsageError, match=r"megaresume\.attach needs a loader of megaresume's"):
        feed_of(torch.utils.data.DataLoader(torch.arange(10)))
    assert feed_of(loader(max_epochs=2, drop_last=True)).has(16)


class Opened(BridgeHost):
    """A run without a session."""

    def __init__(self, reads: bool = True) -> None:
        super().__init__(config(), lambda *_: None, lambda rank, ranks: [0, 1, 2])
        self.steps, self.reads = Steps(ItemFeed(loader())), reads
        self.steps.session = SimpleNamespace(step_begins=lambda: None, clocks=Clocks())  # type: ignore[assignment]


def test_every_batch_is_read_for_the_step_that_is_counted() -> None:
    run = Opened()
    batches, read = run.batches(), []
    for step in range(1, 8):
        run.stepped(SimpleNamespace(step=step - 1, consumed_train_samples=4 * step - 4))
        read += [item for _ in range(2) for item in next(batches).tolist()]
    run.stepped(SimpleNamespace(step=7, consumed_train_samples=28))
    assert sorted(read[:10]) == sorted(read[10:20]) == list(range(10)) and len(set(read[20:])) == 8


@pytest.mark.parametrize(
    ("taken", "step", "samples", "words"),
    [
        (1, 1, 4, "a step was made without all of its micro-batches"),
        (2, 1, 8, "count different steps"),
        (0, 1, 4, "no micro-batch was taken for it"),
        (2, 2, 8, "count different steps"),
    ],
)
def test_other_steps_than_those_of_the_data(taken: int, step: int, samples: int, words: str) -> None:
    run = Opened()
    batches = run.batches()
    for _ in range(taken):
        next(batches)
    with pytest.raises(StateError, match=words):
        run.stepped(SimpleNamespace(step=step, consumed_train_samples=samples))
    with pytest.raises(StateError, match=words):
        next(batches)


def test_a_stage_in_the_middle_of_a_pipeline_reads_nothing() -> None:
    run = Opened(reads=False)
    run.stepped(SimpleNamespace(step=3, consumed_train_samples=12))
    assert (run.steps.step, run.steps.samples) == (3, 12)


def test_each_evaluation_begins_at_the_first_batch() -> None:
    run, groups = Opened(), SimpleNamespace(dp=SimpleNamespace(rank=lambda: 0, size=lambda: 1))
    batches = run.validation(groups)
    assert batches is not None
    assert list(itertools.islice(batches, 2)) == [0, 1]
    run.step = 5
    assert list(itertools.islice(batches, 4)) == [0, 1, 2, 0]


def test_the_data_state_is_saved_with_the_schedule() -> None:
    loaded: dict[str, Any] = {}
    schedule = SimpleNamespace(state_dict=lambda: {"num_steps": 3}, load_state_dict=loaded.update, step=7)
    saved = Carrying(schedule, "a state").state_dict()
    found = Carrying(schedule)
    found.load_state_dict(saved)
    assert (found.text, loaded, found.step) == ("a state", {"num_steps": 3}, 7)
    found.load_state_dict({"num_steps": 4})
    assert (found.text, loaded) == ("", {"num_steps": 4})
