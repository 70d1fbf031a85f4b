"""Which checkpoints a root holds, whether each of them is whole, and which one the pointers name.

The two pointer files, for us and for every other program that reads the directory.

    latest                                  DeepSpeed's: the name of a tag directory
    latest_checkpointed_iteration.txt       Megatron's, the tracker: an iteration, or the word ``release``

DeepSpeed writes its own before the other ranks are done, and both upstreams write in place, so a kill leaves an
empty file. Reading is therefore tolerant: it says what is there and what is wrong with it, and never raises.

Which checkpoints a root holds, and whether each of them is whole.

Listing looks at names only; examining one checkpoint reads its records and looks up the size of every file. So a root
with a thousand checkpoints costs one examination when the newest is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from megaresume.checkpoint.lock.lock import write_fenced
from megaresume.checkpoint.records.manifest import Manifest, Progress, list_files, read_manifest
from megaresume.checkpoint.records.names import (
    LATEST,
    RECORDS_DIR,
    TRACKER,
    RecordKind,
    SealError,
    check_tag,
    manifest_path,
    marker_path,
    older_dir,
    parse_record_name,
    records_dir,
    step_path,
    tag_iteration,
    unseal,
    usual_tags,
)
from megaresume.checkpoint.records.step_file import StepFile, read_marker, read_step_file
from megaresume.files import open_file, read_error, read_file
from megaresume.stream.errors import MegaresumeError, NewerFormatError, UsageError

PointerName = Literal["latest", "latest_checkpointed_iteration.txt"]

#: bytes; a pointer holds one short name, more is garbage.
_MAX_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Pointer:
    """What one pointer file says."""

    name: PointerName
    status: Literal["ok", "absent", "empty", "garbled", "release", "dangling", "unreadable"]
    #: the content of the file, shortened for display; None if there is no file.
    text: str | None = None
    #: the tag that it names: a directory that exists where ``status`` is ok or release.
    tag: str | None = None
    #: the iteration that it names, if that is known without opening anything.
    iteration: int | None = None

    @property
    def problem(self) -> str | None:
        """What is wrong, as a sentence; None for a pointer that is absent, ok, or ``release``."""
        match self.status:
            case "empty":
                return f"{self.name} is empty (a writer was killed, or the disk was full)"
            case "garbled":
                wanted = "a tag" if self.name == LATEST else "an iteration or 'release'"
                return f"{self.name} holds {self.text!r}, not {wanted}"
            case "dangling":
                return f"{self.name} names {self.text!r}, but there is no such checkpoint directory"
            case "unreadable":
                return f"{self.name} cannot be read: {self.text}"
            case _:
                return None


def read_pointer(root: Path, name: PointerName) -> Pointer:
    """Read one pointer and look whether what it names exists. Never raises."""
    try:
        with open_file(root / name) as file:
            data = file.read(_MAX_BYTES)
    except FileNotFoundError:
        return Pointer(name=name, status="absent")
    except OSError as error:
        return Pointer(name=name, status="unreadable", text=error.strerror or str(error))
    text = data.decode("utf-8", "backslashreplace").strip()
    shown = text if len(text) <= 80 else text[:77] + "..."
    if not text:
        return Pointer(name=name, status="empty", text="")
    if name == LATEST:
        return _read_latest(root, text, shown)
    return _read_tracker(root, text, shown)


def _read_latest(root: Path, text: str, shown: str) -> Pointer:
    try:
        check_tag(text)
    except UsageError:
        return Pointer(name=LATEST, status="garbled", text=shown)
    there = (root / text).is_dir()
    return Pointer(
        name=LATEST, status="ok" if there else "dangling", text=shown, tag=text, iteration=tag_iteration(text)
    )


def _read_tracker(root: Path, text: str, shown: str) -> Pointer:
    if text == "release":
        there = (root / text).is_dir()
        return Pointer(name=TRACKER, status="release" if there else "dangling", text=shown, tag=text)
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        return Pointer(name=TRACKER, status="garbled", text=shown)
    iteration = int(text)
    tag = next((tag for tag in usual_tags(iteration) if (root / tag).is_dir()), None)
    # An iteration may also be that of a custom tag: `resolve_pointer` says whether it dangles.
    return Pointer(
        name=TRACKER, status="ok" if tag is not None else "dangling", text=shown, tag=tag, iteration=iteration
    )


def read_pointers(root: Path) -> tuple[Pointer, Pointer]:
    """Read ``latest`` and the tracker."""
    return read_pointer(root, LATEST), read_pointer(root, TRACKER)


def write_latest(root: Path, tag: str) -> None:
    """Point ``latest`` to a tag directory, atomically. Raises CheckpointError, UsageError for an impossible tag."""
    write_fenced(root, root / LATEST, check_tag(tag).encode())


def write_tracker(root: Path, iteration: int) -> None:
    """Point the tracker to an iteration, atomically. Raises CheckpointError."""
    write_fenced(root, root / TRACKER, str(iteration).encode())


T = TypeVar("T")

#: complete: manifest and state fit, every file is there with its size.
#: unmanaged: a tag directory of which megaresume knows nothing: written before it was adopted, or without it.
#: incomplete: its save was killed, is in progress, or is being done over.
#: damaged: it was complete, and is no longer.
#: pruned: the weights were deleted, records are left.
#: unsynced: complete, but not durable when a machine that wrote it went down, and without checksums: anything may be
#: in its files.
#: part: complete, and the files of one node alone: those of the others are on their disks, or in a store.
#: newer: a record was written by a newer megaresume (only `Run.examine` says so; `examine` raises).
Status = Literal["complete", "part", "unmanaged", "incomplete", "damaged", "unsynced", "pruned", "newer"]

#: why nothing more is known about an unmanaged one.
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
    #: which of our records are there.
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
        """The iteration, or -1: candidates are sorted by it."""
        return -1 if self.iteration is None else self.iteration


@dataclass(frozen=True, kw_only=True, slots=True)
class Examined:
    """A candidate, and what was found in it."""

    candidate: Candidate
    status: Status
    #: why it is not complete: sentences.
    reasons: tuple[str, ...] = ()
    step: StepFile | None = None
    manifest: Manifest | None = None

    @property
    def is_settled(self) -> bool:
        """Whether everything is there that its save has left here."""
        return self.status in ("complete", "part")

    @property
    def reason(self) -> str:
        """All reasons in one line, shortened."""
        more = f"; and {len(self.reasons) - 5} more" if len(self.reasons) > 5 else ""
        return "; ".join(self.reasons[:5]) + more


def list_candidates(root: Path, *, tags: tuple[str, ...] = ()) -> tuple[Candidate, ...]:
    """Everything in a root that may be a checkpoint, newest first. Reads names, no content.

    Args:
        root: the checkpoint root; may be missing.
        tags: further directory names to consider (those that pointers or users name).

    Raises:
        CheckpointError: the root is there but cannot be listed.
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
    # Usual names before the user's own at the same iteration, and always the same order.
    return tuple(sorted(candidates, key=lambda c: (-c.order, tag_iteration(c.tag) is None, c.tag)))


def find(root: Path, iteration: int, tag: str) -> Candidate | None:
    """One of `list_candidates`; None if nothing is there of this checkpoint."""
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
    """Which of the usual names the records of an iteration are about."""
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
    """The candidate that a pointer names, if its directory is there."""
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
        checksums: read every file that has a checksum in the manifest.
        progress: for checksums: called with the bytes just read, from several threads.

    Raises:
        NewerFormatError: a record was written by a newer megaresume. Never a reason to take an older checkpoint.
    """
    iteration, tag = candidate.iteration, candidate.tag
    if iteration is None or not candidate.records:
        if iteration is not None and older_dir(root, iteration, tag).is_dir():
            return Examined(candidate=candidate, status="incomplete", reasons=(f"it is being saved again; {OLDER}",))
        return _examine_unmanaged(root, candidate)

    step, step_error = _tried(
        lambda: read_step_file(step_path(root, iteration, tag), iteration=iteration, tag=tag, run=run)
    )
    manifest, manifest_error = _tried(
        lambda: read_manifest(manifest_path(root, iteration, tag), iteration=iteration, tag=tag)
    )

    def verdict(status: Status, *reasons: str) -> Examined:
        return Examined(candidate=candidate, status=status, reasons=reasons, step=step, manifest=manifest)

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
    if step is None:
        return verdict("damaged", step_error)
    if marker is not None and marker.save_id != manifest.save_id:
        return verdict(
            "incomplete", f"a second save of this step began {marker.began_at} and did not end: files may be mixed"
        )
    if step.save_id != manifest.save_id or step.state.digest != manifest.digest:
        return verdict(
            "damaged",
            f"state and manifest are from different saves (digest {step.state.digest}, manifest {manifest.digest})",
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
    """What ``read`` returns, or what is wrong with the file; a newer format is an error."""
    try:
        return read(), ""
    except NewerFormatError:
        raise
    except MegaresumeError as error:
        return None, error.headline if error.found is None else f"{error.headline} ({error.found})"


def _examine_unmanaged(root: Path, candidate: Candidate) -> Examined:
    """Without records only the obvious can be detected: an empty directory, or weights of 0 bytes."""

    def verdict(status: Status, *reasons: str) -> Examined:
        return Examined(candidate=candidate, status=status, reasons=reasons)

    try:
        files = list_files(root / candidate.tag)
    except OSError as error:
        return verdict("damaged", f"the tag directory cannot be read: {error.strerror or error}")
    if not files:
        return verdict("incomplete", "the tag directory is empty")
    # A .distcp of 0 bytes is that of a rank that had nothing to save; not all of them are.
    weights = [e for e in files if e.path.endswith(".pt")]
    shards = [e for e in files if e.path.endswith(".distcp")]
    weights += [] if any(e.size for e in shards) else shards
    empty = [f"{e.path} has 0 bytes" for e in weights if e.size == 0]
    if empty:
        return verdict("incomplete", *empty)
    return verdict("unmanaged", UNMANAGED)
