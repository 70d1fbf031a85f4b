"""The records of an earlier save of the same step: kept aside, never overwritten in silence."""

from __future__ import annotations

import os
from pathlib import Path

from megaresume.checkpoint.atomic import fsync_dir, make_dir, write_error
from megaresume.checkpoint.layout import manifest_path, step_path, superseded_path
from megaresume.checkpoint.sealed import NewerFormatError
from megaresume.checkpoint.state_file import StepFile, read_step_file
from megaresume.stream.errors import StateError

__all__ = ["keep_superseded", "retire_records"]


def keep_superseded(root: Path, step: StepFile) -> tuple[str, ...]:
    """Move the state of the same step aside if it is of other data: a step's history is never lost in silence."""
    path = step_path(root, step.iteration, step.tag)
    if not path.exists():
        return ()
    try:
        old = read_step_file(path)
        digest, what = old.state.digest, f"digest {old.state.digest}, saved {old.saved_at}"
        if digest == step.state.digest and old.tag == step.tag:
            return ()
    except NewerFormatError:
        raise
    except StateError as error:
        digest, what = "unreadable", f"an unreadable state ({error.headline})"
    keep = _move_aside(root, step.iteration, step.tag, digest)
    return (
        f"iteration {step.iteration} was committed before with other data: {what}; now digest {step.state.digest}. "
        f"The old state is kept as {keep.relative_to(root)}",
    )


def _move_aside(root: Path, iteration: int, tag: str, digest: str) -> Path:
    path, keep = step_path(root, iteration, tag), superseded_path(root, iteration, tag, digest)
    make_dir(keep.parent)
    try:
        os.replace(path, keep)
        fsync_dir(keep.parent)
        fsync_dir(path.parent)
    except OSError as error:
        raise write_error(keep, error) from error
    return keep


def retire_records(root: Path, iteration: int, tag: str) -> None:
    """Take away what an earlier save of this step recorded, for a save that writes no such records.

    The state is kept among the superseded ones. Put a marker before it, as `begin_save` does.

    Raises:
        CheckpointError: the directory cannot be written.
        StateError: it was written by a newer megaresume.
    """
    manifest, path = manifest_path(root, iteration, tag), step_path(root, iteration, tag)
    try:
        manifest.unlink(missing_ok=True)
    except OSError as error:
        raise write_error(manifest, error) from error
    if not path.exists():
        return
    try:
        digest = read_step_file(path).state.digest
    except NewerFormatError:
        raise
    except StateError:
        digest = "unreadable"
    _move_aside(root, iteration, tag, digest)
