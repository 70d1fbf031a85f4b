"""Jobs of this machine: a program under a launcher, or a launch script for every node, as groups of processes.

    LocalJob      torchrun, deepspeed, or the ranks themselves              all is killed at once, as when a node dies
    LocalScript   bash SCRIPT FLAGS   NNODES=2 NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=...  ->  logs/1.node0.log
                  bash SCRIPT FLAGS   NNODES=2 NODE_RANK=1 ...                                    ->  logs/1.node1.log

Killing is SIGKILL: no handler runs, no file is closed. The mark of `Processes` tells the node of each process, whoever
has started it: so one rank, or one node, can be killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal, Self

from megaresume.checkpoint.system import stat_fields
from megaresume.cluster.launcher import Kind, Launch, RunningLaunch
from megaresume.stream.errors import SetupError

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def keep_port() -> socket.socket:
    """A TCP port that nobody listens on, kept until the socket is closed.

    The socket is bound, so that nobody else is given the port, and does not listen: a program that sets SO_REUSEADDR,
    as torch's store does, can listen there in the meantime. The port is not one of those that the system gives to
    outgoing connections.

    Raises:
        SetupError: there is none.
    """
    last = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = max(int(_RANGE.read_text().split()[0]), _FIRST + 1)
    draw = random.SystemRandom()  # jobs that start at the same moment must not try the same ones
    for _ in range(200):
        kept = socket.socket()
        with contextlib.suppress(OSError):
            kept.bind(("", draw.randrange(_FIRST, last)))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # now: two that set it before could both bind
            return kept
        kept.close()
    raise SetupError(
        "no free port was found for the ranks to meet at",
        found=f"200 ports between {_FIRST} and {last} are in use",
        action="end other jobs on this machine, or set MASTER_ADDR and MASTER_PORT yourself",
    )


def free_port() -> int:
    """The number of such a port, which is not kept: another job may be given it before somebody listens there.

    Raises:
        SetupError: there is none.
    """
    with keep_port() as kept:
        return int(kept.getsockname()[1])


#: begins the name of the variable that marks the processes of a job.
MARK = "MEGARESUME_JOB_"


class Processes:
    """Processes of this machine, and all that they have started: found wherever they moved to, and all of them ended.

    A variable of the environment marks them, which they inherit, also in a job within this one.

    Args:
        output: file in which to look if something goes wrong.
    """

    #: whether each has a session of its own, so that Ctrl-C does not reach it.
    own_session = False

    def __init__(self, output: Path) -> None:
        self.output = output
        self._mark = f"{MARK}{uuid.uuid4().hex}"
        #: the port at which the ranks meet, until the job is over.
        self._port = keep_port()
        self._processes: list[subprocess.Popen[bytes]] = []

    def _start(self, command: list[str], env: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=self.own_session,
        )

    def text(self) -> str:
        """What the job has printed so far."""
        raise NotImplementedError

    def running(self) -> bool:
        """Whether any of those that were started is."""
        return any([process.poll() is None for process in self._processes])  # noqa: C419  all of them are to be reaped

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end; when one process fails, the others are killed, as a launcher does.

        Returns:
            exit status: 0, or the first that is not.

        Raises:
            SetupError: it is still running after ``timeout`` seconds; it is killed first.
        """
        self.wait_until(lambda: any(p.poll() not in (None, 0) for p in self._processes), timeout=timeout)
        failed = [p.returncode for p in self._processes if p.poll() not in (None, 0)]
        if failed:
            self.kill()
            return int(failed[0])
        return 0

    def wait_until(self, condition: Callable[[], bool], *, timeout: float = 600) -> bool:
        """Wait until a condition holds or the job has ended; say whether the condition holds.

        Raises:
            SetupError: neither within ``timeout`` seconds; the job is killed first.
        """
        deadline = time.monotonic() + timeout
        while True:
            running = self.running()
            if condition():
                return True
            if not running:
                return False
            if time.monotonic() > deadline:
                self.kill()
                raise SetupError(
                    f"a run made no progress within {timeout:.0f} seconds and was killed",
                    found=self.text()[-2000:],
                    action=f"look at {self.output}",
                )
            time.sleep(0.01)

    def kill(self) -> int:
        """SIGKILL every process of the job, launcher and ranks and workers, and wait for their ends.

        Returns:
            how many were killed.
        """
        killed = set()
        while members := self._members():
            for pid in members:
                if send_kill(pid):
                    killed.add(pid)
            self.running()  # reaps those that are over
            time.sleep(0.01)
        for process in self._processes:
            process.wait()
        self._port.close()
        return len(killed)

    def _members(self, value: str | None = None) -> dict[int, bytes]:
        """The processes of this job, whose mark has this value, by number, and their environments."""
        mark = f"\0{self._mark}=".encode() + (b"" if value is None else f"{value}\0".encode())
        found = {}
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()  # empty once it has ended
                if mark in environment:
                    found[pid] = environment
        return found


def send_kill(pid: int) -> bool:
    """SIGKILL; whether there was such a process."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


#: ``torchrun`` and ``deepspeed``: under that launcher. ``env``: the processes themselves, told by environment
#: variables who they are, as Slurm does; starts in half the time.
Launcher = Literal["torchrun", "deepspeed", "env"]


class LocalJob(Processes):
    """A run of ``num_processes`` ranks; use it in a ``with`` statement, at whose end whatever still runs is killed.

    Args:
        program: a module (``megaresume.cluster.training``) or the path of a script.
        arguments: of the program.
        num_processes: ranks.
        output: file that gets what all ranks print; appended to.
        launcher: how they are started.
        env: variables on top of this process's environment.
    """

    def __init__(
        self,
        program: str,
        arguments: Sequence[str],
        *,
        num_processes: int,
        output: Path,
        launcher: Launcher = "torchrun",
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(output)
        self._seen_from = output.stat().st_size if output.exists() else 0
        # ninja and the launchers of this environment first: a second ninja on the path makes DeepSpeed compile again.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        base = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {})
        base[self._mark] = "1"
        is_script = program.endswith(".py")
        target = [program] if is_script else ["-m", program]
        port = str(self._port.getsockname()[1])
        if launcher == "env":
            commands = [
                ([sys.executable, *target, *arguments], base | _identity(rank, num_processes, port))
                for rank in range(num_processes)
            ]
        elif launcher == "torchrun":
            options = ["--nproc-per-node", str(num_processes), "--master-port", port]
            commands = [([sys.executable, "-m", "torch.distributed.run", *options, *target, *arguments], base)]
        else:
            options = ["--num_gpus", str(num_processes), "--master_port", port, *([] if is_script else ["--module"])]
            commands = [([sys.executable, "-m", "deepspeed.launcher.runner", *options, program, *arguments], base)]
        with open(output, "ab") as file:
            for command, variables in commands:
                self._processes.append(self._start(command, variables, file))

    def text(self) -> str:
        """What this job has printed so far."""
        with open(self.output, "rb") as file:
            file.seek(self._seen_from)
            return file.read().decode("utf-8", "replace")

    def stop(self, kind: Kind) -> float:
        """See `RunningLaunch`: whatever the kind, all of it is killed at once."""
        at = time.time()
        self.kill()
        return at

    def close(self) -> None:
        """See `RunningLaunch`."""
        self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _identity(rank: int, size: int, port: str) -> dict[str, str]:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in who.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def ask(*words: str) -> dict[str, Any]:
    """Ask a command of the program, with --json; the answer includes its exit status.

    Raises:
        SetupError: it printed nothing.
    """
    done = subprocess.run([sys.executable, "-m", "megaresume", *words, "--json"], stdout=subprocess.PIPE, text=True)
    if not done.stdout.strip():
        raise SetupError(
            f"megaresume {words[0]} failed",
            found=f"exit status {done.returncode}",
            expected="a result",
            action=f"run it by hand: megaresume {' '.join(words)}",
        )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


#: Variables of a job that is to leave the GPUs of this machine alone.
ON_CPUS = {"CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}


def visible_gpus() -> list[str]:
    """The GPUs of this machine that this process may use, as CUDA_VISIBLE_DEVICES names them; without asking torch."""
    if (named := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [name for name in named.split(",") if name]
    numbers = (entry.name.removeprefix("nvidia") for entry in Path("/dev").glob("nvidia[0-9]*"))
    return [str(number) for number in sorted(int(number) for number in numbers if number.isdigit())]


class Devices:
    """The devices of the ranks of jobs whose nodes are all this machine: a GPU for each, or CPUs for all.

    NCCL refuses two ranks on one GPU, and losses of a job on CPUs differ from those on GPUs: if one of the jobs that
    are to be compared has more ranks than there are GPUs, all of them train on CPUs.

    Args:
        most: ranks of the largest of the jobs.
    """

    def __init__(self, most: int) -> None:
        self._gpus = visible_gpus()
        self._too_few = 0 < len(self._gpus) < most
        self.description = "processes of one machine"
        if self._too_few:
            self.description += f", on CPUs: {most} ranks, GPUs: {len(self._gpus)}"

    @property
    def warning(self) -> str:
        """A warning about GPUs that are not used; empty if there is none."""
        return f"   {self.description}" if self._too_few else ""

    def of_node(self, node: int, ranks: int) -> dict[str, str]:
        """Variables for one of the nodes of a job, each of so many ranks."""
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


#: seconds between a signal, or the loss of a rank, and SIGKILL for all that is left, as schedulers have it.
GRACE = 60.0
#: The signals that Slurm would send to the script, by kind of stop.
_SENT = {"sigterm": signal.SIGTERM, "requeue": signal.SIGTERM, "preempt": signal.SIGTERM, "walltime": signal.SIGUSR1}


class LocalLauncher:
    """Starts a launch script on this machine.

    Args:
        script: of one node, as ``launch/torchrun.sh`` is.
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
    """A launch script that was started, once for every node."""

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
    """The processes that are ranks: a launcher started them, not a rank whose workers they are."""
    told = {pid for pid, environment in processes.items() if b"\0RANK=" in environment}
    ranks = []
    for pid in told:
        with contextlib.suppress(OSError):
            parent = int(stat_fields(pid)[1])
            if parent not in told:
                ranks.append(pid)
    return sorted(ranks)
