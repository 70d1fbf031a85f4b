"""A replica of torchft that trains items, and writes down what its weights say was trained.

    python replica.py JOB          JOB: a `Job` as JSON

The weights are the witness. Of parameter ``tally``, one number an item, each sample's gradient is 1 at its item: with a
learning rate of 1 a step takes (times it was trained) / (global batch) from it, whoever trained it. It is all-reduced
by torchft, and healed by torchft; nothing of megaresume is asked. Beside it a small linear model has a loss.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft
from torchft import DistributedDataParallel as DDP

import megaresume


@dataclass(kw_only=True, slots=True)
class Job:
    """What a replica does."""

    #: of all replicas: checkpoints, and what each has written down.
    directory: str
    replica: int
    lighthouse: str
    steps: int = 40
    items: int = 64
    batch: int = 2
    global_batch: int = 8
    asynchronous: bool = False
    #: torchft's DistributedDataParallel; else each gradient is all-reduced by hand.
    ddp: bool = False
    #: a loss that is a sum, divided by what all replicas have summed; without DDP.
    sums: bool = False
    #: seconds that a micro-batch takes.
    seconds: float = 0.0
    save_every: int = 0
    workers: int = 0
    #: items of different lengths, dealt so that all replicas have as much to do.
    balanced: bool = False
    #: SIGKILL to itself: where, and at which time it comes there, from 1; 0: never. forward, reducing, reduced (before
    #: should_commit), committed, healing, saving.
    kill: tuple[str, int] = ("", 0)
    log: bool = True
    #: this process within its replica, how many there are, and the port where they meet.
    local: int = 0
    locals: int = 1
    port: int = 0
    timeout: float = 5.0
    #: ``local_sgd`` or ``diloco`` (`lanes.py`), with so many inner steps; `global_batch` is then of an outer step.
    outer: str = ""
    sync_every: int = 1
    quorum_timeout: float = 20.0


class Witness(torch.nn.Module):
    """See above."""

    def __init__(self, items: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.tally = torch.nn.Parameter(torch.zeros(items))
        self.line = torch.nn.Linear(1, 1)

    def forward(self, items: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of items, int64[m]: what is counted and what is learned, both means."""
        inputs = items[:, None] / len(self.tally)
        return self.tally[items].mean(), (self.line(inputs) - inputs.sin()).square().mean()


def length_of(item: int) -> int:
    """Tokens of an item, from 1 to 63."""
    return 1 + item * 37 % 63


def items_of(batch: list[dict[str, list[int]]]) -> torch.Tensor:
    """The numbers of items that hold nothing else, int64[m]."""
    return torch.tensor([item["input_ids"][0] for item in batch])


def loader_of(job: Job, batch_size: int, **options: Any) -> megaresume.DataLoader:
    """Of the items, whose batches are their numbers."""
    if not job.balanced:
        return megaresume.DataLoader(list(range(job.items)), batch_size=batch_size, seed=3, **options)
    data = [{"input_ids": [item] * length_of(item)} for item in range(job.items)]
    options |= {"seq_length": 64, "packing": "none", "collate_fn": items_of}
    options |= {"lengths_dir": Path(job.directory) / "lengths"}  # for verify
    return megaresume.DataLoader(data, batch_size=batch_size, seed=3, **options)


def death(job: Job) -> Callable[[str], None]:
    """To be called at each place, by its name: this process dies where the job says."""
    come: Counter[str] = Counter()

    def die_at(where: str) -> None:
        come[where] += 1
        if job.kill == (where, come[where]):
            os.kill(os.getpid(), signal.SIGKILL)

    return die_at


def manager_of(
    job: Job, model: Witness, optimizer: torch.optim.Optimizer, port: int, die_at: Callable[[str], None], **options: Any
) -> torchft.Manager:
    """torchft's, whose replicas give each other model and optimizer; its store is at ``port``."""

    def load(state: dict[str, Any]) -> None:
        die_at("healing")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=job.timeout)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        use_async_quorum=job.asynchronous,
        replica_id=f"replica_{job.replica}",
        rank=job.local,
        world_size=job.locals,
        store_addr="127.0.0.1",
        store_port=port,
        lighthouse_addr=job.lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=job.timeout),
        quorum_timeout=timedelta(seconds=job.quorum_timeout),
        connect_timeout=timedelta(seconds=10),
        quorum_retries=20,
        **options,
    )


def main(job: Job) -> None:
    """Train."""
    torch.set_num_threads(1)
    directory, die_at = Path(job.directory), death(job)
    name = f"replica_{job.replica}"
    model = Witness(job.items)
    inner = torch.optim.SGD([{"params": [model.tally], "lr": 1.0}, {"params": model.line.parameters(), "lr": 0.1}])
    if job.locals > 1:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{job.port}", rank=job.local, world_size=job.locals
        )
    store: Any = None
    if job.local == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    if job.locals > 1:
        ports = [store and store.port]
        dist.broadcast_object_list(ports)
        store = store or dist.TCPStore("127.0.0.1", ports[0], wait_for_workers=False)  # type: ignore[attr-defined]
    manager = manager_of(job, model, inner, store.port, die_at)
    optimizer = torchft.Optimizer(manager, inner)
    trained = DDP(manager, model) if job.ddp else model
    balance = megaresume.Balance() if job.balanced else None
    loader = loader_of(job, job.batch, num_workers=job.workers, balance=balance, dp_rank=job.local, dp_size=job.locals)
    loop = megaresume.attach(
        manager,
        loader,
        global_batch_size=job.global_batch,
        checkpoints=megaresume.Checkpoints(save_dir=directory / "checkpoints", max_starts=0),
        log_samples=directory / "log" if job.log else None,
    )
    loop.load()
    with (directory / f"{name}.jsonl" if job.local == 0 else Path(os.devnull)).open("a") as out:
        while loop.step < job.steps:
            optimizer.zero_grad()
            before = model.tally.detach().clone()
            losses, summed, handed = 0.0, 0, []
            for batch in loop:
                # The forward, too: that is where DDP is told whether this backward ends in an all-reduce.
                with trained.no_sync() if isinstance(trained, DDP) and not loop.ends_step else nullcontext():
                    count, loss = trained(batch)
                    if loop.weight:
                        handed += batch.tolist()
                    die_at("forward")
                    time.sleep(job.seconds)
                    if job.sums:
                        summed += len(batch) * bool(loop.weight)
                        ((count + loss) * len(batch) * bool(loop.weight)).backward()
                    else:
                        ((count + loss) * loop.weight).backward()
                losses += float(loss.detach()) * loop.weight
            if not job.ddp:
                scale = manager.num_participants() / loop.total(summed) if job.sums else 1.0
                for parameter in model.parameters():
                    assert parameter.grad is not None
                    if job.locals > 1:  # as FSDP does, within the replica
                        dist.all_reduce(parameter.grad)
                        parameter.grad /= job.locals
                    manager.allreduce(parameter.grad).wait()
                    parameter.grad *= scale
                    die_at("reducing")
            die_at("reduced")
            replicas, step = manager.num_participants(), loop.step
            optimizer.step()
            if loop.step == step and manager.current_step() == step:
                continue
            die_at("committed")
            moved = ((before - model.tally.detach()) * job.global_batch).round().int()
            line = {
                "step": loop.step,
                "pid": os.getpid(),
                "replicas": replicas,
                "rank": manager.participating_rank(),
                "handed": handed,
                "trained": [item for item, times in enumerate(moved.tolist()) for _ in range(times)],
                "tally": ((-model.tally.detach()) * job.global_batch).round().int().tolist(),
                "line": [float(value).hex() for p in model.line.parameters() for value in p.flatten()],
                "loss": losses,
                "quorum": manager._quorum_id,
                "at": time.time(),
            }
            out.write(json.dumps(line) + "\n")
            out.flush()
            if job.save_every and loop.step % job.save_every == 0:
                die_at("saving")
                loop.save()
        loop.finish()
    if job.local == 0:
        (directory / f"{name}.ended").touch()
    os._exit(0)  # without waiting for torchft's own servers


if __name__ == "__main__":
    main(Job(**{**json.loads(sys.argv[1]), "kill": tuple(json.loads(sys.argv[1]).get("kill", ("", 0)))}))
