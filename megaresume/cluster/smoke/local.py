"""Launches of a script on this machine: every node is one process of it, with a session of its own.

    bash SCRIPT FLAGS   NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=...     ->  logs/1.node0.log
    bash SCRIPT FLAGS   NNODES=2 NODE_RANK=1 ...                                       ->  logs/1.node1.log

The mark of `Processes` tells the node of each process, whoever has started it: so one rank, or the node, can be killed.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from megaresume.checkpoint.system import stat_fields
from megaresume.cluster.jobs import Processes, free_port, send_kill
from megaresume.cluster.smoke.job import Job, Kind, Launch
from megaresume.stream.errors import SetupError

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

    description = "processes of one machine"

    def __init__(self, script: Path, *, grace: float = GRACE) -> None:
        self._script, self._grace = script, grace

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """See `Launcher`."""
        if not Path("/proc/self/environ").exists() or shutil.which("bash") is None:
            raise SetupError(
                "processes of this machine cannot be started and found",
                found="no bash" if shutil.which("bash") is None else "no /proc/self/environ",
                expected="Linux, and bash",
                action="run the test on a node of the cluster",
            )

    def start(self, launch: Launch, *, after: Job | None = None) -> Job:
        """See `Launcher`."""
        return LocalScript(self._script, launch, grace=self._grace)


class LocalScript(Processes):
    """A launch script that was started, once for every node."""

    own_session = True

    def __init__(self, script: Path, launch: Launch, *, grace: float = GRACE) -> None:
        self._grace = grace
        logs = launch.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(logs.glob("*.node0.log")))
        self._logs = [logs / f"{number}.node{node}.log" for node in range(launch.nodes)]
        super().__init__(self._logs[0])
        base = os.environ | {"OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"} | dict(launch.env)
        base |= {"NNODES": str(launch.nodes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for node, log in enumerate(self._logs):
            env = base | {"NODE_RANK": str(node), self._mark: str(node)}
            with open(log, "wb") as file:
                self._processes.append(self._start(["bash", str(script), *launch.flags], env, file))

    def stop(self, kind: Kind) -> float:
        """See `Job`."""
        at = time.time()
        if kind in _SIGNALS:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(_SIGNALS[kind])
        else:
            # Of the last node; the first one hosts the place where the ranks meet, and would be missed at once.
            node = len(self._processes) - 1
            members = self._members(str(node))
            victims = _ranks(members)[-1:] if kind == "sigkill" else list(members)
            if not victims:
                raise SetupError(
                    f"there was nothing to stop with {kind}",
                    found=f"no {'process' if kind == 'node-down' else 'rank'} of the launch on node {node}",
                    expected="processes with RANK in their environment" if self.running() else "a job that runs",
                    action=f"look at {self._logs[-1]}",
                )
            at = time.time()
            while victims:
                for pid in victims:
                    send_kill(pid)
                # Of a lost node also those that were started while the others were killed.
                victims = list(self._members(str(node))) if kind == "node-down" else []
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

    def text(self) -> str:
        """See `Job`."""
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in self._logs)

    def close(self) -> None:
        """See `Job`."""
        self.kill()

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.running() or self._members():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _ranks(processes: dict[int, bytes]) -> list[int]:
    """Those that are ranks: a launcher has told them so, and not a rank whose workers they are."""
    told = {pid for pid, environment in processes.items() if b"\0RANK=" in environment}
    ranks = []
    for pid in told:
        with contextlib.suppress(OSError):
            parent = int(stat_fields(pid)[1])
            if parent not in told:
                ranks.append(pid)
    return sorted(ranks)
