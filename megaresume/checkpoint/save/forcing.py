"""Makes one checkpoint durable: forces its files to the disks, adds their checksums to its manifest.

    commit_save     manifest: durable false, the boots of the machines that wrote      <- complete
    each node       reads each of its files (usually from memory) for its checksum
                    its part          step_0000010.synced/node_00001.json      (rank 0's node needs none)
    rank 0          all checksums     into the manifest
    each node       its files and the directories forced to the disk; recorded in its part
    rank 0          all parts there? Megatron's tracker forced, too
                    manifest: durable true                                             <- durable
                    ledger line
                    the older save of the same step removed, old checkpoints pruned, parts removed

A kill in between costs nothing: the page cache outlives a process, and the next start continues from it. A power cut
in between leaves files of the right size with any content: a checkpoint that is complete but not durable is only valid
while every machine that wrote it is up (`Manifest.is_safe`). Once the manifest has the checksums of all files, it is
valid without that, as they can be verified.

If something could not be forced, the system says so once, and treats it as written from then on. So such a file is
written again from memory, verified by its checksum, until that succeeds; until then the checkpoint is only valid by its
checksums (`distrust`).

`megaresume.checkpoint.save.durability` does this in the background.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megaresume.checkpoint.lock.lock import check_owned, write_manifest
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
from megaresume.stream.errors import CheckpointError

FORMAT, VERSION = "megaresume.synced", 1


class NotForcedError(Exception):
    """Raised if a machine could not force files to its disk: their content in memory may be lost.

    Args:
        words: the system's error.
        paths: of the files, relative to the tag directory.
    """

    def __init__(self, words: str, paths: Iterable[str] = ()) -> None:
        super().__init__(words)
        self.paths = frozenset(paths)


class GoneError(Exception):
    """Raised if a file that could not be forced to the disk is no longer in memory as it was saved."""


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
        manifest: of the checkpoint; its checksums are reused.
        paths: the files, relative to the tag directory.
        read: False: compute no others.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        OSError: a file cannot be read.
    """
    known = {entry.path: entry.checksum for entry in manifest.files}
    return {path: known[path] or (checksum_file(root / manifest.tag / path) if read else None) for path in paths}


def force(
    root: Path, manifest: Manifest, paths: Iterable[str], *, again: Mapping[str, str | None] | None = None
) -> None:
    """Force files of a checkpoint that this machine wrote, and all of its directories, to the disk.

    Args:
        root: the checkpoint root.
        manifest: of the checkpoint.
        paths: files of it, relative to the tag directory.
        again: files that could not be forced before -> their checksums: they are written again.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        NotForcedError: the system could not write what was in memory.
        CheckpointError: a file cannot be written again.
        GoneError: memory no longer has what was saved, or that is unknown.
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
    """Force files; returns the system's error if it failed."""
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
    """What one node has forced and checksummed."""

    checksums: Mapping[str, str | None]
    is_forced: bool = False
    #: the error of the last attempt.
    error: str = ""
    #: whether what was saved is lost, so that there is no other attempt.
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
    """Parse (save, part)."""
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
        retention: which older checkpoints to keep.

    Returns:
        tags of older checkpoints whose weights were removed.

    Raises:
        CheckpointError: a write fails, or the root has another owner by now.
        NotForcedError: see `force`.
    """
    # Megatron writes it in place, and forces nothing.
    if (root / TRACKER).exists() and (words := _force(root / TRACKER, os.O_RDONLY)):
        raise NotForcedError(words)
    record = note_checksums(root, manifest, checksums, durable=True, boots=())
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
    """Make a checkpoint valid only by its checksums, if all of its files have one, as a machine could not force its
    files. On rank 0. Raises CheckpointError.
    """
    note_checksums(root, manifest, checksums, boots=())


def note_checksums(
    root: Path, manifest: Manifest, checksums: Mapping[str, str | None], **changes: Any
) -> StepFile | None:
    """Add the checksums of all files, and changes, to the manifest. On rank 0. None if the save no longer has one.
    Raises CheckpointError.
    """
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
    """Checkpoints that earlier processes left complete but not durable, and that can still be made so; oldest first."""
    found: list[Manifest] = []
    for candidate in list_candidates(root):
        examined = examine(root, candidate) if candidate.has_dir and candidate.is_committed else None
        if examined is None or not examined.is_settled or examined.manifest is None:
            continue
        if examined.manifest.durable:
            break
        found.append(examined.manifest)
    return tuple(reversed(found))
