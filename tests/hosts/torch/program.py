"""A training loop in plain torch, and what it trains written down: run by tests in their own process, or as

    torchrun ... program.py DIRECTORY JSON-OPTIONS

The recorder reads the number of an item from its tokens; it shares no code with megaresume.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megaresume
from megaresume import Checkpoints
from megaresume.checkpoint import meetings
from megaresume.hosts.driver import write_down
from megaresume.stream.errors import StateError

ITEMS, BASE = 100, 32


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i holds i, in two tokens."""

    def __init__(self, items: int = ITEMS) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i // BASE, i % BASE])


class Model(torch.nn.Module):
    """With dropout, a buffer, tied weights, and a parameter that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(64, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.1))
        self.head = torch.nn.Linear(16, 64, bias=False)
        self.head.weight = self.words.weight
        self.unused = torch.nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.body(self.words(tokens.flatten())))
        return torch.nn.functional.cross_entropy(logits, tokens.flatten())


def without_shared_memory() -> None:
    """DeepSpeed's operators for it are compiled for minutes, and gloo does as well."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def wrapped(parallel: str) -> Any:
    """A model, alike on every rank."""
    torch.manual_seed(1)
    model = Model()
    if parallel == "ddp" and dist.is_initialized():
        return torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if parallel == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        return FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    if parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model


def loader_of(data: Any, batch: int, accumulation: int, **options: Any) -> Any:
    """Of items; or, if ``data`` is the path of a data.yaml, of packed text. ``balance``: the arguments of one."""
    if "balance" in options:
        options["balance"] = megaresume.Balance(**options["balance"])
    if not isinstance(data, str):
        return megaresume.DataLoader(data, batch_size=batch, accumulation=accumulation, **options)
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    schedule = megaresume.BatchSchedule.constant(batch * accumulation * ranks)
    rank = dist.get_rank() if dist.is_initialized() else 0
    options = {name: options[name] for name in ("num_workers", "balance") if name in options}
    options |= {"dp_rank": rank, "dp_size": ranks}
    return megaresume.StreamLoader(megaresume.open_stream(data), schedule, micro_batch_size=batch, **options)


def run(
    directory: Path,
    *,
    attempt: int = 1,
    kill: tuple[str, int] = ("", 0),
    data: Any = None,
    batch: int = 4,
    accumulation: int = 2,
    epochs: int = 3,
    steps: int | None = None,
    save_every: int = 5,
    parallel: str = "ddp",
    writer: Any = "dcp",
    load: dict[str, Any] | None = None,
    mistake: str = "",
    checkpoints: dict[str, Any] | None = None,
    stop: Any = None,
    watch: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """Train to the end; the record lies beside the directory. ``kill``: at (``step`` or ``save``, N);
    ``alone``: rank 0 saves there alone; ``gone``: it is killed on the others before it saves; ``refused``: every rank
    ends with an error after that save."""
    model = wrapped(parallel)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    if not isinstance(data, str):
        options = {"max_epochs": epochs} | options
    loader = loader_of(Numbers() if data is None else data, batch, accumulation, **options)
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    settings = Checkpoints(save_dir=directory, **checkpoints or {})
    loop = megaresume.attach(objects, loader, checkpoints=settings, writer=writer, stop=stop)
    if mistake != "load":
        loop.load(**load or {})
    if mistake == "look":
        next(iter(loop))
    rank = dist.get_rank() if dist.is_initialized() else 0
    while loop.samples < epochs * ITEMS if steps is None else loop.step < steps:
        for micro in loop:
            is_text = isinstance(data, str)
            loss = model(micro["tokens"] % 64 if is_text else micro) / accumulation
            loss.backward()
            numbers = micro["samples"].tolist() if is_text else (micro[:, 0] * BASE + micro[:, 1]).tolist()
            line = {"attempt": attempt, "step": loop.step + 1, "items": numbers, "loss": loss.item()}
            if is_text:
                line |= {name: micro[name].tolist() for name in ("tokens", "loss_mask")}
            write_down(directory, rank, **line)
            if not loop.ends_step:
                continue
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            loop.stepped()
            if kill == ("step", loop.step):
                os.kill(os.getpid(), signal.SIGKILL)
            if watch is not None:
                watch(loop)
            if loop.step % save_every == 0:
                if kill == ("save", loop.step):
                    die_in_the_next_save()
                if rank and kill == ("gone", loop.step):
                    os.kill(os.getpid(), signal.SIGKILL)
                if rank and kill == ("alone", loop.step):
                    continue  # to a step that rank 0 does not come to
                loop.save()
                if kill == ("refused", loop.step):
                    raise StateError("something is refused")
            if loop.step == steps:
                break
    loop.save()
    loop.finish()
    return loop


def die_in_the_next_save() -> None:
    """Of the second tensor that torch writes."""
    write, left = torch.save, iter(range(3))

    def save(*args: Any, **more: Any) -> None:
        if next(left, 0) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        write(*args, **more)

    torch.save = save


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    asked = json.loads(sys.argv[2])
    meetings.PATIENCE = asked.pop("patience", meetings.PATIENCE)
    run(Path(sys.argv[1]), kill=tuple(asked.pop("kill", ("", 0))), **asked)
    if dist.is_initialized():
        dist.destroy_process_group()
