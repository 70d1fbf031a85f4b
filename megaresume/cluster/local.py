"""Launchers on this machine: for a training program, and for a launch script that is started once per node.

    LocalPrograms   torchrun                            used by the demo
    LocalLauncher   bash SCRIPT FLAGS   NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=...  ->  logs/1.node0.log
                    bash SCRIPT FLAGS   NNODES=2 NODE_RANK=1 ...                                    ->  logs/1.node1.log

A rank or a node is found by the mark of `Processes`, and killed.
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
from megaresume.cluster.launcher import Kind, Launch, RunningLaunch
from megaresume.cluster.processes import LocalJob, Processes, send_kill
from megaresume.stream.errors import SetupError

#: Variables for a job that must not use this machine's GPUs.
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def visible_gpus() -> list[str]:
    """The GPUs available to this process, as in CUDA_VISIBLE_DEVICES; without torch."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    numbers = (entry.name.removeprefix("nvidia") for entry in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in sorted(int(number) for number in numbers if number.isdigit())]


class Devices:
    """The devices of ranks for jobs whose nodes are all this machine: a GPU for each, or CPUs for all.

    NCCL refuses two ranks on one GPU, and losses on CPUs differ from those on GPUs: if any of the jobs to be compared
    has more ranks than there are GPUs, all of them train on CPUs.

    Args:
        most: ranks of the largest job.
    """

    def __init__(self, most: int) -> None:
        self._gpus = visible_gpus()
        self._too_few = 0 < len(self._gpus) < most
        self.description = "processes of one machine"
        if self._too_few:
            self.description += f", on CPUs: {most} ranks, GPUs: {len(self._gpus)}"

    @property
    def warning(self) -> str:
        """A warning about unused GPUs; empty if there are none."""
        return f"   {self.description}" if self._too_few else ""

    def of_node(self, node: int, ranks: int) -> dict[str, str]:
        """Variables for a node of a job, with this many ranks per node."""
        if self._too_few:
            return ON_CPUS
        if not self._gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": ",".join(self._gpus[node * ranks : (node + 1) * ranks])}


class LocalPrograms:
    """Starts a training program on this machine, under torchrun.

    Args:
        program: see `LocalJob`.
        most: ranks of the largest job.
    """

    def __init__(self, program: str, *, most: int) -> None:
        self._program, self.devices = program, Devices(most)
        self.description = self.devices.description

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """See `Launcher`."""

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """See `Launcher`."""
        output = launch.run_dir / f"{launch.name}.log"
        ranks = launch.ranks_per_node
        env = self.devices.of_node(0, ranks)
        return LocalJob(self._program, launch.flags, num_processes=ranks, output=output, env=env)


#: seconds between a signal, or the loss of a rank, and SIGKILL for all that is left, as with schedulers.
GRACE = 60.0
#: The signals that Slurm would send to the script, by kind of stop.
_SENT = {"sigterm": signal.SIGTERM, "requeue": signal.SIGTERM, "preempt": signal.SIGTERM, "walltime": signal.SIGUSR1}


class LocalLauncher:
    """Starts a launch script on this machine.

    Args:
        script: for one node, like ``launch/torchrun.sh``.
        most: ranks of the largest job.
    """

    def __init__(self, script: Path, *, most: int) -> None:
        self._script, self._devices = script, Devices(most)
        self.description = self._devices.description

    def check(self, launches: Sequence[Launch], kinds: Sequence[Kind]) -> None:
        """See `Launcher`."""
        if not Path("/proc/self/environ").exists() or shutil.which("bash") is None:
            raise SetupError(
                "processes of this machine cannot be started and found",
                found="no bash" if shutil.which("bash") is None else "no /proc/self/environ",
                expected="Linux, and bash",
                action="run the test on a node of the cluster",
            )

    def start(self, launch: Launch, *, after: RunningLaunch | None = None) -> RunningLaunch:
        """See `Launcher`."""
        return LocalScript(self._script, launch, self._devices)


class LocalScript(Processes):
    """A running launch script, started once per node."""

    own_session = True

    def __init__(self, script: Path, launch: Launch, devices: Devices, *, grace: float = GRACE) -> None:
        self._grace = grace
        logs = launch.run_dir / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        number = 1 + len(list(logs.glob("*.node0.log")))
        self._logs = [logs / f"{number}.node{node}.log" for node in range(launch.nodes)]
        super().__init__(self._logs[0])
        base = os.environ | {"OMP_NUM_THREADS": "1", "MAX_RESTARTS": "0"} | dict(launch.env)
        base |= {"NNODES": str(launch.nodes), "MASTER_ADDR": "127.0.0.1"}
        base["MASTER_PORT"] = str(self._port.getsockname()[1])
        for node, log in enumerate(self._logs):
            env = base | devices.of_node(node, launch.ranks_per_node) | {"NODE_RANK": str(node), self._mark: str(node)}
            with open(log, "wb") as file:
                self._processes.append(self._start(["bash", str(script), *launch.flags], env, file))

    def stop(self, kind: Kind) -> float:
        """See `RunningLaunch`."""
        at = time.time()
        if kind in _SENT:
            for process in self._processes:
                if process.poll() is None:
                    process.send_signal(_SENT[kind])
        else:
            # The last node: the first one hosts the rendezvous, so its loss would be noticed at once.
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
                # For a lost node, also processes started while the others were killed.
                victims = list(self._members(str(node))) if kind == "node-down" else []
        ended = self._gone_within(self._grace)
        self.close()
        if not ended and kind in _SENT:
            raise SetupError(
                f"the job continued after {_SENT[kind].name}",
                found=f"processes {self._grace:.0f} seconds later; they were killed",
                expected="a script that lets all ranks save, and ends",
                cause="a shell that waits for the training in the foreground runs its trap when the training is over",
                action="trap the signal as launch/torchrun.sh does, with the training in the background and `wait`",
            )
        return at

    def text(self) -> str:
        """See `RunningLaunch`."""
        return "".join(log.read_text(encoding="utf-8", errors="replace") for log in self._logs)

    def close(self) -> None:
        """See `RunningLaunch`."""
        self.kill()

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while self.running() or self._members():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def _ranks(processes: dict[int, bytes]) -> list[int]:
    """The processes that are ranks: started by a launcher, not by a rank, as its workers are."""
    told = {pid for pid, environment in processes.items() if b"\0RANK=" in environment}
    ranks = []
    for pid in told:
        with contextlib.suppress(OSError):
            parent = int(stat_fields(pid)[1])
            if parent not in told:
                ranks.append(pid)
    return sorted(ranks)
