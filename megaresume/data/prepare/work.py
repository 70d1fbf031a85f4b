"""Shared by preparing text and preparing shards: a directory of finished parts, and worker processes.

``OUTPUT.prepare/`` has the finished parts, from which a rerun continues after a kill:

    plan.json     the input and the settings; another plan is refused
    lock          held while a prepare runs
    NAME          one finished part: a line of JSON that describes it, with a hash, then its arrays

A part appears by rename, when it is complete. If several machines share the work, each has its own directory within it,
with its own plan, lock and parts, and holds the lock of the whole as shared; merging needs that lock exclusively. All
plans have to agree, so that the directories may also be copied together.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import json
import multiprocessing
import os
import shutil
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.data.sidecar import write_json_atomically
from megaresume.files import written_atomically
from megaresume.stream.errors import CorpusError, SetupError, UsageError

T = TypeVar("T")

FORMAT = "megaresume.prepare"
VERSION = 2
PLAN = "plan.json"
#: settings of a plan for handling bad input.
POLICIES = ("invalid", "bad_lines", "too_long")


class WorkDirectory:
    """The directory of one prepare.

    Args:
        output: the file to make; the directory is beside it.
    """

    def __init__(self, output: Path) -> None:
        self.directory = output.with_name(output.name + ".prepare")

    @contextmanager
    def locked(self, plan: Mapping[str, Any], *, restart: bool, machine: str = "") -> Iterator[None]:
        """Lock the directory: a new one, or one left by a killed run of the same plan.

        Args:
            plan: input files and settings, plain JSON.
            restart: discard what another run left.
            machine: the subdirectory of one of several machines; "": the whole directory.

        Raises:
            SetupError: another prepare is running there.
            UsageError: the directory belongs to another plan.
        """
        mine = self.directory / machine
        mine.mkdir(parents=True, exist_ok=True)
        with ExitStack() as locks:
            if machine:
                locks.enter_context(_lock(self.directory, fcntl.LOCK_SH))
            locks.enter_context(_lock(mine, fcntl.LOCK_EX))
            if restart:
                _empty(mine)
            self._check_plan(mine / PLAN, json.loads(json.dumps({"format": FORMAT, "version": VERSION, **plan})))
            yield

    def plans(self) -> list[Path]:
        """The existing plans: of the whole, and of each of several machines."""
        return sorted([*self.directory.glob(PLAN), *self.directory.glob(f"*/{PLAN}")])

    def _check_plan(self, path: Path, plan: dict[str, Any]) -> None:
        """Compare this plan with all existing ones, and save it.

        It is written before the others are read: of two different ones at once, at least one sees the other.
        """
        is_new = not path.exists()
        if is_new:
            write_json_atomically(path, plan)
        try:
            for other in self.plans():
                # One of several machines must not discard the work of others.
                is_of_others = other != path and path.parent != self.directory
                afresh = f"remove {self.directory}" if is_of_others else "add --restart to discard its work"
                _check_alike(other, plan, afresh)
        except UsageError:
            if is_new:
                path.unlink()
            raise
        if not is_new:  # a policy may be more lenient now
            write_json_atomically(path, plan)

    def path(self, name: str) -> Path:
        """The path of a finished part."""
        return self.directory / name

    def write(self, name: str, head: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Write a part, atomically.

        Args:
            name: of the part.
            head: describes it, plain JSON.
            arrays: its body, by name.

        Raises:
            OSError: it cannot be written.
        """
        bodies = [np.ascontiguousarray(array).view(np.uint8).data for array in arrays.values() if array.size]
        said = {**head, "arrays": {key: [array.dtype.str, *array.shape] for key, array in arrays.items()}}
        said["hash"] = _hash(said, bodies)
        path = self.path(name)
        path.parent.mkdir(exist_ok=True)
        with written_atomically(path, sync=False) as file:
            file.write(json.dumps(said).encode() + b"\n")
            for body in bodies:
                file.write(body)

    def find(self, name: str) -> dict[str, Any] | None:
        """The head of a part, if it is finished; a damaged one is removed."""
        path = self.path(name)
        try:
            with open(path, "rb") as file:
                line = file.readline()
                size = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return None
        try:
            head: dict[str, Any] = json.loads(line)
            if size == len(line) + sum(np.dtype(dtype).itemsize * prod(shape) for dtype, *shape in _arrays(head)):
                return head
        except (ValueError, TypeError, KeyError, AttributeError):
            pass
        path.unlink()
        return None

    def read(self, name: str) -> tuple[dict[str, Any], dict[str, npt.NDArray[Any]]]:
        """Head and arrays of a finished part.

        Raises:
            CorpusError: it is damaged; it is removed, so that a rerun makes it again.
        """
        path = self.path(name)
        line, _, body = path.read_bytes().partition(b"\n")
        try:
            head: dict[str, Any] = json.loads(line)
            expected = head.pop("hash")
        except (ValueError, LookupError, TypeError, AttributeError):
            head, expected = {}, "a line of JSON"
        if _hash(head, [body]) != expected:
            path.unlink()
            raise CorpusError(
                f"{path} is damaged",
                found="another hash than when it was written",
                expected=expected,
                cause="a damaged disk, or a machine that lost power",
                action="run the same command again: this part is made again, the others are kept",
            )
        arrays, at = {}, 0
        for key, (dtype, *shape) in zip(head["arrays"], _arrays(head), strict=True):
            arrays[key] = np.frombuffer(body, dtype, prod(shape), at).reshape(shape)
            at += arrays[key].nbytes
        return head, arrays

    def remove(self) -> None:
        """Remove the directory."""
        shutil.rmtree(self.directory)


def _hash(head: Mapping[str, Any], bodies: Iterable[Any]) -> str:
    """The hash of a part's head and arrays: xxh3_64, 16 hex digits."""
    hasher = xxhash.xxh3_64(json.dumps(head).encode())
    for body in bodies:
        hasher.update(body)
    return hasher.hexdigest()


def _arrays(head: Mapping[str, Any]) -> Iterable[Sequence[Any]]:
    """Dtype and shape of each array of a part."""
    arrays: Iterable[Sequence[Any]] = head["arrays"].values()
    return arrays


def disk_error(path: Path, error: OSError) -> SetupError:
    """The error for a file that cannot be written."""
    full = error.errno in (28, 122)  # ENOSPC, EDQUOT
    return SetupError(
        f"{path} cannot be written",
        found=error.strerror or str(error),
        expected="room for about twice the size of the corpus, until it is complete"
        if full
        else "a writable directory",
        cause="the disk or the quota is full" if full else None,
        action="free some space and run the same command again: it continues where it stopped"
        if full
        else "check the permissions of the directory, or give another --output",
    )


@contextmanager
def _lock(directory: Path, how: int) -> Iterator[None]:
    with open(directory / "lock", "a+") as lock:
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise SetupError(
                    f"another prepare is working on {directory}",
                    found=f"{directory / 'lock'} is locked",
                    expected="one prepare at a time, or different parts (--part)",
                    action="wait for it, or give this one another --output",
                ) from error
            # Some network file systems have no locks: the user must ensure it.
        yield


def _empty(directory: Path) -> None:
    for path in directory.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()


def _check_alike(path: Path, plan: Mapping[str, Any], afresh: str) -> None:
    try:
        old = json.loads(path.read_bytes())
    except ValueError:
        old = None
    # What finished under "error" has no bad input, so that a more lenient policy would not change it.
    if isinstance(old, dict) and old | {key: plan[key] for key in POLICIES if old.get(key) == "error"} == plan:
        return
    raise UsageError(
        f"{path.parent} was left by a prepare of other input or with other settings",
        found="; ".join(_differences(old, plan)) if isinstance(old, dict) else "an unreadable plan.json",
        expected="the same input files and settings, to continue where that run stopped",
        action=f"repeat the earlier command to continue, or {afresh}",
    )


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """The differences between two heads, in words; at most a few."""
    keys = sorted({*old, *new} - {"inputs"})
    found = [f"{key} was {old.get(key)!r}, is {new.get(key)!r}" for key in keys if old.get(key) != new.get(key)]
    before = {f["path"]: f for f in old.get("inputs", [])}
    after = {f["path"]: f for f in new.get("inputs", [])}
    if list(before) != list(after):
        gone, added = [p for p in before if p not in after], [p for p in after if p not in before]
        found += [f"{p} is gone" for p in gone[:3]] + [f"{p} is new" for p in added[:3]]
        found += [] if gone or added else ["the files are in another order"]
    found += [f"{p} changed" for p in [p for p in after if p in before and before[p] != after[p]][:3]]
    return found


def check_workers(wanted: int) -> None:
    """Refuse an invalid number of workers.

    Raises:
        UsageError: it is below 1.
    """
    if wanted < 1:
        raise UsageError("bad --workers", found=wanted, expected="1 or more", action="correct --workers")


def run(
    work: Iterable[tuple[Any, ...]], function: Callable[..., T], shared: Any, *, workers: int
) -> Generator[T, None, None]:
    """``function(shared, *item)`` for every item, in order, in worker processes, or in this one if ``workers`` is 1.

    Args:
        work: items; only a few are taken ahead, so that they may be large.
        function: defined in a module, so that it can be sent to a new process.
        shared: needed by every call; sent to each process once.
        workers: processes.

    Raises:
        SetupError: a worker died.
        MegaresumeError: raised by ``function``; that of the first item that failed.
    """
    if workers <= 1:
        for item in work:
            yield function(shared, *item)
        return
    pending: deque[Future[T]] = deque()
    # spawn: a fork of a process with threads (tqdm, tokenizers) may hang.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_start, initargs=(function, shared))
    try:
        for item in work:
            pending.append(pool.submit(_call, *item))
            while len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise SetupError(
            "a worker process died",
            found=str(error),
            expected="workers that finish their work",
            cause="out of memory (see dmesg), or it was killed",
            action="run the same command again, with fewer --workers: it continues where it stopped",
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


#: The function that a worker process calls, and the arguments that all calls share.
_function: Callable[..., Any] | None = None


def _start(function: Callable[..., Any], shared: Any) -> None:
    global _function
    _function = functools.partial(function, shared)
    # One process per core: threads inside the tokenizer would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    parent = multiprocessing.parent_process()

    def die_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    # A killed parent sends no notice: without this, its workers would wait for work forever.
    threading.Thread(target=die_with_parent, daemon=True).start()


def _call(*item: Any) -> Any:
    assert _function is not None, "in a worker process"
    return _function(*item)
