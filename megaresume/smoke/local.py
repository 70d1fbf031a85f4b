"""Launches of a script on this machine: every node is one process of it, with a session of its own.

    bash SCRIPT FLAGS   NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=...     ->  logs/1.node0.log
    bash SCRIPT FLAGS   NNODES=2 NODE_RANK=1 ...                                       ->  logs/1.node1.log

A variable of the environment marks all processes of a node, whoever has started them and wherever they moved to: so
they are found when one rank, or the node, is to be killed, and none is left over.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaresume.smoke.job import KINDS, Job, Kind, Launch
from megaresume.stream.errors import SetupError
from megaresume.training.ports import free_port

__all__ = ["LocalLauncher", "LocalScript"]

#: set for every process of a node: ``<launch>:<node>``.
MARK = "MEGARESUME_SMOKE"
#: seconds between a signal, or the loss of a rank, and SIGKILL for all that is left, as schedulers have it.
GRACE = 60.0
#: what Slurm would send to the script.
_SIGNALS = {"sigterm": signal.SIGTERM, "requeue": signal.SIGTERM, "preempt": signal.SIGTERM, "walltime": signal.SIGUSR1}


class LocalLauncher:
    """Starts a launch script on this machine.

    Args:
        script: of one node, as ``launch/torchrun.sh`` is.
        grace: seconds, see `GRACE`.
    """

    kinds: Sequence[Kind] = KINDS

    def __init__(self, script: Path, *, grace: float = GRACE) -> None:
        self._script, self._grace = script, grace

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """See `Launcher`."""
        import importlib.util
        import shutil

        if importlib.util.find_spec("psutil") is None or shutil.which("bash") is None:
            raise SetupError(
                "processes of this machine cannot be started and found",
                found="no bash" if shutil.which("bash") is None else "no psutil",
                expected="bash, and the package psutil",
                action="pip install psutil",
            )

    def start(self, launch: Launch, *, after: Job | None = None) -> Job:
        """See `Launcher`."""
        return LocalScript(self._script, launch, grace=self._grace)


class LocalScript:
    """A launch script that was started, once for every node."""

    def __init__(self, script: Path, launch: Launch, *, grace: float = GRACE) -> None:
        self._launch, self._grace = launch, grace
        self._token = uuid.uuid4().hex
        logs = launch.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(logs.glob("*.node0.log")))
        self._logs = [logs / f"{number}.node{node}.log" for node in range(launch.nodes)]
        base = os.environ | {"OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"} | dict(launch.env)
        base |= {"NNODES": str(launch.nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        self._nodes = []
        for node, log in enumerate(self._logs):
            env = base | {"NODE_RANK": str(node), MARK: f"{self._token}:{node}"}
            with open(log, "wb") as file:
                self._nodes.append(
                    subprocess.Popen(
                        ["bash", str(script), *launch.flags],
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )

    def running(self) -> bool:
        """See `Job`."""
        return any([node.poll() is None for node in self._nodes])  # noqa: C419  all of them are to be reaped

    def stop(self, kind: Kind) -> float:
        """See `Job`."""
        at = time.time()
        if kind in _SIGNALS:
            for node in self._nodes:
                if node.poll() is None:
                    node.send_signal(_SIGNALS[kind])
        else:
            # Of the last node; the first one hosts the place where the ranks meet, and would be missed at once.
            lost = self._members(len(self._nodes) - 1)
            self._kill(lost if kind == "node-down" else _ranks(lost)[-1:], kind)
        ended = self._gone_within(self._grace)
        self.close()
        if not ended and kind in _SIGNALS:
            raise SetupError(
                f"the job went on after {_SIGNALS[kind].name}",
                found=f"processes {self._grace:.0f} seconds later; they were killed",
                expected="a script that lets all ranks save, and ends",
                cause="a shell that waits for the training in the foreground runs its trap when the training is over",
                action="trap the signal as launch/torchrun.sh does, with the training in the background and `wait`",
            )
        return at

    def wait(self, timeout: float) -> int:
        """See `Job`."""
        deadline = time.monotonic() + timeout
        while self.running():
            if time.monotonic() > deadline:
                self.close()
                raise SetupError(
                    f"a launch did not end within {timeout:.0f} seconds, and was killed",
                    found=self.text()[-2000:],
                    action=f"look at {self._logs[0]}",
                )
            time.sleep(0.02)
        return next((int(node.returncode) for node in self._nodes if node.returncode), 0)

    def text(self) -> str:
        """See `Job`."""
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in self._logs)

    def close(self) -> None:
        """See `Job`."""
        while members := self._members(None):
            for process in members:
                _send_kill(process)
            self.running()
            time.sleep(0.02)
        for node in self._nodes:
            node.wait()

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.running() or self._members(None):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def _members(self, node: int | None) -> list[Any]:
        """The processes of a node, or of all; by number."""
        import psutil  # deferred: comes with DeepSpeed

        mark = self._token + ("" if node is None else f":{node}")
        found = []
        for process in psutil.process_iter():
            try:
                ours = process.environ().get(MARK, "")
                if (ours == mark or (node is None and ours.startswith(mark))) and process.status() != "zombie":
                    found.append(process)
            except (psutil.Error, OSError):
                continue
        return sorted(found, key=lambda process: process.pid)

    def _kill(self, victims: Sequence[Any], kind: Kind) -> None:
        if not victims:
            raise SetupError(
                f"there was nothing to stop with {kind}",
                found=f"no {'process' if kind == 'node-down' else 'rank'} of the launch on node {len(self._nodes) - 1}",
                expected="a job that runs" if not self.running() else "processes with RANK in their environment",
                action=f"look at {self._logs[-1]}",
            )
        for process in victims:
            _send_kill(process)


def _send_kill(process: Any) -> None:
    import psutil

    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return


def _ranks(processes: Sequence[Any]) -> list[Any]:
    """Those that are ranks: a launcher has told them so, and not a rank whose workers they are."""
    import psutil

    told = {}
    for process in processes:
        try:
            told[process.pid] = ("RANK" in process.environ(), process.ppid())
        except (psutil.Error, OSError):
            continue
    ranks = {pid for pid, (has, parent) in told.items() if has and not told.get(parent, (False, 0))[0]}
    return [process for process in processes if process.pid in ranks]


def own_script(launch: str) -> Path:
    """One of our launch scripts."""
    return Path(__file__).parents[2] / "launch" / f"{launch}.sh"
