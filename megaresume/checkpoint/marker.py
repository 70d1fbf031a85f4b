"""The marker of a save: written before the first model file, removed after the last step of the commit.

Without it two things look alike that are not: a tag directory that a program without megaresume wrote, and one whose
save was killed; a complete checkpoint, and one whose files a second save of the same step is overwriting. And it
tells a commit that was killed before the pointers moved from pointers that somebody moved back on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.atomic import write_atomic, write_error
from megaresume.checkpoint.sealed import count, flag, read_sealed, seal, text
from megaresume.stream.errors import CheckpointError

__all__ = ["FORMAT", "VERSION", "Marker", "read_marker", "remove_marker", "write_marker"]

FORMAT = "megaresume.saving"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """A save that has begun."""

    iteration: int
    tag: str
    #: the save; its state and manifest will have the same, 16 hex digits.
    save_id: str
    #: the run, 16 hex digits.
    run: str
    #: UTC.
    began_at: str
    #: which pointers this save will move.
    latest: bool
    tracker: bool

    def to_bytes(self) -> bytes:
        """The content of the file."""
        fields: Mapping[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "iteration": self.iteration,
            "tag": self.tag,
            "save_id": self.save_id,
            "run": self.run,
            "began_at": self.began_at,
            "latest": self.latest,
            "tracker": self.tracker,
        }
        return seal(fields, depth=1)


def write_marker(path: Path, marker: Marker) -> None:
    """Write atomically. Raises CheckpointError."""
    write_atomic(path, marker.to_bytes())


def read_marker(path: Path) -> Marker | None:
    """Read a marker; None where there is none.

    Raises:
        CheckpointError: damaged.
        NewerFormatError: of a newer version.
    """
    if not path.exists():
        return None
    fields = read_sealed(path, what="the save marker", format_name=FORMAT, version=VERSION, error=CheckpointError)
    try:
        return Marker(
            iteration=count(fields["iteration"]),
            tag=text(fields["tag"]),
            save_id=text(fields["save_id"]),
            run=text(fields["run"]),
            began_at=text(fields["began_at"]),
            latest=flag(fields["latest"]),
            tracker=flag(fields["tracker"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            "the save marker lacks a field or has one of the wrong kind", found=f"{path}: {error}"
        ) from error


def remove_marker(path: Path) -> None:
    """Remove a marker; no error where there is none. Raises CheckpointError.

    Not made durable: one that a power cut brings back beside its own manifest changes nothing.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error) from error
