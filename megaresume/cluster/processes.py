"""`LocalJob`: programs on this machine, under a launcher, as groups of processes.

Killing means SIGKILL to all processes at once, as when a node dies: no handler runs, no file is closed. The mark of
`Processes` shows the node of each process, whichever process started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
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

from megaresume.cluster.launcher import Kind
from megaresume.stream.errors import SetupError

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def keep_port() -> socket.socket:
    """Reserve a TCP port on which nobody listens, until the socket is closed.

    The socket is bound, so that nobody else is given the port, and does not listen: a program that sets SO_REUSEADDR,
    as torch's store does, can listen there in the meantime. The port is outside the system's range for outgoing
    connections.

    Raises:
        SetupError: no port is free.
    """
    last = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = max(int(_RANGE.read_text().split()[0]), _FIRST + 1)
    draw = random.SystemRandom()  # jobs started at the same moment must not try the same ports
    for _ in range(200):
        kept = socket.socket()
        with contextlib.suppress(OSError):
            kept.bind(("", draw.randrange(_FIRST, last)))
            kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # only now, or two could both bind
            return kept
        kept.close()
    raise SetupError(
        "no free port was found for the ranks to meet at",
        found=f"200 ports between {_FIRST} and {last} are in use",
        action="end other jobs on this machine, or set MASTER_ADDR and MASTER_PORT yourself",
    )


def free_port() -> int:
    """The number of such a port, without reserving it: another job may get it before it is used.

    Raises:
        SetupError: no port is free.
    """
    with keep_port() as kept:
        return int(kept.getsockname()[1])


#: the prefix of the variable that marks the processes of a job.
MARK = "MEGARESUME_JOB_"


class Processes:
    """Processes on this machine and all of their descendants, which are found and ended even if they change their
    parent.

    An environment variable marks them; descendants inherit it, also those in a nested job.

    Args:
        output: the file to look at if something goes wrong.
    """

    #: whether each gets its own session, so that Ctrl-C does not reach it.
    own_session = False

    def __init__(self, output: Path) -> None:
        self.output = output
        self._mark = f"{MARK}{uuid.uuid4().hex}"
        #: the port where the ranks meet, until the job is over.
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
        """The job's output so far."""
        raise NotImplementedError

    def running(self) -> bool:
        """Whether any of the started processes is running."""
        return any([process.poll() is None for process in self._processes])  # noqa: C419  all of them are to be reaped

    def wait(self, timeout: float = 600) -> int:
        """Wait for the end; if one process fails, the others are killed, as by a launcher.

        Returns:
            exit status: 0, or the first that is nonzero.

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
        """Wait until a condition holds or the job has ended; returns whether it holds.

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
            the number of killed processes.
        """
        killed = set()
        while members := self._members():
            for pid in members:
                if send_kill(pid):
                    killed.add(pid)
            self.running()  # reaps those that have ended
            time.sleep(0.01)
        for process in self._processes:
            process.wait()
        self._port.close()
        return len(killed)

    def _members(self, value: str | None = None) -> dict[int, bytes]:
        """The processes of this job whose mark has this value: number -> environment."""
        mark = f"\0{self._mark}=".encode() + (b"" if value is None else f"{value}\0".encode())
        found = {}
        for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                environment = b"\0" + Path(f"/proc/{pid}/environ").read_bytes()  # empty once it has ended
                if mark in environment:
                    found[pid] = environment
        return found


def send_kill(pid: int) -> bool:
    """Send SIGKILL; returns whether the process existed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


#: ``torchrun`` and ``deepspeed``: under that launcher. ``env``: the processes themselves, with environment variables
#: for their rank, as under Slurm; starts in half the time.
Launcher = Literal["torchrun", "deepspeed", "env"]


class LocalJob(Processes):
    """A run of ``num_processes`` ranks, as a context manager that kills everything still running at its end.

    Args:
        program: a module (``megaresume.cluster.training``) or the path of a script.
        arguments: of the program.
        num_processes: number of ranks.
        output: file for the output of all ranks; appended to.
        launcher: how they are started.
        env: additional environment variables.
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
        # ninja and the launchers of this environment first: with another ninja first, DeepSpeed compiles again.
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
        """This job's output so far."""
        with open(self.output, "rb") as file:
            file.seek(self._seen_from)
            return file.read().decode("utf-8", "replace")

    def stop(self, kind: Kind) -> float:
        """See `RunningLaunch`: for any kind, everything is killed at once."""
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
    """Run a command of the program with --json; the answer includes its exit status.

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
