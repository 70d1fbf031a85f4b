"""Runs of a training program on this machine: started, watched, killed without warning. For demo, smoke tests, tests.

Killing is SIGKILL to every process of the run at once: no handler runs, no file is closed, as when a node dies.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Literal, Self

from megaresume.stream.errors import SetupError
from megaresume.training.ports import free_port

if TYPE_CHECKING:
    import psutil

__all__ = ["Launcher", "LocalJob"]

#: ``torchrun`` and ``deepspeed``: under that launcher. ``env``: the processes themselves, told by environment
#: variables who they are, as Slurm does; starts in half the time.
Launcher = Literal["torchrun", "deepspeed", "env"]


class LocalJob:
    """A run of ``num_processes`` ranks; use it in a ``with`` statement, at whose end whatever still runs is killed.

    Args:
        program: a module (``megaresume.training``) or the path of a script.
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
        self.output = output
        self._seen_from = output.stat().st_size if output.exists() else 0
        # ninja and the launchers of this environment first: a second ninja on the path makes DeepSpeed compile anew.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        base = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {})
        # A variable of its own, which every process of the job inherits, those of jobs within it too.
        self._mark = f"MEGARESUME_JOB_{uuid.uuid4().hex}"
        base[self._mark] = "1"
        is_script = program.endswith(".py")
        target = [program] if is_script else ["-m", program]
        port = str(free_port())
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
        self._processes = []
        with open(output, "ab") as file:
            for command, variables in commands:
                self._processes.append(self._start(command, variables, file))

    def _start(self, command: list[str], env: dict[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)

    def text(self) -> str:
        """What this job has printed so far."""
        with open(self.output, "rb") as file:
            file.seek(self._seen_from)
            return file.read().decode("utf-8", "replace")

    def running(self) -> bool:
        """Whether any of its processes is."""
        return any(process.poll() is None for process in self._processes)

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
                    f"a run did not get on within {timeout:.0f} seconds and was killed",
                    found=self.text()[-2000:],
                    action=f"look at {self.output}",
                )
            time.sleep(0.01)

    def kill(self) -> int:
        """SIGKILL every process of the job, launcher and ranks and workers, and wait for their ends.

        Returns:
            how many were killed.
        """
        import psutil  # deferred: comes with DeepSpeed

        killed = set()
        while members := self._members():
            for member in members:
                with contextlib.suppress(psutil.NoSuchProcess):
                    member.send_signal(signal.SIGKILL)
                    killed.add(member.pid)
            self.running()  # reaps those that are over
            psutil.wait_procs(members, timeout=1)
        for process in self._processes:
            process.wait()
        return len(killed)

    def _members(self) -> list[psutil.Process]:
        """Its processes, also those that one which has died, a rank or a launcher, has left behind."""
        import psutil  # deferred: see above

        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
                if self._mark in process.environ():
                    found.append(process)
        return found

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _identity(rank: int, size: int, port: str) -> dict[str, str]:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in who.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
