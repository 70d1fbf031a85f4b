"""From complete to durable: what a commit leaves in the memory of the machines is forced to their disks, and summed.

    commit_save     manifest: durable false, the boots of the machines that wrote      <- complete
    each node       force: each of its files read (from memory, as a rule) for its checksum, and forced to the disk;
                    the directories
                    its part          step_0000010.synced/node_00001.json      (the node of rank 0 needs none)
    rank 0          all parts there?
                    manifest: durable true, all checksums                              <- durable
                    ledger line
                    the older save of the same step removed, old checkpoints pruned, parts removed

The training does not wait for any of this. A kill in between costs nothing: memory outlives a process, and the next
start goes on with it. A power cut in between leaves files of the right size with anything in them: a checkpoint that is
complete and not durable counts only while every machine that wrote it is up (`Manifest.is_safe`).

What could not be forced is lost in part, and asking again would not say so: such a checkpoint never counts again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from megaresume.checkpoint.choosing.candidates import examine, list_candidates
from megaresume.checkpoint.files import fsync_file, make_dir, read_sealed, seal, text, write_atomic
from megaresume.checkpoint.ledger import append_ledger
from megaresume.checkpoint.lock import check_owned, write_fenced
from megaresume.checkpoint.manifest import FileEntry, Manifest, checksum_file, read_manifest
from megaresume.checkpoint.paths import ledger_path, manifest_path, part_path, step_path
from megaresume.checkpoint.saving.older import changing, remove_older
from megaresume.checkpoint.saving.rank_files import remove_orphans
from megaresume.checkpoint.saving.retention import KEEP_ALL, Retention, prune
from megaresume.checkpoint.step_file import StepFile, read_step_file
from megaresume.stream.errors import CheckpointError

FORMAT, VERSION = "megaresume.synced", 1


class NotForcedError(Exception):
    """A machine could not force a file to its disk: what the system's memory held of it may be lost."""


def committed(root: Path, iteration: int, tag: str, save_id: str) -> Manifest | None:
    """The manifest of a save; None: it is not committed, or the step was saved again.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    path = manifest_path(root, iteration, tag)
    if not path.exists():
        return None
    manifest = read_manifest(path, iteration=iteration, tag=tag)
    return manifest if manifest.save_id == save_id else None


def force(
    root: Path,
    manifest: Manifest,
    paths: Iterable[str],
    *,
    checksums: bool = True,
    wait: Callable[[], object] = lambda: None,
) -> dict[str, str | None]:
    """Read and force files of a checkpoint that this machine wrote, and all of its directories.

    Args:
        root: the checkpoint root.
        manifest: of the checkpoint.
        paths: files of it, relative to the tag directory.
        checksums: whether to take them.
        wait: called between two files.

    Returns:
        by path: the checksum, or None.

    Raises:
        FileNotFoundError: the checkpoint is gone.
        NotForcedError: the system could not write what it held.
        OSError: a file cannot be read.
    """
    tag_dir = root / manifest.tag
    found: dict[str, str | None] = {}
    for path in paths:
        found[path] = checksum_file(tag_dir / path) if checksums else None
        _force(tag_dir / path, os.O_RDONLY)
        wait()
    inner = {parent for path in (entry.path for entry in manifest.files) for parent in (tag_dir / path).parents}
    for directory in sorted((d for d in inner if d.is_relative_to(root)), reverse=True):
        _force(directory, os.O_RDONLY | os.O_DIRECTORY)
    return found


def _force(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags | os.O_CLOEXEC)
    try:
        fsync_file(descriptor)
    except OSError as error:
        raise NotForcedError(f"{path}: {error.strerror or error}") from error
    finally:
        os.close(descriptor)


def write_part(root: Path, manifest: Manifest, node: int, checksums: Mapping[str, str | None], error: str = "") -> None:
    """What one node has done, for rank 0; with an ``error``, what it could not. Raises CheckpointError."""
    path = part_path(root, manifest.iteration, manifest.tag, node)
    make_dir(path.parent)
    fields = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "error": error,
        "files": [[name, checksum] for name, checksum in checksums.items()],
    }
    write_atomic(path, seal(fields, depth=2))


def read_part(root: Path, manifest: Manifest, node: int) -> dict[str, str | None] | None:
    """What one node has done; None: it is not there yet.

    Raises:
        CheckpointError: it is damaged.
        NotForcedError: that node could not.
    """
    path = part_path(root, manifest.iteration, manifest.tag, node)
    if not path.exists():
        return None
    fields = read_sealed(path, what="the part of a node", format_name=FORMAT, version=VERSION, error=CheckpointError)
    if fields["save_id"] != manifest.save_id:
        return None
    if fields["error"]:
        raise NotForcedError(text(fields["error"]))
    return {text(name): checksum for name, checksum in fields["files"]}


def finish(
    root: Path, manifest: Manifest, checksums: Mapping[str, str | None], *, retention: Retention = KEEP_ALL
) -> tuple[str, ...]:
    """Say that a checkpoint is durable, and let old ones go. On rank 0, when every node has done its part.

    Args:
        root: the checkpoint root.
        manifest: of the checkpoint.
        checksums: of all its files.
        retention: which older checkpoints stay.

    Returns:
        tags of older checkpoints whose weights are gone.

    Raises:
        CheckpointError: the disk refuses, or the root has another owner by now.
    """
    files = tuple(FileEntry(path=e.path, size=e.size, checksum=checksums.get(e.path)) for e in manifest.files)
    step = _replace(root, replace(manifest, files=files, durable=True, boots=()))
    if step is None:
        return ()
    append_ledger(ledger_path(root), step.ledger_entry("durable", {"save_id": step.save_id}))
    remove_older(root, step.iteration, step.tag)
    shutil.rmtree(part_path(root, step.iteration, step.tag, 0).parent, ignore_errors=True)
    pruned = prune(root, retention, step)
    remove_orphans(root)
    return pruned


def distrust(root: Path, manifest: Manifest) -> None:
    """A machine could not force its files: no start may take this checkpoint. On rank 0. Raises CheckpointError."""
    _replace(root, replace(manifest, boots=()))


def _replace(root: Path, manifest: Manifest) -> StepFile | None:
    """Write a manifest in the place of the one of the same save; None: there is none any more."""
    check_owned(root)
    iteration, tag = manifest.iteration, manifest.tag
    with changing:
        there = committed(root, iteration, tag, manifest.save_id)
        if there is None or there.durable or not (root / tag).is_dir():
            return None
        write_fenced(root, manifest_path(root, iteration, tag), manifest.to_bytes())
    return read_step_file(step_path(root, iteration, tag), iteration=iteration, tag=tag)


def make_durable(
    root: str | os.PathLike[str],
    manifest: Manifest,
    *,
    checksums: bool = True,
    retention: Retention = KEEP_ALL,
) -> tuple[str, ...]:
    """All of it at once, for a checkpoint that this machine wrote. Arguments, result and errors as of `finish`."""
    place = Path(os.path.abspath(root))
    try:
        sums = force(place, manifest, (entry.path for entry in manifest.files), checksums=checksums)
    except NotForcedError as error:
        distrust(place, manifest)
        raise CheckpointError(
            f"{manifest.tag} could not be forced to the disk, and no start takes it",
            found=str(error),
            cause="the disk is full or fails, or the quota is used up",
        ) from error
    return finish(place, manifest, sums, retention=retention)


def not_durable(root: Path) -> tuple[Manifest, ...]:
    """What earlier processes have left complete and not durable, and can still be made so; the oldest first."""
    found: list[Manifest] = []
    for candidate in list_candidates(root):
        if not candidate.has_dir or "manifest" not in candidate.records:
            continue
        examined = examine(root, candidate)
        if examined.status != "complete" or examined.manifest is None:
            continue
        if examined.manifest.durable:
            break
        found.append(examined.manifest)
    return tuple(reversed(found))
