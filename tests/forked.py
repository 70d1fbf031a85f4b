"""Programs that tests start are forked from processes that have imported torch and DeepSpeed: seconds less for each.

    pytest    --words, environment, open files-->  this file, run as a program  --fork-->  the program
      `<------------------------------- is the parent of --------------------------------------'

`subprocess` and `multiprocessing` ask for a process, and get one that differs in this alone: the modules are there. It
is a child of who asked; has the environment (also in /proc), arguments, working directory, session and open files that
it was asked to have, fresh random state, and a ``__main__`` of its own. It ends as a Python process does, threads and
at-exit handlers included, without taking each module, and torch's tables of operators, apart. Launchers that were
forked fork their ranks so too.

Even and odd ranks are forked from two processes, so that their string hashes differ, as those of processes that were
started do. Programs with a trainer of Hugging Face's or of Lightning's are forked from two more, forked from these,
which have imported their packages as well. Nothing of megaresume or megatron is imported before the fork, but their
files have been read, and are read again if they have changed.

Who reads other variables at imports, has options of the interpreter, or is started by a shell, is started as ever; so
are all programs of tests with the mark `cold`: those about starting, about what is imported, and one of each launcher.
"""

from __future__ import annotations

import _posixsubprocess
import atexit
import contextlib
import ctypes
import dataclasses
import fcntl
import functools
import gc
import importlib
import io
import json
import marshal
import os
import runpy
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

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
    "torch.distributed.launcher",
    "torch.utils.cpp_extension",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "multistorageclient",
    "deepspeed",
    # Imported by each engine, by each DataLoader with workers, and by tests' programs.
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "multiprocessing.sharedctypes",
    "pytest",
    "torch.distributed.checkpoint.state_dict",
    "torch.utils.serialization",
    "xxhash",
)
#: what many programs import, which is read and compiled once, and not imported before the fork.
OF_PROGRAMS = (
    "megaresume.batches.loader",
    "megaresume.batches.open",
    "megaresume.hosts.deepspeed.attach",
    "megaresume.hosts.loop",
    "megaresume.hosts.megatron.hooks",
    "megaresume.hosts.megatron.host",
    "megaresume.run",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing",
    "megatron.core.parallel_state",
    "megatron.core.pipeline_parallel",
    "megatron.core.rerun_state_machine",
)
#: and what programs import whose text has one of these names.
OF_TRAINERS = ("accelerate", "transformers", "lightning")
#: read while these modules are imported.
ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "TORCHDYNAMO_DISABLE": "1",
}
#: begin names that are read there too, and when an interpreter starts.
_AT_START = ("HF_", "LC_", "LD_", "NUMBA_", "PYTHON", "TRANSFORMERS_")
#: makes room for the environment of what is forked.
ROOM = {"MEGARESUME_TESTS_ROOM": "." * 100_000}
#: begins paths of ours.
_CLONE = str(Path(__file__).parents[1])
_IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_SET_CHILD_SUBREAPER = 36
#: in words of programs whose ranks start programs, after `_CLONE`, which may have any name.
_STARTING = ("megatron", "background", "elastic", "megaresume.run", "cluster.training", "loaders", "newest")


@dataclass(frozen=True, kw_only=True)
class Program:
    """What is to be forked."""

    #: script and arguments, or these after ``-m`` or ``-c``.
    words: list[str]
    env: dict[str, str]
    cwd: str
    #: whether it leads a session.
    session: bool = False
    #: its process group, see `os.setpgid`; negative: that of who asks.
    group: int = -1
    #: numbers of the open files that come with the request.
    files: list[int]
    #: whether what it prints is written at once.
    unbuffered: bool = False
    #: whether it may start programs itself, which are to be forked too.
    starts_others: bool = False


class Warm:
    """A process that forks, for the process that has made this."""

    def __init__(self, ours: socket.socket) -> None:
        self._ours, self._owner, self._lock = ours, os.getpid(), threading.Lock()
        # What forks forks a process that forks and ends, so that the program is an orphan, which is given to us.
        self._adopt = ctypes.CDLL(None).prctl
        # Or it would not end with this process, but with the last worker that this has forked.
        os.register_at_fork(after_in_child=ours.close)

    def start(self, program: Program, files: Sequence[int]) -> int | None:
        """Its pid; None: it cannot be forked from here."""
        request = json.dumps(asdict(program)).encode()
        if os.getpid() != self._owner or len(request) > 150_000:
            return None
        with self._lock:
            self._adopt(_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._ours, [request], list(files))
                answer = self._ours.recv(100)
            finally:
                self._adopt(_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the process that forks programs has ended")
        return int(answer)


def program_of(
    args: Sequence[Any], executables: Sequence[Any], env: Mapping[str, str], cwd: str
) -> tuple[list[str], bool] | None:
    """Words of a program of this interpreter, and whether it may start others; None: another, or one with options."""
    words = [os.fsdecode(word) for word in args]
    found = next((os.fsdecode(path) for path in executables if os.access(path, os.X_OK)), "")
    if found != sys.executable:
        if os.path.dirname(found) != os.path.dirname(sys.executable) or not _is_ours(found):
            return None
        words[0] = found  # a command that an installation has made
    else:
        del words[0]
    asked = words[1:] if words[:1] == ["-u"] else words
    if not asked or (asked[0] not in ("-m", "-c") and not os.path.isfile(os.path.join(cwd, asked[0]))):
        return None
    if asked[0] in ("-m", "-c") and (len(asked) < 2 or asked[1] == "pytest"):
        return None
    if asked[0] == "-c" and "resource_tracker" in asked[1]:
        return None  # it imports nothing
    ours = [word.removeprefix(_CLONE) for word in words]
    is_rank = "RANK" in env and not any(folder in word for word in ours for folder in _STARTING)
    return words, not (is_rank or "--multiprocessing-fork" in words)


@functools.cache
def _is_ours(path: str) -> bool:
    with open(path, "rb") as file:
        return file.readline().strip() == b"#!" + os.fsencode(sys.executable)


def can_fork(env: Mapping[str, str], base: Mapping[str, str], places: Collection[str]) -> bool:
    """Whether the imports of such a program read the same variables, and find the same modules."""
    if not all(env.get(name, value) == value for name, value in ENVIRONMENT.items()):
        return False
    names = {name for name in {*env, *base} if name.startswith(_AT_START)} - {*ENVIRONMENT, "PYTHONPATH"}
    if any(env.get(name) != base.get(name) for name in names):
        return False
    theirs = {name.partition(".")[0] for name in (*MODULES, *OF_TRAINERS)}
    installed = {Path(folder) for folder in sysconfig.get_paths().values()}
    folders = {*map(Path, places), *_folders(env.get("PYTHONPATH", ""))} - installed
    # A folder without __init__.py is found after a package of the same name, wherever that is.
    modules = [file for name in theirs for file in (f"{name}/__init__.py", f"{name}.py")]
    return not any((folder / file).exists() for folder in folders for file in modules)


def _folders(path: str) -> list[Path]:
    return [Path(folder) for folder in path.split(os.pathsep) if folder]


def forking(
    of: Callable[[list[str], Mapping[str, str], str], Warm | None], base: Mapping[str, str], start: Callable[..., int]
) -> Callable[..., int]:
    """``_posixsubprocess.fork_exec``, which forks where that is possible.

    Args:
        of: the process that forks such words, environment and directory; None: none does.
        base: what the environment was at its start.
        start: the function itself.
    """

    def fork_exec(*given: Any) -> int:
        (args, executables, close_fds, kept, cwd, variables, stdin, _, _, stdout, _, stderr, _, failed, _) = given[:15]
        session, group, *others = given[15:22]
        env = dict(os.environ)
        if variables is not None:
            env = dict(os.fsdecode(pair).split("=", 1) for pair in variables)
        directory = os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd))
        found = program_of(args, executables, env, directory)
        if found is None or not close_fds or others != [None, None, None, -1, None] or not os.path.isdir(directory):
            return start(*given)
        words, starts_others = found
        unbuffered = words[0] == "-u"
        words = words[unbuffered:]
        scripts = {os.path.dirname(os.path.join(directory, word)) for word in words if word.endswith(".py")}
        warm = of(words, env, directory) if can_fork(env, base, {directory, *scripts}) else None
        streams = [fd if fd != -1 else number for number, fd in enumerate((stdin, stdout, stderr))]
        more = [fd for fd in kept if fd != failed]
        program = Program(
            words=words,
            env=env,
            cwd=directory,
            session=bool(session),
            group=group,
            files=[0, 1, 2, *more],
            unbuffered=unbuffered or bool(env.get("PYTHONUNBUFFERED")),
            starts_others=starts_others,
        )
        pid = None if warm is None else warm.start(program, [*streams, *more])
        return start(*given) if pid is None else pid

    return fork_exec


def install(fork_exec: Callable[..., int]) -> None:
    """From now on `subprocess` and `multiprocessing` start processes so."""
    _posixsubprocess.fork_exec = fork_exec
    subprocess._fork_exec = fork_exec  # type: ignore[attr-defined]


def serve(requests: socket.socket) -> Program:
    """Fork until nobody asks any more; returns in a program alone, with what it is."""
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    while True:
        request, files, _, _ = socket.recv_fds(requests, 200_000, 60)
        if not request:
            os._exit(0)
        ready, say = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            requests.close()
            os.close(ready)
            program = Program(**json.loads(request))
            become(program, [*files, say])
            return program
        os.close(say)
        for fd in files:
            os.close(fd)
        os.waitpid(between, 0)
        requests.send(os.read(ready, 100))
        os.close(ready)


def become(program: Program, files: list[int]) -> None:
    """Make this process look as if it had been started so, and say its number in the last of the files."""
    import random

    import numpy as np

    if program.session:
        os.setsid()
    elif program.group >= 0:
        os.setpgid(0, program.group)
    above = max(program.files) + 1
    *moved, say = (fcntl.fcntl(fd, fcntl.F_DUPFD, above) for fd in files)
    for fd in files:
        os.close(fd)
    for fd, number in zip(moved, program.files, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    _open_streams(program.unbuffered)
    os.chdir(program.cwd)
    inherited = _folders(os.environ.get("PYTHONPATH", ""))
    os.environ.clear()
    os.environ.update(program.env)
    _show(program.env)
    random.seed()
    np.random.seed()
    words = program.words
    sys.argv[:] = words[1:] if words[0] == "-m" else ["-c", *words[2:]] if words[0] == "-c" else words
    sys.orig_argv[:] = [sys.executable, *words]
    sys.path[0] = {"-m": program.cwd, "-c": ""}.get(words[0], os.path.dirname(os.path.realpath(words[0])))
    own = _folders(os.environ.get("PYTHONPATH", ""))
    sys.path[1:] = [*map(str, own), *(place for place in sys.path[1:] if Path(place) not in inherited)]
    if program.starts_others:
        _fork_others([*program.files, say])
    for number in _IGNORED:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.write(say, str(os.getpid()).encode())
    os.close(say)


def _open_streams(unbuffered: bool) -> None:
    """Of other files than those at the start."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        was, mode = getattr(sys, name), "w" if fd else "r"
        options = {"encoding": was.encoding, "errors": was.errors}
        stream: IO[str]
        if fd and (unbuffered or fd == 2):
            stream = io.TextIOWrapper(io.FileIO(fd, "wb", closefd=False), write_through=True, **options)
        else:
            stream = open(fd, mode, closefd=False, **options)  # noqa: SIM115  for as long as the process lives
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _show(env: Mapping[str, str]) -> None:
    """Put variables where /proc shows those of a process, which was started with others: marks of jobs first."""
    first, last = (int(field) for field in Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    own = dict(sorted(env.items(), key=lambda item: not item[0].startswith("MEGARESUME_JOB_")))
    block = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in own.items())[: last - first - 1]
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, block, len(block))


def _fork_others(files: list[int]) -> None:
    """What this process starts is forked from one that is as fresh as this one still is, and has none of its files."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        null = os.open(os.devnull, os.O_RDWR)
        for fd in files:
            os.dup2(null, fd)
        run(serve(theirs))
    theirs.close()
    warm = Warm(ours)
    install(forking(lambda *_: warm, dict(os.environ), _posixsubprocess.fork_exec))


def run(program: Program) -> None:
    """Run it, and end as it does."""
    words, status = program.words, 0
    if any((folder / "sitecustomize.py").exists() for folder in _folders(program.env.get("PYTHONPATH", ""))):
        sys.modules.pop("sitecustomize", None)
        importlib.import_module("sitecustomize")  # as an interpreter does when it starts
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if words[0] == "-m":
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        elif words[0] == "-c":
            exec(compile(words[1], "<string>", "exec"), vars(main))
        else:
            main.__file__ = os.path.join(program.cwd, words[0])
            with open(words[0], "rb") as file:
                code = compile(file.read(), main.__file__, "exec")
            exec(code, vars(main))
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if status != ended.code and ended.code is not None:
            print(ended.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001  it is over, whatever it is
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
        error.__traceback__ = None
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for name in ("last_type", "last_value", "last_traceback"):
        vars(sys).pop(name, None)
    if threading.active_count() == 1:
        vars(main).clear()
        gc.collect()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status & 0xFF)


def freeze() -> None:
    """What is imported stays: the collector need not look through millions of objects, here and in what is forked."""
    gc.freeze()
    frozen = gc.get_freeze_count()
    gc.get_freeze_count = lambda: frozen  # which counts them one by one, at each import by megaresume


def keep_operators() -> None:
    """Torch would take each of its thousands of operators off its tables at the end of every process, one by one."""
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if (found := finalizer.peek()) is not None and found[1].__module__ == "torch.library":
            finalizer.atexit = False


def prepare_compiler() -> None:
    """Numba reads its tables, and scipy, with the first function of a process, also with one that it has kept."""
    import numba

    numba.njit("int64(int64[:])")(lambda numbers: numbers.sum())


def keep_code() -> None:
    """Have `OF_PROGRAMS` read, and the functions of their dataclasses compiled, by a fork, for all others."""
    loader = importlib._bootstrap_external.SourceLoader  # type: ignore[attr-defined]
    read = loader.get_code
    files: dict[str, tuple[tuple[int, int], types.CodeType]] = {}
    texts: dict[str, types.CodeType] = {}

    def state_of(path: str) -> tuple[int, int]:
        return (found := os.stat(path)).st_mtime_ns, found.st_size

    def noted_code(self: Any, name: str) -> types.CodeType:
        code = read(self, name)
        files[self.path] = state_of(self.path), code
        return code

    def noted_exec(text: str, *scopes: Any) -> None:
        texts[text] = compile(text, "<string>", "exec", dont_inherit=True)
        exec(texts[text], *scopes)

    receive, send = os.pipe()
    if os.fork() == 0:
        warnings.simplefilter("ignore")
        loader.get_code, vars(dataclasses)["exec"] = noted_code, noted_exec
        for name in OF_PROGRAMS:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        with open(send, "wb") as file:
            marshal.dump((files, texts), file)
        os._exit(0)
    os.close(send)
    with open(receive, "rb") as file:
        files, texts = marshal.load(file)
    os.wait()

    def kept_code(self: Any, name: str) -> types.CodeType:
        state, code = files.get(self.path, (None, None))
        return code if code is not None and state == state_of(self.path) else read(self, name)

    loader.get_code = kept_code
    vars(dataclasses)["exec"] = lambda text, *scopes: exec(texts.get(text, text), *scopes)


def main() -> None:
    """Import, fork, run."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(requests.fileno(), False)
    gc.disable()
    for name in (*MODULES, *sys.argv[2:]):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "transformers" in sys.argv:
        with contextlib.suppress(ImportError, AttributeError):
            importlib.import_module("transformers").Trainer  # noqa: B018  imports most of it
    if comm := sys.modules.get("deepspeed.ops.op_builder.cpu.comm"):
        # Or an engine on CPUs would compile it, for a minute, once on each machine; gloo does without.
        comm.ShareMemCommBuilder.is_compatible = lambda self, verbose=False: False
    prepare_compiler()
    keep_operators()
    if not sys.argv[2:]:  # or this is a fork of one that has them
        keep_code()
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), "forking is not safe"
    assert not {"megaresume", "megatron"} & {name.partition(".")[0] for name in sys.modules}
    freeze()
    gc.enable()
    requests.send(b"ready")
    run(serve(requests))


if __name__ == "__main__":
    main()
