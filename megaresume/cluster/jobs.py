"""Runs of a training program on this machine: started, watched, killed without warning. For demo, smoke tests, tests.

Killing is SIGKILL to every process of the run at once: no handler runs, no file is closed, as when a node dies.
"""

from __future__ import annotations

import contextlib
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
from typing import IO, Literal, Self

from megaresume.cluster.records import RunRecords, read_records
from megaresume.stream.errors import SetupError, UsageError

_FIRST = 10_000
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port that nobody listens on.

    Not one of those that the system gives to outgoing connections: a job's own ranks, or another job, may be given it
    between this call and the moment at which rank 0 listens.

    Raises:
        SetupError: there is none.
    """
    last = 32_768
    with contextlib.suppress(OSError, ValueError, IndexError):
        last = max(int(_RANGE.read_text().split()[0]), _FIRST + 1)
    draw = random.SystemRandom()  # jobs that start at the same moment must not try the same ones
    for _ in range(200):
        port = draw.randrange(_FIRST, last)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port
    raise SetupError(
        "no free port was found for the ranks to meet at",
        found=f"200 ports between {_FIRST} and {last} are in use",
        action="end other jobs on this machine, or set MASTER_ADDR and MASTER_PORT yourself",
    )


def own_directory(out: Path, *, mark: str, what: str, overwrite: bool) -> None:
    """Make it, empty but for the mark.

    Args:
        out: the directory.
        mark: name of the file that says whose it is.
        what: what fills it, in a word.
        overwrite: remove what an earlier one has left.

    Raises:
        UsageError: it is not empty, and not to be removed; it is no directory, or cannot be made.
    """
    try:
        _make(out, mark, what, overwrite)
    except OSError as error:
        raise UsageError(
            f"cannot make --out {out}",
            found=f"{error.filename or out}: {error.strerror or error}",
            expected="a directory, or a place to make one",
            action="--out ANOTHER",
        ) from error


def _make(out: Path, mark: str, what: str, overwrite: bool) -> None:
    if out.exists() and any(out.iterdir()):
        if not (out / mark).exists():
            raise UsageError(
                "the directory holds something else",
                found=f"{out}, not empty",
                expected=f"an empty directory, or one of an earlier {what}",
                action="--out ANOTHER",
            )
        if not overwrite:
            raise UsageError(
                f"an earlier {what} is there",
                found=f"{out}",
                expected="an empty directory",
                action=f"--overwrite, or --out ANOTHER; its report: {out / 'report.html'}",
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / mark).touch()


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
        """What it has printed so far."""
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
        killed = set()
        while members := self._members():
            for pid in members:
                if send_kill(pid):
                    killed.add(pid)
            self.running()  # reaps those that are over
            time.sleep(0.01)
        for process in self._processes:
            process.wait()
        return len(killed)

    def _members(self, value: str | None = None) -> dict[int, bytes]:
        """Its processes by number, and their environments; those whose mark has this value. Also those that one which
        has died, a rank or a launcher, has left behind."""
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
        # ninja and the launchers of this environment first: a second ninja on the path makes DeepSpeed compile anew.
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        base = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | dict(env or {})
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
        with open(output, "ab") as file:
            for command, variables in commands:
                self._processes.append(self._start(command, variables, file))

    def text(self) -> str:
        """What this job has printed so far."""
        with open(self.output, "rb") as file:
            file.seek(self._seen_from)
            return file.read().decode("utf-8", "replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def _identity(rank: int, size: int, port: str) -> dict[str, str]:
    who = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    return {name: str(value) for name, value in who.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


class Watch:
    """Looks at the records again and again.

    Args:
        records: file or directory.
        steps: of the whole run.
        what: in front of the bar.
        read: what is there -> its records.
    """

    def __init__(
        self, records: Path, steps: int, what: str, *, read: Callable[[Path], RunRecords | None] = read_records
    ) -> None:
        from tqdm import tqdm

        self._path, self._read = records, read
        self._size = -1
        self._times: list[float] = []
        #: the last step done, and where the last start began.
        self.step = 0
        #: as read last; None: nothing yet.
        self.records: RunRecords | None = None
        #: seconds of `time.monotonic` when there was something new.
        self.changed = time.monotonic()
        self._bar = tqdm(total=steps, desc=what, unit="step", disable=None, leave=False, file=sys.stderr)
        self.reached(None)

    @property
    def starts(self) -> int:
        """How many there have been."""
        return 0 if self.records is None else len(self.records.starts)

    @property
    def start(self) -> int:
        """The step that the last one began with; 0: there is none."""
        return int(self.records.starts[-1]["step"]) if self.records is not None and self.records.starts else 0

    @property
    def step_seconds(self) -> float:
        """Of the last steps, on average."""
        last = self._times[-4:]
        return (last[-1] - last[0]) / max(len(last) - 1, 1) if last else 0.0

    def reached(self, step: int | None) -> bool:
        """Look again; say whether this step is done (None: no)."""
        size = _size(self._path)
        if size != self._size:
            self._size = size
            self.changed = time.monotonic()
            self.records = self._read(self._path) if size else None
            done = 0 if self.records is None else max([self.start, *self.records.steps])
            if done > self.step:
                self._times.append(time.monotonic())
            self.step = done
            self._bar.update(done - self._bar.n)
        return step is not None and self.step >= step

    def close(self) -> None:
        """Remove the bar."""
        self.reached(None)
        self._bar.close()


def _size(path: Path) -> int:
    """Bytes, in all files."""
    if path.is_dir():
        return sum(file.stat().st_size for file in path.iterdir())
    return path.stat().st_size if path.exists() else 0
