"""Restarts in place: a rank or a node dies, torchrun's agents start their workers again, and the data goes on exactly.

One agent a node, as on a cluster: every "node" here is an agent of its own with one rank, and dies by SIGKILL with all
of its processes. Every run is compared with one of a single rank that nobody disturbed.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from megaresume.cluster.processes import free_port
from megaresume.cluster.records import RunRecords, read_records
from tests.agents import Agents
from tests.cluster.training.compare import compare
from tests.docs.pages import section
from tests.release import release

DOCUMENT = section("stopping.md", "Restarts in place")
#: The commands of the document: several nodes, one node, and a loop around the deepspeed launcher.
NODES, ONE_NODE, LOOP = re.findall(r"```bash\n(.*?)```", DOCUMENT, flags=re.DOTALL)
#: See `Agents`, which set it too.
OWN_STORE = "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1\n"
ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


class Nodes(Agents):
    """Those of one job of the document."""

    def __init__(self, directory: Path, data_yaml: Path, block: str, more: str) -> None:
        self.log = directory / "log.jsonl"
        assert block.startswith(OWN_STORE + "torchrun ")
        words = shlex.split(block.removeprefix(OWN_STORE).replace("\\\n", " ").replace("data.yaml", str(data_yaml)))[1:]
        port = free_port()
        # On two cores that other tests keep busy, nodes would be taken for lost, or come too late: see the document.
        patient = ("max_attempt=5", "max_attempt=15"), ("last_call_timeout=2", "last_call_timeout=15")
        for old, new in ((":29400", f":{port}"), *patient):
            words = [word.replace(old, new) for word in words]
        words += f"--split 9,1,0 --megaresume-log-samples {self.log} {more}".split()
        env = {"MEGARESUME_CACHE": str(directory / "cache"), "PYTHONPATH": str(Path(__file__).parents[3])}
        super().__init__(directory, words, ENVIRONMENT | env, port if "--rdzv-endpoint" in words else None, directory)

    @property
    def records(self) -> RunRecords:
        return read_records(self.log)

    def until(self, happened: Callable[[RunRecords], bool]) -> None:
        """Wait; all nodes must live meanwhile."""
        deadline = time.monotonic() + 600
        while not (self.log.exists() and happened(self.records)):
            for name, agent in self.alive.items():
                assert agent.poll() is None, f"{name}: {self.text(name)[-3000:]}"
            assert time.monotonic() < deadline, "\n".join(self.text(name)[-3000:] for name in self.alive)
            time.sleep(0.05)

    def until_trained(self, *, dp: int, beyond: int = 0) -> int:
        """Wait until a step beyond this one was trained by so many ranks; returns it."""

        def newest(records: RunRecords) -> tuple[int, int]:
            step = max(records.steps, default=0)
            return step, records.steps[step]["dp"] if step else 0

        self.until(lambda records: newest(records)[0] > beyond + 2 and newest(records)[1] == dp)
        return newest(self.records)[0]


@pytest.fixture
def nodes(tmp_path: Path, data_yaml: Path) -> Iterator[Callable[[str, str], Nodes]]:
    """``nodes(block of the document, more flags)``; killed at the end."""
    made: list[Nodes] = []

    def make(block: str, more: str) -> Nodes:
        made.append(Nodes(tmp_path, data_yaml, block, more))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.fixture(scope="module")
def uninterrupted(runs: Any) -> Callable[[int], RunRecords]:
    """``uninterrupted(last)``: the steps up to this one as one rank trains them that nobody disturbs."""
    longest: dict[int, RunRecords] = {}

    def of(last: int) -> RunRecords:
        if last > max(longest, default=0):
            flags = f"--train-iters {last} --global-batch-size 6 --micro-batch-size 1"
            done = runs(f"undisturbed{last}", flags, num_processes=1)
            assert done.status == 0, done.text[-3000:]
            longest[last] = done.records
        known = longest[max(longest)]
        return replace(known, steps={step: record for step, record in known.steps.items() if step <= last})

    return of


def test_nodes_are_lost_and_won(nodes: Any, uninterrupted: Any) -> None:
    """3 nodes, one is killed; the other two go on in place; a third one comes. ZeRO 1, converted each time."""
    flags = "--exit-signal-handler --megaresume-stop-status 75 --save-interval 2 --megaresume-keep-last 2"
    # A pause leaves the processor to those that start meanwhile, and the steps to compare are few.
    job = nodes(NODES, f"{flags} --megaresume-min-step-seconds 0.3")
    for name in ("one", "two", "three"):
        job.start(name)
    reached = job.until_trained(dp=3)
    # Its agent first: else it would start its worker again.
    job.kill("three")
    reached = job.until_trained(dp=2, beyond=reached)
    lost = job.records.lost
    assert len(lost) < 4, "no more than since the last save, which is at every second step, or the one before it"
    job.start("four")
    reached = job.until_trained(dp=3, beyond=reached)
    # The workers that stopped for the newcomer saved first.
    assert job.records.lost == lost
    job.close()

    records = job.records
    assert compare(records, uninterrupted(max(records.steps))) is None
    sizes = [record["dp"] for _, record in sorted(records.steps.items())]
    # On a busy machine, one of two nodes may be late for a start; then the other one trains alone until it is there.
    assert [size for size, _ in groupby(size for size in sizes if size > 1)][-3:] == [3, 2, 3]
    said = "".join(job.text(name) for name in ("one", "two", "three", "four"))
    assert all(f"| dp {before}->{after} " in said for before, after in pairwise(sizes) if before != after)
    assert "| repeated 0 skipped 0 |" in said
    # Killed processes hold nothing: whoever comes takes their place without waiting.
    assert "is in use" not in said


@release(
    "two launches",
    "`::test_nodes_are_lost_and_won`",
)
def test_a_rank_is_lost(nodes: Any, uninterrupted: Any) -> None:
    """One node of two ranks without a rendezvous of its own; a rank is killed; the run ends as if nothing had been."""
    job = nodes(ONE_NODE, "--train-iters 20")
    job.start("node")
    job.until(lambda records: len(records.steps) > 3)
    ranks = [child for child in psutil.Process(job.alive["node"].pid).children() if "RANK" in child.environ()]
    assert len(ranks) == 2
    ranks[1].send_signal(signal.SIGKILL)
    assert job.alive["node"].wait(240) == 0, job.text("node")[-3000:]
    records = job.records
    assert [start["attempt"] for start in records.starts] == [1, 2] and len(records.steps) == 20
    assert records.starts[1]["step"] > 0
    assert compare(records, uninterrupted(20)) is None


def test_the_shared_store_is_named() -> None:
    """What makes every restart in place fail is said at the first start, with what to do."""
    import megaresume.cluster.training.launch as launch

    env = {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True", "WORLD_SIZE": "2"}
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in (launch.restart_warning(env) or "")
    for name, value in (
        ("TORCHELASTIC_MAX_RESTARTS", "0"),
        ("TORCHELASTIC_USE_AGENT_STORE", "False"),
        ("WORLD_SIZE", "1"),
    ):
        assert launch.restart_warning(env | {name: value}) is None
    assert launch.restart_warning({}) is None


@pytest.mark.process
def test_deepspeed_has_no_elastic_launcher() -> None:
    """If one comes back, docs/stopping.md is to be written anew."""
    program = [sys.executable, "-m", "deepspeed.launcher.runner", "--elastic_training", "x.py"]
    env = os.environ | {"DS_ACCELERATOR": "cpu"}
    done = subprocess.run(program, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 2 and "unrecognized arguments: --elastic_training" in done.stderr


@release(
    "three launches",
    "`tests/cluster/launch/test_scripts.py::test_deepspeed_is_started_again_after_a_failure_and_stopped`",
)
def test_the_loop_around_the_deepspeed_launcher(data_yaml: Path, uninterrupted: Any, tmp_path: Path) -> None:
    """The launcher ends when a rank is killed; the next start has one rank less. ZeRO 1."""
    programs = tmp_path / "bin"
    programs.mkdir()
    launcher = programs / "deepspeed"
    command = f"{sys.executable} -m deepspeed.launcher.runner --master_port {free_port()}"
    launcher.write_text(f'#!/bin/bash\nexec {command} "$@"\n')
    launcher.chmod(0o755)
    log = tmp_path / "log.jsonl"
    loop = LOOP.replace("data.yaml", str(data_yaml))
    loop = loop.replace(" && break", f" --split 9,1,0 --megaresume-log-samples {log} && break")
    env = os.environ | ENVIRONMENT | {"PYTHONPATH": str(Path(__file__).parents[3])}
    env["PATH"] = f"{programs}:{env['PATH']}"
    with open(tmp_path / "out", "wb") as out:
        shell = subprocess.Popen(["bash", "-c", loop], cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 600
        while not (log.exists() and len(read_records(log).steps) > 3):
            assert shell.poll() is None and time.monotonic() < deadline, (tmp_path / "out").read_text()[-3000:]
            time.sleep(0.05)
        ranks = [p for p in psutil.Process(shell.pid).children(recursive=True) if "--local_rank=1" in p.cmdline()]
        ranks[0].send_signal(signal.SIGKILL)
        assert shell.wait(240) == 0, (tmp_path / "out").read_text()[-3000:]
    finally:
        shell.kill()
    records = read_records(log)
    assert [start["topology"]["dp"] for start in records.starts] == [2, 1] and records.starts[1]["step"] > 0
    assert compare(records, uninterrupted(30)) is None
