"""The states of a loader on disk: ``<save>/megaresume/step_0000010.loader/rank_00000.pkl``, one a data-parallel rank.

Pickles, because the loaders' own states are; trusted like the weights beside them, and opened only by a resume, behind
their checksum. The manifest of the checkpoint names them with size and checksum.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import xxhash

from megaresume.checkpoint.atomic import make_dir, write_atomic
from megaresume.checkpoint.layout import deepspeed_tag, megatron_tag, records_dir, step_path
from megaresume.checkpoint.manifest import FileEntry
from megaresume.integrations.loaders.record import LoaderRecord, RankState
from megaresume.stream.errors import StateError

__all__ = ["beside", "describe", "loader_dir", "read_rank", "remove_pruned", "write_rank"]

_DIRECTORY = re.compile(r"step_([0-9]{7,18})(?:@(.+))?\.loader")


def loader_dir(root: Path, iteration: int, tag: str) -> Path:
    """Where the states of a step lie."""
    return step_path(root, iteration, tag).with_suffix(".loader")


def describe(dp_rank: int, state: bytes, skip: int) -> RankState:
    """The record of a state that is about to be written."""
    return RankState(
        file=f"rank_{dp_rank:05d}.pkl", size=len(state), checksum=xxhash.xxh3_128_hexdigest(state), skip=skip
    )


def write_rank(root: Path, iteration: int, tag: str, rank: RankState, state: bytes) -> None:
    """Write one rank's state, atomically and durably. Raises CheckpointError where the disk refuses."""
    directory = loader_dir(root, iteration, tag)
    make_dir(directory)
    write_atomic(directory / rank.file, state)


def beside(root: Path, iteration: int, tag: str, record: LoaderRecord) -> tuple[FileEntry, ...]:
    """What the manifest says of the states: paths relative to ``<save>/megaresume``."""
    directory = loader_dir(root, iteration, tag).relative_to(records_dir(root))
    return tuple(
        FileEntry(path=(directory / rank.file).as_posix(), size=rank.size, checksum=rank.checksum)
        for rank in record.ranks
    )


def read_rank(root: Path, iteration: int, tag: str, rank: RankState) -> bytes:
    """Read one rank's state.

    Raises:
        StateError: it is missing, or is not the one that was saved.
    """
    path = loader_dir(root, iteration, tag) / rank.file
    inspect = f"megaresume inspect {root} shows which checkpoints are whole; load one of those"
    try:
        data = path.read_bytes()
    except OSError as error:
        raise StateError(
            "the state of the loader is missing",
            found=f"{path}: {error.strerror or error}",
            expected=f"{rank.size} bytes",
            cause="the directory megaresume was not copied along, or is not on a filesystem that all nodes share",
            action=inspect,
        ) from error
    checksum = xxhash.xxh3_128_hexdigest(data)
    if checksum != rank.checksum:
        raise StateError(
            "the state of the loader is damaged",
            found=f"{path}: {len(data)} bytes, checksum {checksum}",
            expected=f"{rank.size} bytes, checksum {rank.checksum}",
            cause="the file was copied in part, or belongs to another save of the same step",
            action=inspect,
        )
    return data


def remove_pruned(root: Path, *, keep: Path) -> None:
    """Delete the states of checkpoints whose tag directory is gone: without weights they are of no use.

    Args:
        root: the checkpoint root.
        keep: the directory of the save that is going on, whose tag directory comes later.
    """
    try:
        names = os.listdir(records_dir(root))
    except OSError:
        return
    for name in names:
        match = _DIRECTORY.fullmatch(name)
        if match is None or records_dir(root) / name == keep:
            continue
        iteration = int(match[1])
        tags = [match[2]] if match[2] else [deepspeed_tag(iteration), megatron_tag(iteration)]
        if not any((root / tag).is_dir() for tag in tags):
            shutil.rmtree(records_dir(root) / name, ignore_errors=True)
