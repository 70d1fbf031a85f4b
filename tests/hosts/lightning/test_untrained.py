"""What Lightning counts as trained, and was not: refused before the next save. In this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision

from megaresume.stream.errors import StateError
from tests.hosts.lightning.program import Module, attached, loader, newest
from tests.hosts.torch.record import lines

pytestmark = [pytest.mark.process, pytest.mark.filterwarnings("ignore::UserWarning:lightning")]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "run"


class Leaving(Module):
    """No backward pass, or no optimizer step, for the micro-batch with a number; or as ``made`` makes the step."""

    def __init__(
        self, directory: Path, *, backward: int | None = None, step: int | None = None, made: Callable[[Any], None]
    ) -> None:
        super().__init__(directory)
        self.no_backward, self.no_step, self.made = backward, step, made

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == self.no_backward else loss

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx == self.no_step:
            optimizer_closure()
            self.made(optimizer.optimizer)
        else:
            optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("leave", "accumulation", "words"),
    [
        ({"backward": 2}, 1, "taken since step 2, and no backward pass"),
        ({"backward": 2}, 2, "taken since step 1, and no backward pass"),
        ({"step": 3}, 2, "no optimizer step after the micro-batches of step 2"),
    ],
)
def test_what_lightning_counts_and_was_not_done(
    directory: Path, leave: dict[str, int], accumulation: int, words: str
) -> None:
    saver = ModelCheckpoint(directory.with_name("links"), every_n_train_steps=1)
    trainer = attached(directory, saver, accumulate_grad_batches=accumulation)
    with pytest.raises(StateError, match=words):
        trainer.fit(Leaving(directory, made=lambda _: None, **leave), loader(accumulation=accumulation))
    assert newest(directory) == (2 if accumulation == 1 else 1)


def test_steps_made_with_an_optimizer_of_torchs_itself(directory: Path) -> None:
    attached(directory).fit(Leaving(directory, step=3, made=lambda optimizer: optimizer.step()), loader())
    assert len(lines(directory)) == 6


class Scaled(Module):
    """The third loss is infinite."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (torch.inf if batch_idx == 2 else 1)


def test_a_step_that_a_gradient_scaler_leaves_out(directory: Path) -> None:
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=4))
    module = Scaled(directory)
    attached(directory, plugins=[precision]).fit(module, loader())
    assert len(lines(directory)) == 6
    assert {int(one["step"]) for one in module.optimizers().optimizer.state.values()} == {5}  # type: ignore[union-attr]
