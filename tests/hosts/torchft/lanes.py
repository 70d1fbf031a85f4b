"""A replica under torchft's LocalSGD or DiLoCo, that writes down what its weights say was trained.

The weights are the witness, as in `replica.py`: each sample takes 1 at its item from parameter ``tally`` while an inner
step trains it. Before the last inner step of a lane, what the lane took is scaled by (samples of the outer step) /
(samples of the lane, as the weights say): in the weighted mean of all lanes each sample then counts 1, whoever trained
it and however many lanes there were. A lane that is lost, counted twice, or given another weight, is seen in the sum.
Nothing of megaresume is asked.

Beside it a small linear model learns, by an inner optimizer with momentum and, of DiLoCo, an outer one with momentum,
both of which replicas that join must be given.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchft.local_sgd import DiLoCo, LocalSGD

import megaresume
from tests.hosts.torchft.replica import Job, Witness, death, loader_of, manager_of


def main(job: Job) -> None:
    """Train."""
    torch.set_num_threads(1)
    directory, die_at = Path(job.directory), death(job)
    name = f"replica_{job.replica}"
    model = Witness(job.items)
    inner = torch.optim.SGD(
        [{"params": [model.tally], "lr": 1.0}, {"params": model.line.parameters(), "lr": 0.1, "momentum": 0.9}]
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    manager = manager_of(job, model, inner, store.port, die_at, init_sync=False)
    outer: Any
    if job.outer == "diloco":
        outer_optimizer = torch.optim.SGD(
            [
                {"params": [model.tally], "lr": 1.0},
                {"params": model.line.parameters(), "lr": 0.7, "momentum": 0.9, "nesterov": True},
            ]
        )
        outer = DiLoCo(manager, [model], inner, outer_optimizer, sync_every=job.sync_every)
    else:
        outer = LocalSGD(manager, model, inner, sync_every=job.sync_every)
    balance = megaresume.Balance() if job.balanced else None
    with outer, (directory / f"{name}.jsonl").open("a") as out:
        loader = loader_of(job, job.batch, num_workers=job.workers, balance=balance, dp_rank=0, dp_size=1)
        loop = megaresume.attach(
            outer,
            loader,
            global_batch_size=job.global_batch // job.sync_every,
            checkpoints=megaresume.Checkpoints(save_dir=directory / "checkpoints", max_starts=0),
            log_samples=directory / "log" if job.log else None,
        )
        reduce = manager.allreduce

        def reducing(*args: Any, **more: Any) -> Any:
            work = reduce(*args, **more)
            die_at("reducing")
            return work

        manager.allreduce = reducing
        loop.load()
        while loop.step < job.steps:
            before, step, made, handed = model.tally.detach().clone(), loop.step, 0, []
            inner.zero_grad()
            for batch in loop:
                count, loss = model(batch)
                die_at("forward")
                time.sleep(job.seconds)
                here = len(batch) * bool(loop.weight)
                handed += batch.tolist()[:here]
                (count * here + loss * loop.weight).backward()
                if not loop.ends_step:
                    continue
                made += 1
                if made == job.sync_every:
                    with torch.no_grad():  # the last gradients are not in the weights yet
                        last = model.tally.grad
                        assert last is not None
                        taken = before - model.tally + last
                        scale = job.global_batch / max(float(taken.sum()), 1.0)
                        model.tally.copy_(before - taken * scale)
                        last.zero_()
                    die_at("reduced")
                inner.step()
                inner.zero_grad()
            if loop.step == step:
                continue
            die_at("committed")
            line = {
                "step": loop.step,
                "pid": os.getpid(),
                "replicas": manager.num_participants(),
                "rank": manager.participating_rank(),
                "handed": handed,
                "inner": made,
                "tally": [round(-float(value), 3) for value in model.tally.detach()],
                "line": [float(value).hex() for p in model.line.parameters() for value in p.flatten()],
                "quorum": manager._quorum_id,
                "at": time.time(),
            }
            out.write(json.dumps(line) + "\n")
            out.flush()
            if job.save_every and loop.step % job.save_every == 0:
                die_at("saving")
                loop.save()
        loop.finish()
    (directory / f"{name}.ended").touch()
    os._exit(0)  # without waiting for torchft's own servers
