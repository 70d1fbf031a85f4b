"""The local launcher: what it kills, and that nothing is left over."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from megaresume.cluster.launcher import Launch
from megaresume.cluster.local import ON_CPUS, Devices, LocalScript
from megaresume.stream.errors import SetupError

pytestmark = pytest.mark.process

#: a launcher whose rank has a session of its own, and a worker that has inherited who its rank is.
RANK = 'RANK=$NODE_RANK setsid bash -c \'echo $$ >> "$1/ranks"; bash -c "sleep 100; :" & wait\' - "$1"'


def start(directory: Path, text: str, *, nodes: int = 1, grace: float = 20) -> LocalScript:
    script = directory / "train.sh"
    script.write_text(text)
    launch = Launch(
        nodes=nodes, ranks_per_node=1, flags=(str(directory),), env=(), run_dir=directory / "run", name="run"
    )
    job = LocalScript(script, launch, Devices(1), grace=grace)
    deadline = time.monotonic() + 120
    while len(ranks(directory)) < nodes and time.monotonic() < deadline:
        time.sleep(0.02)
    return job


def ranks(directory: Path) -> list[int]:
    path = directory / "ranks"
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_sigkill_ends_one_rank_of_the_last_node(tmp_path: Path) -> None:
    # Node 0 has a rank as well, which does not miss the other one.
    text = (
        f"if [ $NODE_RANK = 1 ]; then\n{RANK}\nelse\nRANK=0 bash -c 'sleep 100; :' &\necho $! > $1/ranks.0\nwait\nfi\n"
    )
    script = tmp_path / "train.sh"
    script.write_text(text)
    launch = Launch(nodes=2, ranks_per_node=1, flags=(str(tmp_path),), env=(), run_dir=tmp_path / "run", name="run")
    job = LocalScript(script, launch, Devices(1), grace=3)
    deadline = time.monotonic() + 120
    while not (ranks(tmp_path) and (tmp_path / "ranks.0").exists()) and time.monotonic() < deadline:
        time.sleep(0.02)
    (victim,) = ranks(tmp_path)
    job.stop("sigkill")
    assert not alive(victim) and not job.running()
    other = int((tmp_path / "ranks.0").read_text())
    assert not alive(other)  # what is left behind the grace is killed, too


def test_node_down_leaves_nothing_of_the_node(tmp_path: Path) -> None:
    job = start(tmp_path, f"{RANK}\n", nodes=1)
    (rank,) = ranks(tmp_path)
    before = time.time()
    at = job.stop("node-down")
    assert before <= at <= time.time()
    assert not alive(rank) and not job.running() and job.wait(1) == -signal.SIGKILL


def test_a_script_that_ignores_its_signal(tmp_path: Path) -> None:
    job = start(tmp_path, f"trap '' TERM\n{RANK}\n", grace=0.5)
    (rank,) = ranks(tmp_path)
    with pytest.raises(SetupError, match="continued after SIGTERM"):
        job.stop("sigterm")
    assert not alive(rank) and not job.running()


def test_nothing_else_is_touched(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.mkdir()
    other.mkdir()
    job, bystander = start(one, f"{RANK}\n"), start(other, f"{RANK}\n")
    job.stop("node-down")
    assert bystander.running() and alive(ranks(other)[0])
    bystander.close()
    assert not bystander.running()


def test_every_node_of_this_machine_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7,6")
    devices = Devices(most=4)
    assert [devices.of_node(node, 2) for node in range(2)] == [
        {"CUDA_VISIBLE_DEVICES": "4,5"},
        {"CUDA_VISIBLE_DEVICES": "7,6"},
    ]
    assert devices.of_node(0, 1) == {"CUDA_VISIBLE_DEVICES": "4"}
    assert not devices.warning


def test_ranks_that_are_more_than_the_gpus_train_on_cpus_in_every_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    devices = Devices(most=2)
    assert devices.of_node(0, 2) == devices.of_node(0, 1) == ON_CPUS  # the smaller one too: losses are compared
    assert devices.description == "processes of one machine, on CPUs: 2 ranks, GPUs: 1"
    assert devices.description in devices.warning
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert Devices(most=2).of_node(1, 1) == {}
