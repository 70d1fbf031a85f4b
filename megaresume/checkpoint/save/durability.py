"""From complete to durable: files that a commit left in the page cache are forced to the disks, and get checksums.

    commit_save     manifest: durable false, the boots of the machines that wrote      <- complete
    each node       each of its files read (from memory, as a rule) for its checksum
                    its part          step_0000010.synced/node_00001.json      (the node of rank 0 needs none)
    rank 0          all checksums     into the manifest
    each node       its files and the directories forced to the disk; its part says so
    rank 0          all parts there? Megatron's tracker forced, too
                    manifest: durable true                                             <- durable
                    ledger line
                    the older save of the same step removed, old checkpoints pruned, parts removed

A kill in between costs nothing: memory outlives a process, and the next start continues with it. A power cut in between
leaves files of the right size with anything in them: a checkpoint that is complete and not durable counts only while
every machine that wrote it is up (`Manifest.is_safe`). Once the manifest has the checksums, it counts without that, if
every file has its checksum.

Of what could not be forced the system says so once, and calls it written from then on. So such a file is written again
from memory, by its checksum, until that succeeds; meanwhile the checkpoint counts only by its checksums (`distrust`).

The training does not wait for any of this: one thread for each machine does it, in its lowest rank (`Durability`).

    save     all ranks: which file is whose; each machine's thread is told            `Durability.submit`
    thread   waits for the manifest, which an asynchronous save writes much later; then as above
    close    waits for the thread, for a while; the end of the program does, too

The threads talk through files alone: a collective would meet those of the training. What can pass (a full disk under
the records) is tried again, later and later; nothing here ends a training.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.checkpoint import system
from megaresume.checkpoint.lock.fenced import write_manifest
from megaresume.checkpoint.lock.lock import check_owned
from megaresume.checkpoint.ranks import gather, rank
from megaresume.checkpoint.records.candidates import examine, list_candidates
from megaresume.checkpoint.records.ledger import append_ledger
from megaresume.checkpoint.records.manifest import Manifest, checksum_file, read_manifest, write_copy
from megaresume.checkpoint.records.names import (
    TRACKER,
    Saved,
    ledger_path,
    manifest_path,
    part_path,
    records_dir,
    step_path,
)
from megaresume.checkpoint.records.rank_files import remove_orphans
from megaresume.checkpoint.records.sealed import flag, read_record, seal, text
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention, changing, prune, remove_older
from megaresume.files import fsync_file, leftover_name, make_dir, write_atomic, write_error
from megaresume.stream.errors import CheckpointError, MegaresumeError

if TYPE_CHECKING:
    from megaresume.checkpoint.nodes import Nodes

FORMAT, VERSION = "megaresume.synced", 1


class NotForcedError(Exception):
    """A machine could not force files to its disk: what the system's memory held of them may be lost.

    Args:
        words: what the system said.
        paths: of the files, relative to the tag directory.
    """

    def __init__(self, words: str, paths: Iterable[str] = ()) -> None:
        super().__init__(words)
        self.paths = frozenset(paths)


class GoneError(Exception):
    """A file that could not be forced to the disk is no longer in memory as it was saved."""


def committed(root: Path, saved: Saved) -> Manifest | None:
    """The manifest of a save; None if it is not committed, or the step was saved again.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    path = manifest_path(root, saved.iteration, saved.tag)
    if not path.exists():
        return None
    manifest = read_manifest(path, iteration=saved.iteration, tag=saved.tag)
    return manifest if manifest.save_id == saved.save_id else None


def take_checksums(root: Path, manifest: Manifest, paths: Iterable[str], *, read: bool = True) -> dict[str, str | None]:
    """Checksums of files that this machine wrote.

    Args:
        root: the checkpoint root.
        manifest: of the checkpoint; what it has is taken from there.
        paths: the files, relative to the tag directory.
        read: False: no others.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        OSError: a file cannot be read.
    """
    known = {entry.path: entry.checksum for entry in manifest.files}
    return {path: known[path] or (checksum_file(root / manifest.tag / path) if read else None) for path in paths}


def note_checksums(root: Path, manifest: Manifest, checksums: Mapping[str, str | None]) -> None:
    """Put the checksums of all files into the manifest. On rank 0. Raises CheckpointError."""
    _replace(root, manifest, checksums)


def force(
    root: Path, manifest: Manifest, paths: Iterable[str], *, again: Mapping[str, str | None] | None = None
) -> None:
    """Force files of a checkpoint that this machine wrote, and all of its directories, to the disk.

    Args:
        root: the checkpoint root.
        manifest: of the checkpoint.
        paths: files of it, relative to the tag directory.
        again: those that could not be forced before, with their checksums: they are written again.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        NotForcedError: the system could not write what it held.
        CheckpointError: the disk refuses what is written again.
        GoneError: memory does not hold what was saved, or that is unknown.
    """
    tag_dir, mine, again, failed = root / manifest.tag, list(paths), again or {}, dict[str, str]()
    for path in mine:
        if path in again:
            _write_again(root, tag_dir / path, again[path])
        elif words := _force(tag_dir / path, os.O_RDONLY):
            failed[path] = words
    inner = {parent for path in (entry.path for entry in manifest.files) for parent in (tag_dir / path).parents}
    for directory in sorted((d for d in inner if d.is_relative_to(root)), reverse=True):
        if words := _force(directory, os.O_RDONLY | os.O_DIRECTORY):
            raise NotForcedError(words, mine)  # their names may be lost
    if failed:
        raise NotForcedError("; ".join(failed.values()), failed)


def _force(path: Path, flags: int) -> str:
    """Force files; returns what the system said if it could not."""
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        fsync_file(descriptor)
    except OSError as error:
        return f"{path}: {error.strerror or error}"
    finally:
        os.close(descriptor)
    return ""


def _write_again(root: Path, path: Path, checksum: str | None) -> None:
    draft = records_dir(root) / leftover_name(path.name)
    try:
        if checksum is None or write_copy(path, draft) != checksum:
            raise GoneError(f"{path}: could not be written to the disk, and memory no longer holds it as it was saved")
        os.replace(draft, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        draft.unlink(missing_ok=True)


@dataclass(kw_only=True, slots=True)
class NodePart:
    """What one node has forced and summed."""

    checksums: Mapping[str, str | None]
    is_forced: bool = False
    #: why it could not be, at the last try.
    error: str = ""
    #: whether what was saved is nowhere any more: there will be no other try.
    is_gone: bool = False


def write_part(root: Path, manifest: Manifest, node: int, part: NodePart) -> None:
    """Write what this node has done, for rank 0 to read. Raises CheckpointError."""
    path = part_path(root, manifest.iteration, manifest.tag, node)
    make_dir(path.parent)
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "forced": part.is_forced,
        "error": part.error,
        "gone": part.is_gone,
        "files": [[name, checksum] for name, checksum in part.checksums.items()],
    }
    write_atomic(path, seal(fields, depth=2))


def read_part(root: Path, manifest: Manifest, node: int) -> NodePart | None:
    """Read what a node has done; None if it has written nothing yet. Raises CheckpointError if that is damaged."""
    path = part_path(root, manifest.iteration, manifest.tag, node)
    if not path.exists():
        return None
    what = "the part of a node"
    save_id, part = read_record(path, _part, what=what, format_name=FORMAT, version=VERSION, error=CheckpointError)
    return part if save_id == manifest.save_id else None


def _part(fields: Mapping[str, Any]) -> tuple[str, NodePart]:
    """(save, part)."""
    return fields["save_id"], NodePart(
        checksums={text(name): checksum for name, checksum in fields["files"]},
        is_forced=flag(fields["forced"]),
        error=text(fields["error"]),
        is_gone=flag(fields["gone"]),
    )


def finish(
    root: Path, manifest: Manifest, checksums: Mapping[str, str | None], *, retention: Retention = KEEP_ALL
) -> tuple[str, ...]:
    """Record that a checkpoint is durable, and delete old ones. On rank 0, when every node has done its part.

    Args:
        root: the checkpoint root.
        manifest: of the checkpoint.
        checksums: of all its files.
        retention: which older checkpoints stay.

    Returns:
        tags of older checkpoints whose weights are gone.

    Raises:
        CheckpointError: the disk refuses, or the root has another owner by now.
        NotForcedError: see `force`.
    """
    # Megatron writes its own in place, and forces nothing.
    if (root / TRACKER).exists() and (words := _force(root / TRACKER, os.O_RDONLY)):
        raise NotForcedError(words)
    record = _replace(root, manifest, checksums, durable=True, boots=())
    if record is None:
        return ()
    if manifest.is_of_rank_0:
        append_ledger(ledger_path(root), record.ledger_entry("durable", {"save_id": record.save_id}))
    remove_older(root, record.iteration, record.tag)
    shutil.rmtree(part_path(root, record.iteration, record.tag, 0).parent, ignore_errors=True)
    pruned = prune(root, retention, record)
    remove_orphans(root)
    return pruned


def distrust(root: Path, manifest: Manifest, checksums: Mapping[str, str | None]) -> None:
    """A machine could not force its files: from now on this checkpoint counts only by its checksums, if all its files
    have one. On rank 0. Raises CheckpointError."""
    _replace(root, manifest, checksums, boots=())


def _replace(root: Path, manifest: Manifest, checksums: Mapping[str, str | None], **changes: Any) -> StepFile | None:
    """Write a manifest with these checksums, and changes, in its place; None if the save no longer has one."""
    check_owned(root)
    files = tuple(replace(entry, checksum=checksums.get(entry.path) or entry.checksum) for entry in manifest.files)
    manifest = replace(manifest, files=files, **changes)
    iteration, tag = manifest.iteration, manifest.tag
    with changing:
        there = committed(root, manifest.saved)
        if there is None or there.durable or not (root / tag).is_dir():
            return None
        write_manifest(root, manifest)
    return read_step_file(step_path(root, iteration, tag), iteration=iteration, tag=tag)


def not_durable(root: Path) -> tuple[Manifest, ...]:
    """What earlier processes have left complete and not durable, and can still be made so; the oldest first."""
    found: list[Manifest] = []
    for candidate in list_candidates(root):
        examined = examine(root, candidate) if candidate.has_dir and candidate.is_committed else None
        if examined is None or not examined.is_settled or examined.manifest is None:
            continue
        if examined.manifest.durable:
            break
        found.append(examined.manifest)
    return tuple(reversed(found))


log = logging.getLogger(__name__)

#: seconds between looks for what others write, and between tries, doubled each time.
POLL, FIRST_PAUSE, LONGEST_PAUSE = 0.2, 1.0, 60.0
#: seconds that the end of a run waits; that it does if an error ended it; and for a manifest that is not there yet.
PATIENCE, PATIENCE_IN_ERROR, PATIENCE_FOR_COMMIT = 600.0, 20.0, 30.0


class Machines:
    """The machines of a job, by their boots; or one, if each has a directory of its own. Collective to make."""

    def __init__(self, nodes: Nodes | None = None) -> None:
        boots = gather(system.boot_id())
        system.note_boots(boots)
        if nodes is not None:
            self.boots, self.of_rank = (system.boot_id(),), (0,) * len(boots)
            self.mine = 0 if nodes.leads else None
            return
        #: of every machine, that of rank 0 first.
        self.boots = tuple(dict.fromkeys(boots))
        #: of every rank, the number of its machine.
        self.of_rank = tuple(self.boots.index(boot) for boot in boots)
        #: this machine's number; None if another rank works for it.
        first = self.of_rank.index(self.of_rank[rank()]) == rank()
        self.mine = self.of_rank[rank()] if first else None


@dataclass(kw_only=True, slots=True)
class _Work:
    root: Path
    saved: Saved
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
        """The checksums of this machine and of the others."""
        known = [part.checksums for part in (self.part, *parts) if part is not None]
        return dict(chain.from_iterable(checksums.items() for checksums in known))


class Durability:
    """The thread that makes checkpoints durable, on the rank of each machine that has it; see above.

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
        """The machines of this job. Collective at the first call."""
        if self._machines is None:
            self._machines = Machines()
            # Before anything that commits at the end of the program is registered: this waits for it.
            atexit.register(self._at_exit)
        return self._machines

    def separate(self, nodes: Nodes) -> None:
        """From now on every node makes its own directory durable. Collective."""
        self._machines = Machines(nodes)

    def submit(
        self,
        root: Path,
        saved: Saved,
        *,
        expected: Sequence[Sequence[str] | None] = (),
        retention: Retention = KEEP_ALL,
    ) -> None:
        """Take note of a save, which may be committed later. On every rank; returns at once.

        Args:
            root: the checkpoint root.
            saved: which save it is.
            expected: the files that each rank writes; None if not known.
            retention: which older checkpoints stay.
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
        """Wait until nothing is left to do for a tag, which is about to be saved again, or the disk refuses."""
        place = root.resolve()
        with self._changed:
            same = [work for work in self._queue if work.saved.tag == tag and work.root.resolve() == place]
            for work in same:  # what is not committed by now never will be
                work.passed = time.monotonic() - PATIENCE_FOR_COMMIT
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(work.failed or work not in self._queue for work in same), PATIENCE)

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
                waiting = ", ".join(work.saved.tag for work in self._queue)
                log.warning("megaresume: waiting until %s is on the disk", waiting)
                self._changed.wait_for(lambda: not self._queue, max(0.0, deadline - time.monotonic()))
            for work in self._queue:
                log.error(
                    "megaresume: %s is complete but not durable yet: until the next start there has made it so, a "
                    "restart of the machines loses it",
                    work.root / work.saved.tag,
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
                return True  # pruned or saved again meanwhile
            missing = [path for path in work.paths(manifest) if not (work.root / work.saved.tag / path).exists()]
            if not missing:
                raise  # of the records: there again at the next try
            words = f"somebody deleted {', '.join(missing)}"
        work.part = work.part or NodePart(checksums={})
        work.part.is_gone, work.part.error = True, words
        self._exchange(work, work.part, manifest)
        log.error("megaresume: %s is damaged, and no start will load it: %s", work.saved.tag, words)
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
