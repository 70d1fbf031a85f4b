"""`Durability`: makes complete checkpoints durable while the training continues.

What a commit left in the page cache is forced to the disks, and gets checksums (`megaresume.checkpoint.save.forcing`).
The training does not wait for it: on each machine, one thread in the lowest rank does it.

    save     all ranks: which file is whose; tell each machine's thread               `Durability.submit`
    thread   waits for the manifest, which an asynchronous save writes much later; then as in `forcing`
    close    waits for the thread, for a while; so does the end of the program

The threads only communicate through files: a collective would interleave with those of the training. Errors that may
pass (a full disk under the records) are retried after ever longer pauses; none ends a training.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from megaresume.checkpoint import system
from megaresume.checkpoint.ending import before_end, not_before_end
from megaresume.checkpoint.ranks import gather, rank
from megaresume.checkpoint.records.manifest import Manifest
from megaresume.checkpoint.records.names import Saved
from megaresume.checkpoint.save.forcing import (
    GoneError,
    NodePart,
    NotForcedError,
    committed,
    distrust,
    finish,
    force,
    note_checksums,
    read_part,
    take_checksums,
    write_part,
)
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention
from megaresume.stream.errors import MegaresumeError

if TYPE_CHECKING:
    from megaresume.checkpoint.nodes import Nodes

log = logging.getLogger(__name__)

#: seconds between looks for what others write, and between retries, doubled each time.
POLL, FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0, 60.0
#: seconds that the end of a run waits; the same after an error; and for a manifest that does not exist yet.
PATIENCE, PATIENCE_IN_ERROR, PATIENCE_FOR_COMMIT = 600.0, 20.0, 30.0


class Machines:
    """The machines of a job, by their boots; or only one, if each has its own directory. Creating it is collective."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        boots = gather(system.boot_id())
        system.note_boots(boots)
        if nodes is not None:
            self.boots, self.of_rank = (system.boot_id(),), (0,) * len(boots)
            self.mine = 0 if nodes.leads else None
            return
        #: boot of every machine, rank 0's first.
        self.boots = tuple(dict.fromkeys(boots))
        #: machine number of every rank.
        self.of_rank = tuple(self.boots.index(boot) for boot in boots)
        #: this machine's number; None if another rank works for it.
        first = self.of_rank.index(self.of_rank[rank()]) == rank()
        self.mine = self.of_rank[rank()] if first else None


@dataclass(kw_only=True, slots=True)
class _Work:
    root: Path
    saved: Saved
    #: the number of this machine.
    machine: int
    machines: int
    #: file -> the machine that writes it; others may be anybody's.
    owners: Mapping[str, int]
    retention: Retention = KEEP_ALL
    #: what this machine has done; None: nothing.
    part: NodePart | None = None
    #: since when no manifest is expected any more: a later save is committed, or the run ends; None if it may still
    #: come.
    passed: float | None = None
    #: whether the last attempt failed.
    failed: bool = False
    #: files that could not be forced to the disk.
    lost: set[str] = field(default_factory=set)

    def paths(self, manifest: Manifest) -> Iterable[str]:
        """The files for this machine: its own, and, to be safe, all that have no known owner."""
        return [e.path for e in manifest.files if self.owners.get(e.path, self.machine) == self.machine]

    def all_checksums(self, parts: Iterable[NodePart | None]) -> dict[str, str | None]:
        """The checksums computed by this machine and by the others."""
        known = [part.checksums for part in (self.part, *parts) if part is not None]
        return dict(chain.from_iterable(checksums.items() for checksums in known))


class Durability:
    """The thread that makes checkpoints durable, on one rank of each machine.

    Args:
        checksums: whether to compute them.
    """

    def __init__(self, *, checksums: bool) -> None:
        self._checksums = checksums
        self._machines: Machines | None = None
        self._queue: list[_Work] = []
        self._changed = threading.Condition()
        self._closing = False
        self._thread: threading.Thread | None = None

    @property
    def machines(self) -> Machines:
        """The machines of this job. Collective at the first call."""
        if self._machines is None:
            self._machines = Machines()
            # Before functions that commit at exit are registered, so that this runs after them, and waits.
            before_end(self._at_exit)
        return self._machines

    def separate(self, nodes: Nodes) -> None:
        """Let every node make its own directory durable from now on. Collective."""
        self._machines = Machines(nodes)

    def submit(
        self,
        root: Path,
        saved: Saved,
        *,
        expected: Sequence[Sequence[str] | None] = (),
        retention: Retention = KEEP_ALL,
    ) -> None:
        """Queue a save, which may be committed later. On every rank; returns at once.

        Args:
            root: the checkpoint root.
            saved: the id of the save.
            expected: the files that each rank writes; None if unknown.
            retention: which older checkpoints to keep.
        """
        machines = self.machines
        if machines.mine is None:
            return
        work = _Work(
            root=root,
            saved=saved,
            machine=machines.mine,
            machines=len(machines.boots),
            owners={name: machines.of_rank[number] for number, names in enumerate(expected) for name in names or ()},
            retention=retention,
        )
        with self._changed:
            self._queue.append(work)
            self._closing = False
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="megaresume-durable", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait_for(self, root: Path, tag: str) -> None:
        """Wait until nothing is left to do for a tag that is about to be saved again, or writing fails."""
        place = root.resolve()
        with self._changed:
            same = [work for work in self._queue if work.saved.tag == tag and work.root.resolve() == place]
            for work in same:  # what is not committed by now never will be
                work.passed = time.monotonic() - PATIENCE_FOR_COMMIT
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(work.failed or work not in self._queue for work in same), PATIENCE)

    def close(self, timeout: float | None = None, *, is_saving: bool = True) -> None:
        """Wait a limited time for the remaining work; logs what is left. On any rank.

        Args:
            timeout: None: the default for the end of a run.
            is_saving: False: rank 0 commits none of the submitted saves any more.
        """
        not_before_end(self._at_exit)
        self._close(PATIENCE if timeout is None else timeout, is_saving=is_saving)

    def _at_exit(self) -> None:
        # What commits at the end of a program has done so: see `machines`.
        self._close(PATIENCE if getattr(sys, "last_value", None) is None else PATIENCE_IN_ERROR, is_saving=False)

    def _close(self, timeout: float, *, is_saving: bool = True) -> None:
        deadline = time.monotonic() + max(timeout, 0.0)
        # Another machine may see a manifest later than the one that wrote it.
        nothing_comes = not is_saving and self._machines is not None and self._machines.mine == 0
        patience = 0.0 if nothing_comes else min(PATIENCE_FOR_COMMIT, max(timeout, 0.0))
        with self._changed:
            self._closing = True
            for work in self._queue:
                work.passed = time.monotonic() - (PATIENCE_FOR_COMMIT - patience)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._queue, min(1.0, max(timeout, 0.0))):
                waiting = ", ".join(work.saved.tag for work in self._queue)
                log.warning("megaresume: waiting until %s is on the disk", waiting)
                self._changed.wait_for(lambda: not self._queue, max(0.0, deadline - time.monotonic()))
            for work in filter(_is_complete, self._queue):
                log.error(
                    "megaresume: %s is complete but not durable yet: until the next start there has made it so, a "
                    "restart of the machines loses it",
                    work.root / work.saved.tag,
                )
            self._queue.clear()

    # The thread

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the training has priority
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)
        pause = FIRST_PAUSE
        while True:
            with self._changed:
                if not self._queue:
                    if self._closing:
                        self._thread = None
                        return
                    self._changed.wait()
                    continue
                queue = list(self._queue)
            seconds = POLL
            for work in queue:
                try:
                    is_over = self._advance(work)
                    pause = FIRST_PAUSE
                except (MegaresumeError, NotForcedError, OSError) as error:
                    log.warning("megaresume: %s is complete but not durable yet: %s", work.saved.tag, error)
                    is_over, seconds = False, pause
                    with self._changed:
                        work.failed = True
                        self._changed.notify_all()
                    pause = min(2 * pause, LONGEST_PAUSE)
                except Exception:
                    log.exception("megaresume: %s stays complete, and does not become durable", work.saved.tag)
                    is_over = True
                if is_over:
                    with self._changed:
                        if work in self._queue:
                            self._queue.remove(work)
                        self._changed.notify_all()
            with self._changed:
                if self._queue and not (seconds == POLL and self._queue[-1] is not queue[-1]):
                    self._changed.wait(seconds)

    def _advance(self, work: _Work) -> bool:
        """Do what can be done now. Returns whether everything is done."""
        manifest = committed(work.root, work.saved)
        if manifest is None:
            return work.passed is not None and time.monotonic() - work.passed >= PATIENCE_FOR_COMMIT
        self._pass_before(work)
        if manifest.durable:
            return True
        try:
            return self._make_durable(work, manifest)
        except GoneError as error:
            words = str(error)
        except FileNotFoundError:
            still = committed(work.root, work.saved)
            if still is None or not (work.root / work.saved.tag).is_dir():
                return True  # pruned or saved again in the meantime
            missing = [path for path in work.paths(manifest) if not (work.root / work.saved.tag / path).exists()]
            if not missing:
                raise  # a file of the records: retried later
            words = f"somebody deleted {', '.join(missing)}"
        work.part = work.part or NodePart(checksums={})
        work.part.is_gone, work.part.error = True, words
        self._exchange(work, work.part, manifest)
        log.error("megaresume: %s is damaged, and no start will load it: %s", work.saved.tag, words)
        return True

    def _pass_before(self, work: _Work) -> None:
        """Give up on earlier saves, as saves are committed in order."""
        with self._changed:
            for earlier in self._queue[: self._queue.index(work)] if work in self._queue else ():
                earlier.passed = earlier.passed or time.monotonic()

    def _make_durable(self, work: _Work, manifest: Manifest) -> bool:
        mine = list(work.paths(manifest))
        if work.part is None:
            work.part = NodePart(checksums=take_checksums(work.root, manifest, mine, read=self._checksums))
            # It is no longer known which of them could not be forced.
            work.lost |= {path for path in mine if work.machine == 0 and not manifest.boots}
        part = work.part
        parts = self._exchange(work, part, manifest)
        if not part.is_forced:
            try:
                force(work.root, manifest, mine, again={path: part.checksums[path] for path in work.lost})
            except NotForcedError as error:
                work.lost |= error.paths
                part.error = str(error)
                self._exchange(work, part, manifest)
                raise
            part.is_forced, part.error = True, ""
        if work.machine != 0:
            self._exchange(work, part, manifest)
            return True
        if gone := [other.error for other in parts if other is not None and other.is_gone]:
            raise GoneError("; ".join(gone))
        if not all(other is not None and other.is_forced for other in parts):
            return False
        finish(work.root, manifest, work.all_checksums(parts), retention=work.retention)
        return True

    def _exchange(self, work: _Work, mine: NodePart, manifest: Manifest) -> list[NodePart | None]:
        """Tell rank 0 what this machine has done; on rank 0: add the results of all machines to the manifest, and
        return the other machines' parts.
        """
        if work.machine != 0:
            write_part(work.root, manifest, work.machine, mine)
            return []
        parts = [read_part(work.root, manifest, machine) for machine in range(1, work.machines)]
        checksums = work.all_checksums(parts)
        if manifest.boots and any(part is not None and part.error for part in (mine, *parts)):
            distrust(work.root, manifest, checksums)
        elif not manifest.has_checksums and all(checksums.get(entry.path) for entry in manifest.files):
            note_checksums(work.root, manifest, checksums)
        return parts


def _is_complete(work: _Work) -> bool:
    with contextlib.suppress(MegaresumeError, OSError):
        return committed(work.root, work.saved) is not None
    return False
