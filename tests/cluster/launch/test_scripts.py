"""launch/torchrun.sh and launch/deepspeed.sh with real ranks: told to stop they save, and the next start goes on there.

One run goes through all of it, with another script, another number of nodes and another signal at every start; in its
record every step must be there once. A "node" is a call of a script of its own.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from megaresume.cluster.processes import free_port
from megaresume.cluster.records import read_records
from megaresume.shipped import launch_script
from tests.cluster.launch.conftest import ENDLESS, FLAGS
from tests.release import release

PATIENCE = 300
#: in the place of PYTHON: notes how it was started, saves the second time, and fails.
SAVES_AND_FAILS = """
import os, sys
from pathlib import Path

if "deepspeed.launcher.runner" not in sys.argv:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
run = Path(os.environ["RUN_DIR"])
with open(run / "commands", "a") as commands:
    commands.write("pinned\\n" if "--ckpt-step" in sys.argv else "free\\n")
if len((run / "commands").read_text().split()) == 2:
    from megaresume.checkpoint.records.ledger import LedgerEntry, append_ledger, with_attempt
    from megaresume.checkpoint.records.names import ledger_path
    from megaresume.checkpoint.system import Topology

    words = dict(tag=None, samples=7, digest="0" * 16, run="a" * 16, time="", topology=Topology())
    entry = LedgerEntry(kind="checkpoint", iteration=31, **words, details=with_attempt({}))
    append_ledger(ledger_path(run / "checkpoints"), entry)
sys.exit(3)
"""


class Node:
    """A script that was started, in a session of its own."""

    def __init__(self, directory: Path, script: str, flags: str, **settings: object) -> None:
        self.run = directory / str(settings["RUN_DIR"])
        self.output = directory / f"{self.run.name}.{time.monotonic_ns()}.txt"
        # By hand where no launcher is in between, as after `conda activate`.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        path = f"{settings.pop('SSH')}:{path}" if "SSH" in settings else path
        env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "MASTER_"))}
        env |= {"PATH": path, "DS_ACCELERATOR": "cpu", "MEGARESUME_CACHE": str(directory / "cache")}
        env |= {name: str(value) for name, value in settings.items()}
        with open(self.output, "w") as output:
            self.process = subprocess.Popen(
                [launch_script(script), *flags.split()],
                cwd=directory,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # Where these tests run in the background of a script they ignore it, and a shell cannot change that.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    @property
    def decisions(self) -> list[str]:
        """What the script itself said, without the time."""
        # A rank that prints at the same moment may begin or end its own words on the same line.
        return re.findall(r"\.sh, node \d+\] (.*?)(?=\[|$)", self.text, re.MULTILINE)

    def below(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def ranks(self) -> list[psutil.Process]:
        """Of this node, in their order."""
        found = {}
        for process in self.below():
            try:
                if (rank := process.environ().get("RANK")) is not None and "-m" in process.cmdline():
                    found[int(rank)] = process
            except (psutil.Error, OSError):
                continue
        return [found[rank] for rank in sorted(found)]

    def wait(self) -> int:
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """As a power cut."""
        for process in [*self.below(), psutil.Process(self.process.pid)]:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait()


Start = Callable[..., Node]


@pytest.fixture
def start(directory: Path) -> Iterator[Start]:
    """``start(script, flags, RUN_DIR=..., ...)``; what still runs at the end of the test is killed."""
    nodes: list[Node] = []

    def start(script: str, flags: str, **settings: object) -> Node:
        nodes.append(Node(directory, script, f"{FLAGS} {flags}", DATA="data.yaml", **settings))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.kill()


def steps(run: Path) -> list[int]:
    """That were trained, in their order."""
    log = run / "samples.jsonl"
    return [*read_records(log).steps] if log.exists() else []


def until(condition: Callable[[], object], *nodes: Node) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        for node in nodes:
            assert node.process.poll() is None, node.text
        assert time.monotonic() < deadline, [node.text for node in nodes]
        time.sleep(0.05)


def until_steps(number: int, *nodes: Node) -> None:
    """Until the run has so many more steps than now."""
    goal = len(steps(nodes[0].run)) + number
    until(lambda: len(steps(nodes[0].run)) >= goal, *nodes)


def test_one_run_through_all_scripts_and_signals(start: Start, directory: Path) -> None:
    run = directory / "run"

    # Two nodes under torchrun; only the second is told. A second signal, and one more, change nothing.
    place = {"NNODES": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "PROCS_PER_NODE": 1}
    nodes = [start("torchrun.sh", ENDLESS, RUN_DIR="run", NODE_RANK=rank, **place) for rank in range(2)]
    until_steps(2, *nodes)
    nodes[1].process.send_signal(signal.SIGTERM)
    until(lambda: "TERM came" in nodes[1].text)
    nodes[1].process.send_signal(signal.SIGUSR1)
    nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].text + nodes[1].text
    decisions = nodes[1].decisions
    assert decisions[1].startswith("TERM came: all ranks save")
    assert all(line.endswith("came: changes nothing, the ranks have been told") for line in decisions[2:-1])
    assert decisions[-1].startswith("stopped by TERM: the ranks have saved and ended")
    saved = steps(run)[-1]
    assert (run / "checkpoints" / "latest").read_text() == f"global_step{saved}"
    assert not (run / "stop").exists()

    # Two nodes under deepspeed without ssh, to the end of the run; and once more, when it is over.
    place["MASTER_PORT"] = free_port()
    end = f"--train-iters {saved + 2}"
    nodes = [start("deepspeed.sh", end, RUN_DIR="run", NODE_RANK=rank, **place) for rank in range(2)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].text + nodes[1].text
    assert f"repeated 0 skipped 0 | step {saved} from global_step{saved}" in nodes[0].text
    assert [node.decisions[-1] for node in nodes] == [f"the run is over: it has said so after step {saved + 2}"] * 2

    assert steps(run) == [*range(1, saved + 3)] and not read_records(run / "samples.jsonl").lost


def test_a_signal_while_ranks_still_start(start: Start, directory: Path) -> None:
    node = start("torchrun.sh", ENDLESS, RUN_DIR="early", PROCS_PER_NODE=1, STOP_STATUS=75)
    until(lambda: node.ranks(), node)  # it imports, and ignores the signal
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 75, node.text
    assert f"{node.run.name}/stop is there" in node.text and len(steps(directory / "early")) <= 1


def test_torchrun_on_the_nodes_of_a_hostfile(start: Start, directory: Path) -> None:
    # What stands for ssh: the command that would run there runs here, as a login shell would start it.
    ssh = directory / "ssh" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text('#!/bin/bash\n[[ $1 == -o ]] && shift 2\nhost=$1; shift\nHOST=$host exec bash -c "$*"\n')
    ssh.chmod(0o755)
    (directory / "nodes.txt").write_text("node1 slots=1\n\nnode2 slots=1\n")
    place = {"HOSTFILE": "nodes.txt", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "STOP_STATUS": 75}
    node = start("torchrun.sh", ENDLESS, RUN_DIR="by ssh", SSH=ssh.parent, **place)
    until_steps(2, node)
    node.process.send_signal(signal.SIGTERM)
    assert node.wait() == 75, node.text
    assert node.decisions[-1] == "the nodes ended with status 75, 75"
    assert "node 1] start: 2 node(s), 1 rank(s) on each" in node.text
    assert steps(directory / "by ssh") == [*range(1, len(steps(directory / "by ssh")) + 1)]


def test_deepspeed_is_started_again_after_a_failure_and_stopped(start: Start, directory: Path) -> None:
    # A stop file that was left behind stops nothing.
    (directory / "again").mkdir()
    (directory / "again" / "stop").touch()
    node = start("deepspeed.sh", f"{ENDLESS} --save-interval 2", RUN_DIR="again", PROCS_PER_NODE=2, MAX_RESTARTS=1)
    until(lambda: (directory / "again" / "checkpoints" / "latest").exists(), node)
    node.ranks()[0].kill()
    until(lambda: node.text.count("megaresume: resumed at") == 1, node)
    until_steps(1, node)
    # The signal goes to the script's whole group.
    os.killpg(node.process.pid, signal.SIGINT)
    assert node.wait() == 0, node.text
    assert node.decisions[1].endswith("; restart 1 of 1 from the last checkpoint")
    assert node.decisions[-1].startswith("stopped by INT: the ranks have saved and ended")
    assert (
        directory / "again" / "checkpoints" / "latest"
    ).read_text() == f"global_step{steps(directory / 'again')[-1]}"


def test_deepspeed_is_not_started_again_for_ever(start: Start, directory: Path) -> None:
    python = directory / "python"
    python.write_text(f'#!/bin/sh\ncase "$*" in *deepspeed.launcher*) exit 3 ;; esac\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    node = start("deepspeed.sh", ENDLESS, RUN_DIR="for ever", PYTHON=python, PROCS_PER_NODE=1, MAX_RESTARTS=1)
    assert node.wait() == 3, node.text
    assert node.decisions[1:] == [
        "failed: status 3; restart 1 of 1 from the last checkpoint",
        "failed: status 3; the same command resumes from the last checkpoint",
    ]


def test_a_restart_goes_on_from_what_was_saved_since(start: Start, directory: Path) -> None:
    """`--ckpt-step` is for the attempts until one has saved: else each would do the same steps."""
    python = directory / "saves-and-fails"
    python.write_text(f"#!{sys.executable}\n{SAVES_AND_FAILS}")
    python.chmod(0o755)
    settings = {"RUN_DIR": "pinned", "PYTHON": python, "PROCS_PER_NODE": 1, "MAX_RESTARTS": 2}
    node = start("deepspeed.sh", f"{ENDLESS} --ckpt-step 20", **settings)
    assert node.wait() == 3, node.text
    assert (directory / "pinned" / "commands").read_text().split() == ["pinned", "pinned", "free"]
    assert node.decisions[2:] == [
        "failed: status 3; restart 2 of 2 from the last checkpoint",
        "--ckpt-step 20 is left out: it has saved since, and resumes from there",
        "failed: status 3; the same command without --ckpt-step 20 resumes from the last checkpoint",
    ]


@release(
    "30 s until the agents notice",
    "`tests/cluster/training/test_restart_in_place.py::test_nodes_are_lost_and_won`",
)
def test_torchrun_goes_on_in_place_without_a_lost_node(start: Start, directory: Path) -> None:
    place = {"NNODES": "1:2", "MASTER_PORT": free_port(), "PROCS_PER_NODE": 1, "MAX_RESTARTS": 2}
    place["RENDEZVOUS"] = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2"
    flags = f"{ENDLESS} --save-interval 2 --megaresume-keep-last 2"
    nodes = [start("torchrun.sh", flags, RUN_DIR="elastic", NODE_RANK=rank, **place) for rank in range(2)]
    until(lambda: (directory / "elastic" / "checkpoints" / "latest").exists(), *nodes)
    nodes[1].kill()
    until(lambda: "dp 2->1" in nodes[0].text, nodes[0])
    until_steps(1, nodes[0])
    nodes[0].process.send_signal(signal.SIGTERM)
    assert nodes[0].wait() == 0, nodes[0].text
    assert nodes[0].decisions[-1].startswith("stopped by TERM")


@pytest.mark.parametrize(
    ("script", "settings", "words"),
    [
        ("torchrun.sh", {"DATA": "nothing.yaml"}, "there is no DATA=nothing.yaml"),
        ("deepspeed.sh", {"PYTHON": "/nowhere/python"}, "PYTHON=/nowhere/python has no megaresume"),
        ("torchrun.sh", {"PYTHON": "false"}, "PYTHON=false has no megaresume"),
        ("torchrun.sh", {"NNODES": "two"}, "NNODES=two is neither a number nor MIN:MAX"),
        ("deepspeed.sh", {"PROCS_PER_NODE": "0"}, "PROCS_PER_NODE=0 is not a number of ranks"),
        ("deepspeed.sh", {"HOSTFILE": "hosts.txt"}, "there is no HOSTFILE=hosts.txt"),
        ("deepspeed.sh", {"NNODES": "2"}, "NNODES=2, and neither HOSTFILE nor NODE_RANK"),
        ("deepspeed.sh", {"NNODES": "2", "NODE_RANK": "0"}, "NODE_RANK without MASTER_ADDR"),
        ("torchrun.sh", {"RUN_DIR": "data.yaml/run"}, "RUN_DIR=data.yaml/run cannot be created"),
    ],
)
def test_refusals(directory: Path, script: str, settings: dict[str, str], words: str) -> None:
    node = Node(directory, script, "", **({"RUN_DIR": "refused", "DATA": "data.yaml"} | settings))
    assert node.wait() == 2, node.text
    assert f"refused: {words}" in node.text
