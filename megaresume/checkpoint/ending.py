"""How a training process ends: an error is printed once per job; a successful program ends with its status.

When megaresume refuses something, a training process ends with a message without a traceback, once per job. The
launcher catches the error itself; in a user's script, an exception hook does, from the first use of a name of
`megaresume` on. Exit status 1 in both cases. Other errors keep their tracebacks, as does one in the user's code that
caused the refusal.

    all ranks found it together            rank 0 prints it, while the others wait
    each by itself, in a process group     the first rank to sign the group's store
    without a group                        rank 0; the others wait for their launcher to end them, then print it too,
                                           unless it was printed on their node in this step of srun, which ends nobody

Checkpoints that are complete by then are forced to the disk and copied first, for a while (`before_end`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import io
import os
import sys
import sysconfig
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from megaresume.checkpoint.ranks import gather, is_known_to_all, is_rank_0, on_rank_0, shared_store
from megaresume.stream.errors import MegaresumeError

#: Seconds that a rank waits for the others, if all of them should have found the same error.
END_PATIENCE = 30.0
#: seconds of rank 0's head start; seconds that a rank stays after printing, so that the others find out.
_AHEAD, _STAY = 1.0, 2.0
#: variables that hold a process's rank.
_RANKS = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")

#: functions that are called before the process ends, the last one first.
_before_end: list[Callable[[], object]] = []

_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


@functools.cache
def show_refusals() -> None:
    """From now on, an uncaught error of megaresume ends the process as under the launcher. A second call does nothing.

    Every other exception goes to the ``sys.excepthook`` of the first call.
    """
    sys.excepthook = _hook(sys.excepthook)


def _hook(before: _Hook) -> _Hook:
    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, MegaresumeError):
            end(error)  # it returns if Python can exit by itself, with status 1
        else:
            before(kind, error, trace)

    return show


def before_end(function: Callable[[], object]) -> None:
    """Call a function before the process ends, as `atexit` does, and also if `end` ends it.

    It should not take long if ``sys.last_value`` is an error.
    """
    atexit.register(function)
    _before_end.append(function)


def is_end_of_all() -> bool:
    """In a function of `before_end`: whether an error that all ranks have ends the program, so that they still meet."""
    error = getattr(sys, "last_value", None)
    return error is not None and is_known_to_all(error) and _has_group()


def _has_group() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def not_before_end(function: Callable[[], object]) -> None:
    """Withdraw `before_end`."""
    atexit.unregister(function)
    _before_end[:] = [one for one in _before_end if one != function]


def end(error: MegaresumeError) -> int:
    """Print an error once, and end this rank so that its launcher ends the others.

    Returns:
        the exit status, if there is no process group; with one, the process ends here.
    """
    sys.last_value = error  # as Python does, if the launcher has not caught it
    if not _has_group():
        say(error)
        return 1
    try:
        # If all ranks are here, none may end before rank 0 has printed why: its launcher would end rank 0.
        _with_others(error, _say_together if is_known_to_all(error) else functools.partial(_say_if_first, error))
    finally:
        # A rank that waits for the others while exiting keeps the launcher from ending them.
        os._exit(1)


def _with_others(error: MegaresumeError, speak: Callable[[Callable[[], None]], None]) -> None:
    """Let one rank of the group print it. This one does if the others do not answer.

    A rank that was killed, or whose script caught the error, never comes: the group would wait for its own timeout.
    """
    said = threading.Event()

    def say_it() -> None:
        said.set()
        rank = sys.modules["torch.distributed"].get_rank()
        _print(error, "" if rank == 0 else f"rank {rank}: ")

    def give_up() -> None:
        try:
            if not said.is_set():
                say(error)
        finally:
            os._exit(1)

    timer = threading.Timer(END_PATIENCE, give_up)
    timer.daemon = True
    timer.start()
    try:
        speak(say_it)
    except Exception:  # noqa: BLE001  the group is broken, and what matters is the error that we came with
        if not said.is_set():
            say(error)


def _say_together(say_it: Callable[[], None]) -> None:
    """Print it on rank 0, and let every rank finish: a launcher ends the others as soon as one has ended."""
    on_rank_0(say_it)
    _finish()
    gather(None)


def _finish() -> None:
    """Call the functions of `before_end`."""
    while _before_end:
        with contextlib.suppress(Exception):  # the process ends for another reason
            _before_end.pop()()


def _say_if_first(error: MegaresumeError, say_it: Callable[[], None]) -> None:
    """Print it if no other rank, which may have found the same by itself, did so first."""
    if not is_rank_0():
        time.sleep(_AHEAD)
    if shared_store().add(f"megaresume/refused/{_key(error)}", 1) == 1:
        say_it()
    _finish()
    time.sleep(_STAY)


def _key(error: MegaresumeError) -> str:
    return hashlib.sha256(str(error).encode()).hexdigest()[:16]


def say(error: MegaresumeError) -> None:
    """Print an error: the first rank at once; others, which may be alone with theirs, a little later.

    If all have found the same, their launcher has ended the others by then.
    """
    rank = next((int(os.environ[name]) for name in _RANKS if os.environ.get(name, "").isdecimal()), 0)
    is_first_of_node = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0"
    if rank != 0:
        time.sleep(2 if is_first_of_node else 4)
    if (mark := _mark(error)) is not None:
        with contextlib.suppress(OSError):  # a full disk must not suppress the message
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                return
    _print(error, "" if rank == 0 else f"rank {rank}: ")


def _mark(error: MegaresumeError) -> Path | None:
    """A file that exists once a task of this srun step has printed it on this node; None if not started by srun.

    Step numbers are never reused, so no other step can have left it.
    """
    env = os.environ
    with contextlib.suppress(OSError):
        if Path(f"/proc/{os.getppid()}/comm").read_text().startswith("slurmstepd"):
            step = ".".join(env.get(f"SLURM_{name}", "0") for name in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
            return Path(tempfile.gettempdir(), f"megaresume-refused-{os.getuid()}-{step}-{_key(error)}")
    return None


def _print(error: MegaresumeError, who: str = "") -> None:
    with contextlib.suppress(OSError, ValueError):  # a closed stdout must not suppress the message
        sys.stdout.flush()
    # torch's hook calls the previous one with a buffer as stderr, and we do not return to it.
    stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    print(f"{_user_traceback(error)}megaresume: error: {who}{error}", file=stream, flush=True)


def _user_traceback(error: MegaresumeError) -> str:
    """The traceback of the user's code that raised the cause; "" if the cause is not in user code."""
    cause = error.__cause__
    while isinstance(cause, MegaresumeError):
        cause = cause.__cause__
    if cause is None:
        return ""
    frames = traceback.extract_tb(cause.__traceback__)
    own = [number for number, frame in enumerate(frames, 1) if frame.filename.startswith(_OURS)]
    below = frames[max(own, default=0) :]
    if all(frame.filename.startswith(("<", _OURS, *_INSTALLED)) for frame in below):  # not in the user's code
        return ""
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(below)]
    return "".join([*lines, *traceback.format_exception_only(cause)])


_OURS = str(Path(__file__).parents[2]) + os.sep
#: Python itself, and installed packages.
_INSTALLED = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))


def run_program(main: Callable[[], int]) -> None:
    """Run a program and end the process with its status, as Python does, but without finalizing the interpreter.

    gloo's threads drop the tensors of a script's last collectives, and need Python for that: if it is already
    finalizing, torch aborts the process, after a successful run (pytorch#190489). An exception that the program leaves
    to Python ends as usual.
    """
    try:
        status: object = main()
    except SystemExit as end:
        status = end.code
    if not _has_gloo():
        sys.exit(status)  # type: ignore[arg-type]
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)  # as Python does
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads that Python waits for
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit((status or 0) & 0xFF)


def _has_gloo() -> bool:
    tasks = Path("/proc/self/task").glob("*/comm")
    return any(task.read_text().startswith("pt_gloo_runloop") for task in tasks)
