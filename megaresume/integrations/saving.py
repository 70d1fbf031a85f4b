"""`Save`: a save that has begun, from its marker to its commit, which may come long after."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megaresume.checkpoint.commit import PendingCheckpoint, commit_save
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.manifest import FileEntry

if TYPE_CHECKING:
    from megaresume.integrations.session import Session

__all__ = ["Save"]


class Save:
    """A save that has begun, with everything that its commit will write.

    A host that finishes it later (`defer`) calls `commit` on rank 0 after the last byte of all ranks.
    """

    def __init__(self, session: Session, envelope: Envelope, pending: PendingCheckpoint, began: float) -> None:
        self.envelope, self.pending = envelope, pending
        self.is_deferred = False
        self.rank_files: tuple[FileEntry, ...] = ()
        self.expected: tuple[str, ...] | None = None
        self._session, self._began = session, began

    @property
    def save_dir(self) -> Path:
        """The checkpoint root."""
        return self.pending.save_dir

    @property
    def tag(self) -> str:
        """Name of the tag directory."""
        return self.pending.step.tag

    def defer(self) -> None:
        """The files are written in the background: whoever waits for them commits."""
        self.is_deferred = True

    def commit(self) -> None:
        """Make it count. On rank 0.

        Raises:
            CheckpointError: files are missing or empty, another job writes there, or the disk refuses.
        """
        session = self._session
        origin = None if session.data is None else session.data.origin
        commit_save(
            self.pending,
            expected_files=self.expected,
            beside=self.rank_files,
            origin=origin,
            checksums=session.verify_checkpoint,
        )
        if self.pending.latest:
            session.host.committed(self.save_dir)
        if (copies := session.copies_of(self.save_dir)) is not None:
            copies.submit(self.envelope.iteration, self.tag)
        session.is_saved(self._began)
