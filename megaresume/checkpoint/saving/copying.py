"""One checkpoint from a local root to its copies: each file proven by reading it back, and a commit as of a save.

shared: ledger -> marker -> each file: copied, forced to the disk, read back, its checksum compared
        -> data state -> manifest, with checksums -> pointers -> ledger -> marker removed

The ledger comes first: should the local storage be lost in the first copy, what is left says whose it is, and that a
checkpoint was committed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import xxhash

from megaresume.checkpoint.choosing.candidates import examine, find, read_pointers, write_latest, write_tracker
from megaresume.checkpoint.ledger import append_lines, read_ledger
from megaresume.checkpoint.lock import check_owned, write_fenced
from megaresume.checkpoint.manifest import FileEntry, Manifest, checksum_file, list_files, read_manifest
from megaresume.checkpoint.paths import data_path, ledger_path, manifest_path, marker_path, records_dir, step_path
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
    size_of,
    write_all,
    write_atomic,
    write_error,
)
from megaresume.stream.errors import CheckpointError, MegaresumeError

log = logging.getLogger(__name__)

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


def is_copied(local: Path, shared: Path, iteration: int | None, tag: str) -> bool:
    """Whether the copy of a checkpoint was completed: the same save, with a manifest, every file with its size."""
    if iteration is None:
        return False
    try:
        ours = read_manifest(manifest_path(local, iteration, tag), iteration=iteration, tag=tag)
        copied = read_manifest(manifest_path(shared, iteration, tag), iteration=iteration, tag=tag)
        marker = read_marker(marker_path(shared, iteration, tag))
    except MegaresumeError:
        return False
    return ours.save_id == copied.save_id and marker is None and not copied.verify(shared / tag)


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
