"""Which checkpoints a root has, whether each is complete, which one a pointer names, and their run.

Listing only reads names; examining a checkpoint reads its records and looks up the size of every file. So a root with a
thousand checkpoints costs one examination if the newest is complete.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from megaresume.checkpoint.records.ledger import read_run
from megaresume.checkpoint.records.manifest import Manifest, list_files, read_manifest
from megaresume.checkpoint.records.marker import read_marker
from megaresume.checkpoint.records.names import (
    RECORDS_DIR,
    RecordKind,
    ledger_path,
    manifest_path,
    marker_path,
    older_dir,
    parse_record_name,
    records_dir,
    step_path,
    tag_iteration,
    usual_tags,
)
from megaresume.checkpoint.records.pointers import Pointer
from megaresume.checkpoint.records.sealed import SealError, unseal
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.files import read_error, read_file
from megaresume.stream.errors import CheckpointError, MegaresumeError, NewerFormatError, StateError, listed
from megaresume.stream.progress import Progress

T = TypeVar("T")

#: complete: manifest and state fit, and every file exists with its size.
#: unmanaged: a tag directory unknown to megaresume: written before it was used, or without it.
#: incomplete: its save was killed, is in progress, or is being repeated.
#: damaged: it was complete, and no longer is.
#: pruned: the weights were deleted, the records were kept.
#: unsynced: complete, but not durable when a machine that wrote it went down, and without checksums: its files may
#: contain anything.
#: part: complete, but with the files of one node only: the others are on other nodes' disks, or in a store.
#: newer: a record was written by a newer megaresume (only returned by `Run.examine`; `examine` raises).
Status = Literal["complete", "part", "unmanaged", "incomplete", "damaged", "unsynced", "pruned", "newer"]

#: why nothing more is known about an unmanaged checkpoint.
UNMANAGED = "it was written without megaresume: no data state, and whether it is complete cannot be known"


UNSYNCED = (
    "it was complete, but not durable yet when a machine that wrote it went down, or could not write it to its disk: "
    "files of the right size may hold anything"
)
OLDER = "an older save of the same step is kept, and put back by the next start that saves there"


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A possible checkpoint."""

    tag: str
    #: None: a custom name without a record.
    iteration: int | None
    has_dir: bool
    #: which of our records exist.
    records: frozenset[RecordKind]

    @property
    def unfinished(self) -> bool:
        """Whether a save of it began and was never committed. Its data state may have been written."""
        return "saving" in self.records and not self.is_committed

    @property
    def is_committed(self) -> bool:
        """Whether a save of it was committed."""
        return "manifest" in self.records

    @property
    def order(self) -> int:
        """The sort key: the iteration, or -1."""
        return -1 if self.iteration is None else self.iteration


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A candidate and the result of examining it."""

    candidate: Candidate
    status: Status
    #: why it is not complete: sentences.
    reasons: tuple[str, ...] = ()
    record: StepFile | None = None
    manifest: Manifest | None = None

    @property
    def is_settled(self) -> bool:
        """Whether everything exists that its save left here."""
        return self.status in ("complete", "part")

    @property
    def reason(self) -> str:
        """All reasons in one line, shortened."""
        return listed(self.reasons, 5, "; ")


def list_candidates(root: Path, *, tags: tuple[str, ...] = ()) -> tuple[Candidate, ...]:
    """Everything in a root that may be a checkpoint, newest first. Only reads names.

    Args:
        root: the checkpoint root; may be missing.
        tags: further directory names to consider (from pointers or users).

    Raises:
        CheckpointError: the root exists but cannot be listed.
    """
    directories = set(_directories(root, frozenset(tags)))
    found: dict[tuple[str, int | None], set[RecordKind]] = {}
    for name in _names(records_dir(root)):
        record = parse_record_name(name)
        if record is not None:
            tag = record.tag or _usual_tag(root, record.iteration, directories)
            found.setdefault((tag, record.iteration), set()).add(record.kind)
    known = {tag for tag, _ in found}
    for tag in directories - known:
        found[tag, tag_iteration(tag)] = set()
    candidates = [
        Candidate(tag=tag, iteration=iteration, has_dir=tag in directories, records=frozenset(records))
        for (tag, iteration), records in found.items()
    ]
    # At the same iteration, usual names before custom ones, and always in the same order.
    return tuple(sorted(candidates, key=lambda c: (-c.order, tag_iteration(c.tag) is None, c.tag)))


def find(root: Path, iteration: int, tag: str) -> Candidate | None:
    """One of `list_candidates`; None if nothing of this checkpoint exists."""
    return next((c for c in list_candidates(root, tags=(tag,)) if (c.iteration, c.tag) == (iteration, tag)), None)


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise read_error(directory, error) from error


def _directories(root: Path, tags: frozenset[str]) -> list[str]:
    names = [name for name in _names(root) if tag_iteration(name) is not None or name in tags | {"release"}]
    own = {r.tag for name in _names(records_dir(root)) if (r := parse_record_name(name)) and r.tag}
    names += [tag for tag in own if tag not in names]
    return [name for name in names if name != RECORDS_DIR and (root / name).is_dir()]


def _usual_tag(root: Path, iteration: int, directories: set[str]) -> str:
    """The usual name that the records of an iteration refer to."""
    usual = usual_tags(iteration)
    there = [tag for tag in usual if tag in directories]
    if len(there) == 1:
        return there[0]
    for path in (step_path, manifest_path, marker_path):
        try:
            tag = unseal(read_file(path(root, iteration, usual[0]))).get("tag")
        except (OSError, SealError):
            continue
        if tag in usual:
            return str(tag)
    return usual[0]


def resolve_pointer(pointer: Pointer, candidates: tuple[Candidate, ...]) -> Candidate | None:
    """The candidate that a pointer names, if its directory exists."""
    there = [c for c in candidates if c.has_dir]
    if pointer.tag is not None:
        return next((c for c in there if c.tag == pointer.tag), None)
    if pointer.iteration is not None:
        return next((c for c in there if c.iteration == pointer.iteration), None)
    return None


def examine(
    root: Path,
    candidate: Candidate,
    *,
    run: str | None = None,
    checksums: bool = False,
    progress: Progress | None = None,
) -> Examined:
    """Examine one checkpoint: its records, its files and their sizes.

    Args:
        root: the checkpoint root.
        candidate: one of `list_candidates`.
        run: the run that the root belongs to; None: any.
        checksums: verify every file that has a checksum in the manifest.
        progress: for checksums: called with the bytes just read, from several threads.

    Raises:
        NewerFormatError: a record was written by a newer megaresume. Never a reason to load an older checkpoint.
    """
    iteration, tag = candidate.iteration, candidate.tag
    if iteration is None or not candidate.records:
        if iteration is not None and older_dir(root, iteration, tag).is_dir():
            return Examined(candidate=candidate, status="incomplete", reasons=(f"it is being saved again; {OLDER}",))
        return _examine_unmanaged(root, candidate)

    record, record_error = _tried(
        lambda: read_step_file(step_path(root, iteration, tag), iteration=iteration, tag=tag, run=run)
    )
    manifest, manifest_error = _tried(
        lambda: read_manifest(manifest_path(root, iteration, tag), iteration=iteration, tag=tag)
    )

    def verdict(status: Status, *reasons: str) -> Examined:
        return Examined(candidate=candidate, status=status, reasons=reasons, record=record, manifest=manifest)

    if not candidate.has_dir and candidate.is_committed:
        return verdict("pruned", "the tag directory is not there (only its records are)")
    marker, marker_error = _tried(lambda: read_marker(marker_path(root, iteration, tag)))
    if marker_error:
        return verdict("damaged", f"{marker_error}; it may be half overwritten")
    if not candidate.is_committed:
        aside = older_dir(root, iteration, tag).is_dir()
        why = "it has records but no manifest: the manifest was deleted, or the files were copied in part"
        if marker is not None:
            why = f"its save began {marker.began_at} and did not end"
        return verdict("incomplete", why + ("; " + OLDER if aside else ""))
    if manifest is None:
        return verdict("damaged", manifest_error)
    if record is None:
        return verdict("damaged", record_error)
    if marker is not None and marker.save_id != manifest.save_id:
        return verdict(
            "incomplete", f"a second save of this step began {marker.began_at} and did not end: files may be mixed"
        )
    if record.save_id != manifest.save_id or record.state.digest != manifest.digest:
        return verdict(
            "damaged",
            f"state and manifest are from different saves (digest {record.state.digest}, manifest {manifest.digest})",
        )
    # Checksums show whether the files reached the disk.
    in_doubt = not manifest.is_safe
    mode: Literal["sizes", "checksums"] = "checksums" if checksums or in_doubt else "sizes"
    problems = manifest.verify(root / tag, mode=mode, progress=progress)
    if problems:
        return verdict("damaged", *map(str, problems))
    if in_doubt and not manifest.has_checksums:
        return verdict("unsynced", UNSYNCED)
    if manifest.part is not None:
        node, nodes = manifest.part
        return verdict("part", f"these are the files of node {node} alone, of {nodes}")
    return verdict("complete")


def _tried(read: Callable[[], T]) -> tuple[T | None, str]:
    """The result of ``read``, and what is wrong with the file; raises for a newer format."""
    try:
        return read(), ""
    except NewerFormatError:
        raise
    except MegaresumeError as error:
        return None, error.headline if error.found is None else f"{error.headline} ({error.found})"


def _examine_unmanaged(root: Path, candidate: Candidate) -> Examined:
    """Examine a checkpoint without records, where only an empty directory, or weights of 0 bytes, can be detected."""

    def verdict(status: Status, *reasons: str) -> Examined:
        return Examined(candidate=candidate, status=status, reasons=reasons)

    try:
        files = list_files(root / candidate.tag)
    except OSError as error:
        return verdict("damaged", f"the tag directory cannot be read: {error.strerror or error}")
    if not files:
        return verdict("incomplete", "the tag directory is empty")
    # A rank that had nothing to save leaves an empty .distcp; but not all of them are empty.
    weights = [e for e in files if e.path.endswith(".pt")]
    shards = [e for e in files if e.path.endswith(".distcp")]
    weights += [] if any(e.size for e in shards) else shards
    empty = [f"{e.path} has 0 bytes" for e in weights if e.size == 0]
    if empty:
        return verdict("incomplete", *empty)
    return verdict("unmanaged", UNMANAGED)


def run_of(root: Path) -> str | None:
    """The run of a checkpoint root: from the ledger, otherwise from its newest readable record."""
    run = read_run(ledger_path(root))
    if run is not None:
        return run
    try:
        names = sorted(os.listdir(records_dir(root)), reverse=True)
    except (FileNotFoundError, NotADirectoryError):
        return None
    for name in names:
        record = parse_record_name(name)
        try:
            if record is not None and record.kind == "state":
                return read_step_file(records_dir(root) / name).run
            if record is not None and record.kind == "saving":
                marker = read_marker(records_dir(root) / name)
                if marker is not None:
                    return marker.run
        except NewerFormatError:
            raise
        except (StateError, CheckpointError):
            continue
    return None
