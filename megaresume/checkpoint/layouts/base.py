"""What the layouts have in common: `Look`, what was seen of one checkpoint, and `Layout`, how to see it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Layout", "Look", "subdirectories"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """One checkpoint, held against what its layout demands."""

    #: why it is not complete: sentences. Empty: nothing is missing.
    problems: tuple[str, ...] = ()
    #: what somebody should know who takes it.
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How one family of programs lays out its checkpoints."""

    #: for ``--layout``.
    name: str
    #: for people.
    title: str
    #: names of its checkpoint directories; group 1: the iteration.
    pattern: re.Pattern[str]
    #: the file that names the newest one; None: there is no such file.
    pointer: str | None
    #: the pointer moves only when a save is over: what is newer than it was never finished.
    pointer_commits: bool
    #: `megaresume` may have left its records beside the checkpoints.
    managed: bool
    #: further directories that are checkpoints, whatever their name.
    others: Callable[[Path], list[str]]
    #: look at one checkpoint directory, given the iteration that its name tells.
    look: Callable[[Path, int | None], Look]
    #: the iteration that the files tell, for directories whose name does not.
    number_inside: Callable[[Path], int | None] = lambda directory: None

    def number(self, name: str) -> int | None:
        """The iteration that a directory's name tells."""
        match = self.pattern.fullmatch(name)
        return int(match[1]) if match else None


def _is_dir(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # a link that leads round in a circle, or to where this user may not look


def subdirectories(root: Path) -> list[str]:
    """Names of the directories in a directory; none where it is not there.

    Raises:
        OSError: it cannot be listed.
    """
    try:
        with os.scandir(root) as entries:
            return sorted(entry.name for entry in entries if _is_dir(entry))
    except (FileNotFoundError, NotADirectoryError):
        return []
