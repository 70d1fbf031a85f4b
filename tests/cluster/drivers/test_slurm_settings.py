"""Settings of the batch script that are refused before anything starts, and the command of every launcher."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from megaresume.cluster.drivers.attempts import Attempts, read_attempts, write_attempts
from megaresume.cluster.drivers.node_check import Verdict
from megaresume.cluster.drivers.slurm import SlurmDriver
from megaresume.cluster.drivers.slurm_commands import usable
from megaresume.cluster.drivers.slurm_job import RankLayout, SlurmJob, SlurmSettings, tasks
from megaresume.stream.errors import UsageError


def driver(directory: Path, *, job: str = "17", **changes: str) -> SlurmDriver:
    words = {
        "run_dir": str(directory / "run"),
        "data": str(directory / "data.yaml"),
        "python": sys.executable,
        "launcher": "torchrun",
        "procs_per_node": "1",
        "train_nodes": "all",
        "requeue": "yes",
        "chain": "0",
        "chain_options": "",
        "max_restarts": "3",
        "exclude_nodes": "2",
        "node_check": "yes",
        "save_seconds": "600",
        "srun_options": "",
        "script": "train.sbatch",
        "heard": "-",
    }
    settings = SlurmSettings(**(words | changes), container=(), train=("-m", "x", words["data"]), flags=())
    slurm = SlurmJob(id=job, attempt=0, name="x", nodes=("n1",), node_list="n1", partition="batch")
    return SlurmDriver(settings, slurm)


def begin(driver: SlurmDriver) -> int:
    ranks = driver._check()
    driver._count()
    return ranks


@pytest.fixture(autouse=True)
def in_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_HET_SIZE", "SLURM_ARRAY_TASK_ID", "MEGARESUME_CHAIN_HEAD", "MEGARESUME_CHAIN_LEFT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"requeue": "maybe"}, "REQUEUE=maybe is not known"),
        ({"launcher": "mpirun"}, "LAUNCHER=mpirun is not known"),
        ({"chain": "some"}, "CHAIN=some is not a number"),
        ({"exclude_nodes": "-1"}, "EXCLUDE_NODES=-1 is not a number"),
        ({"procs_per_node": "0"}, "PROCS_PER_NODE=0 is not a number of ranks"),
        ({"train_nodes": "0"}, "TRAIN_NODES=0 is not a number of nodes"),
        ({"python": "/nowhere/python"}, "there is no PYTHON=/nowhere/python"),
        ({"node_check": "no"}, "there is no DATA="),
        ({"run_dir": "/proc/run"}, "RUN_DIR=/proc/run cannot be created"),
    ],
)
def test_refusals(tmp_path: Path, changes: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        begin(driver(tmp_path, **changes))
    assert refused.value.args[0].startswith(words)
    assert not (tmp_path / "run").exists()


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    """Of one node alone the node check tells; here nobody is asked."""
    (tmp_path / "data.yaml").touch()
    begun = driver(tmp_path, node_check="no")
    begun.settings = replace(begun.settings, train=("gone.py",))
    with pytest.raises(UsageError, match="there is no script gone"):
        begun._check()


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict(bad=(), missing=("gone.py", "web")), "there is no script gone.py (in "),
        (Verdict(bad=(), missing=("module my.training",)), f"PYTHON={sys.executable} has no module my.training"),
        (Verdict(bad=(), broken=(("torch", "no luck"),)), f"PYTHON={sys.executable} cannot import torch: no luck"),
    ],
)
def test_what_no_node_has_is_refused(tmp_path: Path, verdict: Verdict, words: str) -> None:
    begun = driver(tmp_path)
    training = ("gone.py",) if verdict.missing[:1] == ("gone.py",) else ("-m", "my.training")
    begun.settings = replace(begun.settings, train=training)
    with pytest.raises(UsageError) as refused:
        begun.settings.check_verdict(verdict)
    assert refused.value.args[0].startswith(words)


def test_a_heterogeneous_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_HET_SIZE", "2")
    with pytest.raises(UsageError, match="heterogeneous job"):
        driver(tmp_path)._check()


def test_an_array_needs_directories_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    for run_dir in ("run", "run13"):
        with pytest.raises(UsageError, match="the jobs of this array would all write to"):
            driver(tmp_path, run_dir=str(tmp_path / run_dir))._check()
    for run_dir in ("run/3", "run-3"):
        assert driver(tmp_path, run_dir=str(tmp_path / run_dir))._check() == 1


def test_an_attempt_is_counted_before_it_begins(tmp_path: Path) -> None:
    assert begin(driver(tmp_path)) == 1
    path = tmp_path / "run" / "logs" / "attempts.17.json"
    assert read_attempts(path) == Attempts(fruitless=1)
    write_attempts(path, Attempts(fruitless=4))
    with pytest.raises(UsageError, match="4 attempts in a row without a new checkpoint, MAX_RESTARTS=3"):
        begin(driver(tmp_path))
    assert begin(driver(tmp_path, job="18")) == 1  # submitted by hand: counts from 0


def test_a_chain_counts_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGARESUME_CHAIN_HEAD", "15")
    begin(driver(tmp_path))
    assert read_attempts(tmp_path / "run" / "logs" / "attempts.15.json") == Attempts(fruitless=1)


def test_the_trainers_environment_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEP", "of the user")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "8")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "1")
    command, env = driver(tmp_path).settings.srun(("n1",), 4, ["true"])
    assert env["STEP"] == "of the user"
    assert env["SRUN_CPUS_PER_TASK"] == "2"  # of the job's eight, for each of four ranks
    assert command == ["srun", "--nodes=1", "--ntasks=4", "--ntasks-per-node=4", "--cpu-bind=none", "true"]
    settings = driver(tmp_path, srun_options="--container-image=x --cpu-bind=cores").settings
    own = settings.srun(("n1",), 1, ["true"])[0]
    assert own[4:] == ["--container-image=x", "--cpu-bind=cores", "true"]


LAYOUT = RankLayout(nodes=("n1", "n2"), ranks_per_node=4, address="10.0.0.1", port=12345)
TRAINING = ("-m", "megaresume.cluster.training", "--save", "a run, 'mine'")


@pytest.mark.parametrize(
    ("launcher", "per_node", "words"),
    [
        ("torchrun", 1, "-m torch.distributed.run --nnodes 2 --node-rank"),
        ("srun", 4, "LOCAL_WORLD_SIZE=4; exec"),
        ("deepspeed", 1, "--no_ssh --node_rank"),
    ],
)
def test_the_command_of_a_launcher(tmp_path: Path, launcher: str, per_node: int, words: str) -> None:
    container = ("apptainer", "exec", "a file.sif")
    started = tasks(launcher, LAYOUT, python="/my env/python", container=container, training=TRAINING, logs=tmp_path)
    assert started.per_node == per_node
    assert started.words[4:9] == (*container, "bash", "-c")
    assert words in started.words[-1]
    split = shlex.split(started.words[-1])
    assert split[-2:] == ["--save", "a run, 'mine'"] and "/my env/python" in split
    assert split[-4] == ("--module" if launcher == "deepspeed" else "-m")
    if launcher == "deepspeed":
        assert (tmp_path / "hostfile").read_text() == "n1 slots=4\nn2 slots=4\n"


def test_nodes_that_can_get_a_job() -> None:
    assert all(map(usable, ("idle", "mixed", "idle~", "mixed-", "allocated#", "completing")))
    assert not any(map(usable, ("idle*", "down", "drained", "allocated*", "maint")))
