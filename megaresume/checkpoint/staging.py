"""Two storages: a run saves to fast local storage, and a thread copies what is committed to shared storage.

    training     save -> local: marker, files, state, manifest, pointers, ledger
    the thread   shared: marker -> each file: copied, forced to the disk, read back, its checksum compared
                        -> data state -> manifest, with checksums -> pointers -> ledger -> marker removed
                 then old ones go: of the local ones only those whose copy is complete

The training never waits for a copy, and never fails for one. What goes wrong is logged and tried again, later and
later. A kill at any moment leaves a copy without a manifest, which nobody takes; the next start goes on with it, and
what is there already with the right checksum is not copied again. Which of the two storages a start takes is decided
in `two_roots`.

For a local directory that all ranks see: one node, or a fast filesystem of all nodes.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.atomic import make_dir, remove_leftovers, write_atomic
from megaresume.checkpoint.beside import remove_orphans
from megaresume.checkpoint.candidates import Candidate, examine, list_candidates
from megaresume.checkpoint.commit import run_of
from megaresume.checkpoint.copying import copy_checked
from megaresume.checkpoint.data_file import data_path
from megaresume.checkpoint.layout import (
    check_tag,
    ledger_path,
    manifest_path,
    marker_path,
    records_dir,
    step_path,
)
from megaresume.checkpoint.ledger import append_lines, read_ledger
from megaresume.checkpoint.lock import check_owned, write_fenced
from megaresume.checkpoint.manifest import FileEntry, Manifest, read_manifest
from megaresume.checkpoint.marker import Marker, read_marker, remove_marker, write_marker
from megaresume.checkpoint.pointers import read_pointers, write_latest, write_tracker
from megaresume.checkpoint.retention import KEEP_ALL, Retention, prune
from megaresume.checkpoint.sealed import count, read_sealed, seal, text
from megaresume.checkpoint.state_file import StepFile, read_step_file, write_step_file
from megaresume.checkpoint.superseded import keep_superseded
from megaresume.stream.errors import CheckpointError, MegaresumeError

__all__ = ["Stager", "Staging", "is_copied", "read_staging", "share_ledger", "stage"]

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
    """What became of the copies of a root; None: it is not copied anywhere, or its note cannot be read. Reads only."""
    try:
        fields = read_sealed(
            staging_path(root), what="the note", format_name=FORMAT, version=VERSION, error=CheckpointError
        )
        count(fields["version"])
        shared = Path(text(fields["to"]))
        done = {c.tag: _is_copied(root, shared, c) for c in list_candidates(root) if c.has_dir and _committed(c)}
    except (MegaresumeError, KeyError, ValueError):
        return None
    return Staging(
        to=shared,
        copied=tuple(tag for tag, copied in done.items() if copied),
        waiting=tuple(tag for tag, copied in done.items() if not copied),
    )


def _committed(candidate: Candidate) -> bool:
    return candidate.iteration is not None and {"manifest", "state"} <= candidate.records


def is_copied(local: Path, shared: Path, iteration: int, tag: str) -> bool:
    """Whether the copy of a checkpoint was completed: the same save, with a manifest, every file with its size."""
    try:
        ours = read_manifest(manifest_path(local, iteration, tag), iteration=iteration, tag=tag)
        copied = read_manifest(manifest_path(shared, iteration, tag), iteration=iteration, tag=tag)
        marker = read_marker(marker_path(shared, iteration, tag))
    except MegaresumeError:
        return False
    return ours.save_id == copied.save_id and marker is None and not copied.verify(shared / tag)


def _is_copied(local: Path, shared: Path, candidate: Candidate) -> bool:
    return candidate.iteration is not None and is_copied(local, shared, candidate.iteration, candidate.tag)


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

    def start(self) -> None:
        """Begin, with what an earlier process left uncopied.

        Raises:
            CheckpointError: the local root cannot be written.
        """
        make_dir(records_dir(self.local))
        note = {"format": FORMAT, "version": VERSION, "to": str(self.shared)}
        write_atomic(staging_path(self.local), seal(note, depth=1))
        for candidate in reversed(list_candidates(self.local)):
            if candidate.has_dir and candidate.iteration is not None and _committed(candidate):
                self._queue.append((candidate.iteration, candidate.tag))
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
        """Wait for the copies, at most so many seconds, and stop.

        Returns:
            tags that are not copied; they are named in the log, and the next start goes on with them.
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
        if left_over := self.waiting():
            log.error(
                "megaresume: not copied to %s: %s. They are complete in %s; the next start there goes on with them",
                self.shared,
                ", ".join(left_over),
                self.local,
            )
        return left_over

    def _run(self) -> None:
        pause = FIRST_PAUSE
        started = False
        while not self._closing.is_set():
            with self._changed:
                while not self._queue and not self._closing.is_set():
                    self._changed.wait()
                if self._closing.is_set():
                    return
                iteration, tag = self._queue[0]
            try:
                if not started:
                    make_dir(records_dir(self.shared))
                    remove_leftovers(records_dir(self.shared))
                    started = True
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

    def _copy(self, iteration: int, tag: str) -> None:
        copied = stage(self.local, self.shared, iteration, tag)
        if copied is not None:
            # Local ones first: a copy that has gone by the same rule is no copy.
            prune(self.local, self.retention, copied, copied_to=self.shared)
            prune(self.shared, self.retention, copied)
            remove_orphans(self.local)
            remove_orphans(self.shared)


def stage(local: Path, shared: Path, iteration: int, tag: str) -> StepFile | None:
    """Copy one checkpoint, or finish a copy that was cut off.

    Returns:
        its data state; None: it is no longer there, or no longer whole, and there is nothing to copy.

    Raises:
        CheckpointError: a disk refuses, or gives back other bytes than were written.
    """
    candidate = next((c for c in list_candidates(local, tags=(tag,)) if (c.iteration, c.tag) == (iteration, tag)), None)
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
    make_dir(records_dir(shared))
    latest, tracker = _moves(local, shared, step)
    marker = Marker(
        iteration=iteration,
        tag=tag,
        save_id=step.save_id,
        run=step.run,
        began_at=step.saved_at,
        latest=latest,
        tracker=tracker,
    )
    write_marker(marker_path(shared, iteration, tag), marker)
    files = tuple(_copied(local / tag, shared / tag, manifest.files))
    beside = tuple(_copied(records_dir(local), records_dir(shared), manifest.beside))
    if not _is_still(local, step):
        log.warning("megaresume: %s was saved again while it was copied", tag)
        return None
    if data_path(local).is_file():
        write_atomic(data_path(shared), data_path(local).read_bytes())
    keep_superseded(shared, step)
    copy = Manifest(
        iteration=iteration, tag=tag, save_id=step.save_id, digest=manifest.digest, files=files, beside=beside
    )
    write_step_file(step_path(shared, iteration, tag), step, sync_dir=False)
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


def _copied(source: Path, target: Path, entries: tuple[FileEntry, ...]) -> Iterator[FileEntry]:
    for entry in entries:
        checksum = copy_checked(source / entry.path, target / entry.path, entry)
        yield FileEntry(path=entry.path, size=entry.size, checksum=checksum)


def _moves(local: Path, shared: Path, step: StepFile) -> tuple[bool, bool]:
    """Which pointers a copy moves: to what the local ones name, or closer to it; never back."""
    latest, tracker = (
        wanted.tag == step.tag
        or (wanted.iteration is not None and wanted.iteration >= step.iteration > _order(now.iteration))
        for wanted, now in zip(read_pointers(local), read_pointers(shared), strict=True)
    )
    return latest, tracker


def _order(iteration: int | None) -> int:
    return -1 if iteration is None else iteration


def _is_still(local: Path, step: StepFile) -> bool:
    """Whether no other save of the step has begun since."""
    marker = read_marker(marker_path(local, step.iteration, step.tag))
    now = read_step_file(step_path(local, step.iteration, step.tag))
    return now.save_id == step.save_id and (marker is None or marker.save_id == step.save_id)


def share_ledger(source: Path, target: Path) -> None:
    """Append the lines of one ledger that the other lacks, in their order."""
    there = {entry.to_bytes() for entry in read_ledger(ledger_path(target)).entries}
    missing = [line for entry in read_ledger(ledger_path(source)).entries if (line := entry.to_bytes()) not in there]
    append_lines(ledger_path(target), missing)
