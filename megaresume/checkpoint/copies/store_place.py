"""`StorePlace`: copies in an object store, under the id of their save, committed by a new head (`lease`).

Machines without a shared directory upload the parts of a checkpoint, each its own:

    node k     its files -> the manifest of its part                        `NodePlace`
    rank 0     its files; waits for all parts -> commit, of all parts       `StorePlace`
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from megaresume.checkpoint.copies.places import DirectoryPlace, PartMissingError, Place, missing_lines, part_here
from megaresume.checkpoint.lock.lock import say
from megaresume.checkpoint.ranks import pauses
from megaresume.checkpoint.records.candidates import list_candidates, run_of
from megaresume.checkpoint.records.ledger import add_lines, merge_lines
from megaresume.checkpoint.records.manifest import FileEntry, Manifest, checksum_file, read_manifest
from megaresume.checkpoint.records.marker import Marker, remove_marker
from megaresume.checkpoint.records.names import (
    RECORDS_DIR,
    Saved,
    data_path,
    ledger_path,
    manifest_path,
    marker_path,
    rank_dirs,
    records_dir,
    step_path,
)
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.checkpoint.save.retention import Retention, keep_superseded, superfluous
from megaresume.checkpoint.store.lease import Head, Lease
from megaresume.checkpoint.store.mirror import (
    LEDGERS,
    POSITIONS,
    PRUNED,
    UPLOADED,
    Mirror,
    file_name,
    is_part,
    part_name,
    record_name,
)
from megaresume.checkpoint.store.objects import is_store
from megaresume.checkpoint.store.scratch import Scratch
from megaresume.checkpoint.store.store import GaveWayError, Store
from megaresume.files import (
    write_atomic,
)
from megaresume.stream.errors import CheckpointError, MegaresumeError, StateError, listed

log = logging.getLogger(__name__)


#: most seconds between looks for other nodes' parts; and seconds without any progress of theirs before giving up.
PART_POLL, PART_PATIENCE = 2.0, 3600.0


class StorePlace:
    """A checkpoint root in an object store.

    Args:
        url: ``s3://bucket/run``.
        say: prints what people must know about the store.
    """

    def __init__(self, url: str, say: Callable[[str], object]) -> None:
        self.store = Store(url)
        self.name = self.store.url
        self._scratch = Scratch()
        self.root = self._scratch.path
        self.mirror = Mirror(self.store, self.root)
        self.lease = Lease(self.store, say)
        #: lines of the ledger added by this writer.
        self._lines: list[bytes] = []
        #: unfinished copies of earlier writers.
        self._unfinished: list[Saved] = []
        #: older saves of steps that this writer has copied again.
        self._replaced: set[Saved] = set()
        self._begun = False
        #: saves whose parts are on all nodes of this job. Other saves in parts cannot be completed.
        self.together: frozenset[str] = frozenset()

    def hold(self, local: Path, beat: Callable[[], object]) -> None:
        self.lease.take(run_of(local), beat)
        self._look()

    def _look(self) -> None:
        head = self.mirror.refresh() or Head()
        self._unfinished = list(self.mirror.unfinished(head))

    def release(self) -> None:
        self.lease.release()

    def reopen(self) -> None:
        self.store.reopen()  # with the credentials available by now

    def begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        self.store.abort_uploads(UPLOADED)
        self._delete(saved for saved in self.lease.head.removed if self.mirror.has_objects(saved))

    def check_owned(self) -> None:
        self.lease.check()

    def share_ledger(self, local: Path) -> None:
        if missing := missing_lines(local, self.root):
            lines = merge_lines(self._lines, missing)
            self.store.write(f"{LEDGERS}{self.lease.head.epoch:07d}.jsonl", b"".join(lines))
            self._lines = lines
            add_lines(ledger_path(self.root), missing)

    def takes(self, local: Path, iteration: int, tag: str) -> bool:
        part = part_here(local, iteration, tag)
        return part is None or part.save_id in self.together

    def refusal(self, record: StepFile) -> str | None:
        if not self.lease.head.is_removed(record.save_id):
            return None
        return f"another machine has continued without it, and removed from {self.name} what there was of it"

    def announce(self, record: StepFile, marker: Marker) -> None:
        self.store.write(self._record(record, marker_path), marker.to_bytes())

    def _record(self, record: StepFile, path: Callable[[Path, int, str], Path]) -> str:
        return record_name(record.save_id, path(Path(), record.iteration, record.tag).name)

    def put_files(
        self, local: Path, record: StepFile, manifest: Manifest, gives_way: Callable[[], bool] = lambda: False
    ) -> Manifest:
        names = [
            *((local / record.tag / e.path, file_name(record.tag, record.save_id, e.path), e) for e in manifest.files),
            *((records_dir(local) / e.path, record_name(record.save_id, e.path), e) for e in manifest.beside),
        ]
        there = self.mirror.objects_of(record.tag, record.save_id)
        # Objects appear whole, under the id of their save: one with the right size is the right one.
        wanted = [(path, name, entry) for path, name, entry in names if there.get(name) != entry.size]
        uploaded = dict(zip((name for _, name, _ in wanted), self.store.upload_all(wanted, gives_way), strict=True))
        for path, name, entry in names:
            if name not in uploaded:
                uploaded[name] = entry.checksum or checksum_file(path)
        sums = [replace(entry, checksum=uploaded[name]) for _, name, entry in names]
        count = len(manifest.files)
        return self._whole(record, replace(manifest, files=tuple(sums[:count]), beside=tuple(sums[count:])), gives_way)

    def _whole(self, record: StepFile, mine: Manifest, gives_way: Callable[[], bool]) -> Manifest:
        """The manifest of the whole checkpoint, once all nodes have uploaded their parts."""
        if mine.part is None:
            return mine
        parts, there, since = {mine.part[0]: mine}, dict[str, int](), time.monotonic()
        for _ in pauses(PART_POLL, min(PART_POLL, 0.05)):
            before, there = there, self.mirror.objects_of(record.tag, record.save_id)
            for node in set(range(mine.part[1])) - set(parts):
                if part_name(record.save_id, node) in there:
                    parts[node] = self._read_part(record, mine, node)
            missing = sorted(set(range(mine.part[1])) - set(parts))
            if not missing:
                break
            if gives_way():
                raise GaveWayError
            if there != before:
                since = time.monotonic()
            elif time.monotonic() - since > PART_PATIENCE:
                raise PartMissingError(
                    f"of {record.tag} the parts of nodes {', '.join(map(str, missing))} have not come: nothing of it "
                    f"has reached {self.name} for {PART_PATIENCE:.0f} s; the log of the lowest rank on each says why"
                )
        return join_parts(parts.values())

    def _read_part(self, record: StepFile, mine: Manifest, node: int) -> Manifest:
        name = part_name(record.save_id, node)
        copy = self.root / f".{Path(name).name}"
        copy.write_bytes(self.store.read(name) or b"")
        part = read_manifest(copy, iteration=record.iteration, tag=record.tag)
        if (part.save_id, part.digest, part.part) != (mine.save_id, mine.digest, (node, mine.part and mine.part[1])):
            raise CheckpointError(
                f"node {node} has copied the part of another save",
                found=f"{self.name}/{name}: save {part.save_id}, digest {part.digest}, part {part.part}",
                expected=f"save {mine.save_id}, digest {mine.digest}",
                cause="two jobs copy to one place",
                action="let every job copy to its own place",
            )
        return part

    def put_data(self, data: bytes) -> None:
        self.store.write(f"{RECORDS_DIR}/{data_path(Path()).name}", data)

    def commit(self, record: StepFile, manifest: Manifest, *, latest: bool, tracker: bool) -> None:
        self._check_there(record, manifest)
        before = set(self.root.glob(f"{RECORDS_DIR}/superseded/*"))
        keep_superseded(self.root, record)
        for path in set(self.root.glob(f"{RECORDS_DIR}/superseded/*")) - before:
            self.store.write(str(path.relative_to(self.root)), path.read_bytes())
        self.store.write(self._record(record, step_path), record.to_bytes())
        self.store.write(self._record(record, manifest_path), manifest.to_bytes())
        saved = record.saved
        same = [
            s for s in self.lease.head.saves if (s.iteration, s.tag) == (record.iteration, record.tag) and s != saved
        ]
        head = self.lease.commit(lambda head: head.with_save(saved, latest=latest, tracker=tracker))
        self._replaced |= set(same)
        self._show(record, manifest)
        self.mirror.point(head)

    def _check_there(self, record: StepFile, manifest: Manifest) -> None:
        there = self.mirror.objects_of(record.tag, record.save_id)
        wanted = {file_name(record.tag, record.save_id, e.path): e.size for e in manifest.files}
        wanted |= {record_name(record.save_id, e.path): e.size for e in manifest.beside}
        if wrong := [name for name, size in wanted.items() if there.get(name) != size]:
            raise CheckpointError(
                f"{record.tag} was copied and is not there as a whole",
                found=f"{self.name}: {', '.join(wrong[:5])}: {there.get(wrong[0], 'no')} of {wanted[wrong[0]]} bytes",
                expected=f"{len(wanted)} objects",
                cause="somebody deletes objects there, a rule of the bucket does, or the store loses data",
                action="it is copied again; look at the rules of the bucket",
            )

    def _show(self, record: StepFile, manifest: Manifest) -> None:
        """Make the mirror show a checkpoint that was committed."""
        shutil.rmtree(self.root / record.tag, ignore_errors=True)
        for entry in manifest.files:
            self.mirror.stand_in(f"{record.tag}/{entry.path}", entry.size)
        for entry in manifest.beside:
            self.mirror.stand_in(f"{RECORDS_DIR}/{entry.path}", entry.size)
        write_atomic(step_path(self.root, record.iteration, record.tag), record.to_bytes())
        write_atomic(manifest_path(self.root, record.iteration, record.tag), manifest.to_bytes())
        remove_marker(marker_path(self.root, record.iteration, record.tag))  # of an earlier try, interrupted by a kill

    def conclude(self, record: StepFile) -> None:
        parts = [name for name in self.store.sizes(record_name(record.save_id, "")) if is_part(name)]
        self.store.delete([self._record(record, marker_path), *parts])

    def prune(self, retention: Retention, copied: StepFile, local: Path, waits: Callable[[int, str], bool]) -> None:
        try:
            doomed = [
                (candidate.iteration, candidate.tag)
                for candidate in superfluous(self.root, retention, copied)
                if not (local / candidate.tag).is_dir()
            ]
            pruned = [saved for saved in self.lease.head.saves if (saved.iteration, saved.tag) in doomed]
            replaced = [saved for saved in self.lease.head.removed if saved in self._replaced]
            left = self._left_behind(copied, local, waits)
            for saved in pruned:
                self._keep_records(saved)
            if pruned or left:
                self.lease.commit(lambda head: head.without([*pruned, *left]))
            for saved in pruned:
                for place in (self.root / saved.tag, *rank_dirs(self.root, saved.iteration, saved.tag)):
                    shutil.rmtree(place, ignore_errors=True)
            self._delete([*pruned, *left, *replaced])
            self._replaced.clear()
        except (MegaresumeError, OSError) as error:
            log.warning("megaresume: old checkpoints are kept in %s: %s", self.name, error)

    def put_position(self, data: bytes) -> None:
        self.store.write(f"{POSITIONS}{self.lease.head.epoch:07d}.json", data)

    def _keep_records(self, saved: Saved) -> None:
        """Keep data state and manifest after the weights are deleted."""
        for path in (step_path, manifest_path):
            name = path(Path(), saved.iteration, saved.tag).name
            if (data := self.store.read(record_name(saved.save_id, name))) is not None:
                self.store.write(f"{PRUNED}{name}", data)

    def _delete(self, saves: Iterable[Saved]) -> None:
        """Delete the objects of saves that a head lists as removed: nobody relies on them, whoever owns the root."""
        for saved in saves:
            self.store.delete(self.mirror.objects_of(saved.tag, saved.save_id))

    def _left_behind(self, copied: StepFile, local: Path, waits: Callable[[int, str], bool]) -> list[Saved]:
        """Unfinished copies of earlier writers, whose originals are not here, or are no longer copied."""
        older = [saved for saved in self._unfinished if saved.iteration <= copied.iteration]
        if not older:
            return []
        ours = {copied.save_id}
        for candidate in list_candidates(local):
            if candidate.iteration is None or "state" not in candidate.records:
                continue
            if waits(candidate.iteration, candidate.tag):
                with contextlib.suppress(StateError):
                    ours.add(read_step_file(step_path(local, candidate.iteration, candidate.tag)).save_id)
        committed = {saved.save_id for saved in self.lease.head.saves}
        self._unfinished = [saved for saved in self._unfinished if saved not in older]
        return [saved for saved in older if saved.save_id not in ours | committed]


class NodePlace(StorePlace):
    """The same root on nodes other than rank 0's, which upload their parts. It has no lease and moves no pointers: its
    objects only become valid by rank 0's commit.
    """

    def hold(self, local: Path, beat: Callable[[], object]) -> None:
        self.head = self.mirror.refresh() or Head()

    def release(self) -> None:
        pass

    def begin(self) -> None:
        pass  # rank 0 cleans up; others may already be uploading here

    def check_owned(self) -> None:
        pass  # rank 0 does

    def share_ledger(self, local: Path) -> None:
        pass

    def takes(self, local: Path, iteration: int, tag: str) -> bool:
        part = part_here(local, iteration, tag)  # rank 0 copies whole ones; this disk was another node's
        return part is not None and part.save_id in self.together

    def refusal(self, record: StepFile) -> str | None:
        is_removed = self.head.is_removed(record.save_id)
        return f"it was removed from {self.name}" if is_removed else None

    def _whole(self, record: StepFile, mine: Manifest, gives_way: Callable[[], bool]) -> Manifest:
        return mine

    def put_data(self, data: bytes) -> None:
        pass

    def commit(self, record: StepFile, manifest: Manifest, *, latest: bool, tracker: bool) -> None:
        self._check_there(record, manifest)
        assert manifest.part is not None
        self.store.write(part_name(record.save_id, manifest.part[0]), manifest.to_bytes())
        self._show(record, manifest)

    def conclude(self, record: StepFile) -> None:
        pass

    def prune(self, retention: Retention, copied: StepFile, local: Path, waits: Callable[[int, str], bool]) -> None:
        pass


def join_parts(parts: Iterable[Manifest]) -> Manifest:
    """The manifest of a checkpoint, from those of all its parts.

    Raises:
        CheckpointError: nodes have written different files with the same name.
    """
    manifests = [(0 if manifest.part is None else manifest.part[0], manifest) for manifest in parts]
    first = manifests[0][1]
    files, beside = (
        join_files(first.tag, {node: getattr(manifest, field) for node, manifest in manifests})
        for field in ("files", "beside")
    )
    return replace(first, files=files, beside=beside, part=None)


def join_files(tag: str, parts: Mapping[int, Iterable[FileEntry]]) -> tuple[FileEntry, ...]:
    """The files of a checkpoint, sorted by path, from those that each node has written.

    Raises:
        CheckpointError: nodes have written different files with the same name; names them.
    """
    found: dict[str, dict[int, FileEntry]] = {}
    for node, entries in sorted(parts.items()):
        for entry in entries:
            found.setdefault(entry.path, {})[node] = entry
    different = {path: some for path, some in sorted(found.items()) if len(set(some.values())) > 1}
    if different:
        raise CheckpointError(
            f"nodes have written different files with one name, and {tag} cannot be put together",
            found=listed([_words_of(path, some) for path, some in different.items()], 5, "; "),
            expected="each file of a checkpoint from one node, or the same file from every node that writes it",
            cause="the trainer or a callback writes it on every node, as with save_on_each_node, and its contents "
            "depend on the rank",
            action="let one rank of the job write it (save_on_each_node=False), or put the rank into its name; or save "
            "to a directory that all nodes see",
        )
    return tuple(next(iter(found[path].values())) for path in sorted(found))


def _words_of(path: str, some: Mapping[int, FileEntry]) -> str:
    """Which nodes have written a file, and how large."""
    shown = [f"{entry.size} bytes on node {node}" for node, entry in some.items()]
    return f"{path}: {listed(shown, 3)}" + (", not the same" if len({e.size for e in some.values()}) == 1 else "")


def place_of(where: str | os.PathLike[str] | Place, say: Callable[[str], object] = say) -> Place:
    """The place for a path or a URL."""
    if not isinstance(where, str | os.PathLike):
        return where
    return StorePlace(os.fspath(where), say) if is_store(where) else DirectoryPlace(where)
