"""The note in a local root that says where its checkpoints are copied to: for people, who cannot always ask a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.names import records_dir
from megaresume.checkpoint.records.sealed import read_record, seal, text, texts
from megaresume.files import write_atomic
from megaresume.stream.errors import CheckpointError

FORMAT, VERSION = "megaresume.staging", 1


def note_path(root: Path) -> Path:
    """The path of the note in a local root."""
    return records_dir(root) / "staging.json"


def read_note(root: Path) -> tuple[str, tuple[str, ...] | None]:
    """Where the copies go, a directory or a URL; and the tags copied to a URL, None for a directory.

    Raises:
        MegaresumeError: there is no note, or it cannot be read.
    """
    path = note_path(root)
    return read_record(path, _note, what="the note", format_name=FORMAT, version=VERSION, error=CheckpointError)


def write_note(root: Path, to: str, copied: Iterable[str] | None) -> None:
    """Write the note: see `read_note`.

    Raises:
        CheckpointError: it cannot be written.
    """
    note: dict[str, Any] = {"format": FORMAT, "version": VERSION, "to": to}
    if copied is not None:
        note["copied"] = list(copied)
    write_atomic(note_path(root), seal(note, depth=1))


def _note(fields: Mapping[str, Any]) -> tuple[str, tuple[str, ...] | None]:
    return text(fields["to"]), texts(fields["copied"]) if "copied" in fields else None
