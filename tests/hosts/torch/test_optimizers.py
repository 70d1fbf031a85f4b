"""Optimizers without a state, or with that of some parameters, go on as if nobody had stopped. In this process."""

from __future__ import annotations

import functools
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

import megaresume
from megaresume import Checkpoints
from megaresume.stream.errors import CheckpointError, StateError, UsageError
from tests.hosts.torch.program import Numbers

SECOND_HEAD, FIRST_STEP, END = 4, 2, 8


class Run:
    """A model of two heads, in groups of their own in the other order, and the loop around it."""

    def __init__(self, directory: Path, writer: Any, optimizer: Any) -> None:
        torch.manual_seed(0)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)])
        first, second = (head.parameters() for head in self.heads)
        self.optimizer = optimizer([{"params": second}, {"params": first, "lr": 0.05}], lr=0.01)
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        objects = {"model": self.heads, "optimizer": self.optimizer}
        self.loop = megaresume.attach(objects, loader, checkpoints=Checkpoints(save_dir=directory), writer=writer)

    def train(self, stop: int) -> list[float]:
        """The losses until a step. The second head comes into use late; as a gradient scaler does, leave out steps."""
        losses = []
        for batch in self.loop:
            heads = self.heads if self.loop.step >= SECOND_HEAD else self.heads[:1]
            loss = sum(head(batch.float() / 100).pow(2).mean() for head in heads)
            loss.backward()
            if self.loop.step >= FIRST_STEP:
                self.optimizer.step()
            self.optimizer.zero_grad()
            self.loop.stepped()
            losses.append(loss.item())
            if self.loop.step == stop:
                break
        return losses


class Plain(torch.optim.Optimizer):
    """As Muon is often written: its step takes no closure."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    momentum = self.state[one].setdefault("momentum", torch.zeros_like(one))
                    one.sub_(momentum.mul_(0.9).add_(one.grad), alpha=group["lr"])


@pytest.mark.parametrize("writer", ["dcp", "torch"])
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, Plain])
def test_saved_before_a_parameter_has_a_state(tmp_path: Path, writer: str, optimizer: Any) -> None:
    whole = Run(tmp_path / "whole", writer, optimizer)
    losses: list[float] = []
    expected = whole.train(END)
    whole.loop.close()
    # Before any step of the optimizer, before the second head is used, after it.
    for stop in (FIRST_STEP - 1, SECOND_HEAD - 1, SECOND_HEAD + 1, END):
        run = Run(tmp_path / "parts", writer, optimizer)
        assert (run.loop.load() is None) == (not losses)
        losses += run.train(stop)
        run.loop.save()
        run.loop.close()
    assert losses == expected


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_a_load_in_the_middle_of_a_run(tmp_path: Path, writer: str) -> None:
    run = Run(tmp_path, writer, torch.optim.AdamW)
    run.loop.load()
    run.train(SECOND_HEAD - 1)
    run.loop.save()
    expected = run.train(END)
    run.loop.load()
    assert run.train(END) == expected
    run.loop.close()


def test_options_of_an_optimizer_that_would_be_loaded_without_its_state(tmp_path: Path) -> None:
    run = Run(tmp_path, "dcp", functools.partial(torch.optim.SGD, momentum=0.9))
    run.train(SECOND_HEAD - 1)
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path, "dcp", torch.optim.SGD)
    with pytest.raises(CheckpointError, match=r"cannot be read(.|\n)*today's does not have: momentum_buffer"):
        run.loop.load()
    run.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_a_parameter_that_is_frozen_when_it_is_loaded(tmp_path: Path, writer: str) -> None:
    """torch would leave out its state, and say nothing: it may be trained again by a later step."""
    whole = Run(tmp_path / "whole", writer, torch.optim.AdamW)
    expected = whole.train(END)
    whole.loop.close()
    run = Run(tmp_path / "run", writer, torch.optim.AdamW)
    losses = run.train(SECOND_HEAD + 1)
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path / "run", writer, torch.optim.AdamW)
    run.heads[1].requires_grad_(False)
    with pytest.raises(StateError, match=r"left out(.|\n)*optimizer\.1\.bias, optimizer\.1\.weight"):
        run.loop.load()
    run.loop.close()
    run = Run(tmp_path / "run", writer, torch.optim.AdamW)
    run.loop.load()
    run.heads[1].requires_grad_(False).requires_grad_()
    assert losses + run.train(END) == expected
    run.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_parameters_that_were_added_later(tmp_path: Path, writer: str) -> None:
    run = Run(tmp_path, writer, torch.optim.AdamW)
    run.train(SECOND_HEAD + 1)
    run.loop.save()
    run.loop.close()
    run = Run(tmp_path, writer, lambda groups, lr: torch.optim.AdamW(groups[1:], lr=lr))
    with pytest.raises(StateError, match=r"left out(.|\n)*optimizer\.1\.bias(.|\n)*when it is made"):
        run.loop.load()
    run.loop.close()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_parameters_that_stay_frozen(tmp_path: Path, writer: str) -> None:
    """As of a model of which adapters alone are trained, and whose optimizer was given all of it."""

    def frozen(directory: Path) -> Run:
        run = Run(directory, writer, torch.optim.AdamW)
        run.heads[1].requires_grad_(False)
        return run

    whole, run = frozen(tmp_path / "whole"), frozen(tmp_path / "run")
    expected, losses = whole.train(END), run.train(SECOND_HEAD + 1)
    run.loop.save()
    whole.loop.close()
    run.loop.close()
    run = frozen(tmp_path / "run")
    run.loop.load()
    assert losses + run.train(END) == expected
    assert all(parameter not in run.optimizer.state for parameter in run.heads[1].parameters())
    run.loop.close()


class Twofold(torch.optim.Adam):
    """Its step calls its parent's, which has hooks of its own."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Closures(torch.optim.LBFGS):
    """It steps several times in one step."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.mark.parametrize(
    "made",
    [
        lambda *models: [Twofold(model.parameters()) for model in models],
        lambda *models: [Closures(model.parameters()) for model in models],
        lambda *models: [torch.optim.SGD([p]) for model in models for p in model.parameters()],
    ],
    ids=["a subclass", "closures", "one for each parameter"],
)
def test_steps_that_are_one_for_each_batch(tmp_path: Path, made: Any) -> None:
    """Several optimizers, a scaler that skips a step, and steps within an accumulation."""
    torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])  # the hooks of the parent's step come with an instance
    models = torch.nn.ModuleDict({"one": torch.nn.Linear(2, 1), "other": torch.nn.Linear(2, 1)})
    optimizers = made(*models.values())
    loader = megaresume.DataLoader(Numbers(), batch_size=4, accumulation=2)
    objects = {"models": models} | {f"optimizer {n}": one for n, one in enumerate(optimizers)}
    loop = megaresume.attach(objects, loader, checkpoints=Checkpoints(save_dir=tmp_path))
    for batch in loop:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            loss = sum(model(batch.float() / 100).pow(2).mean() for model in models.values())
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            return loss

        for one in optimizers:
            one.zero_grad()
            if loop.step != 1:
                one.step(closure)
        if loop.ends_step:
            loop.stepped()
        if loop.step == 3:
            break
    loop.save()
    assert loop.samples == 24
    loop.close()


def train_by_closure(loop: Any, model: torch.nn.Module, optimizer: Any, steps: int) -> list[float]:
    """Load, train to this step, save: the losses."""
    loop.load()
    losses = []
    for batch in loop:

        def closure(batch: torch.Tensor = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(batch.float() / 100) - 1).pow(2).mean()
            loss.backward()
            return loss

        losses.append(float(optimizer.step(closure).detach()))
        loop.stepped()
        if loop.step == steps:
            break
    try:
        loop.save()
    finally:
        loop.close()
    return losses


def test_one_that_needs_a_closure(tmp_path: Path) -> None:
    """Its checkpoints could not be loaded; as an object of another kind they can."""

    def train(directory: Path, *, steps: int) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        with pytest.raises(UsageError, match=r"'optimizer' could be saved, and not loaded(.|\n)*LBFGS(.|\n)*closure"):
            megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=directory)
        held = types.SimpleNamespace(state_dict=optimizer.state_dict, load_state_dict=optimizer.load_state_dict)
        loop = megaresume.attach({"model": model, "optimizer": held}, loader, checkpoints=directory)
        return train_by_closure(loop, model, optimizer, steps)

    whole = train(tmp_path / "whole", steps=END)
    assert train(tmp_path / "parts", steps=3) + train(tmp_path / "parts", steps=END) == whole


def test_one_that_gives_its_state_after_a_collective(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 1)
    loader = megaresume.DataLoader(Numbers(), batch_size=4)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        with pytest.raises(UsageError, match=r"cannot be saved(.|\n)*ZeroRedundancyOptimizer(.|\n)*fully_shard"):
            megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=tmp_path)
    finally:
        dist.destroy_process_group()


class Sharpness(torch.optim.Optimizer):
    """SAM as it is often written: it asserts that it is given a closure, and its state lacks the inner optimizer's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})
        self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        with torch.enable_grad():
            closure()
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    self.state[one]["up"] = 0.05 * one.grad
                    one.add_(self.state[one]["up"])
        with torch.enable_grad():
            loss = closure()
        for one, state in self.state.items():
            one.sub_(state["up"])
        self.base_optimizer.step()
        return loss


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_one_that_steps_by_another(tmp_path: Path, writer: Any) -> None:
    """Refused while the momentum of the inner one is in no checkpoint; then it continues as if nobody had stopped."""

    def train(directory: Path, *, steps: int, inner: bool = True) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(2, 1)
        optimizer = Sharpness(model.parameters())
        objects = {"model": model, "optimizer": optimizer} | ({"inner": optimizer.base_optimizer} if inner else {})
        loop = megaresume.attach(
            objects, megaresume.DataLoader(Numbers(), batch_size=4), checkpoints=directory, writer=writer
        )
        return train_by_closure(loop, model, optimizer, steps)

    with pytest.raises(UsageError, match=r"within another one(.|\n)*Sharpness, whose(.|\n)*SGD(.|\n)*base_optimizer"):
        train(tmp_path / "refused", steps=1, inner=False)
    whole = train(tmp_path / "whole", steps=END)
    assert train(tmp_path / "parts", steps=3) + train(tmp_path / "parts", steps=END) == whole
