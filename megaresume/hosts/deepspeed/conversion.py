"""Universal checkpoints: made by ``megaresume convert DIR``, or by a job that loads.

A conversion is done under a lock, if there is room, in a directory that is not read until it is complete.

    lock (or wait for its holder) -> already there? -> room on the disk? -> worker process -> seal -> rename

A kill at any time leaves at most a hidden directory; the next conversion deletes it and starts again. The lock is the
kernel's and is released with the process that holds it. On a filesystem without locks, two jobs may both convert; the
first to rename wins, and the other uses the result.

The worker process runs DeepSpeed's ds_to_universal:

    python -m megaresume.hosts.deepspeed.conversion TAG_DIR OUTPUT WORKERS PARENT

Its memory is freed when it ends, and it forks workers, which a rank with a GPU must not do. It ends when the process
that started it is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import fcntl
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any

from megaresume.checkpoint.records.manifest import list_files
from megaresume.checkpoint.records.names import records_dir
from megaresume.command_line import at_least
from megaresume.files import fsync_dir, make_dir, write_error
from megaresume.hosts.deepspeed.load_rules import (
    Maker,
    Universal,
    choose_to_load,
    list_universal,
    read_universal,
    universal_dir,
    write_seal,
)
from megaresume.render import spell_bytes
from megaresume.stream.errors import CheckpointError, UsageError

#: a conversion in progress, or one that was killed; unlike our other leftovers, not every start deletes it.
_CONVERTING = re.compile(r"\..+_universal\.converting-[0-9a-f]{8}")


#: seconds between lines of progress, and between looks at the worker.
_PROGRESS, _POLL = 15.0, 0.2
#: variables that launchers set for a rank; removed for the worker, which is not a rank.
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
#: bytes; for less, one process converts faster than several start.
_SMALL = 1 << 30


def default_workers(size: int) -> int:
    """The number of processes to convert a checkpoint of this many bytes."""
    return 1 if size < _SMALL else max(1, min(8, (os.cpu_count() or 1) // 2))


@dataclass(slots=True)
class Reporter:
    """Reports progress, at intervals, and gives signs of life."""

    say: Callable[[str], None]
    #: called often while there is nothing to report.
    beat: Callable[[], None] = lambda: None
    _next: float = field(default_factory=lambda: time.monotonic() + _PROGRESS)

    def wait(self, words: Callable[[], str]) -> None:
        """Sleep a moment; report the words if the last line was long ago."""
        self.beat()
        time.sleep(_POLL)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS
            self.say(words())


def room_needed(tag_dir: Path) -> int:
    """The bytes that a conversion needs at its peak: fragments, merged state, and the model files."""
    files = list_files(tag_dir)
    state = sum(entry.size for entry in files if entry.path.endswith("_optim_states.pt"))
    model = sum(entry.size for entry in files if entry.path.endswith("_model_states.pt"))
    return int(1.05 * (2 * state + model))


def convert(tag_dir: Path, *, save_id: str, made_by: Maker, report: Reporter, workers: int | None = None) -> Universal:
    """Make the universal form of a ZeRO checkpoint, or return the existing one. In one process.

    Args:
        tag_dir: the checkpoint, complete.
        save_id: of its save.
        made_by: who requested it; one made by a job is removed after its next checkpoint.
        report: reports progress.
        workers: number of processes; None: by the size.

    Raises:
        CheckpointError: no room, something else has the name, DeepSpeed cannot convert it, or a write fails.
    """
    with _locked(records_dir(tag_dir.parent), report) as alone:
        for path in list_universal(tag_dir.parent) if alone else ():
            if _CONVERTING.fullmatch(path.name):  # left by a killed conversion, perhaps after its rename
                shutil.rmtree(path, ignore_errors=True)
        there = read_universal(tag_dir, save_id, checksums=True)
        if there is not None:
            return there
        _check_room(tag_dir)
        return _convert(tag_dir, save_id, made_by, report, workers)


@contextlib.contextmanager
def _locked(directory: Path, report: Reporter) -> Iterator[bool]:
    """Hold the lock of a checkpoint root, after waiting for it. Yields whether the filesystem has locks."""
    make_dir(directory)
    path = directory / "convert.lock"
    began = time.monotonic()
    try:
        lock = open(path, "a+")  # noqa: SIM115  held until the end of the block
    except OSError as error:
        raise write_error(path, error) from error
    with lock:
        alone = True
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    alone = False  # some network filesystems have no locks
                    break
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            report.wait(lambda who=holder: f"{who} is converting there; waiting for {time.monotonic() - began:.0f} s")  # type: ignore[misc]
        if alone:
            lock.truncate(0)
            lock.write(f"process {os.getpid()} on {os.uname().nodename}\n")
            lock.flush()
        try:
            yield alone
        finally:
            if alone:
                # Not left to the close: a process that was forked in the meantime also has the file.
                fcntl.flock(lock, fcntl.LOCK_UN)


def _check_room(tag_dir: Path) -> None:
    needed, free = room_needed(tag_dir), shutil.disk_usage(tag_dir).free
    if free < needed:
        raise CheckpointError(
            f"there is no room to convert {tag_dir.name}",
            found=f"{spell_bytes(free)} free in {tag_dir.parent}",
            expected=f"{spell_bytes(needed)}: twice the optimizer state, and the model",
            action="free space, or start on the number of ranks that saved it",
        )


def _convert(tag_dir: Path, save_id: str, made_by: Maker, report: Reporter, workers: int | None) -> Universal:
    began, needed = time.monotonic(), room_needed(tag_dir)
    target = universal_dir(tag_dir)
    temporary = target.with_name(f".{target.name}.converting-{os.urandom(4).hex()}")
    # DeepSpeed writes a pointer beside its output, so the output is one level deeper.
    output = temporary / target.name
    report.say(f"converting {tag_dir.name} into {target.name}; needs {spell_bytes(needed)} of disk while it works")
    try:
        output.mkdir(parents=True)
        _run_worker(tag_dir, output, temporary / "convert.log", needed, workers or default_workers(needed), report)
        made = write_seal(output, save_id=save_id, made_by=made_by)
        try:
            output.rename(target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            there = read_universal(tag_dir, save_id)  # another job was faster, if there are no locks
            assert there is not None
            return there
        fsync_dir(target.parent)
    except OSError as error:
        raise write_error(output, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    report.say(f"converted in {time.monotonic() - began:.0f} s: {target.name}, {spell_bytes(made.size)}")
    return Universal(path=target, save_id=save_id, made_by=made_by, size=made.size)


def _run_worker(tag_dir: Path, output: Path, log: Path, needed: int, workers: int, report: Reporter) -> None:
    command = [sys.executable, "-m", "megaresume.hosts.deepspeed.conversion"]
    command += [str(tag_dir), str(output), str(workers), str(os.getpid())]
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCH}
    # The checkpoint may name anything that this process can import. No GPU is needed.
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()

    def progress() -> str:
        written, took = spell_bytes(_size_below(output)), time.monotonic() - began
        return f"converting {tag_dir.name}: {written} of {spell_bytes(needed)} written in {took:.0f} s"

    with open(log, "wb") as file:
        worker = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True)
    try:
        while worker.poll() is None:
            report.wait(progress)
    finally:
        if worker.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()
    if worker.returncode:
        said = log.read_text(errors="replace").strip()
        raise CheckpointError(
            f"DeepSpeed could not convert {tag_dir.name}",
            found=f"exit status {worker.returncode}: " + "\n    ".join(said.splitlines()[-5:]),
            expected=f"a universal checkpoint in {universal_dir(tag_dir)}",
            cause="killed for memory or by a full disk, if no error is named"
            if worker.returncode < 0
            else "a damaged file, or a layout that DeepSpeed's ds_to_universal does not know",
            action=f"megaresume inspect {quote(str(tag_dir.parent))} --checksums shows damage; where there is "
            "none, start on the number of ranks that saved it",
        )


def _size_below(directory: Path) -> int:
    """The bytes so far, while another process creates and removes files."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of ``megaresume convert``."""
    parser.description = (
        f"{parser.description}. It unpickles the checkpoint's files, as DeepSpeed does: convert only what you trust"
    )
    parser.add_argument("dir", metavar="DIR", type=Path, help="the directory where the run saves its checkpoints")
    parser.add_argument("--tag", help="the checkpoint, such as global_step100 (default: what a start would take)")
    parser.add_argument("--workers", type=at_least(1), metavar="N", help="processes (default: by size and cores)")


def run(args: argparse.Namespace) -> int:
    """``megaresume convert``: convert, unless already done."""
    if not args.dir.is_dir():
        raise UsageError(
            "no such directory",
            found=str(args.dir),
            expected="the directory where a run saves its checkpoints",
            action="check the path",
        )
    choice = choose_to_load(args.dir, args.tag, False, checksums=True)
    if choice is None:
        raise CheckpointError(f"there is no checkpoint in {args.dir}")
    if choice.record is None:
        raise UsageError(
            "only checkpoints with records of megaresume are converted",
            found=f"{choice.tag_dir}, written without megaresume",
            action="python -m deepspeed.checkpoint.ds_to_universal --help, and load_universal",
        )
    if not choice.record.topology.zero_stage:
        raise UsageError(
            "this checkpoint needs no conversion",
            found=f"{choice.tag}, saved without ZeRO",
            expected="ZeRO 1, 2 or 3; without it any number of ranks loads the checkpoint",
            action="load it as it is",
        )
    save_id = choice.record.save_id
    done = read_universal(choice.tag_dir, save_id, checksums=True)
    if done is None:
        report = Reporter(say=lambda words: print(words, flush=True))
        done = convert(choice.tag_dir, save_id=save_id, made_by="command", report=report, workers=args.workers)
    print(f"{done.path} can be loaded by any number of data-parallel ranks: start the run as usual")
    return 0


def main(argv: list[str]) -> None:
    """In the worker process: convert, according to its command line."""
    source, output, workers, parent = argv
    threading.Thread(target=_end_with, args=(int(parent),), daemon=True).start()
    import torch  # deferred: takes seconds, in which the parent may end
    from deepspeed.checkpoint import ds_to_universal

    torch.load = _tensors_only(torch.load)
    ds_to_universal.main(
        argparse.Namespace(
            input_folder=source,
            output_folder=output,
            num_extract_workers=int(workers),
            num_merge_workers=max(1, int(workers) // 2),
            keep_temp_folder=False,
            strict=True,
            # Programs other than Megatron-DeepSpeed do not describe their layout in a checkpoint.
            inject_missing_state=True,
        )
    )


def _tensors_only(load: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.load``, which returns a module's state without anything but tensors: megatron-core's layers put None
    there as their extra state, and ds_to_universal (0.19) takes all of it for tensors. The files themselves are copied
    unchanged.
    """

    @functools.wraps(load)
    def load_tensors(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        if isinstance(state, dict) and isinstance(state.get("module"), dict):
            state["module"] = {name: x for name, x in state["module"].items() if hasattr(x, "float")}
        return state

    return load_tensors


def _end_with(parent: int) -> None:
    """End this process and its workers, one process group, when the parent is gone."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
