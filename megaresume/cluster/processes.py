"""Programs of this machine, under a launcher, as groups of processes: `LocalJob`.

Killing is SIGKILL: no handler runs, no file is closed. All is killed at once, as when a node dies. The mark of
`Processes` tells the node of each process, whoever has started it.
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
