"""What megaresume costs a step of torchft: two replicas, with it and without, by turns.

    python -m tests.hosts.torchft.cost [--steps 100] [--seconds 0.05] [--rounds 3]

A step is a pause of so many seconds and an all-reduce; the time of steps is taken by the first replica, between two
decisions of `should_commit`. Then the other replica is killed, and the time until the next committed step is the wait.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import statistics
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torchft

import megaresume
from tests.hosts.torchft.harness import forked, free_port, lighthouse

#: samples of a step.
SIZE = 8


def replica(directory: Path, number: int, port: int, steps: int, seconds: float, kind: str) -> None:
    """Train; replica 0 kills the other one before the last ten steps, and writes down the times."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=kind.endswith("async"),
        replica_id=f"replica_{number}",
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://127.0.0.1:{port}",
        hostname="127.0.0.1",
        timeout=timedelta(seconds=5),
    )
    optimizer = torchft.Optimizer(manager, inner)
    dataset = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    (directory / f"pid_{number}").write_text(str(os.getpid()))
    loop = plain = None
    if kind.startswith("torchft"):
        sampler = torchft.DistributedSampler(
            list(range(4096)), replica_rank=number, num_replica_groups=2, group_rank=0, num_replicas=1
        )
        plain = iter(torch.utils.data.DataLoader(dataset, batch_size=SIZE // 2, sampler=sampler))
    else:
        loader = megaresume.DataLoader(dataset, batch_size=SIZE // 2, dp_rank=0, dp_size=1)
        log = directory / "log" if "log" in kind else None
        checkpoints = megaresume.Checkpoints(save_dir=directory / "checkpoints", max_starts=0)
        loop = megaresume.attach(manager, loader, global_batch_size=SIZE, checkpoints=checkpoints, log_samples=log)
    times: list[tuple[float, int]] = []
    step, is_alone = 0, False
    while step < steps or number:  # the other one ends by being killed
        optimizer.zero_grad()
        for batch in loop if loop is not None else [next(plain)]:  # type: ignore[call-overload]
            time.sleep(seconds)
            loss = model(batch).mean()
            (loss if loop is None else loss * loop.weight).backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if manager.current_step() > step:
            times.append((time.perf_counter(), manager.num_participants()))
        step = manager.current_step()
        if number == 0 and step == steps - 10 and not is_alone:
            is_alone = True
            os.kill(int((directory / "pid_1").read_text()), signal.SIGKILL)
    if number == 0:
        (directory / "times.json").write_text(json.dumps(times))
    os._exit(0)


def measure(kind: str, steps: int, seconds: float) -> tuple[list[float], float]:
    """Times of steps of two replicas; and the wait of the step after the kill."""
    directory, port = Path(tempfile.mkdtemp()), free_port()
    tower = forked(lambda: lighthouse(port), directory / "lighthouse.log")
    replicas = [
        forked(
            lambda number=number: replica(directory, number, port, steps, seconds, kind), directory / f"{number}.log"
        )
        for number in range(2)
    ]
    os.waitpid(replicas[1], 0)
    # One is enough from now on.
    os.waitpid(replicas[0], 0)
    os.kill(tower, signal.SIGKILL)
    os.waitpid(tower, 0)
    times = json.loads((directory / "times.json").read_text())
    steps_of = [(b - a, m) for (a, _), (b, m) in itertools.pairwise(times[5:])]
    return [took for took, members in steps_of if members == 2], max(took for took, members in steps_of if members == 1)


def cli() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.05)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    kinds = ("torchft", "megaresume", "megaresume log", "torchft async", "megaresume async")
    took: dict[str, list[float]] = {kind: [] for kind in kinds}
    waits: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(args.rounds):
        for kind in kinds:
            times, wait = measure(kind, args.steps, args.seconds)
            took[kind] += times
            waits[kind].append(wait)
    for kind in kinds:
        tenth = statistics.quantiles(took[kind], n=10)[0]
        print(
            f"{kind:18} step {statistics.median(took[kind]) * 1e3:7.2f} ms (median), {tenth * 1e3:7.2f} ms (10 %), "
            f"wait after a kill {statistics.median(waits[kind]):5.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    cli()
