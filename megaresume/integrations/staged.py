"""The second storage of an engine's checkpoints: checked when the engine is attached, copied to from rank 0.

attach     both are this job's alone; every rank sees the local directory and the shared one
load       whichever holds the newest complete checkpoint
commit     rank 0 hands it to the copying thread
close      rank 0 waits for the copies, for a while; the end of the program does, too
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from megaresume.checkpoint.copying import adopt
from megaresume.checkpoint.lock import release
from megaresume.checkpoint.retention import Retention
from megaresume.checkpoint.staging import PATIENCE, Stager
from megaresume.integrations.claiming import claim_directory, hold_directory
from megaresume.integrations.ranks import on_all_ranks
from megaresume.stream.errors import SetupError, UsageError

__all__ = ["Staged"]

#: seconds that the end of a program waits that an error ended.
_PATIENCE_IN_ERROR = 20.0


class Staged:
    """Copies what an engine saves to a second storage. On all ranks; rank 0 does the work. Collective.

    Args:
        save_dir: where the engine saves: fast storage that every rank sees.
        stage_to: where the copies go: an existing directory.
        retention: which old checkpoints stay, in both.

    Raises, on every rank:
        UsageError: both are the same directory.
        SetupError: a rank does not see one of the two.
        CheckpointError: another job writes to one of the two, or it cannot be written.
    """

    def __init__(self, save_dir: str, stage_to: str | os.PathLike[str], retention: Retention) -> None:
        self.local, self.shared = Path(os.path.abspath(save_dir)), Path(os.path.abspath(stage_to))
        on_all_ranks(self._check_shared)
        # Storage of one node each would hold parts of a checkpoint.
        claim_directory(self.local, action="save to the shared storage itself: remove stage_to (--megaresume-stage-to)")
        hold_directory(self.shared)
        self._stager = Stager(self.local, self.shared, retention)
        self._started = False

    def _check_shared(self) -> None:
        if self.local == self.shared or self.local in self.shared.parents or self.shared in self.local.parents:
            raise UsageError(
                "checkpoints cannot be copied to where they are",
                found=f"saved to {self.local}, copied to {self.shared}",
                expected="two directories, on two storages, neither inside the other",
            )
        if not self.shared.is_dir():
            raise SetupError(
                "the directory that checkpoints are to be copied to is not there",
                found=f"no directory {self.shared} on {os.uname().nodename}",
                expected="an existing directory, so that a storage that is not mounted is no fresh start",
                cause="the first start of a run, or the storage is not mounted on this node",
                action=f"mount it; for a new run: mkdir -p {self.shared}",
            )

    def holds(self, directory: str | os.PathLike[str]) -> bool:
        """Whether a directory is the local one."""
        return Path(os.path.abspath(directory)) == self.local

    def adopt(self) -> None:
        """On rank 0, before the start is recorded."""
        adopt(self.local, self.shared)

    def start(self) -> None:
        """Begin to copy, with what an earlier process left. On rank 0, once; again does nothing."""
        if not self._started:
            self._started = True
            self._stager.start()
            atexit.register(self._at_exit)

    def submit(self, iteration: int, tag: str) -> None:
        """A checkpoint was committed. On rank 0."""
        self._stager.submit(iteration, tag)

    def close(self, timeout: float | None = None) -> None:
        """Wait for the copies, at most so many seconds; what is not copied is said."""
        if self._started:
            atexit.unregister(self._at_exit)
            self._stager.close(PATIENCE if timeout is None else max(timeout, 0.0))
        release(self.shared)

    def _at_exit(self) -> None:
        self._stager.close(PATIENCE if getattr(sys, "last_value", None) is None else _PATIENCE_IN_ERROR)
