"""The beginning of a run in the directory that it saves to: nobody else's, and the same on every node."""

from __future__ import annotations

import os

from megaresume.checkpoint.lock import release, take
from megaresume.integrations.ranks import is_rank_0, on_rank_0
from megaresume.integrations.shared import check_shared
from megaresume.stream.errors import MegaresumeError

__all__ = ["claim_directory", "hold_directory"]


def claim_directory(directory: str | os.PathLike[str], *, action: str | None = None) -> None:
    """Take the lock on rank 0, and see that all ranks see it there. Collective; before anything is loaded.

    Args:
        directory: the checkpoint root.
        action: what to do where it is not shared; None: mount it.

    Raises, on every rank:
        CheckpointError: another job writes there, or rank 0 cannot.
        SetupError: a node does not see it.
    """
    # In this order: what another start clears away must not be the file that this one's ranks look for.
    hold_directory(directory)
    try:
        check_shared(directory, action=action)
    except MegaresumeError:
        if is_rank_0():
            release(directory)
        raise


def hold_directory(directory: str | os.PathLike[str]) -> None:
    """Take the lock on rank 0. Collective.

    Raises, on every rank:
        CheckpointError: another job writes there, or rank 0 cannot.
    """

    def hold() -> None:
        take(directory)

    on_rank_0(hold)
