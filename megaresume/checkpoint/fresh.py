"""A start from step 0 may not save over the checkpoints of another one: a forgotten load looks like that."""

from __future__ import annotations

import os
from pathlib import Path

from megaresume.checkpoint.choose import choose
from megaresume.stream.errors import CheckpointError, UsageError

__all__ = ["check_fresh_start"]


def check_fresh_start(directory: str | os.PathLike[str], *, cause: str, load: str) -> None:
    """Refuse to save to a directory that holds a complete checkpoint which this start did not go on from. Reads only.

    What a kill in the middle of a first save has left is no checkpoint.

    Args:
        directory: the checkpoint root.
        cause: how that happens in this program.
        load: how to go on from it.

    Raises:
        UsageError: it holds one.
    """
    try:
        choice = choose(directory)
    except CheckpointError:
        return
    if choice is None:
        return
    raise UsageError(
        "this start did not load a checkpoint of this directory, and would save over those that are there",
        found=f"{choice.tag} in {Path(directory).absolute()}",
        expected="a directory that this start has loaded from, or one without checkpoints",
        cause=cause,
        action=f"{load} to go on from it; to start over on purpose, save to another directory, or move this one away",
    )
