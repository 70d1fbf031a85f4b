"""Two ranks that are asked to stop, in every way; each scenario trains, is stopped, and says what was saved."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
import toy

import megaresume
from megaresume.checkpoint.stopping import StopConditions, Stopped

toy.start()
rank = dist.get_rank()


def stopped_by(name: str, conditions: StopConditions, act: Any, *, workers: int = 0, steps: int = 8) -> None:
    """Train until stopped; ``act(step)`` runs after the first micro-batch of every step."""
    save = toy.ROOT / name
    engine = toy.engine_of()
    data = megaresume.attach(
        engine,
        toy.DATA,
        checkpoints=megaresume.Checkpoints(save_dir=save),
        loader_options=megaresume.LoaderOptions(num_workers=workers),
        stop=conditions,
    )
    reason, status, seen = None, None, []
    try:
        while engine.global_steps < steps:
            batch = next(data)
            act(engine.global_steps)
            loss = toy.loss_of(engine(batch["tokens"]), batch["labels"], batch["loss_mask"])
            engine.backward(loss)
            engine.step()
            seen.append([engine.global_steps, batch["samples"].tolist()])
    except Stopped as stop:
        reason, status = stop.reason, stop.code
    data.close()
    handlers = [signal.getsignal(number) == signal.SIG_DFL for number in (signal.SIGUSR1, signal.SIGUSR2)]
    dist.barrier()
    toy.result(
        name,
        {
            "reason": reason,
            "status": status,
            "step": engine.global_steps,
            "saved": sorted(p.name for p in save.glob("global_step*")),
            "latest": (save / "latest").read_text() if (save / "latest").exists() else None,
            "given_back": handlers,
            "micro_batches": len(seen),
        },
    )


def send(number: int, *, to: int, at: int, whom: str = "self") -> Any:
    def act(step: int) -> None:
        if rank != to or step != at:
            return
        targets = [os.getpid()]
        if whom == "all":
            children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
            assert children, "no worker process"
            targets += map(int, children)
        for _ in range(2):  # the second changes nothing
            # From outside, as Slurm: a worker does obey its parent.
            subprocess.run(["kill", f"-{number:d}", *map(str, targets)], check=True)
        time.sleep(0.3)

    return act


def nothing(_step: int) -> None:
    """Let it run."""


stopped_by("usr1", StopConditions(), send(signal.SIGUSR1, to=1, at=2))
stopped_by("term_workers", StopConditions(), send(signal.SIGTERM, to=0, at=2, whom="all"), workers=1)

trigger = toy.ROOT / "stop-now"
stopped_by("file", StopConditions(file=str(trigger), status=7), lambda step: trigger.touch() if step == 3 else None)
toy.result("file_gone", not trigger.exists())

os.environ["SLURM_JOB_END_TIME"] = str(int(time.time()) + 100)
stopped_by("near_the_end", StopConditions(before_end=3), nothing)
stopped_by("unmeasured_save", StopConditions(before_end="auto"), nothing)  # keeps minutes for it
stopped_by("far_from_the_end", StopConditions(before_end=0.1), nothing, steps=3)
del os.environ["SLURM_JOB_END_TIME"]
stopped_by("minutes", StopConditions(after_minutes=0.01), lambda step: time.sleep(0.4 * (step == 1)))
dist.destroy_process_group()
