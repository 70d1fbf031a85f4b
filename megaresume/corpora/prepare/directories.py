"""The files below a directory that match a pattern: through links, each directory once."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from megaresume.stream.errors import CorpusError, UsageError

__all__ = ["files_below"]


def files_below(directory: Path, pattern: str) -> tuple[list[Path], list[Path]]:
    """Files that match, sorted by their path; and links to directories that are read already, by another path.

    Names that begin with a dot are left out. The directories proper are gone through first, so that a link to one of
    them is what is left out, and so is a link to a directory that it lies in, which would lead round for ever.

    Args:
        directory: where to look.
        pattern: of paths in it, with ``**`` for any depth.

    Raises:
        UsageError: the pattern is none.
        CorpusError: a link that matches leads nowhere; a directory cannot be read.
    """
    wanted = _parts(pattern)
    files: list[Path] = []
    twice: list[Path] = []
    seen: set[tuple[int, int]] = set()
    waiting, links = deque([directory]), deque[Path]()
    while waiting or links:
        here = waiting.popleft() if waiting else links.popleft()
        found = here.stat()
        if (found.st_dev, found.st_ino) in seen:
            twice.append(here)
            continue
        seen.add((found.st_dev, found.st_ino))
        for entry in _entries(here):
            path = here / entry.name
            # Not by the entry: of a link to itself it raises.
            if path.is_dir() if entry.is_symlink() else entry.is_dir():
                (links if entry.is_symlink() else waiting).append(path)
            elif _matches(path.relative_to(directory).parts, wanted):
                if path.is_file() if entry.is_symlink() else entry.is_file():
                    files.append(path)
                elif entry.is_symlink():
                    raise CorpusError(
                        f"{path} is a link that leads nowhere",
                        found=os.readlink(path),
                        expected="a link to a file or a directory",
                        cause="its target was moved, or is on a disk that is not mounted here",
                        action="correct or remove the link, or leave it out by --glob",
                    )
    return sorted(files, key=lambda file: file.relative_to(directory).as_posix()), twice


def _entries(directory: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return sorted((e for e in entries if not e.name.startswith(".")), key=lambda e: e.name)
    except OSError as error:
        raise CorpusError(
            f"{directory} cannot be read",
            found=error.strerror or str(error),
            expected="a directory that can be listed: its files would be missing from the corpus",
            action=f"check: ls -ld {directory}",
        ) from error


def _parts(pattern: str) -> tuple[str, ...]:
    parts = PurePosixPath(pattern).parts
    if not parts or pattern.startswith("/") or any("**" in part and part != "**" for part in parts):
        raise UsageError(
            "bad --glob",
            found=repr(pattern),
            expected="a pattern of names below the directory, ** alone between two slashes",
            action="correct --glob, for example --glob '**/*.py'",
        )
    return parts


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Whether a path matches, name by name; ``**`` stands for any number of directories."""
    if not pattern or not names:
        return not pattern and not names
    if pattern[0] == "**":
        rest = pattern[1:] or ("*",)
        return any(_matches(names[k:], rest) for k in range(len(names)))
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])
