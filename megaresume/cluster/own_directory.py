"""`own_directory`: the output directory of the demo or the smoke test."""

from __future__ import annotations

import shutil
from pathlib import Path

from megaresume.stream.errors import UsageError


def own_directory(out: Path, *, mark: str, what: str, overwrite: bool) -> None:
    """Create the directory, empty except for the mark.

    Args:
        out: the directory.
        mark: name of the file that marks the directory as ours.
        what: what fills it, in a word.
        overwrite: remove an earlier output.

    Raises:
        UsageError: it is not empty and must not be removed; it is not a directory, or cannot be created.
    """
    try:
        _make(out, mark, what, overwrite)
    except OSError as error:
        raise UsageError(
            f"cannot make --out {out}",
            found=f"{error.filename or out}: {error.strerror or error}",
            expected="a directory, or a place to make one",
            action="--out ANOTHER",
        ) from error


def _make(out: Path, mark: str, what: str, overwrite: bool) -> None:
    if out.exists() and any(out.iterdir()):
        if not (out / mark).exists():
            raise UsageError(
                "the directory holds something else",
                found=f"{out}, not empty",
                expected=f"an empty directory, or one of an earlier {what}",
                action="--out ANOTHER",
            )
        if not overwrite:
            raise UsageError(
                f"an earlier {what} is there",
                found=f"{out}",
                expected="an empty directory",
                action=f"--overwrite, or --out ANOTHER; its report: {out / 'report.html'}",
            )
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    (out / mark).touch()
