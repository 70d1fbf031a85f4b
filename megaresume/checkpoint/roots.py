"""The roots of one process, that is, its directories of checkpoints: their names, locks and copies.

A relative path must mean what it did when the run began. Only the job that holds the lock of a root writes there, and a
run saves to no root with checkpoints that it has not resumed from. The lock is the process's: of several runs in it,
the one that took a root last saves there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from megaresume.checkpoint.lock.lock import claim_directory, release
from megaresume.checkpoint.ranks import on_rank_0
from megaresume.checkpoint.save.durability import Durability
from megaresume.checkpoint.save.retention import Retention
from megaresume.checkpoint.starts import restore_older
from megaresume.stream.errors import UsageError

if TYPE_CHECKING:
    from megaresume.checkpoint.copies.parts import Parts
    from megaresume.checkpoint.copies.session_copies import Staged

T = TypeVar("T")


#: by root, the run of this process that took it last.
_takers: WeakValueDictionary[Path, Roots] = WeakValueDictionary()


class Roots:
    """See above.

    Args:
        save_dir: where the run saves, if known beforehand.
        stage_to: where checkpoints in ``save_dir`` are copied to; None: they are not.
        retention: which older copies stay.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] | None, stage_to: str | os.PathLike[str] | None, retention: Retention
    ) -> None:
        #: where the run saves; None if it is not known yet, or another run's.
        self.save_dir = None if save_dir is None else Path(os.path.abspath(save_dir))
        self._stage_to, self._retention = stage_to, retention
        #: the working directory, which relative paths start from.
        self._home = _working_directory()
        self._copies: Staged | None = None
        self._parts: Parts | None = None
        #: whose lock this run holds; that it may save to.
        self._claimed: set[Path] = set()
        self._own: set[Path] = set()

    def start(self, durability: Durability) -> None:
        """Take the lock of `save_dir`, and look where its copies are. On all ranks.

        Raises, on every rank:
            CheckpointError: another job writes there, or it cannot be written.
            SetupError: a node does not see it.
            UsageError: ``stage_to`` is not a place for copies.
        """
        if self.save_dir is None:
            return
        if self._stage_to is None:
            self.claim(self.save_dir)
            return
        # Imported here: a run without copies starts without them, and without object stores.
        from megaresume.checkpoint.copies.parts import Parts
        from megaresume.checkpoint.copies.session_copies import Staged

        self._copies = copies = Staged(os.fspath(self.save_dir), self._stage_to, self._retention)
        self._note_claim(self.save_dir)
        if are_many := copies.nodes.are_many:
            self._parts = Parts(copies)
            durability.separate(copies.nodes)
        self.on_nodes(self.save_dir, functools.partial(restore_older, self.save_dir, holds_parts=are_many))

    def claim(self, root: Path) -> None:
        """Take the lock of a root, if this run does not hold it already. On all ranks."""
        if root.resolve() not in self._claimed:
            claim_directory(root)
            self._note_claim(root)
            on_rank_0(functools.partial(restore_older, root))

    def _note_claim(self, root: Path) -> None:
        self._claimed.add(root.resolve())
        _takers[root.resolve()] = self

    def _is_last(self, root: Path) -> bool:
        """Whether no other run of this process has taken a root since this one did."""
        return _takers.get(root.resolve(), self) is self

    def holds_lock_of(self, root: Path) -> bool:
        """Whether this run has taken the lock of a root."""
        return root.resolve() in self._claimed

    def named(self, directory: str | os.PathLike[str]) -> Path:
        """The root of a directory that the program named for a save or a load.

        Raises:
            UsageError: it is relative, and the working directory is another one than when the run began.
        """
        if not os.path.isabs(directory) and (now := _working_directory()) != self._home:
            before = os.path.abspath(os.path.join(self._home, directory))
            raise UsageError(
                "a relative directory of checkpoints, after the working directory was changed",
                found=f"{os.fspath(directory)!r} in {now}, which is {os.path.abspath(directory)}",
                expected=f"{before}, as when the run began",
                cause="os.chdir; the run would be split over two directories",
                action=f"save and load by the absolute path: {before!r}",
            )
        return Path(os.path.abspath(directory))

    def named_for_save(self, directory: str | os.PathLike[str]) -> Path:
        """As `named`, for a save.

        Raises:
            UsageError: also if it is not the `save_dir` that was given beforehand, or another run of this process has
                taken it since this one did.
        """
        root = self.named(directory)
        if self.save_dir is not None and root.resolve() != self.save_dir.resolve():
            raise UsageError(
                "a checkpoint is saved to another directory than the run's",
                found=str(root),
                expected=str(self.save_dir),
                cause="save_dir, or the trainer's own setting, was changed after the run was attached",
                action=f"save to {str(self.save_dir)!r}; for copies elsewhere: stage_to",
            )
        if self.holds_lock_of(root) and not self._is_last(root):
            raise UsageError(
                "two runs of this program save to one directory",
                found=f"{root}, with which megaresume.attach was called again",
                expected="a directory for each run: the checkpoints of one would replace those of the other",
                cause="two models with a loop each; or one was attached again, and the program goes on with the first",
                action="give each a directory of its own; of a run that is attached again, use what the last call "
                "returned",
            )
        return root

    def copies_of(self, root: Path) -> Staged | None:
        """Where a root is copied to; None if it is not copied."""
        return self._copies if self._copies is not None and self._copies.holds(root) else None

    def parts_of(self, root: Path) -> Parts | None:
        """What each node does with its own root; None if all ranks see the same one."""
        return self._parts if self.copies_of(root) is not None else None

    def on_nodes(self, root: Path, function: Callable[[], T]) -> T:
        """As `on_rank_0`, for what is done to a root: see `Parts.on_nodes`."""
        parts = self.parts_of(root)
        return on_rank_0(function) if parts is None else parts.on_nodes(function)

    def mark_as_own(self, load_dir: str | os.PathLike[str]) -> None:
        """Note that the run resumes from this root, so that it may save there."""
        self._own.add(Path(load_dir).resolve())

    def is_own(self, root: Path) -> bool:
        """Whether the run resumes from this root, or has saved there."""
        return root.resolve() in self._own

    def let_go(self, root: Path) -> None:
        """Let others write to a root."""
        self._claimed.discard(root.resolve())
        if self._is_last(root):
            release(root)

    def close(self, seconds: float | None, *, is_saving: bool) -> None:
        """Finish the copies in this time, and let other jobs write to all of them, unless a save is still written."""
        if self._copies is not None:
            self._copies.close(seconds)
        if not is_saving:
            for directory in filter(self._is_last, self._claimed):
                release(directory)


def _working_directory() -> str:
    """Where relative paths begin; "" if that directory no longer exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
