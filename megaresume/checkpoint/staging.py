"""Two storages: a run saves to fast local storage, and a thread copies what is committed to shared storage.

    training     save -> local: marker, files, state, manifest, pointers, ledger
    the thread   shared: ledger -> marker -> each file: copied, forced to the disk, read back, its checksum compared
                        -> data state -> manifest, with checksums -> pointers -> ledger -> marker removed
                 then old ones go: of the local ones only those whose copy is complete

The training never waits for a copy, and never fails for one. What goes wrong is logged and tried again, later and
later. A kill at any moment leaves a copy without a manifest, which nobody takes; the next start continues with it, and
what is there already with the right checksum is not copied again. The ledger comes first: if the local storage is gone
by then and no copy is complete, the ledger among the copies says whose they were and what was lost, and the start is
refused. Which of the two storages a start takes is decided by `choose.choose_of_two`.

`Staged` is the second storage of a session; rank 0 does the work:

    start      both are this job's alone; every rank sees the local directory and the shared one
    load       whichever holds the newest complete checkpoint
    commit     rank 0 hands it to the copying thread
    close      rank 0 waits for the copies, for a while; the end of the program does, too

For a local directory that all ranks see: one node, or a fast filesystem of all nodes.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from megaresume.checkpoint.candidates import (
    Candidate,
    examine,
    find,
    list_candidates,
    read_pointers,
    write_latest,
    write_tracker,
)
from megaresume.checkpoint.choose import choose_of_two
from megaresume.checkpoint.ledger import append_lines, read_ledger
from megaresume.checkpoint.lock import check_owned, claim_directory, hold_directory, release, write_fenced
from megaresume.checkpoint.manifest import FileEntry, Manifest, checksum_file, list_files, remove_orphans
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.checkpoint.records import (
    check_tag,
    data_path,
    ledger_path,
    manifest_path,
    marker_path,
    read_record,
    records_dir,
    seal,
    step_path,
    text,
)
from megaresume.checkpoint.retention import KEEP_ALL, Retention, is_copied, prune
from megaresume.checkpoint.step_file import (
    Marker,
    StepFile,
    keep_superseded,
    read_marker,
    read_step_file,
    remove_marker,
    run_of,
    write_marker,
    write_step_file,
)
from megaresume.files import (
    fsync_dir,
    fsync_file,
    make_dir,
    open_file,
    remove_leftovers,
    size_of,
    write_all,
    write_atomic,
    write_error,
)
from megaresume.stream.errors import CheckpointError, MegaresumeError, SetupError, UsageError

log = logging.getLogger(__name__)

FORMAT, VERSION = "megaresume.staging", 1
#: seconds between tries, doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
#: seconds that the end of a run waits for its copies.
PATIENCE = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """Where the checkpoints of a root are copied to, for people and for `megaresume inspect`."""

    to: Path
    copied: tuple[str, ...]
    waiting: tuple[str, ...]


def staging_path(root: Path) -> Path:
    """The note in a local root."""
    return records_dir(root) / "staging.json"


def read_staging(root: Path) -> Staging | None:
    """What became of the copies of a root; None if it is not copied anywhere, or its note cannot be read. Reads
    only."""
    try:
        path = staging_path(root)
        to = read_record(path, _to, what="the note", format_name=FORMAT, version=VERSION, error=CheckpointError)
        shared = Path(to)
        done = {c.tag: is_copied(root, shared, iteration, c.tag) for iteration, c in reversed(_committed(root))}
    except MegaresumeError:
        return None
    return Staging(
        to=shared,
        copied=tuple(tag for tag, copied in done.items() if copied),
        waiting=tuple(tag for tag, copied in done.items() if not copied),
    )


def _to(fields: Mapping[str, Any]) -> str:
    return text(fields["to"])


def _committed(root: Path) -> list[tuple[int, Candidate]]:
    """Checkpoints that are there, with their iterations, the oldest first."""
    found = [c for c in reversed(list_candidates(root)) if c.has_dir and {"manifest", "state"} <= c.records]
    return [(c.iteration, c) for c in found if c.iteration is not None]


class Stager:
    """Copies what is committed in a local root to a shared one, in a thread. On one rank of the run.

    Args:
        local: the checkpoint root that the run saves to.
        shared: where the copies go.
        retention: which old checkpoints stay, in both; local ones always until they are copied.
    """

    def __init__(self, local: str | os.PathLike[str], shared: str | os.PathLike[str], retention: Retention = KEEP_ALL):
        self.local, self.shared = Path(os.path.abspath(local)), Path(os.path.abspath(shared))
        self.retention = retention
        self._queue: deque[tuple[int, str]] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        #: of the checkpoint that was copied last; None if none was.
        self._last: StepFile | None = None

    def start(self) -> None:
        """Begin, with what an earlier process left uncopied.

        Raises:
            CheckpointError: the local root cannot be written.
        """
        make_dir(records_dir(self.local))
        note = {"format": FORMAT, "version": VERSION, "to": str(self.shared)}
        write_atomic(staging_path(self.local), seal(note, depth=1))
        self._queue.extend((iteration, candidate.tag) for iteration, candidate in _committed(self.local))
        self._thread = threading.Thread(target=self._run, name="megaresume-staging", daemon=True)
        self._thread.start()

    def submit(self, iteration: int, tag: str) -> None:
        """Have a checkpoint copied that was just committed. Returns at once. Behind the end, the next start does it."""
        if self._thread is None:
            log.warning("megaresume: %s is not copied to %s yet: the next start copies it", tag, self.shared)
            return
        with self._changed:
            self._queue.append((iteration, check_tag(tag)))
            waiting = len(self._queue)
            self._changed.notify_all()
        if waiting > 2:
            log.warning("megaresume: %d checkpoints wait to be copied to %s: saves are faster", waiting, self.shared)

    def waiting(self) -> tuple[str, ...]:
        """Tags that are not copied yet, the one in work included."""
        with self._changed:
            return tuple(tag for _, tag in self._queue)

    def close(self, timeout: float = PATIENCE) -> tuple[str, ...]:
        """Wait for the copies, at most ``timeout`` seconds, and stop.

        Returns:
            tags that are not copied; they are named in the log, and the next start continues with them.
        """
        if self._thread is None:
            return ()
        deadline = time.monotonic() + timeout
        with self._changed:
            if self._queue:
                log.warning("megaresume: waiting for the copies of %s", ", ".join(tag for _, tag in self._queue))
            while self._queue and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(timeout=1.0)
        self._thread = None
        left_over = self.waiting()
        if self._last is not None and not left_over:
            self._prune(self._last)  # what became durable after its copy counts now
        if left_over:
            log.error(
                "megaresume: not copied to %s: %s. They are complete in %s; the next start there goes on with them",
                self.shared,
                ", ".join(left_over),
                self.local,
            )
        return left_over

    def _run(self) -> None:
        pause = FIRST_PAUSE
        with contextlib.suppress(MegaresumeError, OSError):
            self._begin()  # what fails here fails again in the first copy, which says so
        while not self._closing.is_set():
            with self._changed:
                while not self._queue and not self._closing.is_set():
                    self._changed.wait()
                if self._closing.is_set():
                    return
                iteration, tag = self._queue[0]
            try:
                self._copy(iteration, tag)
            except (MegaresumeError, OSError) as error:
                log.error("megaresume: %s is not copied to %s yet: %s", tag, self.shared, error)
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            except Exception:
                log.exception("megaresume: the copy of %s is given up", tag)
            pause = FIRST_PAUSE
            with self._changed:
                self._queue.popleft()
                self._changed.notify_all()

    def _begin(self) -> None:
        """Let the copies know of the run before it has saved: for a start on another node."""
        make_dir(records_dir(self.shared))
        remove_leftovers(records_dir(self.shared))
        if run_of(self.shared) in (None, run_of(self.local)):
            share_ledger(self.local, self.shared)

    def _copy(self, iteration: int, tag: str) -> None:
        copied = stage(self.local, self.shared, iteration, tag)
        if copied is not None:
            self._last = copied
            self._prune(copied)

    def _prune(self, copied: StepFile) -> None:
        # Local ones first: without its copy one would stay forever. A copy may be durable before what it is a copy of.
        prune(self.local, self.retention, copied, copied_to=self.shared)
        prune(self.shared, self.retention, copied, copies_of=self.local)
        remove_orphans(self.local)
        remove_orphans(self.shared)


#: seconds that the end of a program waits that an error ended.
_PATIENCE_IN_ERROR = 20.0


class Staged:
    """Copies what an engine saves to a second storage. On all ranks; rank 0 does the work. Collective.

    Args:
        save_dir: where the engine saves: fast storage that every rank sees.
        stage_to: where the copies go: an existing directory.
        retention: which old checkpoints stay, in both.

    Raises, on every rank:
        UsageError: both are the same directory.
        SetupError: a rank does not see one of the two.
        CheckpointError: another job writes to one of the two, or it cannot be written.
    """

    def __init__(self, save_dir: str, stage_to: str | os.PathLike[str], retention: Retention) -> None:
        self.local, self.shared = Path(os.path.abspath(save_dir)), Path(os.path.abspath(stage_to))
        on_all_ranks(self._check_shared)
        # Storage of one node each would hold parts of a checkpoint.
        claim_directory(self.local, action="save to the shared storage itself: remove stage_to (--megaresume-stage-to)")
        hold_directory(self.shared)
        self._stager = Stager(self.local, self.shared, retention)
        self._started = False

    def _check_shared(self) -> None:
        local, shared = self.local.resolve(), self.shared.resolve()
        if local == shared or local in shared.parents or shared in local.parents:
            raise UsageError(
                "checkpoints cannot be copied to where they are",
                found=f"saved to {self.local}, copied to {self.shared}",
                expected="two directories, on two storages, neither inside the other",
            )
        if not self.shared.is_dir():
            raise SetupError(
                "the directory to copy checkpoints to does not exist",
                found=f"no directory {self.shared} on {os.uname().nodename}",
                expected="an existing directory: storage that is not mounted must not look like a fresh start",
                cause="the first start of a run, or the storage is not mounted on this node",
                action=f"mount it; for a new run: mkdir -p {self.shared}",
            )

    def holds(self, directory: str | os.PathLike[str]) -> bool:
        """Whether a directory is the local one, by whatever name."""
        return Path(directory).resolve() == self.local.resolve()

    def adopt(self, *, is_fresh: bool) -> None:
        """On rank 0, before the start is recorded.

        Args:
            is_fresh: nothing was loaded, and nothing was looked for.

        Raises:
            CheckpointError: then, if one of the two tells of checkpoints that are no longer whole.
        """
        if is_fresh:
            choose_of_two(self.local, self.shared)
        if (words := adopt(self.local, self.shared)) is not None:
            print(f"megaresume: {words}", flush=True)

    def start(self) -> None:
        """Begin to copy, with what an earlier process left. On rank 0, once; again does nothing."""
        if not self._started:
            self._started = True
            self._stager.start()
            atexit.register(self._at_exit)

    def submit(self, iteration: int, tag: str) -> None:
        """A checkpoint was committed. On rank 0."""
        self._stager.submit(iteration, tag)

    def close(self, timeout: float | None = None) -> None:
        """Wait a limited time for the copies; log what is not copied."""
        if self._started:
            atexit.unregister(self._at_exit)
            self._stager.close(PATIENCE if timeout is None else max(timeout, 0.0))
        release(self.shared)

    def _at_exit(self) -> None:
        self._stager.close(PATIENCE if getattr(sys, "last_value", None) is None else _PATIENCE_IN_ERROR)


#: bytes at once; reading, hashing and writing release the interpreter lock.
_CHUNK = 8 << 20


def copy_checked(source: Path, target: Path, entry: FileEntry) -> str:
    """Copy a file, unless the same bytes are there already.

    Args:
        source: the file.
        target: where it goes; its directory is made.
        entry: its size, and its checksum if the save took one.

    Returns:
        the checksum of both, 32 hex digits.

    Raises:
        CheckpointError: a disk refuses; the source is not what was saved; or the target reads back other bytes.
    """
    if size_of(target) == entry.size:  # of a copy that was cut off
        expected = entry.checksum or _checksum(source)
        if _checksum(target) == expected:
            return expected
    make_dir(target.parent)
    written = write_copy(source, target)
    size = os.stat(source).st_size
    if size != entry.size or (entry.checksum is not None and written != entry.checksum):
        raise CheckpointError(
            f"{source} is not what was saved, and is not copied",
            found=f"{size} bytes, checksum {written}",
            expected=f"{entry.size} bytes" + (f", checksum {entry.checksum}" if entry.checksum else ""),
            cause="the local storage returns other bytes than were written, or the step is being saved again",
        )
    if (found := _checksum(target)) != written:
        raise CheckpointError(
            f"{target} was written and reads back other bytes",
            found=f"checksum {found}",
            expected=f"checksum {written}",
            cause="the shared storage or the network damages data",
            action="it is copied again; look at the storage",
        )
    return written


def write_copy(source: Path, target: Path) -> str:
    """Copy a file and force it to the disk; the checksum of what was written. Raises CheckpointError."""
    hasher = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))
    try:
        with open_file(source) as file:
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            try:
                while size := file.readinto(buffer):
                    hasher.update(buffer[:size])
                    write_all(descriptor, buffer[:size])
                fsync_file(descriptor)
            finally:
                os.close(descriptor)
        fsync_dir(target.parent)
    except OSError as error:
        raise write_error(target, error) from error
    return hasher.hexdigest()


def _checksum(path: Path) -> str:
    try:
        return checksum_file(path, stored=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read back", found=error.strerror or str(error)) from error


def stage(local: Path, shared: Path, iteration: int, tag: str) -> StepFile | None:
    """Copy one checkpoint, or finish a copy that was cut off.

    Returns:
        its data state; None if it is no longer there, or no longer whole, and there is nothing to copy.

    Raises:
        CheckpointError: a disk refuses, or gives back other bytes than were written.
    """
    candidate = find(local, iteration, tag)
    found = None if candidate is None else examine(local, candidate)
    if found is None or found.step is None or found.manifest is None or found.status != "complete":
        log.warning("megaresume: %s is not copied: %s", tag, "it is gone" if found is None else found.reason)
        return None
    step, manifest = found.step, found.manifest
    if is_copied(local, shared, iteration, tag):
        share_ledger(local, shared)
        return step
    check_owned(shared)
    _check_run(shared, step)
    began = time.monotonic()
    share_ledger(local, shared)
    latest, tracker = _moves(local, shared, step)
    write_marker(marker_path(shared, iteration, tag), Marker.of(step, latest=latest, tracker=tracker))
    _remove_others(shared / tag, manifest)
    files = tuple(_copied(local / tag, shared / tag, manifest.files))
    beside = tuple(_copied(records_dir(local), records_dir(shared), manifest.beside))
    if not _is_still(local, step):
        log.warning("megaresume: %s was saved again while it was copied", tag)
        return None
    if data_path(local).is_file():
        write_atomic(data_path(shared), data_path(local).read_bytes())
    keep_superseded(shared, step)
    copy = replace(manifest, files=files, beside=beside, durable=True, boots=())
    write_step_file(step_path(shared, iteration, tag), step)
    write_fenced(shared, manifest_path(shared, iteration, tag), copy.to_bytes())
    if latest:
        write_latest(shared, tag)
    if tracker:
        write_tracker(shared, iteration)
    share_ledger(local, shared)
    remove_marker(marker_path(shared, iteration, tag))
    log.info("megaresume: %s is copied to %s, %.0f s", tag, shared, time.monotonic() - began)
    return step


def _check_run(shared: Path, step: StepFile) -> None:
    if (run := run_of(shared)) not in (None, step.run):
        raise CheckpointError(
            f"{shared} holds the checkpoints of another run",
            found=f"run {run}; {step.tag} is of run {step.run}",
            expected="an empty directory, or the copies of the same run",
            action="give every run a --megaresume-stage-to of its own",
        )


def _remove_others(tag_dir: Path, manifest: Manifest) -> None:
    """Files of an older save of the step, under another layout."""
    ours = {entry.path for entry in manifest.files}
    try:
        for entry in list_files(tag_dir) if tag_dir.is_dir() else ():
            if entry.path not in ours:
                os.unlink(tag_dir / entry.path)
    except OSError as error:
        raise write_error(tag_dir, error) from error


def _copied(source: Path, target: Path, entries: tuple[FileEntry, ...]) -> Iterator[FileEntry]:
    for entry in entries:
        checksum = copy_checked(source / entry.path, target / entry.path, entry)
        yield FileEntry(path=entry.path, size=entry.size, checksum=checksum)


def _moves(local: Path, shared: Path, step: StepFile) -> tuple[bool, bool]:
    """Which pointers a copy moves: to what the local ones name, or closer to it; never back."""
    latest, tracker = (
        wanted.tag == step.tag
        or (
            wanted.iteration is not None
            and wanted.iteration >= step.iteration > (-1 if now.iteration is None else now.iteration)
        )
        for wanted, now in zip(read_pointers(local), read_pointers(shared), strict=True)
    )
    return latest, tracker


def _is_still(local: Path, step: StepFile) -> bool:
    """Whether no other save of the step has begun since."""
    marker = read_marker(marker_path(local, step.iteration, step.tag))
    now = read_step_file(step_path(local, step.iteration, step.tag))
    return now.save_id == step.save_id and (marker is None or marker.save_id == step.save_id)


def share_ledger(source: Path, target: Path) -> None:
    """Append the lines of one ledger that the other lacks, in their order; a new one appears with all its lines."""
    there = {entry.to_bytes() for entry in read_ledger(ledger_path(target)).entries}
    missing = [line for entry in read_ledger(ledger_path(source)).entries if (line := entry.to_bytes()) not in there]
    if ledger_path(target).exists():
        append_lines(ledger_path(target), missing)
    elif missing:
        make_dir(records_dir(target))
        write_atomic(ledger_path(target), b"".join(missing))


def adopt(local: Path, shared: Path) -> str | None:
    """Let an empty local root, on a node that is new to the run, know the run's ledger. Before its start is recorded.

    Returns:
        a note for the user; None if the local root has a ledger of its own, or the run is new.

    Raises:
        CheckpointError: it cannot be written.
    """
    if run_of(local) is not None or run_of(shared) is None:
        return None
    share_ledger(shared, local)
    entries = read_ledger(ledger_path(shared)).entries
    words = f"{local} is empty; {shared} knows of {sum(entry.kind == 'start' for entry in entries)} starts of this run"
    if any(entry.kind == "checkpoint" for entry in entries):
        return words
    return f"{words} and of no checkpoint: it begins at step 0"
