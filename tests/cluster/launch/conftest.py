"""A real Slurm for these tests, brought up by the first test that wants it and ended whatever happens.

    lock NUMBER  ->  install.sh  ->  cluster.sh start (CLUSTER_ID=NUMBER)  ->  tests  ->  cluster.sh stop
       `-- a watcher waits for the same lock: when this process dies in any way, it stops the cluster

Every pytest process has a number of its own, so clusters live side by side. Where Slurm cannot be installed the tests
fail with the words of install.sh; they are never skipped.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil
import pytest

from tests.cluster.training.conftest import MODEL, write_corpus

#: of a tiny model, and of a run that ends when it is told to, and leaves time to others until then.
FLAGS = f"{MODEL} --micro-batch-size 1 --global-batch-size 2 --lr-decay-style constant --lr-warmup-fraction 0"
ENDLESS = "--train-iters 1000000 --megaresume-min-step-seconds 0.3"

SCRIPTS = Path(__file__).parents[3] / "launch" / "slurm" / "local-cluster"
# Short, as a Unix socket lies in it, and seen by all nodes.
HOME = Path(f"/tmp/megaresume-slurm-tests-{os.getuid()}")
NUMBERS = range(20, 100)
NODES = 4
#: For machines that do other work at the same time: longer than on a laptop.
SETTINGS = {
    "CLUSTER_NODES": str(NODES),
    # A busy machine may take longer than 8 s to start a step on a node. Requeued jobs need not wait so long: `hurried`.
    "CLUSTER_CRED_EXPIRE": "20",
    "CLUSTER_NODE_TIMEOUT": "30",
    "CLUSTER_KILL_WAIT": "20",
    "CLUSTER_PREEMPT_GRACE": "90",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """A running cluster of the nodes n1, n2, ..."""

    root: Path
    #: ns or flat, see cluster.sh.
    mode: str

    @property
    def conf(self) -> Path:
        """Its slurm.conf."""
        return self.root / "slurm.conf"

    @property
    def env(self) -> dict[str, str]:
        """The environment in which Slurm's commands mean this cluster."""
        return os.environ | {"SLURM_CONF": str(self.conf)}

    @property
    def nodes(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(f"n{number}" for number in range(1, NODES + 1))

    def slurm(self, *words: object, check: bool = True) -> str:
        """What a command prints, such as ``slurm("sinfo", "-h")``."""
        done = subprocess.run([*map(str, words)], env=self.env, capture_output=True, text=True, timeout=300)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def exec(self, node: str, *words: str) -> str:
        """What a command prints that runs inside a node."""
        done = _script("cluster.sh", self.root, "exec", node, *words)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def kill_node(self, node: str) -> None:
        """Cut its power."""
        assert _script("cluster.sh", self.root, "kill-node", node).returncode == 0

    def kill_slurmd(self, node: str) -> None:
        """Kill the daemon, not the jobs."""
        assert _script("cluster.sh", self.root, "kill-slurmd", node).returncode == 0

    @contextmanager
    def without_controller(self) -> Iterator[None]:
        """Its process is killed, and started again at the end."""
        (controller,) = [process for process in psutil.process_iter() if self._is_controller(process)]
        env = controller.environ()
        controller.kill()
        controller.wait()
        try:
            yield
        finally:
            with open(self.root / "log" / "slurmctld.out", "a") as log:
                words = ["setsid", "--fork", "slurmctld", "-D"]
                subprocess.run(words, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, check=True)

    def _is_controller(self, process: psutil.Process) -> bool:
        try:
            return process.name() == "slurmctld" and process.environ().get("CLUSTER_DAEMON_OF") == str(self.root)
        except (psutil.Error, OSError):
            return False

    def start_node(self, node: str) -> None:
        """Switch it on, or start its daemon."""
        done = _script("cluster.sh", self.root, "start-node", node)
        assert done.returncode == 0, done.stderr

    def rest(self) -> None:
        """No job, and all nodes idle."""
        for node in self.nodes:
            self.start_node(node)
        deadline = time.monotonic() + 180
        while True:
            if jobs := self.slurm("squeue", "-h", "-o", "%A").split():
                self.slurm("scancel", *jobs, check=False)
            states = dict(line.split("|") for line in self.slurm("sinfo", "-hNp", "batch", "-o", "%N|%T").split())
            for node in (node for node, state in states.items() if state.startswith(("down", "drain"))):
                self.slurm("scontrol", "update", f"nodename={node}", "state=resume", check=False)
            if not jobs and [*states.values()] == ["idle"] * NODES:
                return
            assert time.monotonic() < deadline, f"the cluster does not come to rest: jobs {jobs}, nodes {states}"
            time.sleep(0.2)


def _script(name: str, root: Path, *words: str, **settings: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | SETTINGS | settings | {"CLUSTER_ROOT": str(root), "CLUSTER_ID": root.name}
    return subprocess.run([SCRIPTS / name, *words], env=env, capture_output=True, text=True, timeout=900)


def _install(*more: str) -> None:
    HOME.mkdir(exist_ok=True)
    with open(HOME / "install.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = _script("install.sh", HOME, *more)
    if done.returncode:
        pytest.fail(f"Slurm cannot be installed, so these tests fail:\n{done.stderr}", pytrace=False)


def _lock(number: int) -> IO[str] | None:
    """The lock of a number; None: another process has it. The kernel gives it back when this one ends."""
    HOME.mkdir(exist_ok=True)
    file = open(HOME / f"{number}.lock", "w")  # noqa: SIM115  kept open
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _sweep() -> None:
    """End clusters whose pytest, and whose watcher, are no more."""
    for root in HOME.glob("[0-9]*/run"):
        if (lock := _lock(int(root.parent.name))) is not None:
            with lock:
                _script("cluster.sh", root.parent, "stop")


@contextmanager
def hurried(cluster: Cluster) -> Iterator[None]:
    """Requeued jobs start some seconds after they were queued.

    Slurm has them wait until their old credentials have expired. Nodes refuse credentials that are not a second younger
    than the end of the attempt before; it has ended on all nodes when the job is pending.
    """
    over = threading.Event()

    def hurry() -> None:
        # By how often it was queued again, too: a short attempt fits between two looks.
        seen: dict[tuple[str, str], float] = {}
        while not over.wait(0.5):
            columns = "JobArrayID:40,RestartCnt:20,Reason:40"
            waiting = cluster.slurm("squeue", "-h", "-r", "-t", "PENDING", "-O", columns, check=False).splitlines()
            now = time.monotonic()
            rows = (line.split(maxsplit=2) for line in waiting)
            reasons = {(job, restarts): reason.strip() for job, restarts, reason in rows}
            seen = {attempt: seen.get(attempt, now) for attempt in reasons}
            for attempt, reason in reasons.items():
                if reason == "BeginTime" and now > seen[attempt] + 2.5:
                    cluster.slurm("scontrol", "update", f"jobid={attempt[0]}", "StartTime=now", check=False)

    thread = threading.Thread(target=hurry, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def running_cluster(**settings: str) -> Iterator[Cluster]:
    """A cluster of one's own; ``settings`` are those of cluster.sh."""
    _install()
    _sweep()
    number, lock = next((n, lock) for n in NUMBERS if (lock := _lock(n)) is not None)
    root = HOME / str(number)
    with lock:
        env = os.environ | {"CLUSTER_ROOT": str(root), "CLUSTER_ID": str(number)}
        watcher = subprocess.Popen(
            ["flock", lock.name, SCRIPTS / "cluster.sh", "stop"],
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            # One whose pytest has died this moment, before its watcher had the lock, would be taken for this one.
            _script("cluster.sh", root, "stop")
            done = _script("cluster.sh", root, "start", **settings)
            if done.returncode:
                pytest.fail(f"the cluster does not start:\n{done.stdout}{done.stderr}", pytrace=False)
            mode = (root / "run" / "settings").read_text().split("CLUSTER_MODE=")[1].split()[0]
            yield Cluster(root=root, mode=mode)
        finally:
            _script("cluster.sh", root, "stop")
            with suppress(ProcessLookupError):
                watcher.terminate()
            watcher.wait()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A real Slurm of four nodes with a `batch` partition, and an `urgent` one that preempts it."""
    with running_cluster() as cluster:
        yield cluster


@pytest.fixture
def slurm(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """The cluster, meant by Slurm's commands in this test; at rest before and after it."""
    monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
    with hurried(cluster):
        cluster.rest()
        yield cluster
        cluster.rest()


@pytest.fixture(scope="session")
def shellcheck() -> str:
    """The program that checks shell scripts."""
    _install("shellcheck")
    return "shellcheck"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a data.yaml and what it names; every node sees it."""
    directory = tmp_path_factory.mktemp("launch")
    write_corpus(directory / "web", documents=400, seed=1)
    (directory / "data.yaml").write_text("seed: 1234\nseq_length: 64\nsources:\n  web: {path: web}\n")
    return directory
