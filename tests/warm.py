"""A process that has imported torch and DeepSpeed, and forks ranks: a launch without seconds of imports in every rank.

    pytest  --one JSON line-->  this file, run as a program  --fork-->  a rank
            <--one JSON line--

A rank has the environment, arguments, working directory and output that it was asked to have, fresh random state, and
runs its module or script as ``__main__``; it ends as any Python process does, at-exit handlers included. Nothing of
megaresume or megatron is imported before the fork. Even and odd ranks are forked from two processes, so that their
string hashes differ, as those of processes that were started do.

Launches with torchrun, deepspeed or Slurm, and those of `megaresume demo` and `megaresume smoke`, start every process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

if __name__ == "__main__":
    LocalJob: Any = object  # nothing of megaresume is imported before the fork
else:
    from megaresume.cluster.local import LocalJob

#: what torch, DeepSpeed and megatron-core need, and import or make megatron-core import.
MODULES = (
    "boto3",
    "numba",
    "sympy",
    "torch",
    "torch._dynamo",
    "torch._inductor.compile_fx",
    "torch.distributed._tensor",
    "torch.distributed.checkpoint",
    "torch.utils.cpp_extension",
    "torch.utils.data",
    "multistorageclient",
    "deepspeed",
)
#: read while these modules are imported.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class Warm:
    """The process that forks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, **request: object) -> Any:
        """Send a line, read one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@functools.cache
def warm(parity: int) -> Warm:
    """One for even ranks, one for odd ones; they end with this process, which closes their standard input."""
    return Warm()


class Forked:
    """A rank, with what `subprocess.Popen` has."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], output: Path) -> None:
        self._warm = _warm_for(env)
        self.pid = int(self._warm.ask(start=list(words), env=dict(env), cwd=os.getcwd(), output=str(output)))
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None: it runs."""
        if self.returncode is None:
            self.returncode = self._warm.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status


class WarmJob(LocalJob):
    """A `LocalJob` whose ranks are forked, unless a launcher starts them or they read other variables at imports."""

    def _start(self, command: list[str], env: dict[str, str], output: IO[bytes]) -> Any:
        if "RANK" in env and can_fork(env):
            return Forked(command[1:], env, self.output)
        return super()._start(command, env, output)

    def _members(self, value: str | None = None) -> dict[int, bytes]:
        """Also what runs in the sessions of forked ranks: each is the leader of one, which its workers belong to."""
        import psutil

        found = super()._members(value)
        sessions = {rank.pid for rank in self._processes if isinstance(rank, Forked)}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                    found.setdefault(process.pid, b"")
        return found


def _warm_for(env: Mapping[str, str]) -> Warm:
    return warm(int(env["RANK"]) % 2)


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether the imports of such a rank read the same variables."""
    same = all(env.get(name, value) == value for name, value in ENVIRONMENT.items())
    folders = _folders(env.get("PYTHONPATH", ""))
    return same and not any((folder / name.partition(".")[0]).exists() for folder in folders for name in MODULES)


def _folders(path: str) -> list[Path]:
    return [Path(folder) for folder in path.split(os.pathsep) if folder]


# ---------------------------------------------------------------- the program


def serve(requests: IO[str], answers: IO[str]) -> dict[str, Any]:
    """Answer requests until they end; returns in a forked rank alone, with what it is."""
    ended: dict[int, int] = {}

    def reap(*_: object) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                ended[found[0]] = os.waitstatus_to_exitcode(found[1])

    signal.signal(signal.SIGCHLD, reap)
    for line in requests:
        request = json.loads(line)
        if "poll" in request:
            answer = ended.get(request["poll"])
        elif (answer := os.fork()) == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return dict(request)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
    sys.exit()


def become(rank: Mapping[str, Any]) -> tuple[str, bool]:
    """Make this process look as if it had been started so; returns the module or script, and whether it is a script."""
    import random

    import numpy as np

    os.setsid()
    output = os.open(rank["output"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for fd, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, fd)
    os.close(output)
    os.chdir(rank["cwd"])
    inherited = _folders(os.environ.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(rank["env"])
    random.seed()
    np.random.seed()
    words: list[str] = rank["start"]
    is_module = words[0] == "-m"
    target = words[1] if is_module else words[0]
    sys.argv[:] = words[1:] if is_module else words
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))
    own = _folders(os.environ.get("PYTHONPATH", ""))
    sys.path[1:] = [*map(str, own), *(place for place in sys.path[1:] if Path(place) not in inherited)]
    return target, not is_module


def prepare_compiler() -> None:
    """Numba reads its tables, and scipy, with the first function of a process, also with one that it has kept."""
    import numba

    numba.njit("int64(int64[:])")(lambda numbers: numbers.sum())


def main() -> None:
    """Import, fork, run."""
    import gc
    import runpy
    import threading

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # imports print
    requests = os.fdopen(os.dup(0), "r")
    for name in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    prepare_compiler()
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), "forking is not safe"
    assert not {"megaresume", "megatron"} & {name.partition(".")[0] for name in sys.modules}
    gc.freeze()
    target, is_script = become(serve(requests, answers))
    if is_script:
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
