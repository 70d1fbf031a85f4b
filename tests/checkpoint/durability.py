"""A checkpoint made durable at once, by what each machine does in the background for itself."""

from __future__ import annotations

import os
from pathlib import Path

from megaresume.checkpoint.records.manifest import Manifest
from megaresume.checkpoint.save.forcing import (
    GoneError,
    NotForcedError,
    distrust,
    finish,
    force,
    note_checksums,
    take_checksums,
)
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention
from megaresume.stream.errors import CheckpointError


def make_durable(
    root: str | os.PathLike[str],
    manifest: Manifest,
    *,
    checksums: bool = True,
    retention: Retention = KEEP_ALL,
) -> tuple[str, ...]:
    """All of it at once, for a checkpoint that this machine wrote. Arguments, result and errors as of `finish`."""
    place, paths = Path(os.path.abspath(root)), [entry.path for entry in manifest.files]
    sums = take_checksums(place, manifest, paths, read=checksums)
    if checksums:
        note_checksums(place, manifest, sums)
    try:
        force(place, manifest, paths, again=None if manifest.boots else sums)
    except (NotForcedError, GoneError) as error:
        distrust(place, manifest, sums)
        raise CheckpointError(
            f"{manifest.tag} could not be forced to the disk",
            found=str(error),
            cause="the disk is full or fails, or the quota is used up",
        ) from error
    return finish(place, manifest, sums, retention=retention)
