"""A universal checkpoint that megaresume made: its directory and its seal, whether it is whole, and how one is made.

The seal is a file in the directory: which save it was made of, every file with its size and checksum, and who asked for
it. The directory appears by rename with the seal in it, so that one without a seal is somebody else's.

A conversion is locked, with room for it, in a directory that nobody reads until it is whole.

    lock (or wait for whoever holds it) -> there already? -> room on the disk? -> worker process -> seal -> rename

A kill at any moment leaves a hidden directory at most; the next conversion clears it and begins again. The lock is the
kernel's and goes with the process that holds it. Two jobs on a filesystem without locks both convert; the first to
rename wins, and the other takes what it finds.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from typing import Any, Literal

from megaresume.checkpoint.formats import read_record, rows, seal, text
from megaresume.checkpoint.manifest import FileEntry, checksum_files, file_entry, list_files, verify_files
from megaresume.checkpoint.paths import records_dir
from megaresume.files import delete_soon, fsync_dir, leftover_name, make_dir, write_error
from megaresume.stream.errors import CheckpointError

SUFFIX = "_universal"
SEAL = "megaresume.json"
FORMAT = "megaresume.universal"
VERSION = 1

#: job: converted while a run was loading; command: by `megaresume convert`.
Maker = Literal["job", "command"]

#: a conversion that is in progress, or was killed; not a leftover of ours, which any start clears away.
_CONVERTING = re.compile(r"\..+_universal\.converting-[0-9a-f]{8}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Universal:
    """A universal checkpoint that is whole."""

    path: Path
    #: the save that it was made of.
    save_id: str
    made_by: Maker
    #: bytes.
    size: int


def universal_dir(tag_dir: Path) -> Path:
    """Where the universal form of a checkpoint lies: ``global_step4_universal`` beside ``global_step4``."""
    return tag_dir.with_name(tag_dir.name + SUFFIX)


def write_seal(directory: Path, *, save_id: str, made_by: Maker) -> Universal:
    """Seal a finished conversion, which has still its temporary name.

    Raises:
        OSError: the disk refuses.
    """
    files = list_files(directory)
    sums = checksum_files(directory, (entry.path for entry in files))
    if failed := next((error for error in sums.values() if isinstance(error, OSError)), None):
        raise failed
    fields: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": save_id,
        "made_by": made_by,
        "files": [[entry.path, entry.size, sums[entry.path]] for entry in files],
    }
    with open(directory / SEAL, "wb") as file:
        file.write(seal(fields, depth=1))
        file.flush()
        os.fsync(file.fileno())
    return Universal(path=directory, save_id=save_id, made_by=made_by, size=sum(entry.size for entry in files))


def read_universal(tag_dir: Path, save_id: str, *, checksums: bool = False) -> Universal | None:
    """The universal form of a checkpoint, if there is one.

    Args:
        tag_dir: of the checkpoint.
        save_id: of its save.
        checksums: read every file, and compare its checksum.

    Returns:
        None if there is none.

    Raises:
        CheckpointError: there is one that cannot be taken: not ours, of another save, or with files that are missing
            or damaged.
    """
    directory = universal_dir(tag_dir)
    if not directory.is_dir():
        return None
    if not (directory / SEAL).exists():
        raise _refused(directory, f"a directory without {SEAL}", "it was converted by hand, perhaps not to its end")
    made_of, made_by, files = _read_seal(directory)
    if made_of != save_id:
        raise _refused(directory, f"made of save {made_of}", "that step was saved again since")
    wrong = verify_files(directory, files, mode="checksums" if checksums else "sizes")
    if wrong:
        cause = "files were deleted, cut short or damaged after the conversion"
        raise _refused(directory, "; ".join(map(str, wrong[:5])), cause)
    return Universal(path=directory, save_id=save_id, made_by=made_by, size=sum(entry.size for entry in files))


def _refused(directory: Path, found: str, cause: str) -> CheckpointError:
    source = directory.name.removesuffix(SUFFIX)
    return CheckpointError(
        f"{directory.name} is in the way of a universal checkpoint",
        found=f"{directory}: {found}",
        expected=f"none, or a whole one that megaresume made of {source}",
        cause=cause,
        action=f"rm -r {quote(str(directory))}    (or, to load it as it is, set load_universal)",
    )


def remove_converted(root: Path) -> None:
    """Remove what jobs have converted for themselves: a newer checkpoint was committed. Behind a commit, on rank 0.

    The files go in a thread of their own: there may be ten thousand of them.
    """
    gone: list[Path] = []
    for path in _listed(root):
        if path.name.endswith(SUFFIX) and _made_by_job(path):
            away = path.with_name(leftover_name(path.name))
            with contextlib.suppress(OSError):  # what cannot be removed is in nobody's way
                path.rename(away)
                gone.append(away)
    delete_soon(gone)


def _made_by_job(directory: Path) -> bool:
    try:
        return _read_seal(directory)[1] == "job"
    except Exception:  # noqa: BLE001  whatever it is, it is not known to be ours, and stays
        return False


def _read_seal(directory: Path) -> tuple[str, Maker, tuple[FileEntry, ...]]:
    """(the save that it was made of, who asked for it, its files). Raises CheckpointError."""

    def make(fields: Mapping[str, Any]) -> tuple[str, Maker, tuple[FileEntry, ...]]:
        made_by: Maker = "job" if text(fields["made_by"]) == "job" else "command"
        return text(fields["save_id"]), made_by, tuple(file_entry(row) for row in rows(fields["files"]))

    what = "the seal of the universal checkpoint"
    return read_record(directory / SEAL, make, what=what, format_name=FORMAT, version=VERSION, error=CheckpointError)


def _listed(root: Path) -> list[Path]:
    try:
        return [root / name for name in sorted(os.listdir(root)) if SUFFIX in name]
    except OSError:
        return []


#: seconds between lines of progress, and between looks at the worker.
_PROGRESS, _POLL = 15.0, 0.2
#: what launchers tell a rank; the worker is none.
_LAUNCH = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
#: bytes; below it one process converts faster than several start.
_SMALL = 1 << 30


def default_workers(size: int) -> int:
    """Processes that convert, for a checkpoint of this many bytes."""
    return 1 if size < _SMALL else max(1, min(8, (os.cpu_count() or 1) // 2))


@dataclass(slots=True)
class Reporter:
    """Reports progress, not too often, and gives signs of life."""

    say: Callable[[str], None]
    #: called often while there is nothing to say.
    beat: Callable[[], None] = lambda: None
    _next: float = field(default_factory=lambda: time.monotonic() + _PROGRESS)

    def wait(self, words: Callable[[], str]) -> None:
        """Sleep a moment; say the words if the last line is long ago."""
        self.beat()
        time.sleep(_POLL)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _PROGRESS
            self.say(words())


def room_needed(tag_dir: Path) -> int:
    """Bytes that a conversion needs at its peak: fragments and merged state side by side, and the model files."""
    files = list_files(tag_dir)
    state = sum(entry.size for entry in files if entry.path.endswith("_optim_states.pt"))
    model = sum(entry.size for entry in files if entry.path.endswith("_model_states.pt"))
    return int(1.05 * (2 * state + model))


def convert(tag_dir: Path, *, save_id: str, made_by: Maker, report: Reporter, workers: int | None = None) -> Universal:
    """Make the universal form of a ZeRO checkpoint, or take the one that is there. In one process.

    Args:
        tag_dir: the checkpoint, complete.
        save_id: of its save.
        made_by: who asks for it; what a job made is removed after its next checkpoint.
        report: told about progress.
        workers: processes; None: by the size.

    Raises:
        CheckpointError: no room, something else has the name, DeepSpeed cannot convert it, or the disk refuses.
    """
    with _locked(records_dir(tag_dir.parent), report) as alone:
        for path in _listed(tag_dir.parent) if alone else ():
            if _CONVERTING.fullmatch(path.name):  # what a killed conversion left, perhaps after its rename
                shutil.rmtree(path, ignore_errors=True)
        there = read_universal(tag_dir, save_id, checksums=True)
        if there is not None:
            return there
        _check_room(tag_dir)
        return _convert(tag_dir, save_id, made_by, report, workers)


@contextlib.contextmanager
def _locked(directory: Path, report: Reporter) -> Iterator[bool]:
    """Hold the lock of a checkpoint root; waits for it. Yields whether there are locks at all."""
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
                # Not left to the close: a process that was forked meanwhile holds the file too.
                fcntl.flock(lock, fcntl.LOCK_UN)


def _check_room(tag_dir: Path) -> None:
    needed, free = room_needed(tag_dir), shutil.disk_usage(tag_dir).free
    if free < needed:
        raise CheckpointError(
            f"there is no room to convert {tag_dir.name}",
            found=f"{_gb(free)} free in {tag_dir.parent}",
            expected=f"{_gb(needed)}: twice the optimizer state, and the model",
            action="free space, or start on the number of ranks that saved it",
        )


def _convert(tag_dir: Path, save_id: str, made_by: Maker, report: Reporter, workers: int | None) -> Universal:
    began, needed = time.monotonic(), room_needed(tag_dir)
    target = universal_dir(tag_dir)
    temporary = target.with_name(f".{target.name}.converting-{os.urandom(4).hex()}")
    # DeepSpeed writes a pointer beside its output: so the output lies one level deeper.
    output = temporary / target.name
    report.say(f"converting {tag_dir.name} into {target.name}; needs {_gb(needed)} of disk while it works")
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
    report.say(f"converted in {time.monotonic() - began:.0f} s: {target.name}, {_gb(made.size)}")
    return Universal(path=target, save_id=save_id, made_by=made_by, size=made.size)


def _run_worker(tag_dir: Path, output: Path, log: Path, needed: int, workers: int, report: Reporter) -> None:
    command = [sys.executable, "-m", "megaresume.hosts.deepspeed.elastic.worker"]
    command += [str(tag_dir), str(output), str(workers), str(os.getpid())]
    env = {name: value for name, value in os.environ.items() if name not in _LAUNCH}
    # What this process can import, the checkpoint may name. A GPU has no part in it.
    env |= {"PYTHONPATH": os.pathsep.join(sys.path), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    began = time.monotonic()

    def progress() -> str:
        written = _size_below(output)
        return f"converting {tag_dir.name}: {_gb(written)} of {_gb(needed)} written in {time.monotonic() - began:.0f} s"

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
    """Bytes so far, while another process creates and removes files."""
    total = 0
    for where, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.stat(os.path.join(where, name)).st_size
    return total


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
