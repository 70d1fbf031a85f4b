"""One job at a time writes to a checkpoint root.

A lock with its owner's name, and a fence against a process that has lost it:

    start    free, or the owner has ended            -> the next number is claimed, the lower ones removed
             an owner whose counter moves            -> refused, naming the owner
             an owner whose counter stands still     -> claimed
    save     the owner's draft -> renamed into place: data state, manifest, pointers      (`write_fenced`)
    end      marked as released

**Taking.** A directory is prepared with its content and renamed to the next number (`claim`). A rename never replaces
a directory that is not empty: if two processes try at once, the filesystem refuses one. Numbers only grow: the last
directory stays when its owner ends, and the next owner removes it. Neither file locks nor the clocks of two nodes are
needed, so this works on NFS and Lustre.

**The fence.** A process that takes the lock removes the directories with lower numbers before it looks at any
checkpoint. An owner makes a checkpoint valid by a rename *out of* its own directory: either before the removal, so that
the new owner sees the checkpoint, or after it, so that the rename fails. There is nothing in between, however long a
process sleeps between two of its instructions. So a node that was believed dead and comes back commits nothing. It may
still write model files, but they are not valid without a manifest.

One daemon thread increases the counters of all roots of a process. A forked child holds nothing. What a killed owner
leaves need not be cleaned up by hand.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megaresume.checkpoint.lock.claim import (
    OWNER,
    RELEASED,
    Owner,
    claim,
    gone,
    newest,
    place,
    read_alive,
    read_owner,
    this_process,
    write_alive,
)
from megaresume.checkpoint.lock.shared import check_shared
from megaresume.checkpoint.ranks import is_rank_0, on_rank_0
from megaresume.checkpoint.records.ledger import read_run
from megaresume.checkpoint.records.manifest import Manifest
from megaresume.checkpoint.records.names import LATEST, TRACKER, check_tag, ledger_path, manifest_path, records_dir
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.files import make_dir, write_atomic
from megaresume.stream.errors import CheckpointError, MegaresumeError, NewerFormatError

#: how often an owner increases its counter.
RENEW_SECONDS = 2.0
#: how long a counter that stands still is watched: ten renewals, as a busy interpreter or filesystem skips some.
PATIENCE_SECONDS = 20.0
_POLL_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """The state of a root's lock."""

    #: held: as far as can be told without waiting. gone: it has ended, so that the next start takes the lock at once.
    status: Literal["held", "gone", "released"]
    #: why the owner counts as ended.
    reason: str | None = None
    #: None if the owner's file is damaged, or was written by a newer megaresume.
    owner: Owner | None

    def __str__(self) -> str:
        return "a process whose name cannot be read" if self.owner is None else str(self.owner)


class Lock:
    """A root that this process holds; created by `take`."""

    def __init__(self, root: Path, number: int, owner: Owner) -> None:
        self.root = root
        self.number = number
        self.owner = owner
        #: files written here can be renamed into place while the root is held.
        self.drafts = place(root, number) / owner.token
        self._count = 0
        self._released = False
        self._writing = threading.Lock()

    def renew(self) -> None:
        """Increase the counter. Raises OSError: FileNotFoundError if another process has taken over the root."""
        with self._writing:
            if not self._released:
                self._count += 1
                write_alive(self.drafts.parent, str(self._count))

    def release(self) -> None:
        """Mark the root as free. If that fails, the next start watches the counter."""
        # The program must be able to end even if the other thread hangs in a filesystem that does not answer.
        if self._writing.acquire(timeout=1.0):
            self._released = True
            with contextlib.suppress(OSError):
                write_alive(self.drafts.parent, RELEASED)
            self._writing.release()

    def taken_by(self) -> Holder | None:
        """Who has taken over the root; None if nobody has."""
        number = newest(self.root)
        return None if number in (None, self.number) else _read(self.root, number, self.owner)

    def check(self) -> None:
        """Raise a CheckpointError if another job has taken over the root. Recreates a lock that a user has deleted,
        unless another job has taken it.
        """
        with contextlib.suppress(OSError):
            self.renew()  # an NFS client caches what is gone, but asks its server before it opens a file
        if self.drafts.is_dir() and newest(self.root) == self.number:
            return
        if newest(self.root) is None:
            make_dir(records_dir(self.root))
            if claim(self.root, self.number, self.owner):
                return
        raise self.lost()

    def lost(self) -> CheckpointError:
        """The error for an owner that has lost the root."""
        return CheckpointError(
            "this job has lost its directory of checkpoints to another one, and nothing that it saves there counts",
            found=f"{self.root} is held by {self.taken_by() or 'nobody'}",
            expected=f"this job: {self.owner}",
            cause="this node was taken for dead (its network, a filesystem that hung, a process that was stopped), and "
            "the job was started again elsewhere",
            action="end this job: the other one continues from the last committed checkpoint",
        )


#: real path -> a root of this process.
_held: dict[Path, Lock] = {}
#: ends the thread that increases the counters; None if there is no thread.
_ending: threading.Event | None = None


def take(root: str | os.PathLike[str]) -> Lock:
    """Hold a root until `release` or the end of this process. On rank 0. Prints whom it waited for, or took over from.

    If this process already holds it, only checks that it still does.

    Raises:
        CheckpointError: another job writes there (names it), or has taken it over from this one; or the directory
            cannot be written.
    """
    root = Path(os.path.abspath(root))
    if (lock := _lock_of(root)) is not None:
        lock.check()
        return lock
    make_dir(records_dir(root))
    me = this_process(token=os.urandom(8).hex(), run=read_run(ledger_path(root)))
    while True:
        before = newest(root)
        if before is not None and not _is_over(root, before, me):
            continue
        number = 1 if before is None else before + 1
        if claim(root, number, me):
            break
    lock = _held[_key(root)] = Lock(root, number, me)
    _raise_counters()
    return lock


def release(root: str | os.PathLike[str]) -> None:
    """Let go of a root; no error if it is not held."""
    if (lock := _held.pop(_key(root), None)) is not None:
        lock.release()


def check_owned(root: Path) -> None:
    """Raise a CheckpointError if this process held a root and has lost it. A process that never held it passes."""
    if (lock := _lock_of(root)) is not None:
        lock.check()


def write_fenced(root: Path, path: Path, data: bytes, *, sync_dir: bool = True) -> None:
    """`write_atomic` of a file that makes a checkpoint valid: fails if this process has lost the root.

    Raises:
        CheckpointError: lost, with the new owner; or a write fails. The old content is preserved.
    """
    lock = _lock_of(root)
    try:
        write_atomic(path, data, sync_dir=sync_dir, drafts=None if lock is None else lock.drafts)
    except CheckpointError as error:
        if lock is not None and lock.taken_by() is not None:
            raise lock.lost() from error
        raise


def write_latest(root: Path, tag: str) -> None:
    """Point ``latest`` to a tag directory, atomically. Raises CheckpointError, UsageError for an impossible tag."""
    write_fenced(root, root / LATEST, check_tag(tag).encode())


def write_tracker(root: Path, iteration: int) -> None:
    """Point the tracker to an iteration, atomically. Raises CheckpointError."""
    write_fenced(root, root / TRACKER, str(iteration).encode())


def write_step_file(path: Path, record: StepFile) -> None:
    """Write atomically, as the owner of the root (see `write_fenced`); durable with the manifest, which is written next
    into the same directory. Raises CheckpointError.
    """
    write_fenced(path.parent.parent, path, record.to_bytes(), sync_dir=False)


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, atomically and durably. Raises CheckpointError."""
    write_fenced(root, manifest_path(root, manifest.iteration, manifest.tag), manifest.to_bytes())


def holder_of(root: Path, *, ask_slurm: bool = False) -> Holder | None:
    """Who holds a root, or last did; None if it was never held. Only reads, and only waits for ``squeue``.

    Raises:
        CheckpointError: the directory cannot be listed.
    """
    number = newest(root)
    return None if number is None else _read(root, number, this_process(token=""), ask_slurm=ask_slurm)


def _key(root: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(root))


def _lock_of(root: Path) -> Lock | None:
    return _held.get(_key(root)) if _held else None


def say(words: str) -> None:
    """Print a line for people, on rank 0."""
    # Printed, not logged: it says why a start waits, whatever the program does with its logging.
    print(f"megaresume: {words}\n", end="", flush=True)  # in one piece, as threads print too


def _read(root: Path, number: int, me: Owner, *, ask_slurm: bool = False) -> Holder:
    owner: Owner | None = None
    with contextlib.suppress(CheckpointError, NewerFormatError):
        owner = read_owner(place(root, number) / OWNER)
    if read_alive(place(root, number)) == RELEASED:
        return Holder(owner=owner, status="released")
    reason = None if owner is None else gone(owner, me, ask_slurm=ask_slurm)
    return Holder(owner=owner, status="held" if reason is None else "gone", reason=reason)


def _is_over(root: Path, number: int, me: Owner) -> bool:
    """Wait until it is clear whether an owner has ended.

    Returns:
        True: it has ended. False: the root has another owner by now.

    Raises:
        CheckpointError: it is alive.
    """
    directory = place(root, number)
    began, first, told = time.monotonic(), read_alive(directory), False
    holder = _read(root, number, me, ask_slurm=True)
    while holder.status == "held":
        now = read_alive(directory)  # read before the newest number: a directory that was taken over is removed
        if newest(root) != number:
            return False
        if now not in (first, RELEASED):
            raise _refused(root, holder)
        waited = time.monotonic() - began
        if waited >= PATIENCE_SECONDS:
            say(f"{root} was held by {holder}: no sign of life for {PATIENCE_SECONDS:g} s; taken over")
            return True
        if waited > 2 * RENEW_SECONDS and not told:
            told = True
            say(f"{root} is held by {holder}: waiting for a sign of life, {PATIENCE_SECONDS:g} s at most")
        if now != RELEASED:
            time.sleep(_POLL_SECONDS)
        holder = _read(root, number, me)
    if holder.status == "gone" and not (holder.owner is not None and holder.owner.is_same_process(me)):
        say(f"{root} was held by {holder}: {holder.reason}; taken over")
    return True


def _refused(root: Path, holder: Holder) -> CheckpointError:
    owner = holder.owner
    array = owner is not None and owner.array is not None
    return CheckpointError(
        "another job writes to this directory of checkpoints",
        found=f"{root} is held by {holder}; it is alive",
        expected="one job at a time",
        cause="the tasks of a job array save to one directory"
        if array
        else "the job was submitted twice, or the one before it has not ended yet",
        action=("end it" if owner is None else owner.how_to_end)
        + " and start again; or save to another directory"
        + (": DIR/$SLURM_ARRAY_TASK_ID" if array else "")
        + "; only to read its checkpoints, leave out where to save (--save, save_dir=)",
    )


# The counters


def _raise_counters() -> None:
    global _ending
    if _ending is None:
        _ending = threading.Event()
        threading.Thread(target=_run, args=(_ending,), name="megaresume-lock", daemon=True).start()


def _run(ending: threading.Event) -> None:
    told: set[str] = set()
    while not ending.wait(RENEW_SECONDS):
        for lock in list(_held.values()):
            # If full, or not answering, the next save reports it, and the next time may succeed.
            with contextlib.suppress(OSError, CheckpointError):
                _renew(lock, told)


def _renew(lock: Lock, told: set[str]) -> None:
    try:
        lock.renew()
    except FileNotFoundError:
        if lock.owner.token not in told and (holder := lock.taken_by()) is not None:
            told.add(lock.owner.token)
            say(f"WARNING: {lock.root} was taken over by {holder}: nothing that this job saves there counts")


def _at_exit() -> None:
    """Registered when this module is imported, and so called after functions that commit at the end of the program."""
    for root in list(_held):
        release(root)
    if _ending is not None:
        _ending.set()


def _in_child() -> None:
    """After a fork: the thread does not exist in the child, and the parent's locks are not the child's."""
    global _ending
    _held.clear()
    _ending = None


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)


def claim_directory(directory: str | os.PathLike[str], *, action: str | None = None) -> None:
    """Take the lock on rank 0, and check that all ranks see it. Collective; before anything is loaded.

    Args:
        directory: the checkpoint root.
        action: what the user should do if it is not shared; None: mount it.

    Raises, on every rank:
        CheckpointError: another job writes there, or rank 0 cannot.
        SetupError: a node does not see it.
    """
    # In this order, so that no other start deletes the file that this one's ranks look for.
    hold_directory(directory)
    try:
        check_shared(directory, action=action)
    except MegaresumeError:
        if is_rank_0():
            release(directory)
        raise


def hold_directory(directory: str | os.PathLike[str]) -> None:
    """Take the lock on rank 0. Collective.

    Raises, on every rank:
        CheckpointError: another job writes there, or rank 0 cannot.
    """

    def hold() -> None:
        take(directory)

    on_rank_0(hold)
