"""FSDP2 between steps: whole parameters left by an evaluation, gradients that are not reduced. In this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import megaresume
from tests.hosts.torch.program import Numbers

fsdp = pytest.importorskip("torch.distributed.fsdp")
END = 8


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Run:
    """A sharded model, of which a forward pass leaves the outermost parameters whole, and the loop around it."""

    def __init__(self, directory: Path, **options: Any) -> None:
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (1,))
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 1))
        fsdp.fully_shard(self.model[0], mesh=mesh, **options)
        fsdp.fully_shard(self.model, mesh=mesh, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.directory = directory

    def attach(self) -> None:
        loader = megaresume.DataLoader(Numbers(), batch_size=4)
        objects = {"model": self.model, "optimizer": self.optimizer}
        self.loop = megaresume.attach(objects, loader, checkpoints=self.directory)

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.zeros(1, 2))
        assert not all(hasattr(one, "placements") for one in self.model.parameters())

    def backward(self, batch: torch.Tensor) -> float:
        loss = self.model(batch.float() / 100).pow(2).mean()
        loss.backward()
        return loss.item()


@pytest.mark.parametrize("writer", ["dcp", "torch"])
def test_an_evaluation_before_each_call(tmp_path: Path, writer: str) -> None:
    def train(directory: Path, *stops: int) -> list[float]:
        losses = []
        for stop in stops:
            run = Run(directory)
            run.evaluate()
            run.attach()
            run.evaluate()
            run.loop.load()
            for batch in run.loop:
                losses.append(run.backward(batch))
                run.optimizer.step()
                run.optimizer.zero_grad()
                run.loop.stepped()
                if run.loop.step == stop:
                    break
            run.evaluate()
            run.loop.save()
            run.loop.close()
        return losses

    assert train(tmp_path / "whole", END) == train(tmp_path / "parts", 3, 4, END)


@pytest.mark.parametrize("reduced", ["float32", "float64"])
@pytest.mark.parametrize("every", [1, 2])
def test_gradients_that_are_not_reduced_at_a_save_are_named_once(
    tmp_path: Path, every: int, reduced: str, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run(tmp_path, mp_policy=fsdp.MixedPrecisionPolicy(reduce_dtype=getattr(torch, reduced)))
    run.attach()
    for batch in run.loop:
        is_last = (run.loop.step + 1) % every == 0
        run.model.set_requires_gradient_sync(is_last)
        run.backward(batch)
        if is_last:
            run.optimizer.step()
            run.optimizer.zero_grad()
        run.loop.stepped()
        run.loop.save()
        if run.loop.step == END:
            break
    run.loop.close()
    assert capfd.readouterr().out.count("AdamW accumulates gradients across a save") == every - 1


def test_a_load_discards_gradients_that_are_not_reduced(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.attach()
    losses: list[list[float]] = [[], []]
    run.loop.save()
    for i in range(2):
        run.loop.load()
        for batch in run.loop:
            losses[i].append(run.backward(batch))
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.loop.stepped()
            if run.loop.step == END:
                break
        run.model.set_requires_gradient_sync(False)
        run.backward(torch.ones(4, 2))
        run.model.set_requires_gradient_sync(True)
    assert losses[0] == losses[1]
    run.loop.close()
