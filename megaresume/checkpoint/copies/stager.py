"""Two storages: a run saves to fast local storage, and a thread copies committed checkpoints to shared storage.

    training     save -> local: marker, files, state, manifest, pointers, ledger
    the thread   shared: ledger -> marker -> each file: copied, forced to the disk, read back, checksum compared
                        -> data state -> manifest, with checksums -> pointers -> ledger -> marker removed
                 then removes old ones; local ones only if their copy is complete

The training never waits for a copy, and never fails because of one. Errors are logged, and copying is retried after
ever longer pauses. A kill at any time leaves a copy without a manifest, which is never loaded; the next start continues
it, without repeating files that have the right checksum. The ledger is copied first: if the local storage is lost
before a copy is complete, the ledger among the copies says whose they were and what was lost, and the start is refused.
`choose.choose_of_two` decides which of the two storages a start uses.

In a session, `session_copies.Staged` uses it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megaresume.checkpoint.copies.places import PartMissingError, Place, part_here, share_ledger
from megaresume.checkpoint.copies.store_place import place_of
from megaresume.checkpoint.records.branches import saves_given_up
from megaresume.checkpoint.records.candidates import Candidate, examine, find, list_candidates, run_of
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.marker import Marker, read_marker
from megaresume.checkpoint.records.names import check_tag, data_path, ledger_path, marker_path, records_dir, step_path
from megaresume.checkpoint.records.pointers import Pointer, read_pointers
from megaresume.checkpoint.records.rank_files import remove_orphans
from megaresume.checkpoint.records.staging_note import read_note, write_note
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention, is_copied, prune
from megaresume.checkpoint.store.objects import is_store
from megaresume.checkpoint.store.store import ChangedSourceError, GaveWayError
from megaresume.files import delete_soon, leftover_name, make_dir
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError

log = logging.getLogger(__name__)

#: seconds between attempts, doubled each time.
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 300.0
#: seconds that the end of a run waits for its copies.
PATIENCE = 600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Staging:
    """Where the checkpoints of a root are copied to, for people and for `megaresume inspect`."""

    #: a directory, or a URL.
    to: Path | str
    copied: tuple[str, ...]
    waiting: tuple[str, ...]


def read_staging(root: Path) -> Staging | None:
    """The state of a root's copies; None if it is not copied, or its note cannot be read. Only reads."""
    try:
        to, copied = read_note(root)
        done = {
            c.tag: is_copied(root, Path(to), iteration, c.tag) if copied is None else c.tag in copied
            for iteration, c in reversed(committed_in(root))
        }
    except MegaresumeError:
        return None
    return Staging(
        to=to if is_store(to) else Path(to),
        copied=tuple(tag for tag, is_there in done.items() if is_there),
        waiting=tuple(tag for tag, is_there in done.items() if not is_there),
    )


def committed_in(root: Path) -> list[tuple[int, Candidate]]:
    """Existing checkpoints with their iterations, oldest first."""
    found = [c for c in reversed(list_candidates(root)) if c.has_dir and {"manifest", "state"} <= c.records]
    return [(c.iteration, c) for c in found if c.iteration is not None]


class Stager:
    """Copies committed checkpoints from a local root to a shared one, in a thread. On one rank of the run.

    Args:
        local: the checkpoint root that the run saves to.
        shared: where the copies go.
        retention: which old checkpoints to keep, in both; local ones are always kept until they are copied.
    """

    def __init__(
        self, local: str | os.PathLike[str], shared: str | os.PathLike[str] | Place, retention: Retention = KEEP_ALL
    ) -> None:
        self.local, self.place = Path(os.path.abspath(local)), place_of(shared)
        self.retention = retention
        self._queue: deque[tuple[int, str]] = deque()
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._is_ending = False
        self._thread: threading.Thread | None = None
        #: the checkpoint that was copied last; None if none was.
        self._last: StepFile | None = None
        #: checkpoints saved by this process.
        self._submitted: set[tuple[int, str]] = set()
        #: the step that training began from; None: copy everything.
        self._began: int | None = None
        #: the saves that led there.
        self._past: frozenset[str] = frozenset()

    def start(self, began: int | None = None, past: frozenset[str] = frozenset()) -> None:
        """Begin with what an earlier process left uncopied on the branch that counts.

        Args:
            began: the step that training begins from; None: copy everything.
            past: the saves that led there: among those saved until now, only these are ever copied.

        Raises:
            CheckpointError: the local root cannot be written.
        """
        make_dir(records_dir(self.local))
        self._write_note()
        self.go_back(began, past)
        self._queue.extend(
            (iteration, candidate.tag)
            for iteration, candidate in committed_in(self.local)
            if self._is_worth_it(iteration, candidate.tag)
        )
        self._thread = threading.Thread(target=self._run, name="megaresume-staging", daemon=True)
        self._thread.start()

    def go_back(self, began: int | None, past: frozenset[str]) -> None:
        """Training begins from this step again: see `start`."""
        with self._changed:
            self._began, self._past = began, past
            self._submitted = {work for work in self._submitted if self._is_past(*work)}
            self._queue = deque(work for work in self._queue if self._is_past(*work))
            self._changed.notify_all()

    def _is_worth_it(self, iteration: int, tag: str) -> bool:
        """Whether a local checkpoint should be, or have been, copied."""
        return (iteration, tag) in self._submitted or (
            self._is_past(iteration, tag) and self.place.takes(self.local, iteration, tag)
        )

    def _is_past(self, iteration: int, tag: str) -> bool:
        """Whether a checkpoint led to the step that training began from."""
        if self._began is None:
            return True
        try:
            save = read_step_file(step_path(self.local, iteration, tag)).save_id
        except StateError:
            return True  # `stage` reports what is wrong
        return save in self._past

    def _write_note(self) -> None:
        """Write the note of this root."""
        copied = None
        if is_store(self.place.name):
            committed = committed_in(self.local)
            copied = [c.tag for i, c in committed if is_copied(self.local, self.place.root, i, c.tag)]
        write_note(self.local, self.place.name, copied)

    def submit(self, iteration: int, tag: str) -> None:
        """Queue a checkpoint that was just committed. Returns at once. After the end, the next start copies it."""
        if self._thread is None:
            log.warning("megaresume: %s is not copied to %s yet: the next start copies it", tag, self.place.name)
            return
        with self._changed:
            self._queue.append((iteration, check_tag(tag)))
            self._submitted.add((iteration, tag))
            waiting = len(self._queue)
            self._changed.notify_all()
        if waiting > 2:
            log.warning(
                "megaresume: %d checkpoints wait to be copied to %s: saves are faster", waiting, self.place.name
            )

    def waiting(self) -> tuple[str, ...]:
        """Tags that are not copied yet, including the current one."""
        with self._changed:
            return tuple(tag for _, tag in self._queue)

    def close(self, timeout: float = PATIENCE) -> tuple[str, ...]:
        """Wait for the copies, at most ``timeout`` seconds, and stop.

        Returns:
            tags that are not copied; they are logged, and the next start continues with them.
        """
        if self._thread is None:
            return ()
        deadline = time.monotonic() + timeout
        with self._changed:
            self._is_ending = is_store(self.place.name)
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
            self._prune(self._last)  # checkpoints that became durable after their copy count now
        if left_over:
            log.error(
                "megaresume: not copied to %s: %s. They stay in %s; the next start there copies them",
                self.place.name,
                ", ".join(left_over),
                self.local,
            )
        return left_over

    def _run(self) -> None:
        pause = FIRST_PAUSE
        with contextlib.suppress(MegaresumeError, OSError):
            self._begin()  # an error is repeated, and reported, by the first copy
        while not self._closing.is_set():
            with self._changed:
                while not self._queue and not self._closing.is_set():
                    self._changed.wait()
                if self._closing.is_set():
                    return
                # At the end, which may come before all are copied, the newest one is the most valuable.
                _, tag = work = max(self._queue) if self._is_ending else self._queue[0]
            try:
                self._copy(work)
            except GaveWayError:
                continue
            except (PartMissingError, ChangedSourceError) as error:
                # The next start retries it. Waiting for that here would delay the other copies.
                log.error("megaresume: %s is not copied to %s: %s", tag, self.place.name, error)
            except (MegaresumeError, OSError) as error:
                log.error("megaresume: %s is not copied to %s yet: %s", tag, self.place.name, error)
                self.place.reopen()
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            except Exception:
                log.exception("megaresume: the copy of %s is given up", tag)
            pause = FIRST_PAUSE
            with self._changed:
                # By identity: the run may have gone back in the meantime, and saved the step again.
                self._queue = deque(one for one in self._queue if one is not work)
                self._changed.notify_all()

    def _begin(self) -> None:
        """Copy the ledger before the run has saved, for a start on another node."""
        self.place.begin()
        if run_of(self.place.root) in (None, run_of(self.local)):
            self.place.share_ledger(self.local)

    def _copy(self, work: tuple[int, str]) -> None:
        iteration, tag = work
        copied = stage(
            self.local,
            self.place,
            iteration,
            tag,
            gives_way=lambda: self._gives_way(work),
            is_wanted=lambda: self._is_waiting(work),
            goal=self._began,
        )
        if copied is not None:
            if self._last is None or not self._is_ending or self._last.iteration < copied.iteration:
                self._last = copied
            if is_store(self.place.name):
                self._write_note()
            self._prune(self._last)

    def _gives_way(self, work: tuple[int, str]) -> bool:
        """Whether to stop: another checkpoint should be copied first, or this one is no longer needed."""
        with self._changed:
            if self._closing.is_set() or not self._is_waiting(work):
                return True
            return self._is_ending and max(self._queue)[0] > work[0]

    def _is_waiting(self, work: tuple[int, str]) -> bool:
        with self._changed:
            return any(one is work for one in self._queue)

    def _prune(self, copied: StepFile) -> None:
        # Local ones first: without its copy, one would stay forever. A copy may be durable before its original.
        prune(self.local, self.retention, copied, copied_to=self.place.root)
        self.place.prune(self.retention, copied, self.local, self._is_worth_it)
        if self.retention:
            self._remove_lost(copied)
        remove_orphans(self.local)

    def _remove_lost(self, copied: StepFile) -> None:
        """Remove parts of older checkpoints whose other parts are lost with their machines, or that nobody copies."""
        for iteration, candidate in committed_in(self.local):
            is_part = part_here(self.local, iteration, candidate.tag) is not None
            if is_part and iteration < copied.iteration and not self._is_worth_it(iteration, candidate.tag):
                remove_soon(self.local, candidate.tag)


def remove_soon(root: Path, tag: str) -> None:
    """Delete a tag directory: renamed at once, the rest in a thread. What cannot be deleted stays."""
    away = root / leftover_name(tag)
    with contextlib.suppress(OSError):
        os.rename(root / tag, away)
        delete_soon([away])


def stage(
    local: Path,
    shared: Path | Place,
    iteration: int,
    tag: str,
    *,
    gives_way: Callable[[], bool] = lambda: False,
    is_wanted: Callable[[], bool] = lambda: True,
    goal: int | None = None,
) -> StepFile | None:
    """Copy one checkpoint, or finish an interrupted copy.

    Args:
        local: the root that it was saved to.
        shared: where its copy goes.
        iteration, tag: of the checkpoint.
        gives_way: whether to stop, called repeatedly during an upload to a store.
        is_wanted: whether it may become valid; called last of all.
        goal: the step that the run continues from, to which pointers move if the local ones name another one.

    Returns:
        its data state; None if it no longer exists or is incomplete, so that there is nothing to copy.

    Raises:
        CheckpointError: reading or writing fails, or returns other bytes than were written.
        ChangedSourceError: a local file differs from what was saved.
        GaveWayError: ``gives_way`` stopped it.
    """
    place = place_of(shared)
    candidate = find(local, iteration, tag)
    found = None if candidate is None else examine(local, candidate)
    if found is None or found.record is None or found.manifest is None or not found.is_settled:
        log.warning("megaresume: %s is not copied: %s", tag, "it is gone" if found is None else found.reason)
        return None
    record, manifest = found.record, found.manifest
    if is_copied(local, place.root, iteration, tag):
        place.share_ledger(local)
        return record
    place.check_owned()
    _check_run(place, record)
    if (why := place.refusal(record)) is not None:
        log.warning("megaresume: %s is not copied: %s", tag, why)
        return None
    began = time.monotonic()
    place.share_ledger(local)
    latest, tracker = _moves(local, place.root, record, goal)
    place.announce(record, Marker.of(record, latest=latest, tracker=tracker))
    copy = place.put_files(local, record, manifest, gives_way)
    if not _is_still(local, record):
        log.warning("megaresume: %s was saved again while it was copied", tag)
        return None
    if not is_wanted():
        log.warning("megaresume: %s is not copied: the run has gone back to before it", tag)
        return None
    if data_path(local).is_file():
        place.put_data(data_path(local).read_bytes())
    place.commit(record, replace(copy, durable=True, boots=()), latest=latest, tracker=tracker)
    place.share_ledger(local)
    place.conclude(record)
    log.info("megaresume: %s is copied to %s, %.0f s", tag, place.name, time.monotonic() - began)
    return record


def _check_run(place: Place, record: StepFile) -> None:
    if (run := run_of(place.root)) not in (None, record.run):
        raise CheckpointError(
            f"{place.name} holds the checkpoints of another run",
            found=f"run {run}; {record.tag} is of run {record.run}",
            expected="an empty directory, or the copies of the same run",
            action="give every run its own --megaresume-stage-to",
        )


def _moves(local: Path, shared: Path, record: StepFile, goal: int | None) -> tuple[bool, bool]:
    """Which pointers a copy moves: to what the local ones name, or closer to it; back only from an abandoned branch.
    For checkpoints before the goal, the local pointers count as naming the goal.
    """
    given_up = saves_given_up(local)

    def there(now: Pointer) -> int:
        if now.iteration is not None and now.tag is not None:
            with contextlib.suppress(StateError):
                if read_step_file(step_path(shared, now.iteration, now.tag)).save_id in given_up:
                    return -1
        return -1 if now.iteration is None else now.iteration

    def moves(wanted: Pointer, now: Pointer) -> bool:
        is_before = goal is not None and record.iteration <= goal and wanted.status != "absent"
        to = goal if is_before else wanted.iteration
        return wanted.tag == record.tag or (to is not None and to >= record.iteration > there(now))

    latest, tracker = map(moves, read_pointers(local), read_pointers(shared))
    return latest, tracker


def _is_still(local: Path, record: StepFile) -> bool:
    """Whether no other save of the step has begun since."""
    marker = read_marker(marker_path(local, record.iteration, record.tag))
    now = read_step_file(step_path(local, record.iteration, record.tag))
    return now.save_id == record.save_id and (marker is None or marker.save_id == record.save_id)


def adopt(local: Path, shared: Path) -> str | None:
    """Copy the run's ledger to an empty local root, on a node that is new to the run. Before its start is recorded.

    Returns:
        a note for the user; None if the local root has its own ledger, or the run is new.

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
