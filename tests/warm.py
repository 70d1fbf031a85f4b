"""A process that has imported torch and DeepSpeed, and forks ranks: a launch without seconds of imports in every rank.

    pytest  --one JSON line-->  this file, run as a program  --fork-->  a rank
            <--one JSON line--

A rank has the environment, arguments, working directory and output that it was asked to have, fresh random state, and
runs its module or script as ``__main__``; it ends as any Python process does, at-exit handlers included. Nothing of
megaresume or megatron is imported before the fork. Even and odd ranks are forked from two processes, so that their
string hashes differ, as those of processes that were started do. Programs with a trainer of Hugging Face's or of
Lightning's are forked from two more, forked from these, which have imported their packages as well.

Launches with torchrun, deepspeed or Slurm, and those of `megaresume demo` and `megaresume smoke`, start every process.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
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
#: and what programs import whose text has one of these names.
OF_TRAINERS = ("accelerate", "transformers", "lightning")
#: of a process with such modules: requests and answers, in the directory that this variable names.
PIPES, PLACE = ("requests", "answers"), "MEGARESUME_TESTS_WARM"
#: read while these modules are imported.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


class Warm:
    """The process that forks.

    Args:
        parity: of the ranks that it forks.
        modules: that it imports, besides `MODULES`: it is forked from the one that has imported those.
    """

    def __init__(self, parity: int, modules: Sequence[str] = ()) -> None:
        # transformers imports pyarrow, whose allocator would start a thread
        env = os.environ | ENVIRONMENT | {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
        self._requests: IO[str]
        self._answers: IO[str]
        if modules:
            pipes = Path(tempfile.mkdtemp(prefix="megaresume-warm-"))
            for name in PIPES:
                os.mkfifo(pipes / name)
            words = [__file__, *modules]
            warm(parity).ask(start=words, env=env | {PLACE: str(pipes)}, cwd=os.getcwd(), output=os.devnull)
            self._requests, self._answers = _opened(pipes, "wr")
            shutil.rmtree(pipes)
        else:
            command = [sys.executable, __file__]
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
            assert self._process.stdin is not None and self._process.stdout is not None
            self._requests, self._answers = self._process.stdin, self._process.stdout

    def ask(self, **request: object) -> Any:
        """Send a line, read one."""
        self._requests.write(json.dumps(request) + "\n")
        self._requests.flush()
        return json.loads(self._answers.readline())


@functools.cache
def warm(parity: int, modules: Sequence[str] = ()) -> Warm:
    """One for even ranks, one for odd ones; they end with this process, which closes what they read from."""
    return Warm(parity, modules)


class Forked:
    """A rank, or a program of one process, with what `subprocess.Popen` has."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], output: Path, cwd: Path | None = None) -> None:
        directory = cwd or Path.cwd()
        self._warm = warm(int(env.get("RANK", 0)) % 2, _modules_of(words, directory))
        self.pid = int(self._warm.ask(start=list(words), env=dict(env), cwd=str(directory), output=str(output)))
        self.returncode: int | None = None
        self._over: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it is over already
            self._over = os.pidfd_open(self.pid)

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None: it runs. The other process is asked only once the rank is over."""
        if self._over is not None and select.select([self._over], [], [], 0)[0]:
            os.close(self._over)
            self._over = None
        if self.returncode is None and self._over is None:
            self.returncode = self._warm.ask(poll=self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end."""
        while (status := self.poll()) is None:
            time.sleep(0.01)
        return status


def run_forked(
    words: Sequence[str], env: Mapping[str, str], directory: Path, output: Path, *, kill_at: str = ""
) -> tuple[int, list[str]]:
    """A program of one process, to its end, without its imports.

    Args:
        words: script and arguments.
        env: all of its environment.
        directory: where it runs.
        output: a new file, for what it says.
        kill_at: it is killed with SIGKILL once it has said a line that begins so.

    Returns:
        exit status, negative for a signal; the lines that it said.
    """
    program = Forked(words, env, output, directory)
    while (status := program.poll()) is None:
        said = output.read_text(encoding="utf-8") if output.exists() and kill_at else ""
        if any(line.startswith(kill_at) for line in said.splitlines()[:-1]):
            os.kill(program.pid, signal.SIGKILL)
            status = program.wait()
            break
        time.sleep(0.01)
    return status, output.read_text(encoding="utf-8").splitlines()


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


def _opened(pipes: Path, modes: str) -> tuple[IO[str], IO[str]]:
    """Requests and answers. Each waits for the other process, so both open them in this order."""
    flags = {"r": os.O_RDONLY, "w": os.O_WRONLY}
    requests, answers = (
        os.fdopen(os.open(pipes / name, flags[mode]), mode) for name, mode in zip(PIPES, modes, strict=True)
    )
    return requests, answers


def _modules_of(words: Sequence[str], directory: Path) -> tuple[str, ...]:
    """Those of `OF_TRAINERS`, if the program speaks of one of them."""
    paths = [directory / word for word in words if word.endswith(".py")]
    texts = [path.read_text(encoding="utf-8") for path in paths if path.exists()]
    return OF_TRAINERS if any(name in text for name in OF_TRAINERS for text in texts) else ()


def can_fork(env: Mapping[str, str]) -> bool:
    """Whether the imports of such a rank read the same variables."""
    same = all(env.get(name, value) == value for name, value in ENVIRONMENT.items())
    folders = _folders(env.get("PYTHONPATH", ""))
    return same and not any(
        (folder / name.partition(".")[0]).exists() for folder in folders for name in (*MODULES, *OF_TRAINERS)
    )


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

    if PLACE in os.environ:
        requests, answers = _opened(Path(os.environ[PLACE]), "rw")
    else:
        requests, answers = os.fdopen(os.dup(0), "r"), os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # imports print
    for name in (*MODULES, *sys.argv[1:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "transformers" in sys.argv:
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module("transformers").Trainer  # noqa: B018  imports most of it
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
