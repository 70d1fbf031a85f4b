"""Two storages: a run saves to fast local storage, and a thread copies what is committed to shared storage.

    training     save -> local: marker, files, state, manifest, pointers, ledger
    the thread   shared: ledger -> marker -> each file: copied, forced to the disk, read back, its checksum compared
                        -> data state -> manifest, with checksums -> pointers -> ledger -> marker removed
                 then old ones go: of the local ones only those whose copy is complete

The training never waits for a copy, and never fails for one. What goes wrong is logged and tried again, later and
later. A kill at any moment leaves a copy without a manifest, which nobody takes; the next start continues with it, and
what is there already with the right checksum is not copied again. If the local storage is gone by then and no copy is
complete, the ledger among the copies says what was lost, and the start is refused. Which of the two storages a start
takes is decided by `choose.choose_of_two`.

For a local directory that all ranks see: one node, or a fast filesystem of all nodes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.candidates import Candidate, list_candidates
from megaresume.checkpoint.formats import read_record, seal, text
from megaresume.checkpoint.paths import check_tag, records_dir
from megaresume.checkpoint.saving.copying import is_copied, share_ledger, stage
from megaresume.checkpoint.saving.rank_files import remove_orphans
from megaresume.checkpoint.saving.retention import KEEP_ALL, Retention, prune
from megaresume.checkpoint.step_file import StepFile, run_of
from megaresume.files import make_dir, remove_leftovers, write_atomic
from megaresume.stream.errors import CheckpointError, MegaresumeError

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
