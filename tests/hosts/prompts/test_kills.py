"""Prompts of a simulated asynchronous trainer that is killed again and again: none lost, none twice, none mistaken."""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from tests.hosts.prompts.counted import count
from tests.hosts.prompts.simulated import Plan, World, lives
from tests.hosts.torch.record import ENVIRONMENT, ROOT
from tests.release import release


def check(world: World, plan: Plan) -> int:
    """Of a run; how often it was killed."""
    assert world.state is not None
    state = json.loads(world.state)
    found = count(state, world.weights, world.said, world.directory / "prompts.jsonl")
    assert (found["lost"], found["twice"], found["mismatched"], world.mismatched) == (0, 0, 0, 0), (plan, found)
    if plan.epochs is not None:
        # To the end of the data: each prompt of the first start in each epoch once, of later ones in those after it.
        assert state["open"] == [], plan
        times = Counter(world.said.values())
        assert [times[f"data {i}"] for i in range(plan.items["data"])] == [plan.epochs] * plan.items["data"], plan
        assert all(times[f"data {i}"] <= plan.epochs for i in range(world.items["data"])), plan
    return world.starts - 1


def test_killed_two_hundred_times(tmp_path: Path) -> None:
    kills = sum(check(*lives(seed, 20, tmp_path / str(seed))) for seed in range(12))
    assert kills >= 200


@release(
    "half an hour: 10,000 kills",
    "`::test_killed_two_hundred_times`",
)
@pytest.mark.timeout(7200)
def test_killed_ten_thousand_times(tmp_path: Path) -> None:
    kills, seed = 0, 100
    while kills < 10_000:
        kills += check(*lives(seed, 40, tmp_path / str(seed)))
        seed += 1


def _killed(directory: Path, seed: int, kills: int) -> None:
    """Processes, each of which is killed at some time after it began to train; then one to the end of the data."""
    draw = random.Random(seed)
    program = [sys.executable, "-m", "tests.hosts.prompts.simulated", str(directory), str(seed)]
    for _ in range(kills):
        process = subprocess.Popen(program, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        # Not a wait for anything: the moment of the kill is drawn.
        try:
            process.wait(draw.random() ** 2 * 0.5)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
    _ended(directory, seed)


def _ended(directory: Path, seed: int) -> None:
    """A process to the end of the data, and what has become of every prompt then."""
    program = [sys.executable, "-m", "tests.hosts.prompts.simulated", str(directory), str(seed)]
    done = subprocess.run(program, env=ENVIRONMENT, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["started", "ended"], done.stderr
    plan, found = Plan.of(seed), json.loads((directory / "checkpoint.json").read_bytes())
    world = World(directory, found["items"], found["shares"], found["starts"], found["state"].encode())
    world.weights, world.mismatched = found["weights"], found["mismatched"]
    world.said = {int(ordinal): text for ordinal, text in found["said"].items()}
    check(world, plan)


@pytest.mark.process
def test_killed_processes(tmp_path: Path) -> None:
    _killed(tmp_path, seed=unblended()[0], kills=2)


@pytest.mark.process
def test_lost_machines(tmp_path: Path) -> None:
    """Each has only what was copied from the one before while that ran: the state, and then the ledger."""
    seed = unblended()[0]
    machines = [tmp_path / str(number) for number in range(3)]
    machines[0].mkdir()
    for machine, following in pairwise(machines):
        program = [sys.executable, "-m", "tests.hosts.prompts.simulated", str(machine), str(seed)]
        process = subprocess.Popen(program, env=ENVIRONMENT, cwd=ROOT, stdout=subprocess.PIPE)
        before = (machine / "checkpoint.json").read_bytes() if (machine / "checkpoint.json").exists() else b""
        while not (machine / "checkpoint.json").exists() or (machine / "checkpoint.json").read_bytes() == before:
            assert process.poll() is None
            time.sleep(0.001)
        following.mkdir()
        for name in ("checkpoint.json", "prompts.jsonl"):
            shutil.copy(machine / name, following)
        process.kill()
        process.wait()
        shutil.rmtree(machine)
    _ended(machines[-1], seed)


@release(
    "sixty processes",
    "`::test_killed_processes`",
)
def test_many_killed_processes(tmp_path: Path) -> None:
    for seed in unblended()[1:7]:
        (tmp_path / str(seed)).mkdir()
        _killed(tmp_path / str(seed), seed, kills=10)


def unblended() -> list[int]:
    """Seeds of runs that come to an end."""
    return [seed for seed in range(40) if Plan.of(seed).epochs is not None]
