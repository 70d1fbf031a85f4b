"""The files that make a checkpoint count: the owner of a root alone can write them (`write_fenced`)."""

from __future__ import annotations

from pathlib import Path

from megaresume.checkpoint.lock.lock import write_fenced
from megaresume.checkpoint.records.manifest import Manifest
from megaresume.checkpoint.records.names import LATEST, TRACKER, check_tag, manifest_path
from megaresume.checkpoint.records.step_file import StepFile


def write_latest(root: Path, tag: str) -> None:
    """Point ``latest`` to a tag directory, atomically. Raises CheckpointError, UsageError for an impossible tag."""
    write_fenced(root, root / LATEST, check_tag(tag).encode())


def write_tracker(root: Path, iteration: int) -> None:
    """Point the tracker to an iteration, atomically. Raises CheckpointError."""
    write_fenced(root, root / TRACKER, str(iteration).encode())


def write_step_file(path: Path, record: StepFile) -> None:
    """Write atomically, as the owner of the root (see `write_fenced`); durable with the manifest, which is written next
    into the same directory. Raises CheckpointError."""
    write_fenced(path.parent.parent, path, record.to_bytes(), sync_dir=False)


def write_manifest(root: Path, manifest: Manifest) -> None:
    """Write the manifest of a checkpoint, atomically and durably. Raises CheckpointError."""
    write_fenced(root, manifest_path(root, manifest.iteration, manifest.tag), manifest.to_bytes())
