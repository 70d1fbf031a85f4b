"""What of `megaresume.attach` needs no torchtitan: its data in a checkpoint, and what it refuses."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import megaresume
from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.hosts.feeds import ItemFeed
from megaresume.hosts.steps import Steps
from megaresume.hosts.torchtitan import CountedBatches, attach
from megaresume.hosts.trainer import Carried
from megaresume.stream.errors import StateError, UsageError


def test_the_data_in_a_checkpoint(tmp_path: Path) -> None:
    """Of another length than what is there before the load, as states are."""
    saved, loaded = Carried(), Carried()
    saved.text = "x" * 1000
    dcp.save({"dataloader": saved}, checkpoint_id=tmp_path, no_dist=True)
    dcp.load({"dataloader": loaded}, checkpoint_id=tmp_path, no_dist=True)
    assert loaded.text == saved.text


def batches(**options: Any) -> tuple[CountedBatches, Steps]:
    """Two micro-batches a step, of seven items an epoch."""
    loader = megaresume.DataLoader(torch.arange(7), batch_size=2, accumulation=2, **options)
    steps = Steps(ItemFeed(loader))
    steps.session = SimpleNamespace(step_begins=lambda: None, clocks=Clocks())  # type: ignore[assignment]
    return CountedBatches(steps, lambda batch: batch.tolist()), steps


def test_epoch_after_epoch_to_the_end_of_the_data() -> None:
    source, steps = batches(max_epochs=3, drop_last=True)
    handed = []
    for number, batch in enumerate(source, 1):
        handed += batch
        if number % 2 == 0:
            steps.stepped()
    assert len(handed) == 20 and steps.step == 5  # of 21: the second half of step 5 is begun, and trained
    assert sorted(handed[:7]) == sorted(handed[7:14]) == list(range(7)) and len(set(handed[14:])) == 6


def test_a_batch_that_is_not_trained() -> None:
    source, _ = batches()
    with pytest.raises(StateError, match="a micro-batch was taken and not trained"):
        list(itertools.islice(source, 3))


def trainer(**manager: Any) -> Any:
    """With all that is looked for."""
    names = ("load", "save", "_should_save", "interval", "states", "save_future", "last_save_model_only")
    made = dict.fromkeys(names) | {"enable": True, "folder": "/save", "keep_latest_k": 0, "dcp_save": None}
    made |= {"initial_load_model_only": True} | manager
    return SimpleNamespace(
        train=None,
        dataloader=megaresume.DataLoader(torch.arange(10), batch_size=2),
        parallel_dims=SimpleNamespace(get_optional_mesh=lambda name: None),
        gradient_accumulation_steps=1,
        checkpointer=SimpleNamespace(**made),
    )


@pytest.mark.parametrize(
    ("manager", "words"),
    [
        ({"enable": False}, "checkpoint.enable: False"),
        ({"load_only": True}, "checkpoint.load_only: True"),
        ({"folder": "gs://bucket/run"}, "checkpoint.folder: gs://bucket/run"),
        ({"exclude_from_loading": ["dataloader", "optimizer"]}, "exclude_from_loading: dataloader\n"),
        ({"initial_load_path": "/old/step-5", "initial_load_model_only": False}, "/old/step-5, with initial_load"),
        ({"ft_manager": object()}, "torchft: enabled"),
    ],
)
def test_settings_that_are_refused(manager: Any, words: str) -> None:
    with pytest.raises(UsageError) as raised:
        attach(trainer(**manager))
    assert words in str(raised.value)


def test_loaders_that_are_refused() -> None:
    mine = trainer()
    mine.gradient_accumulation_steps = 4
    with pytest.raises(UsageError, match=r"samples of a step(.|\n)*accumulation=4"):
        attach(mine)
    mine = trainer()
    mine.dataloader = megaresume.DataLoader(torch.arange(10), batch_size=2, dp_rank=1, dp_size=2)
    with pytest.raises(UsageError, match="disagree about dp_rank"):
        attach(mine)
    mine.dataloader = megaresume.DataLoader(torch.arange(10), batch_size=2, max_epochs=2)
    with pytest.raises(UsageError, match="the last step of the data may be short"):
        attach(mine)
    mine.dataloader = torch.utils.data.DataLoader(torch.arange(10))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"megaresume\.attach needs a loader of megaresume's"):
        attach(mine)


def test_what_is_no_trainer() -> None:
    with pytest.raises(UsageError, match=r"without Trainer.train(.|\n)*CheckpointManager.save"):
        attach(object())
    mine = trainer()
    with pytest.raises(UsageError, match="save_dir cannot be used"):
        attach(mine, checkpoints=megaresume.Checkpoints(save_dir="/elsewhere"))


def test_a_stop_saves_the_step_that_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchtitan counts a step before it reads the first batch of it."""
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.2.2")
    stop, saved = tmp_path / "stop", []

    def save(step: int, last: bool) -> None:
        saved.append((step, mine.step))
        (tmp_path / "run" / f"step-{step}").mkdir(parents=True)
        (tmp_path / "run" / f"step-{step}" / ".metadata").write_text("the weights")

    def train() -> None:
        mine.checkpointer.load(-1)
        source = iter(mine.dataloader)
        while True:
            mine.step += 1
            next(source)
            mine.checkpointer.save(mine.step, False)
            stop.touch()

    mine = trainer(folder=str(tmp_path / "run"), load=lambda _: False, save=save, states={}, _should_save=lambda *_: 0)
    mine.train, mine.step, mine.device = train, 0, torch.device("cpu")
    attach(mine, stop=megaresume.StopConditions(file=str(stop)))
    with pytest.raises(SystemExit):
        mine.train()
    assert saved == [(1, 1)] and mine.step == 2
