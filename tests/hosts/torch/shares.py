"""Two processes attach loaders of right and of wrong ranks, one after the other: ``shares.py DIRECTORY DATA``.

Rank 0 writes down what was said of each, and what both ranks were given for the first step of those that were taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megaresume
from tests.hosts.torch.program import BASE, Numbers, wrapped


def stream_loader(samples: int = 8, **options: Any) -> Any:
    stream = megaresume.open_stream(sys.argv[2])
    return megaresume.StreamLoader(stream, megaresume.BatchSchedule.constant(samples), micro_batch_size=2, **options)


def divided(parallel: str) -> Any:
    """A model whose layers, or stages, are divided over both ranks; else `wrapped`."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layers = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Linear(4, 4))
    if parallel == "stages":
        stage = layers[dist.get_rank()]
        stage.keeper = [PipelineStage(stage, dist.get_rank(), 2, torch.device("cpu"))]
        return stage
    if parallel == "layers":
        return parallelize_module(layers, init_device_mesh("cpu", (2,)), {"*": ColwiseParallel()})
    if parallel == "layers and fsdp2":
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        return fully_shard(parallelize_module(layers, mesh["tp"], {"*": ColwiseParallel()}), mesh=mesh["dp"])
    if parallel == "fsdp2 and layers":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        return fully_shard(parallelize_module(layers, mesh["tp"], {"*": ColwiseParallel()}), mesh=mesh["dp"])
    if parallel == "within fsdp2":
        return fully_shard(torch.nn.Sequential(layers), mesh=init_device_mesh("cpu", (2,)))[0]
    return wrapped(parallel)


def cases(rank: int) -> dict[str, tuple[Callable[[], Any], str, dict[str, Any]]]:
    """By name: loader, model, further arguments of megaresume.attach."""

    def items(**options: Any) -> Callable[[], Any]:
        return lambda: megaresume.DataLoader(Numbers(), **{"batch_size": 2} | options)

    def text(**options: Any) -> Callable[[], Any]:
        return lambda: stream_loader(**options)

    alone: dict[str, Any] = {"dp_rank": 0, "dp_size": 1}
    return {
        "text": (text(), "ddp", {}),
        "items": (items(), "fsdp2", {}),
        "tensor parallel": (text(**alone), "", {}),
        "layers": (text(**alone), "layers", {}),
        "layers and fsdp2": (text(**alone), "layers and fsdp2", {}),
        "fsdp2 and layers": (items(), "fsdp2 and layers", {}),
        "within fsdp2": (items(), "within fsdp2", {}),
        "stages": (text(**alone), "stages", {}),
        "layers, left out": (items(), "layers", {}),
        "layers and fsdp2, left out": (items(), "layers and fsdp2", {}),
        "stages, left out": (items(), "stages", {}),
        "context parallel": (text(**alone), "ddp", {"context_parallel": 2}),
        "numbers on a node": (text(dp_rank=0, dp_size=2), "ddp", {}),
        "numbers on a node, items": (items(dp_rank=1, dp_size=2), "ddp", {}),
        "another size": (items(dp_rank=rank, dp_size=2 + rank), "ddp", {}),
        "one process, ddp": (text(**alone), "ddp", {}),
        "one process, fsdp2": (items(**alone), "fsdp2", {}),
        "fsdp1": (items(), "fsdp1", {}),
        "batch size": (items(batch_size=2 + rank), "ddp", {}),
        "accumulation": (items(accumulation=1 + rank), "ddp", {}),
        "schedule": (text(samples=8 + 4 * rank), "ddp", {}),
        "writer": (items(), "ddp", {"writer": "torch" if rank else "dcp"}),
        "skips": (items(skip=["8:16"] if rank else None), "ddp", {}),
    }


class Held:
    """Something with a state, a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "numbers": torch.full((2,), self.number)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


class Divided(torch.optim.Optimizer):
    """ZeRO by hand: each rank has its own part of each state, as in nanochat's; or the states of its own parameters."""

    def __init__(self, parameters: Any, rank: int, *, by_parameter: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.rank, self.by_parameter = rank, by_parameter

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for n, one in enumerate(self.param_groups[0]["params"]):
            if not self.by_parameter or n % 2 == self.rank:
                self.state[one]["momentum"] = torch.full_like(one, self.rank)


def save_others(rank: int, directory: Path, writer: Any) -> None:
    """Save two steps with objects that are alike on both ranks, and that are not."""
    model = wrapped("ddp")
    parameters = list(model.parameters())
    loop = megaresume.attach(
        {
            "model": model,
            "optimizer": torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            "parts": Divided(parameters, rank, by_parameter=False),
            "in turns": Divided(parameters, rank, by_parameter=True),
            "stage": torch.nn.Linear(2, 2 + rank),
            "alike": Held(7),
            "another": Held(rank),
        },
        megaresume.DataLoader(Numbers(), batch_size=2),
        checkpoints=directory / writer,
        writer=writer,
    )
    for batch in loop:
        model(batch).mean().backward()
        for name in ("optimizer", "parts", "in turns"):
            loop.host.objects.optimizers[name][0].step()
        loop.stepped()
        loop.save()
        if loop.step == 2:
            break
    loop.close()


def save_stage(rank: int, directory: Path) -> str:
    """Save a model of which each rank has other layers, in one file; returns what is said."""
    loop = megaresume.attach(
        {"model": torch.nn.ModuleDict({f"layer {rank}": torch.nn.Linear(2, 2)})},
        megaresume.DataLoader(Numbers(), batch_size=2, dp_rank=0, dp_size=1),
        checkpoints=directory,
        writer="torch",
    )
    next(iter(loop))
    loop.stepped()
    try:
        loop.save()
    except megaresume.MegaresumeError as error:
        return str(error)
    finally:
        loop.close()
    return ""


def main() -> None:
    dist.init_process_group("gloo")
    rank, said = dist.get_rank(), {}
    for number, (name, (make, parallel, more)) in enumerate(cases(rank).items()):
        model = divided(parallel)
        try:
            checkpoints = megaresume.Checkpoints(save_dir=Path(sys.argv[1]) / str(number))
            loop = megaresume.attach({"model": model}, make(), checkpoints=checkpoints, **more)
        except megaresume.MegaresumeError as error:
            mine: Any = str(error)
        else:
            mine = []
            for batch in loop:
                mine += (
                    batch["samples"].tolist()
                    if isinstance(batch, dict)
                    else (batch[:, 0] * BASE + batch[:, 1]).tolist()
                )
                if loop.ends_step:
                    break
            loop.close()
        said[name] = mine
    said["layers apart"] = save_stage(rank, Path(sys.argv[1]) / "apart")
    for writer in ("dcp", "torch"):
        save_others(rank, Path(sys.argv[1]), writer)
    both: list[Any] = [None, None]
    dist.all_gather_object(both, said)
    if rank == 0:
        Path(sys.argv[1], "said.json").write_text(json.dumps({name: [one[name] for one in both] for name in said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
