"""What people do with a Lightning Trainer, and what `megaresume.attach` makes of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lightning")

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.strategies import DeepSpeedStrategy
from lightning.pytorch.utilities import CombinedLoader

import megaresume
from megaresume import Checkpoints
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.hosts.feeds import ItemFeed
from megaresume.hosts.lightning import LightningHost
from megaresume.hosts.steps import Steps
from megaresume.stream.errors import StateError, UsageError
from tests.hosts.lightning.program import Module, attached, loader, newest, run, trainer_of
from tests.hosts.torch.program import BASE, Numbers
from tests.hosts.torch.record import items, lines, trained

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


# What is fine


def test_hooks_of_each_step_that_nothing_is_told_by_are_not_called(directory: Path) -> None:
    """Lightning profiles each call of a callback, which takes longer than most of what hooks do."""
    trainer = attached(directory, profiler=SimpleProfiler())
    trainer.fit(Module(directory), loader())
    times = {name: len(calls) for name, calls in trainer.profiler.recorded_durations.items() if ".DataResume." in name}
    each_step = {name.rpartition(".")[2] for name, num in times.items() if num > 1}
    assert each_step == {"on_train_batch_end"}


def test_deepspeeds_strategy_is_told_the_batch_size(directory: Path) -> None:
    pytest.importorskip("deepspeed")
    strategy = DeepSpeedStrategy()
    trainer = attached(directory, strategy=strategy)
    strategy._lightning_module = module = Module(directory)
    module.trainer = trainer
    found = []
    for one in (loader(batch_size=3), torch.utils.data.DataLoader(Numbers(), batch_size=5)):
        trainer.fit_loop._data_source.instance = one
        found.append(strategy._auto_select_batch_size())
    assert found == [3, 5]


def test_validations_before_in_between_and_after(directory: Path) -> None:
    held_out = torch.utils.data.DataLoader(Numbers(8), batch_size=4, shuffle=True)
    trainer, module = attached(directory, ModelCheckpoint(directory.with_name("links"))), Module(directory)
    trainer.validate(module, held_out, verbose=False)
    trainer.fit(module, loader(), held_out)
    assert newest(directory) == 6
    trainer.save_checkpoint(directory.with_name("after.ckpt"))  # a file of Lightning's
    trainer.validate(module, held_out, ckpt_path=directory.with_name("after.ckpt"), verbose=False)
    run(directory.with_name("whole"), batch=4, accumulation=1, trainer={"max_steps": 6})
    assert items(trained(directory)) == items(trained(directory.with_name("whole")))


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        return loader(accumulation=self.trainer.accumulate_grad_batches)

    def state_dict(self) -> dict[str, Any]:
        return {"own": 1}


def test_a_data_module_and_a_schedule_of_all_steps(directory: Path) -> None:
    rates: list[float] = []

    class Scheduled(Module):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            steps = self.trainer.estimated_stepping_batches
            assert steps == 39
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

        def on_train_batch_end(self, *_: Any) -> None:
            rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    layout = {"max_steps": -1, "max_epochs": 3, "accumulate_grad_batches": 2}
    saver = {"every_n_train_steps": 5, "save_top_k": -1}
    for attempt in (1, 2):
        rates.clear()
        trainer = attached(directory, ModelCheckpoint(directory.with_name("links"), **saver), **layout)
        trainer.fit(Scheduled(directory, attempt), datamodule=Data(), ckpt_path="last")
    assert next(line["step"] for line in lines(directory) if line["attempt"] == 2) == 36
    assert rates[1::2] == [pytest.approx(1 - step / 39) for step in (36, 37)]


class Plateau(Module):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss"}}


def test_a_plateau_at_the_end_of_an_epoch(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    held_out = torch.utils.data.DataLoader(Numbers(8), batch_size=4)
    for epochs, said in ((1, False), (2, True)):
        links = ModelCheckpoint(directory.with_name("links"))
        trainer = attached(directory, links, max_steps=-1, max_epochs=epochs)
        trainer.fit(Plateau(directory, epochs), loader(), held_out, ckpt_path="last")
        assert ("before Lightning's update of ReduceLROnPlateau" in capfd.readouterr().out) == said


def test_early_stopping_ends_the_run_for_good(directory: Path) -> None:
    stopping = EarlyStopping("loss", patience=0, mode="min", stopping_threshold=1e9)
    trainer = attached(directory, stopping, accumulate_grad_batches=4, max_steps=-1, max_epochs=3, val_check_interval=6)
    held_out = torch.utils.data.DataLoader(Numbers(8), batch_size=4)
    trainer.fit(Module(directory), loader(accumulation=4), held_out)  # after six micro-batches: in the second step
    assert [e.iteration for e in read_ledger(ledger_path(directory)).entries if e.kind == "finished"] == [1]


@pytest.mark.parametrize("every", [5, 25])
def test_early_stopping_counts_the_validation_that_follows_a_save(
    directory: Path, every: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """A ModelCheckpoint saves before the validation of its step: of the fifth, or the last one of an epoch."""
    held_out = torch.utils.data.DataLoader(Numbers(8), batch_size=4)
    validated = []
    for attempt, steps in ((1, every), (2, 6 * every)):
        callbacks = (
            EarlyStopping("loss", patience=2, min_delta=1e9),
            ModelCheckpoint(directory.with_name("links"), every_n_train_steps=every),
        )
        trainer, module = attached(directory, *callbacks, max_steps=steps, val_check_interval=every), Module(directory)
        trainer.fit(module, loader(), held_out, ckpt_path="last")
        validated.append(module.validated)
        assert ("before Lightning's validation for EarlyStopping" in capfd.readouterr().out) == (every * attempt == 50)
    assert validated == [[5], [5, 10, 15]] if every == 5 else [[25], [50, 75, 100]]


def test_saves_in_the_middle_of_a_step(directory: Path) -> None:
    """A validation after every third micro-batch, of steps of two; and a call in a hook."""
    links = directory.with_name("links")

    def save(trainer: L.Trainer) -> None:
        if trainer.fit_loop.total_batch_idx == 6:
            trainer.save_checkpoint(links / "own.ckpt")

    saver = {"every_n_train_steps": None, "save_on_train_epoch_end": False}
    layout = {"max_steps": 6, "val_check_interval": 3}
    run(directory, validate=True, saver=saver, watch=save, trainer=layout)
    # after three micro-batches, six, seven (by hand), nine and twelve
    steps = [e.iteration for e in read_ledger(ledger_path(directory)).entries if e.kind == "checkpoint"]
    assert steps == [2, 3, 4, 5, 6]
    with pytest.raises(UsageError, match=r"not a complete checkpoint(.|\n)*in the middle of a step"):
        run(directory, attempt=2, ckpt=links / "own.ckpt")
    run(directory, attempt=2, ckpt=directory / "global_step2", trainer={"max_steps": 6})
    again = [line["items"] for line in lines(directory) if line["attempt"] == 2]
    assert again == [line["items"] for line in lines(directory) if line["attempt"] == 1][4:]


class Alternating(Module):
    """Two optimizers by hand, each of which makes a step after ``every`` micro-batches."""

    every = 1

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        if (batch_idx + 1) % self.every == 0:
            for optimizer in self.optimizers():  # type: ignore[union-attr]
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.SGD(p, lr=0.01) for p in ([*self.model.body.parameters()], [*self.model.words.parameters()])
        ]


@pytest.mark.parametrize("every", [1, 2])
def test_optimization_by_hand(directory: Path, every: int) -> None:
    saver = {"every_n_train_steps": 4, "save_top_k": -1}
    for attempt, steps in ((1, 8), (2, 12)):  # as Lightning counts them: of both optimizers
        links = ModelCheckpoint(directory.with_name("links"), **saver)
        trainer, module = attached(directory, links, max_steps=steps), Alternating(directory, attempt)
        module.every = every
        trainer.fit(module, loader(accumulation=every), ckpt_path="last")
    handed = [line["items"] for line in lines(directory)]
    assert newest(directory) == 6 and len(handed) == 6 * every
    run(directory.with_name("whole"), batch=4, accumulation=1, trainer={"max_steps": 6 * every})
    assert items(handed) == items(trained(directory.with_name("whole")))


def test_a_signal(directory: Path) -> None:
    def ask(trainer: L.Trainer) -> None:
        if trainer.fit_loop.total_batch_idx == 4:  # in the middle of a step
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(megaresume.Stopped):
        run(directory, stop=megaresume.StopConditions(), watch=ask)
    assert newest(directory) == 3
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


# What is stopped


def test_two_fits_and_a_forgotten_path(directory: Path) -> None:
    saver = {"every_n_train_steps": 2}
    trainer, module = attached(directory, ModelCheckpoint(directory.with_name("links"), **saver)), Module(directory)
    trainer.fit(module, loader())
    with pytest.raises(UsageError, match="for one fit"):
        trainer.fit(module, loader())
    with pytest.raises(UsageError, match=r"did not load a checkpoint(.|\n)*ckpt_path='last'"):
        attached(directory).fit(Module(directory, 2), loader())
    with pytest.raises(UsageError, match="not a complete checkpoint"):
        attached(directory).fit(Module(directory, 2), loader(), ckpt_path=directory / "elsewhere.ckpt")
    assert not [line for line in lines(directory) if line["attempt"] == 2]


def test_one_loader_for_training_and_validation(directory: Path) -> None:
    one = loader()
    with pytest.raises(StateError, match=r"something else read from the loader|moved while"):
        attached(directory, val_check_interval=2).fit(Module(directory), one, one)


class Skipping(Module):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


def test_an_epoch_that_is_left_early(directory: Path) -> None:
    with pytest.raises(StateError, match=r"taken and not trained(.|\n)*samples 8 to 11 taken since step 2"):
        attached(directory).fit(Skipping(directory), loader())


def test_optimization_by_hand_with_another_accumulation(directory: Path) -> None:
    module = Alternating(directory)
    with pytest.raises(StateError, match=r"in the middle of a step of the data(.|\n)*accumulation=2"):
        attached(directory).fit(module, loader(accumulation=2))
    module = Alternating(directory)
    module.every = 2
    with pytest.raises(StateError, match="taken and not trained"):
        attached(directory).fit(module, loader())


# What is refused


def test_a_fast_dev_run_is_left_alone(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = attached(directory, fast_dev_run=True)
    assert "fast_dev_run saves nothing" in capsys.readouterr().out
    trainer.fit(Module(directory), loader(), ckpt_path="last")
    assert len(lines(directory)) == 1 and not directory.exists()


def test_items_that_no_rank_would_train_are_said_at_the_last_epoch(caplog: pytest.LogCaptureFixture) -> None:
    """One of 47, in steps of 4, one item at a time on two ranks: Lightning asks for no more batches than there are."""
    made = megaresume.DataLoader(Numbers(47), 1, accumulation=2, dp_rank=0, dp_size=2)
    fit_loop: Any = SimpleNamespace(max_epochs=1)
    host = LightningHost(SimpleNamespace(fit_loop=fit_loop), Checkpoints())
    host.steps = Steps(ItemFeed(made))
    for _ in range(2):
        assert host.batches_of_epoch() == (0, 23)
    assert caplog.text.count("the last 1 of the run's items will not be trained: its last step has 3, which") == 1


def test_batches_of_like_lengths(directory: Path) -> None:
    """Stopped within a window, and resumed in steps of another size."""
    lengths = [i * 37 % 100 for i in range(100)]
    like: dict[str, Any] = {"group_by_length": True, "lengths": lengths}
    order = [int(row[0] * BASE + row[1]) for batch in loader(batch_size=8, **like) for row in batch]
    run(directory, batch=4, accumulation=2, epochs=1, trainer={"max_steps": 5}, **like)
    run(directory, attempt=2, batch=2, accumulation=1, epochs=1, **like)
    steps = trained(directory)
    assert items(steps) == order[:100] and [len(step) for step in steps] == [8] * 5 + [2] * 30
    assert all(max(lengths[i] for i in step) - min(lengths[i] for i in step) < 40 for step in steps[:5])


def test_validation_after_every_so_many_batches_of_all_epochs(directory: Path) -> None:
    """In the place of limit_train_batches; an epoch has 25."""
    trainer = attached(directory, max_steps=40, val_check_interval=7, check_val_every_n_epoch=None)
    module = Module(directory)
    trainer.fit(module, loader(), torch.utils.data.DataLoader(Numbers(8), batch_size=4))
    assert module.validated == [7, 14, 21, 28, 35] and len(trained(directory)) == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"limit_train_batches": 0.5}, "limit_train_batches"),
        ({"overfit_batches": 2}, "overfit_batches"),
        ({"reload_dataloaders_every_n_epochs": 1}, "reload_dataloaders_every_n_epochs"),
        ({"strategy": "ddp_spawn", "devices": 2}, "a process for each script"),
        ({"plugins": [AsyncCheckpointIO()]}, "AsyncCheckpointIO"),
    ],
)
def test_settings_of_the_trainer(directory: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"{words}.* cannot be used with megaresume.attach"):
        attached(directory, **options)


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (lambda: GradientAccumulationScheduler({0: 1, 1: 2}), "GradientAccumulationScheduler"),
        (lambda: StochasticWeightAveraging(0.1), "StochasticWeightAveraging"),
        (LearningRateFinder, "LearningRateFinder"),
        (lambda: OnExceptionCheckpoint("."), "OnExceptionCheckpoint"),
        (lambda: ModelCheckpoint(save_on_exception=True), "save_on_exception"),
        (lambda: ModelCheckpoint("memory://elsewhere"), "a remote dirpath"),
    ],
)
def test_callbacks(directory: Path, callback: Callable[[], Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory.parent)  # where callbacks write that have no folder of their own
    with pytest.raises(UsageError, match=f"{words} cannot be used with megaresume.attach"):
        attached(directory, callback()).fit(Module(directory), loader())


class Own(Module):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(*next(dataloader_iter)[:2])


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (lambda: torch.utils.data.DataLoader(Numbers(), 4), "a loader of megaresume's"),
        (lambda: [loader(), loader()], "a loader of megaresume's"),
        (lambda: CombinedLoader(loader(), "max_size"), "a loader of megaresume's"),
        (
            lambda: loader(dp_rank=0, dp_size=2),
            "a loader of other ranks(.|\n)*rank 0 of 2; the Trainer's",
        ),
        (lambda: loader(accumulation=2), "accumulate_grad_batches other than the loader's"),
        (lambda: loader(max_epochs=2), "max_epochs other than the loader's"),
    ],
)
def test_loaders(directory: Path, data: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        attached(directory, max_steps=-1, max_epochs=3).fit(Module(directory), data())


def test_what_else(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"automatic requeue(.|\n)*stop=megaresume"), monkeypatch.context() as slurm:
        slurm.setenv("SLURM_NTASKS", "1")
        attached(directory, plugins=[SLURMEnvironment()])
    with pytest.raises(UsageError, match="other loops"), monkeypatch.context() as older:
        older.setattr("lightning.pytorch.__version__", "2.5.6")
        attached(directory)
    with pytest.raises(UsageError, match="dataloader_iter"):
        attached(directory).fit(Own(directory), loader())
    with pytest.raises(UsageError, match="no save_dir"):
        megaresume.attach(trainer_of(directory), checkpoints=Checkpoints())
    with pytest.raises(UsageError, match="max_steps beyond"):
        attached(directory, max_steps=26).fit(Module(directory), loader(max_epochs=1))
    trainer = attached(directory)
    with pytest.raises(UsageError, match="already"):
        megaresume.attach(trainer, checkpoints=Checkpoints(save_dir=directory))
    with pytest.raises(UsageError, match=r"by WORLD_SIZE, Trainer\.world_size 1"), monkeypatch.context() as launched:
        alone = attached(directory)
        launched.setenv("WORLD_SIZE", "2")
        alone.fit(Module(directory), loader(dp_rank=0, dp_size=1))
    timed = ModelCheckpoint(directory.with_name("links"), train_time_interval=timedelta(0))
    module = Module(directory)
    module.watch = lambda: module.trainer.save_checkpoint("x.ckpt", storage_options={})
    with pytest.raises(UsageError, match="storage_options"):
        attached(directory, timed).fit(module, loader())
