"""Files that every rank adds to a checkpoint, in a directory of the step in ``<save>/megaresume``.

    step_0000010.random/rank_00000.json    random state of rank 0 (`megaresume.checkpoint.random_state`)
    step_0000010.loader/rank_00000.pkl     state of data-parallel rank 0's loader, if the run has a third-party one

They are written before the commit (`megaresume.checkpoint.saver`), and the manifest lists them with size and checksum:
they are part of the checkpoint. Their kinds are in a table of `megaresume.checkpoint.records.names`.

Those of loaders are pickles, because their libraries' states are; trusted like the weights, and only opened by a
resume.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import xxhash

from megaresume.checkpoint.records.manifest import FileEntry, Manifest
from megaresume.checkpoint.records.names import (
    RankFileKind,
    marker_path,
    parse_rank_dir,
    parse_rank_file,
    rank_file_words,
    records_dir,
    usual_tags,
)
from megaresume.files import make_dir, read_file, write_atomic
from megaresume.stream.errors import StateError


def write_rank_file(root: Path, path: str, data: bytes) -> FileEntry:
    """Write one rank's file, atomically and durably; returns its entry for the manifest.

    Raises:
        CheckpointError: it cannot be written.
    """
    make_dir((records_dir(root) / path).parent)
    write_atomic(records_dir(root) / path, data)
    return FileEntry(path=path, size=len(data), checksum=xxhash.xxh3_128_hexdigest(data))


def read_rank_file(root: Path, entry: FileEntry) -> bytes:
    """Read one rank's file.

    Raises:
        StateError: it is missing, or differs from what was saved; names the rank.
    """
    path = records_dir(root) / entry.path
    inspect = f"megaresume inspect {root} shows which checkpoints are whole; load one of those"
    try:
        data = read_file(path)
    except OSError as error:
        raise StateError(
            f"{rank_file_words(entry.path)} is missing",
            found=f"{path}: {error.strerror or error}",
            expected=f"{entry.size} bytes",
            cause="the directory megaresume was not copied along, or is not on a filesystem that all nodes share",
            action=inspect,
        ) from error
    checksum = xxhash.xxh3_128_hexdigest(data)
    if checksum != entry.checksum:
        raise StateError(
            f"{rank_file_words(entry.path)} is damaged",
            found=f"{path}: {len(data)} bytes, checksum {checksum}",
            expected=f"{entry.size} bytes, checksum {entry.checksum}",
            cause="the file was copied in part, or belongs to another save of the same step",
            action=inspect,
        )
    return data


def ranks_of(entries: Iterable[FileEntry], kind: RankFileKind) -> dict[int, FileEntry]:
    """The files of one kind, by rank."""
    found = ((parse_rank_file(entry.path), entry) for entry in entries)
    return {name[1]: entry for name, entry in found if name is not None and name[0] == kind}


def random_digest(manifest: Manifest) -> tuple[int, str] | None:
    """Number of ranks with random state in a checkpoint, and 16 hex digits over all of it; None if there is none."""
    ranks = ranks_of(manifest.beside, "random")
    if not ranks:
        return None
    words = " ".join(f"{rank}:{ranks[rank].checksum}" for rank in sorted(ranks))
    return len(ranks), xxhash.xxh3_64_hexdigest(words.encode())


def remove_orphans(root: Path) -> None:
    """Delete the files of checkpoints whose tag directory is gone: they are useless without weights.

    Except those of a save in progress, whose tag directory may not exist yet.
    """
    try:
        names = os.listdir(records_dir(root))
    except OSError:
        return
    for name in names:
        if (parsed := parse_rank_dir(name)) is None:
            continue
        iteration, tag = parsed
        tags = [tag] if tag else usual_tags(iteration)
        if not any((root / tag).is_dir() or marker_path(root, iteration, tag).exists() for tag in tags):
            shutil.rmtree(records_dir(root) / name, ignore_errors=True)
