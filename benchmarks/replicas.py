"""What megaresume costs a step of torchft's: two replicas under its lighthouse, with it and without, by turns.

    python -m benchmarks.replicas [--steps 100] [--rounds 5]      # in an environment that has torchft

A step is a forward and a backward of so many seconds in all, asleep, and an all-reduce. Its time is taken by the first
replica, between two decisions of `should_commit`. Then the other replica is killed: the time until the next committed
step is the wait. Alone, torchft trains what its own sampler deals, which loses samples then.

On a busy machine the time of a step is that of the machine. So the processor time is taken as well, of the thread that
trains and of all threads: in each round one run with megaresume and one without, and the median of the differences.
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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchft

import megaresume
from benchmarks.table import Row, markdown
from megaresume.cluster.processes import free_port
from tests.hosts.torchft.harness import forked, lighthouse

#: samples of a step, and its seconds.
SIZE = 8
SECONDS = (0.02, 0.1)


@dataclass(frozen=True)
class Kind:
    """What is measured. ``ours``: ``alone``, ``attach``, or ``log``: with ``log_samples``."""

    asynchronous: bool
    ours: str


def replica(directory: Path, number: int, port: int, steps: int, seconds: float, kind: Kind) -> None:
    """Train; replica 0 kills the other one before the last ten steps, and writes down the times."""
    torch.set_num_threads(1)
    model = torch.nn.Linear(64, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.01)
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=lambda state: (model.load_state_dict(state["model"]), inner.load_state_dict(state["inner"])),
        state_dict=lambda: {"model": model.state_dict(), "inner": inner.state_dict()},
        min_replica_size=1,
        use_async_quorum=kind.asynchronous,
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
    dataset: Any = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
    (directory / f"pid_{number}").write_text(str(os.getpid()))
    loop: Any = None
    plain: Any = None
    if kind.ours == "alone":
        sampler = torchft.DistributedSampler(
            list(range(4096)), replica_rank=number, num_replica_groups=2, group_rank=0, num_replicas=1
        )
        plain = iter(torch.utils.data.DataLoader(dataset, batch_size=SIZE // 2, sampler=sampler))
    else:
        loader = megaresume.DataLoader(dataset, batch_size=SIZE // 2, dp_rank=0, dp_size=1)
        log = directory / "log" if kind.ours == "log" else None
        checkpoints = megaresume.Checkpoints(save_dir=directory / "checkpoints", max_starts=0)
        loop = megaresume.attach(manager, loader, global_batch_size=SIZE, checkpoints=checkpoints, log_samples=log)
    times: list[tuple[float, int, float, float]] = []
    step, is_alone = 0, False
    while step < steps or number:  # the other one ends by being killed
        optimizer.zero_grad()
        for batch in loop if loop is not None else [next(plain)]:
            loss = model(batch).mean()
            time.sleep(seconds / 3)
            loss = loss if loop is None else loss * loop.weight
            time.sleep(2 * seconds / 3)
            loss.backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        optimizer.step()
        if manager.current_step() > step:
            times.append((time.perf_counter(), manager.num_participants(), time.thread_time(), time.process_time()))
        step = manager.current_step()
        if number == 0 and step == steps - 10 and not is_alone:
            is_alone = True
            os.kill(int((directory / "pid_1").read_text()), signal.SIGKILL)
    if number == 0:
        (directory / "times.json").write_text(json.dumps(times))
    os._exit(0)


@dataclass(frozen=True)
class Took:
    """Seconds of a run: steps of two replicas; the step after the kill; processor time of a step, medians."""

    steps: list[float]
    wait: float
    thread: float
    threads: float


def measure(kind: Kind, steps: int, seconds: float, directory: Path) -> Took:
    """One run."""
    port = free_port()
    tower = forked(lambda: lighthouse(port), directory / "lighthouse.log")
    replicas = [
        forked(
            lambda number=number: replica(directory, number, port, steps, seconds, kind),  # type: ignore[misc]
            directory / f"{number}.log",
        )
        for number in range(2)
    ]
    for process in reversed(replicas):
        os.waitpid(process, 0)
    os.kill(tower, signal.SIGKILL)
    os.waitpid(tower, 0)
    times = json.loads((directory / "times.json").read_text())
    # (seconds, members, of the thread, of all threads), of each step.
    of_steps = [(b[0] - a[0], b[1], b[2] - a[2], b[3] - a[3]) for a, b in itertools.pairwise(times[5:])]
    whole = [one for one in of_steps if one[1] == 2]
    return Took(
        steps=[one[0] for one in whole],
        wait=max(one[0] for one in of_steps if one[1] == 1),
        thread=statistics.median(one[2] for one in whole),
        threads=statistics.median(one[3] for one in whole),
    )


def figures(steps: int, rounds: int, lengths: Sequence[float], quorums: Sequence[int]) -> Iterator[Row]:
    """By quorum and length of a step: median, 99 %, and the wait after a kill."""
    for asynchronous, seconds in itertools.product(quorums, lengths):
        kinds = [Kind(bool(asynchronous), ours) for ours in ("alone", "attach", "log")]
        runs: dict[Kind, list[Took]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind in kinds:
                with tempfile.TemporaryDirectory() as directory:
                    runs[kind].append(measure(kind, steps, seconds, Path(directory)))
        took = {kind: [one for run in runs[kind] for one in run.steps] for kind in kinds}
        waits = {kind: [run.wait for run in runs[kind]] for kind in kinds}
        alone, *ours = kinds
        for kind in ours:
            words = f"torchft, {'a' if asynchronous else ''}synchronous quorum, step of {1000 * seconds:.0f} ms"
            words += ", log_samples" if kind.ours == "log" else ""
            for name, of, values in (
                ("median", statistics.median, took),
                ("p99", lambda values: statistics.quantiles(values, n=100)[98], took),
                ("after a kill", statistics.median, waits),
            ):
                mine, baseline = of(values[kind]), of(values[alone])
                yield Row(
                    what=f"{words}: {name}",
                    ours=1000 * mine,
                    unit="ms",
                    baseline=1000 * baseline,
                    against="torchft alone",
                    ratio=baseline / mine,
                    must="less than 1 % more" if name == "median" else "",
                    holds=mine < 1.01 * baseline if name == "median" else None,
                )
            for name in ("thread", "threads"):
                pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(runs[alone], runs[kind], strict=True)]
                more = statistics.median(mine - theirs for theirs, mine in pairs)
                baseline = statistics.median(theirs for theirs, _ in pairs)
                yield Row(
                    what=f"{words}: processor time of the {'training thread' if name == 'thread' else 'process'}",
                    ours=1000 * (baseline + more),
                    unit="ms",
                    baseline=1000 * baseline,
                    against="torchft alone",
                    ratio=baseline / (baseline + more),
                    must=f"less than {10 * seconds:.1f} ms more, 1 % of the step",
                    holds=more < 0.01 * seconds,
                )


def main() -> None:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, nargs="*", default=SECONDS, help="of a step")
    parser.add_argument("--asynchronous", type=int, nargs="*", default=(1, 0))
    args = parser.parse_args()
    rows = []
    for row in figures(args.steps, args.rounds, args.seconds, args.asynchronous):
        print(f"{row.what}: {row.ours:.2f} ms, torchft alone {row.baseline:.2f} ms", flush=True)
        rows.append(row)
    print(markdown(rows))


if __name__ == "__main__":
    main()
