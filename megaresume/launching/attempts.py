"""What an attempt leaves for the next: attempts without progress, and nodes that are left out or were replaced.

The file is written, and is on the disk, before anything is launched: an attempt that nobody sees end is counted, and
a run directory that takes no more bytes refuses the launch instead of beginning for ever "for the first time".
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megaresume.checkpoint.files import make_dir, write_atomic
from megaresume.checkpoint.formats import read_sealed, seal
from megaresume.stream.errors import CheckpointError, SetupError, StateError

FORMAT, VERSION = "megaresume.attempts", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts:
    """The attempts of a job, or of a chain of them."""

    #: in a row without a new checkpoint.
    fruitless: int = 0
    #: nodes that are left out, and why.
    excluded: dict[str, str] = field(default_factory=dict)
    #: nodes that spare ones have replaced, and why.
    replaced: dict[str, str] = field(default_factory=dict)


def read_attempts(path: Path) -> Attempts:
    """What earlier attempts have left; a missing file: nothing. Raises SetupError if it cannot be read."""
    if not path.exists():
        return Attempts()
    try:
        fields = read_sealed(path, what="the count of attempts", format_name=FORMAT, version=VERSION, error=StateError)
        nodes = {name: dict(fields[name]) for name in ("excluded", "replaced")}
        return Attempts(fruitless=int(fields["fruitless"]), **nodes)
    except (StateError, KeyError, TypeError, ValueError) as error:
        raise SetupError(
            "the count of attempts cannot be read, so an endless loop could not be noticed",
            found=f"{path}: {error.headline if isinstance(error, StateError) else error}",
            action="look at the directory; delete the file to count from 0 again",
        ) from error


def write_attempts(path: Path, attempts: Attempts) -> None:
    """Write it, durably. Raises SetupError if the disk refuses."""
    fields: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    fields |= asdict(attempts)
    try:
        make_dir(path.parent)
        write_atomic(path, seal(fields))
    except CheckpointError as error:
        raise SetupError(
            "the count of attempts cannot be written, so an endless loop could not be noticed",
            found=f"{path}: {error.found}",
            expected="a RUN_DIR with free space, free inodes and quota",
            action="make room, or set RUN_DIR to another directory",
        ) from error
