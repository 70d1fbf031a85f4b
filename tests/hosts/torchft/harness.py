"""Kills and joins at random moments, and what came of them.

    python -m tests.hosts.torchft.harness --kills 1000 --seed 1 --directory DIR

Runs of 1 to 4 replicas (`replica.py`) under a real lighthouse, one after the other until so many processes were killed.
A process that is killed is started again after a while: it joins. All are forked from this one, which has imported
torch and torchft and has no threads: a start takes 50 ms.

What is killed, and where:

    a replica, anywhere        by this process, after a random time
    a replica, at a place      by itself: in its forward, between two all-reduces, before and after should_commit, while
                               it is healed, before a save
    the lighthouse             by this process; started again at the same port

Each run is judged by `judge`, from what the weights say; and by ``megaresume verify``, unless that is left out.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torchft.coordination import LighthouseServer

from megaresume.cluster.processes import free_port
from tests.hosts.torchft import lanes, replica
from tests.hosts.torchft.replica import Job, Witness, length_of, loader_of

#: seconds that a run goes on without a kill, at most.
PATIENCE = 240.0
PLACES = ("forward", "reducing", "reduced", "committed", "healing", "saving")


@dataclass(kw_only=True)
class Found:
    """What came of a run."""

    steps: int = 0
    kills: dict[str, int] = field(default_factory=dict)
    joins: int = 0
    #: steps by the number of replicas that made them; those that were made again by others, their makers being dead.
    replicas: dict[int, int] = field(default_factory=dict)
    again: int = 0
    #: the largest difference of a learned weight from that of an uninterrupted run.
    noise: float = 0.0
    #: how much more than the mean the replica has to do that has most, in the mean of the steps of several replicas: as
    #: they were dealt, and if they were dealt in the order of the stream; in work of attention.
    uneven: float = 0.0
    uneven_in_order: float = 0.0
    #: what is wrong, in words.
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0


def forked(work: Callable[[], None], log: Path) -> int:
    """Do it in a process of its own; its number."""
    number = os.fork()
    if number:
        return number
    try:
        out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        work()
        os._exit(0)
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def main(job: Job) -> None:
    """A replica."""
    (lanes.main if job.outer else replica.main)(job)


def lighthouse(port: int, least: int = 1, patience: int = 300) -> None:
    """Torchft's, for so many replicas or more; so many milliseconds it waits for those that it hears of."""
    server = LighthouseServer(
        bind=f"127.0.0.1:{port}",
        min_replicas=least,
        join_timeout_ms=patience,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=700,
    )
    while server.address():
        time.sleep(60)


def order_of(job: Job) -> list[int]:
    """The items of an uninterrupted run of one loader."""
    loader = loader_of(job, job.global_batch, dp_rank=0, dp_size=1)
    items: list[int] = []
    while len(items) < job.steps * job.global_batch:
        items += [int(item) for batch in loader for item in batch]
    return items[: job.steps * job.global_batch]


def uninterrupted(job: Job, order: list[int]) -> list[list[float]]:
    """The learned weights after each step of one process without torchft: the whole batch at once."""
    model = Witness(job.items)
    optimizer = torch.optim.SGD(model.line.parameters(), lr=0.1)
    weights = []
    for step in range(job.steps):
        optimizer.zero_grad()
        _, loss = model(torch.tensor(order[step * job.global_batch : (step + 1) * job.global_batch]))
        loss.backward()
        optimizer.step()
        weights.append([float(value) for p in model.line.parameters() for value in p.flatten()])
    return weights


def uneven(parts: list[list[int]]) -> float:
    """How much more than the mean the largest part has to do, of 1: the squares of lengths."""
    work = [sum(length_of(item) ** 2 for item in part) for part in parts]
    return max(work) * len(work) / sum(work) - 1


def judge(directory: Path, job: Job) -> Found:
    """See `Found`; from the weights that the replicas have written down after each committed step."""
    found, order, size = Found(), order_of(job), job.global_batch
    lines = [
        json.loads(line)
        for path in sorted(directory.glob("replica_*.jsonl"))
        for line in path.read_text().splitlines()
        if line.endswith("}")
    ]
    # With lanes, what is learned depends on how many there were.
    weights = None if job.outer else uninterrupted(job, order)
    dealt: list[tuple[float, float]] = []
    by_step: dict[int, list[Any]] = collections.defaultdict(list)
    for line in lines:
        by_step[line["step"]].append(line)
    for step in range(1, job.steps + 1):
        made = by_step.get(step)
        if not made:
            # Whoever made it died before it wrote it down: the weights of the next step know it.
            continue
        expected = [0] * job.items
        for item in order[: step * size]:
            expected[item] += 1
        for line in made:
            if line["tally"] != expected:
                wrong = {k: (a, b) for k, (a, b) in enumerate(zip(line["tally"], expected, strict=True)) if a != b}
                found.wrong.append(f"step {step}, pid {line['pid']}: item: (trained, expected) {wrong}")
            if weights is not None:
                found.noise = max(
                    found.noise,
                    *(abs(float.fromhex(a) - b) for a, b in zip(line["line"], weights[step - 1], strict=True)),
                )
        newest = max(line["quorum"] for line in made)
        last = [line for line in made if line["quorum"] == newest]
        found.again += len({line["quorum"] for line in made}) > 1
        for one, other in itertools.combinations(made, 2):
            # A new lighthouse counts its quorums anew.
            together = one["quorum"] == other["quorum"] and abs(one["at"] - other["at"]) < 1.0
            if together and one["line"] != other["line"]:
                found.wrong.append(f"step {step}: the weights of pids {one['pid']} and {other['pid']} differ")
        replicas = last[0]["replicas"]
        # Of 16 samples in micro-batches of 2, three replicas have 4, 6 and 6: nothing makes those alike.
        if replicas == len(last) > 1 and len({len(line["handed"]) for line in last}) == 1:
            parts = [
                order[(step - 1) * size :][size * k // replicas : size * (k + 1) // replicas] for k in range(replicas)
            ]
            dealt.append((uneven([line["handed"] for line in last]), uneven(parts)))
        found.replicas[replicas] = found.replicas.get(replicas, 0) + 1
    if dealt:
        found.uneven, found.uneven_in_order = (sum(one) / len(dealt) for one in zip(*dealt, strict=True))
    found.steps = max(by_step, default=0)
    if found.steps != job.steps:
        found.wrong.append(f"{found.steps} steps of {job.steps}")
    if found.noise > 1e-5:
        found.wrong.append(f"learned weights differ by {found.noise}")
    return found


def run(
    directory: Path,
    rng: random.Random,
    most: int,
    *,
    steps: int = 40,
    size: int | None = None,
    places: bool = False,
    verify: bool = True,
    balanced: bool = False,
    outer: bool = False,
) -> Found:
    """One run, with up to so many kills."""
    directory.mkdir(parents=True)
    began, port = time.monotonic(), free_port()
    base: dict[str, Any] = {
        "directory": str(directory),
        "lighthouse": f"http://127.0.0.1:{port}",
        "steps": steps,
        "batch": rng.choice([1, 2, 4]),
        "global_batch": rng.choice([8, 16]),
        "asynchronous": rng.random() < 0.5,
        "ddp": rng.random() < 0.3,
        "seconds": rng.choice([0.005, 0.02]),
        "save_every": rng.choice([3, 7]),
    }
    base["balanced"] = balanced or rng.random() < 0.25
    base["sums"] = not base["ddp"] and rng.random() < 0.4
    size = size or rng.randint(1, 4)
    if outer:
        inner = rng.choice([2, 5])
        base |= {"outer": rng.choice(["local_sgd", "diloco"]), "sync_every": inner, "sums": False, "ddp": False}
        base |= {"global_batch": inner * rng.choice([4, 6, 8]), "items": 120}
    patience = 10000 if outer else 300  # longer than an outer step
    job = Job(replica=0, **base)
    kills: collections.Counter[str] = collections.Counter()
    tower = forked(lambda: lighthouse(port, patience=patience), directory / "lighthouse.log")
    alive: dict[int, int] = {}  # by process, the replica
    where_of: dict[int, str] = {}
    starts: list[tuple[float, int]] = [(0.0, number) for number in range(size)]
    seen, patient = 0, 30.0

    def committed() -> int:
        """Lines that the replicas have written down."""
        return sum(path.read_bytes().count(b"\n") for path in directory.glob("replica_*.jsonl"))

    joins, next_kill, deadline = -size, time.monotonic() + rng.uniform(0.5, 1.5), time.monotonic() + PATIENCE
    try:
        while time.monotonic() < deadline:
            now = time.monotonic()
            for due, number in [one for one in starts if one[0] <= now]:
                starts.remove((due, number))
                place: tuple[str, int] = ("", 0)
                if sum(kills.values()) + sum(1 for _ in starts) < most and (places or rng.random() < 0.7):
                    place = (where := rng.choice(PLACES)), 1 if where in ("healing", "saving") else rng.randint(1, 8)
                one = Job(replica=number, kill=place, **base)
                process = forked(lambda one=one: main(one), directory / f"replica_{number}.log")  # type: ignore[misc]
                alive[process], where_of[process] = number, place[0]
                joins += 1
            while alive and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                process, status = ended
                if process not in alive:
                    continue
                number = alive.pop(process)
                if (directory / f"replica_{number}.ended").exists():
                    continue
                if not os.WIFSIGNALED(status):
                    kills["died"] += 1  # torchft gave up: no lighthouse, a peer that is gone
                elif process in ours:
                    kills["anywhere"] += 1
                else:
                    kills[where_of[process]] += 1
                starts.append((time.monotonic() + rng.uniform(0.0, 0.5), number))
                deadline = time.monotonic() + PATIENCE
            if not alive and not starts:
                break
            # Most of them once a step was committed since the last one; some whatever replicas do, as they start.
            is_due = now >= next_kill and (now >= next_kill + patient or committed() > seen)
            if is_due and sum(kills.values()) < most:
                next_kill, patient, seen = now + rng.uniform(0.3, 2.0), rng.choice([0.0, 30.0, 30.0, 30.0]), committed()
                if rng.random() < 0.08:
                    os.kill(tower, signal.SIGKILL)
                    os.waitpid(tower, 0)
                    kills["lighthouse"] += 1
                    time.sleep(rng.uniform(0.0, 0.5))
                    tower = forked(lambda: lighthouse(port, patience=patience), directory / "lighthouse.log")
                elif alive and not places:
                    victim = rng.choice(list(alive))
                    ours.add(victim)
                    os.kill(victim, signal.SIGKILL)
            time.sleep(0.02)
        else:
            kills["hung"] += 1
    finally:
        for process in (tower, *alive):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    found = judge(directory, job)
    found.kills, found.joins = dict(kills), joins
    if kills["hung"]:
        found.wrong.append(f"it did not end {PATIENCE:.0f} s after the last kill")
    if verify:
        words = [sys.executable, "-m", "megaresume", "verify", str(directory / "checkpoints")]
        done = subprocess.run([*words, "--log-samples", str(directory / "log")], capture_output=True, text=True)
        if done.returncode:
            found.wrong.append(f"verify: {done.stdout[-1500:]}{done.stderr[-1500:]}")
    found.seconds = time.monotonic() - began
    return found


def stale_group(directory: Path, **options: Any) -> Found:
    """Numbers of quorums begin anew with a new lighthouse. Its first quorum, of two replicas, has the number of the
    last one of the old lighthouse, of one: which therefore keeps its process group, and all-reduces alone."""
    directory.mkdir(parents=True)
    port = free_port()
    base: dict[str, Any] = {"directory": str(directory), "lighthouse": f"http://127.0.0.1:{port}", "seconds": 0.05}
    base |= {"steps": 12, "timeout": 2.0, "quorum_timeout": 90.0} | options
    tower = forked(lambda: lighthouse(port), directory / "lighthouse.log")
    replicas = [forked(lambda: main(Job(replica=0, **base)), directory / "replica_0.log")]
    lines = directory / "replica_0.jsonl"
    while not lines.exists() or lines.read_text().count("\n") < 3:
        time.sleep(0.01)
    os.kill(tower, signal.SIGKILL)
    os.waitpid(tower, 0)
    tower = forked(lambda: lighthouse(port, 2), directory / "lighthouse.log")
    replicas.append(forked(lambda: main(Job(replica=1, **base)), directory / "replica_1.log"))
    for process in replicas:
        os.waitpid(process, 0)
    os.kill(tower, signal.SIGKILL)
    os.waitpid(tower, 0)
    return judge(directory, Job(replica=0, **base))


def groups(directory: Path, **options: Any) -> Found:
    """Two replicas of two processes each. One of them is killed, and started again."""
    directory.mkdir(parents=True)
    port = free_port()
    base: dict[str, Any] = {"directory": str(directory), "lighthouse": f"http://127.0.0.1:{port}", "seconds": 0.1}
    base |= {"steps": 40, "batch": 1, "locals": 2, "save_every": 10} | options
    tower = forked(lambda: lighthouse(port), directory / "lighthouse.log")

    def start(number: int) -> list[int]:
        meet = free_port()
        jobs = [Job(replica=number, local=local, port=meet, **base) for local in range(2)]
        return [
            forked(lambda job=job: main(job), directory / f"replica_{number}.{job.local}.log")  # type: ignore[misc]
            for job in jobs
        ]

    first, second = start(0), start(1)
    lines = directory / "replica_1.jsonl"
    while not lines.exists() or lines.read_text().count("\n") < 5:
        if (ended := os.waitpid(-1, os.WNOHANG))[0]:
            raise RuntimeError(f"process {ended[0]} ended with status {ended[1]}; its log is in {directory}")
        time.sleep(0.01)
    for process in second:
        os.kill(process, signal.SIGKILL)
    for process in second:
        os.waitpid(process, 0)
    for process in (*first, *start(1)):
        os.waitpid(process, 0)
    os.kill(tower, signal.SIGKILL)
    os.waitpid(tower, 0)
    return judge(directory, Job(replica=0, **base))


#: processes that this one has killed.
ours: set[int] = set()


def cli() -> int:
    """See above."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--each", type=int, default=12, help="kills of a run, at most")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--runs", type=int, help="so many runs, whatever was killed")
    parser.add_argument("--size", type=int, help="replicas (default: 1 to 4)")
    parser.add_argument("--places", action="store_true", help="replicas die at the places alone")
    parser.add_argument("--balanced", action="store_true", help="balanced ranks in every run, not in a quarter of them")
    parser.add_argument("--outer", action="store_true", help="LocalSGD or DiLoCo: see lanes.py")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--stale-group", action="store_true")
    args = parser.parse_args()
    if args.stale_group or args.groups:
        found = (stale_group if args.stale_group else groups)(args.directory)
        print(json.dumps(asdict(found)))
        return 1 if found.wrong else 0
    total: collections.Counter[str] = collections.Counter()
    replicas: collections.Counter[int] = collections.Counter()
    number = wrong = killed = 0
    noise = 0.0
    while killed < args.kills if args.runs is None else number < args.runs:
        rng = random.Random(args.seed * 1000 + number)
        directory = args.directory / f"run_{args.seed}_{number}"
        most = min(args.each, max(args.kills - killed, 0))
        found = run(
            directory,
            rng,
            most,
            steps=args.steps,
            size=args.size,
            places=args.places,
            verify=not args.no_verify,
            balanced=args.balanced,
            outer=args.outer,
        )
        number += 1
        killed += sum(found.kills.values()) - found.kills.get("died", 0)
        total.update({f"kills {where}": times for where, times in found.kills.items()})
        total.update(runs=1, steps=found.steps, joins=found.joins, again=found.again, wrong=len(found.wrong))
        replicas.update(found.replicas)
        noise = max(noise, found.noise)
        wrong += len(found.wrong)
        print(json.dumps({"directory": str(directory), **asdict(found)}), flush=True)
    print(json.dumps({**total, "noise": noise, "replicas": dict(sorted(replicas.items()))}), flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(cli())
