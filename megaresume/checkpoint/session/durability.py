"""Complete checkpoints become durable while training continues: one thread for each machine, in its lowest rank.

    save     all ranks: which file is whose; each machine's thread is told            `Durability.submit`
    thread   waits for the manifest, which an asynchronous save writes much later
             its machine's files: checksum, forced to the disk; its part written   (`checkpoint.saving.durability`)
             rank 0's: the checksums of all, then, when all are forced, that the checkpoint is durable
    close    waits for the thread, for a while; the end of the program does, too

The threads talk through files alone: a collective would meet those of the training. What can pass (a full disk under
the records) is tried again, later and later; nothing here ends a training.

The files of a checkpoint are those that were saved, wherever they are read: all machines compare checksums together.

every directory    of the tag, by machine and by what is mounted there; its lowest rank works for it
the same files?    by size and time of change, as rank 0 sees them: a shared filesystem
together           who sees the same files shares them; a directory of its own (a local copy) is compared as a whole
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from megaresume.checkpoint import system
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.manifest import FileEntry, Manifest, verify_files
from megaresume.checkpoint.saving.durability import (
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
from megaresume.checkpoint.saving.retention import KEEP_ALL, Retention
from megaresume.checkpoint.session.ranks import gather, is_rank_0, on_all_ranks, on_all_ranks_for_long, on_rank_0, rank
from megaresume.stream.errors import CheckpointError, MegaresumeError

log = logging.getLogger(__name__)

#: seconds between looks for what others write, and between tries, doubled each time.
POLL, FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0, 60.0
#: seconds that the end of a run waits; that it does if an error ended it; and for a manifest that is not there yet.
PATIENCE, PATIENCE_IN_ERROR, PATIENCE_FOR_COMMIT = 600.0, 20.0, 30.0


class Machines:
    """The machines of a job, by their boots. Collective to make."""

    def __init__(self) -> None:
        boots = gather(system.boot_id())
        #: of every machine, that of rank 0 first.
        self.boots = tuple(dict.fromkeys(boots))
        #: of every rank, the number of its machine.
        self.of_rank = tuple(self.boots.index(boot) for boot in boots)
        #: this machine's number; None if another rank works for it.
        first = self.of_rank.index(self.of_rank[rank()]) == rank()
        self.mine = self.of_rank[rank()] if first else None
        system.note_boots(boots)


@dataclass(kw_only=True, slots=True)
class _Work:
    root: Path
    iteration: int
    tag: str
    save_id: str
    #: this machine among all.
    machine: int
    machines: int
    #: files by the machine that writes them; others may be anybody's.
    owners: Mapping[str, int]
    retention: Retention = KEEP_ALL
    #: what this machine has done; None: nothing.
    part: NodePart | None = None
    #: since when nobody expects a manifest any more: a later save is committed, or the run ends; None if it may come.
    passed: float | None = None
    #: whether the last try failed.
    failed: bool = False
    #: files that could not be forced to the disk.
    lost: set[str] = field(default_factory=set)

    def paths(self, manifest: Manifest) -> Iterable[str]:
        """What this machine has to do: its own files, and of those that are nobody's all of them, to be safe."""
        return [e.path for e in manifest.files if self.owners.get(e.path, self.machine) == self.machine]

    def all_checksums(self, parts: Iterable[NodePart | None]) -> dict[str, str | None]:
        """Those of this machine, and of the parts of others."""
        known = [part.checksums for part in (self.part, *parts) if part is not None]
        return dict(chain.from_iterable(checksums.items() for checksums in known))


class Durability:
    """The thread of this machine, if this rank has it; see above.

    Args:
        checksums: whether to take them.
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
        """Of this job. Collective at the first call."""
        if self._machines is None:
            self._machines = Machines()
            # Before anything that commits at the end of the program is registered: this waits for it.
            atexit.register(self._at_exit)
        return self._machines

    def submit(
        self,
        root: Path,
        *,
        iteration: int,
        tag: str,
        save_id: str,
        expected: Sequence[Sequence[str] | None] = (),
        retention: Retention = KEEP_ALL,
    ) -> None:
        """A save was made, which may be committed later. On every rank; returns at once.

        Args:
            root: the checkpoint root.
            iteration, tag, save_id: of the save.
            expected: the files that each rank writes; None if not known.
            retention: which older checkpoints stay.
        """
        machines = self.machines
        if machines.mine is None:
            return
        work = _Work(
            root=root,
            iteration=iteration,
            tag=tag,
            save_id=save_id,
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

    def wait_for(self, root: Path, tag: str, timeout: float = PATIENCE) -> None:
        """Until nothing is to be done for a tag any more, or the disk refuses: it is about to be saved again."""
        place = root.resolve()
        with self._changed:
            same = [work for work in self._queue if work.tag == tag and work.root.resolve() == place]
            for work in same:  # what is not committed by now never will be
                work.passed = time.monotonic() - PATIENCE_FOR_COMMIT
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(work.failed or work not in self._queue for work in same), timeout)

    def close(self, timeout: float | None = None, *, is_saving: bool = True) -> None:
        """Wait a limited time for the remaining work; log what is left. On any rank.

        Args:
            timeout: None: as long as the end of a run waits.
            is_saving: False: rank 0 commits nothing more, of what was submitted.
        """
        atexit.unregister(self._at_exit)
        self._close(PATIENCE if timeout is None else timeout, is_saving=is_saving)

    def _at_exit(self) -> None:
        self._close(PATIENCE if getattr(sys, "last_value", None) is None else PATIENCE_IN_ERROR)

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
                waiting = ", ".join(work.tag for work in self._queue)
                log.warning("megaresume: waiting until %s is on the disk", waiting)
                self._changed.wait_for(lambda: not self._queue, max(0.0, deadline - time.monotonic()))
            for work in self._queue:
                log.error(
                    "megaresume: %s is complete but not durable yet: until the next start there has made it so, a "
                    "restart of the machines loses it",
                    work.root / work.tag,
                )
            self._queue.clear()

    # The thread

    def _run(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the training comes first
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
                    log.warning("megaresume: %s is complete but not durable yet: %s", work.tag, error)
                    is_over, seconds = False, pause
                    with self._changed:
                        work.failed = True
                        self._changed.notify_all()
                    pause = min(2 * pause, LONGEST_PAUSE)
                except Exception:
                    log.exception("megaresume: %s stays complete, and does not become durable", work.tag)
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
        """Do what can be done now. Returns whether nothing is left to do."""
        manifest = committed(work.root, work.iteration, work.tag, work.save_id)
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
            still = committed(work.root, work.iteration, work.tag, work.save_id)
            if still is None or not (work.root / work.tag).is_dir():
                return True  # pruned or saved again meanwhile
            missing = [path for path in work.paths(manifest) if not (work.root / work.tag / path).exists()]
            if not missing:
                raise  # of the records: there again at the next try
            words = f"somebody deleted {', '.join(missing)}"
        work.part = work.part or NodePart(checksums={})
        work.part.is_gone, work.part.error = True, words
        self._exchange(work, work.part, manifest)
        log.error("megaresume: %s is damaged, and no start will load it: %s", work.tag, words)
        return True

    def _pass_before(self, work: _Work) -> None:
        """Saves are committed in the order in which they were made."""
        with self._changed:
            for earlier in self._queue[: self._queue.index(work)] if work in self._queue else ():
                earlier.passed = earlier.passed or time.monotonic()

    def _make_durable(self, work: _Work, manifest: Manifest) -> bool:
        mine = list(work.paths(manifest))
        if work.part is None:
            work.part = NodePart(checksums=take_checksums(work.root, manifest, mine, read=self._checksums))
            # Nobody knows any more which of them could not be forced.
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
        """Tell rank 0 what this machine has done; on rank 0: put into the manifest what all of them have, and return
        the parts of the others."""
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


#: from this many bytes on, a start logs what it waits for.
_MUCH = 10e9

#: of every file: its size and the time of its last change in nanoseconds, which no copy keeps; None if it is not there.
_Stats = list[tuple[int, int] | None]


def find_damage(choice: Choice) -> str | None:
    """Compare the files of a chosen checkpoint with its manifest, where they will be read. Collective.

    Returns:
        what is wrong, in words, the same on every rank; None: nothing.

    Raises, on every rank:
        CheckpointError: a rank does not see the directory, or gives no sign of life.
    """
    manifest = choice.manifest
    if manifest is None:
        return None
    places = gather(on_all_ranks(lambda: _place(choice.tag_dir)))
    distinct = list(dict.fromkeys(places))
    mine = distinct.index(places[rank()])
    works = places.index(places[rank()]) == rank()
    stats = on_rank_0(lambda: _stats(choice.tag_dir, manifest))
    same = gather(works and _stats(choice.tag_dir, manifest) == stats)
    sharing = [number for number, place in enumerate(distinct) if same[places.index(place)]]
    if is_rank_0() and manifest.size >= _MUCH:
        print(f"megaresume: comparing the checksums of {choice.tag}, {manifest.size / 1e9:,.0f} GB", flush=True)

    def compare(beat: Callable[[], None]) -> str | None:
        if not works:
            return None
        files = manifest.files
        if mine in sharing:
            files = _shares(files, len(sharing))[sharing.index(mine)]
        problems = verify_files(choice.tag_dir, files, mode="checksums", progress=lambda _size: beat())
        return "; ".join(map(str, problems[:5])) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")

    found = gather(on_all_ranks_for_long(compare, "compared checksums"))
    wrong = next((number for number, words in enumerate(found) if words), None)
    if wrong is None:
        return None
    where = "" if len(distinct) == 1 else f"as rank {wrong} sees it, on {gather(os.uname().nodename)[wrong]}: "
    return f"{where}{found[wrong]}"


def _place(tag_dir: Path) -> tuple[str, int, int]:
    """What tells one directory from another."""
    try:
        stat = os.stat(tag_dir)
    except OSError as error:
        raise CheckpointError(f"cannot read {tag_dir}", found=error.strerror or str(error)) from error
    return system.boot_id(), stat.st_dev, stat.st_ino


def _stats(tag_dir: Path, manifest: Manifest) -> _Stats:
    def one(entry: FileEntry) -> tuple[int, int] | None:
        try:
            stat = os.stat(os.path.join(tag_dir, entry.path))
        except OSError:
            return None
        return stat.st_size, stat.st_ctime_ns

    return [one(entry) for entry in manifest.files]


def _shares(files: Sequence[FileEntry], number: int) -> list[tuple[FileEntry, ...]]:
    """As many parts, of about as many bytes."""
    parts: list[list[FileEntry]] = [[] for _ in range(number)]
    sizes = [0] * number
    for entry in sorted(files, key=lambda entry: -entry.size):
        least = sizes.index(min(sizes))
        parts[least].append(entry)
        sizes[least] += entry.size
    return [tuple(part) for part in parts]
