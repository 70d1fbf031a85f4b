"""One rank of a run under a tool: ``python -m benchmarks.peers.worker [--prepare] PLAN.json``.

`train` is the loop of all tools that are a loader: one step is an all-reduce over the ranks and a line in the record.
Its checkpoints hold what the tools' documentations say to save, and are written as a careful loop does: the files of
all ranks first, then the name under which they are found.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.recorder import Recorder
from benchmarks.peers.scenario import SAVE_EVERY
from benchmarks.peers.tools import TOOLS
from benchmarks.peers.tools.base import Loader


def train(plan: Plan, rank: int, loader: Loader) -> None:
    """Train until the end of the last epoch, or until the kill."""
    import torch
    import torch.distributed as dist

    recorder = Recorder(plan.directory / "records", plan.life, rank)
    checkpoints = plan.directory / "checkpoints"
    step = epoch = 0
    if (newest := checkpoints / "latest").exists():
        directory = checkpoints / newest.read_text()
        own = directory / f"rank-{rank}.pt"
        # A rank that is new has no state of its own; that of rank 0 is the best there is.
        state = torch.load(own if own.exists() else directory / "rank-0.pt", weights_only=False)
        step, epoch = state["step"], state["epoch"]
        loader.load_state_dict(state["loader"])
    recorder.began(step)
    for epoch in range(epoch, plan.epochs):  # noqa: B020
        batches = loader.batches(epoch)
        while True:
            batch = next(batches, [])
            trained = torch.tensor([len(batch)])
            dist.all_reduce(trained)
            if not trained.item():  # no rank has any left
                break
            step += 1
            recorder.trained(step, batch)
            if step == plan.kill_after:
                end(rank)
            if step % SAVE_EVERY == 0:
                saved = {"step": step, "epoch": epoch, "loader": loader.state_dict()}
                _save(checkpoints, f"step-{step}", rank, saved)


def end(rank: int) -> None:
    """The kill of rank 0, and of the others by the launcher."""
    if rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)


def _save(checkpoints: Path, name: str, rank: int, state: dict[str, Any]) -> None:
    import torch
    import torch.distributed as dist

    (checkpoints / name).mkdir(parents=True, exist_ok=True)
    torch.save(state, checkpoints / name / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        (checkpoints / "latest.new").write_text(name)
        (checkpoints / "latest.new").replace(checkpoints / "latest")
    dist.barrier()


def main(words: list[str]) -> None:
    """Prepare a dataset, or train."""
    plan = Plan.read(Path(words[-1]))
    tool = TOOLS[plan.tool]
    if words[0] == "--prepare":
        assert tool.prepare is not None
        tool.prepare(plan.data, plan.layout.items)
        return
    rank = int(os.environ["RANK"])
    if tool.own_loop is not None:
        tool.own_loop(plan, rank)
        return
    import torch.distributed as dist

    dist.init_process_group("gloo")
    assert tool.loader is not None
    train(plan, rank, tool.loader(plan, rank))
    dist.barrier()
    # Some tools leave threads behind that keep a process from ending.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
