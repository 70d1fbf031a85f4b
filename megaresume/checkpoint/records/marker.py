"""The marker, ``step_0000010.saving.json``: written before the first model file, removed at the end of the commit.

Without it, different cases would look alike: a tag directory written by a program without megaresume, and one whose
save was killed; a complete checkpoint, and one that a second save of the same step is overwriting. And it distinguishes
a commit that was killed before the pointers moved from pointers that somebody moved back on purpose.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from megaresume.checkpoint.records.names import recorded_tag
from megaresume.checkpoint.records.sealed import from_members, read_record, seal
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.system import boots_up
from megaresume.files import write_atomic, write_error
from megaresume.stream.errors import CheckpointError

MARKER_FORMAT, MARKER_VERSION = "megaresume.saving", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Marker:
    """A save that has begun."""

    iteration: int
    tag: str
    #: the id of the save, also in its state and manifest, 16 hex digits.
    save_id: str
    #: the run, 16 hex digits.
    run: str
    #: UTC.
    began_at: str
    #: which pointers this save will move.
    latest: bool
    tracker: bool
    #: boots of the machines that write it (`system.boot_id`); empty: unknown.
    boots: tuple[str, ...] = ()

    @classmethod
    def of(cls, record: StepFile, *, latest: bool, tracker: bool, boots: Iterable[str] = ()) -> Marker:
        """The marker of the save that will write this data state."""
        return cls(
            iteration=record.iteration,
            tag=record.tag,
            save_id=record.save_id,
            run=record.run,
            began_at=record.saved_at,
            latest=latest,
            tracker=tracker,
            boots=tuple(sorted(boots)),
        )

    @property
    def is_safe(self) -> bool:
        """Whether what was written is on the disk, or in the memory of machines that have all been up since."""
        return not self.boots or boots_up().issuperset(self.boots)

    def to_bytes(self) -> bytes:
        """The file as bytes."""
        return seal({"format": MARKER_FORMAT, "version": MARKER_VERSION, **asdict(self)}, depth=1)


def write_marker(path: Path, marker: Marker) -> None:
    """Write atomically. Raises CheckpointError."""
    write_atomic(path, marker.to_bytes())


def read_marker(path: Path) -> Marker | None:
    """Read a marker; None if there is none.

    Raises:
        CheckpointError: damaged.
        NewerFormatError: it has a newer version.
    """
    if not path.exists():
        return None
    return read_record(
        path,
        lambda fields: from_members(Marker, fields, tag=recorded_tag),
        what="the save marker",
        format_name=MARKER_FORMAT,
        version=MARKER_VERSION,
        error=CheckpointError,
    )


def remove_marker(path: Path) -> None:
    """Remove a marker; no error if there is none. Raises CheckpointError.

    Not made durable: if a power cut brings it back beside its own manifest, that changes nothing.
    """
    try:
        os.unlink(path)
    except FileNotFoundError:
        return
    except OSError as error:
        raise write_error(path, error) from error
