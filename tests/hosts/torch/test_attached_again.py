"""A loop that is attached again in one process, after an error in the middle of a step or of a save.

In-process restarts (NVIDIA's resiliency extension, Megatron's inprocess) do this: the process lives on, the models, the
loader and what they are attached to are made anew.
"""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import megaresume
from megaresume.checkpoint.lock import lock
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.stream.errors import UsageError

STEPS, SAVE_EVERY = 14, 4


class Aborted(Exception):
    """What an in-process restart raises."""


class Fails:
    """An object of the checkpoint whose state cannot be had, once it was told so."""

    aborts = False

    def state_dict(self) -> dict[str, Any]:
        if self.aborts:
            raise Aborted
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def train(directory: Path, trained: dict[int, list[float]], abort: tuple[str, int] = ("", 0)) -> dict[str, Any]:
    """To the end, or to the error; what each step has trained goes into `trained`. Returns the weights."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer, fails = torch.optim.AdamW(model.parameters(), lr=1e-2), Fails()
    loader = megaresume.DataLoader(torch.arange(50.0)[:, None], batch_size=3, accumulation=2, seed=1)
    objects = {"model": model, "optimizer": optimizer, "fails": fails}
    loop = megaresume.attach(objects, loader, checkpoints=megaresume.Checkpoints(save_dir=directory, max_starts=0))
    loop.load()
    while loop.step < STEPS:
        handed: list[float] = []
        for batch in loop:
            model(batch).square().mean().backward()
            handed += batch.flatten().tolist()
            if abort == ("step", loop.step + 1):
                raise Aborted
            if not loop.ends_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            loop.stepped()
            trained[loop.step], handed = handed, []
            if loop.step % SAVE_EVERY == 0:
                fails.aborts = abort == ("save", loop.step)
                loop.save()
            if loop.step == STEPS:
                break
    loop.finish()
    return dict(model.state_dict())


@pytest.mark.parametrize("collected", [True, False], ids=["what was there is gone", "it is still referred to"])
@pytest.mark.parametrize("where", ["step", "save"])
def test_it_goes_on_bit_for_bit(tmp_path: Path, where: Literal["step", "save"], collected: bool) -> None:
    whole: dict[int, list[float]] = {}
    expected = train(tmp_path / "whole", whole)
    trained: dict[int, list[float]] = {}
    kept = []
    for step in (8, 12):
        with pytest.raises(Exception) as error:
            train(tmp_path / "run", trained, (where, step))
        assert isinstance(error.value, Aborted) or isinstance(error.value.__cause__, Aborted), error.value
        kept.append(error)  # and with its traceback the loop
        if collected:
            kept.clear()
            del error
            gc.collect()
    weights = train(tmp_path / "run", trained)
    assert trained == whole
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    entries = read_ledger(ledger_path(tmp_path / "run")).entries
    assert [entry.iteration for entry in entries if entry.kind == "start"] == [0, 4, 8]


def attached(directory: Path) -> tuple[Any, torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = megaresume.DataLoader(torch.arange(20.0)[:, None], batch_size=2)
    loop = megaresume.attach({"model": model, "optimizer": optimizer}, loader, checkpoints=directory)
    loop.load()
    return loop, model, optimizer


def step(loop: Any, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for batch in loop:
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.stepped()
        return


def test_two_loops_in_one_directory(tmp_path: Path) -> None:
    """Each would replace what the other one has saved of the same step."""
    first, second = attached(tmp_path), attached(tmp_path)
    for one in (first, second):
        step(*one)
    with pytest.raises(UsageError, match="two runs of this program save to one directory"):
        first[0].save()
    second[0].save()
    assert (tmp_path / "global_step1").is_dir()


def test_the_lock_stays_with_the_loop_that_goes_on(tmp_path: Path) -> None:
    first = attached(tmp_path)
    second = attached(tmp_path)
    first[0].close()
    assert lock._lock_of(tmp_path) is not None
    step(*second)
    second[0].save()
    second[0].close()
    assert lock._lock_of(tmp_path) is None
