"""The roots of one process, its directories of checkpoints: their names, locks and copies.

A relative path must mean the same as when the run began. Only the job that holds the lock of a root writes there, and a
run does not save to a root with checkpoints that it has not resumed from. The lock belongs to the process: of several
runs in it, the one that took a root last may save there.
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


#: by root: the run of this process that took it last.
_takers: WeakValueDictionary[Path, Roots] = WeakValueDictionary()


class Roots:
    """The roots of one run.

    Args:
        save_dir: where the run saves, if known in advance.
        stage_to: where checkpoints in ``save_dir`` are copied to; None: nowhere.
        retention: which older copies to keep.
    """

    def __init__(
        self, save_dir: str | os.PathLike[str] | None, stage_to: str | os.PathLike[str] | None, retention: Retention
    ) -> None:
        #: where the run saves; None if unknown so far, or another run's.
        self.save_dir = None if save_dir is None else Path(os.path.abspath(save_dir))
        self._stage_to, self._retention = stage_to, retention
        #: the working directory, which is the base of relative paths.
        self._home = _working_directory()
        self._copies: Staged | None = None
        self._parts: Parts | None = None
        #: roots whose lock this run holds; roots that it may save to.
        self._claimed: set[Path] = set()
        self._own: set[Path] = set()

    def start(self, durability: Durability) -> None:
        """Take the lock of `save_dir`, and find its copies. On all ranks.

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
        # Imported here: a run without copies starts without loading them and object stores.
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
        """The root of a directory that the program gave for a save or a load.

        Raises:
            UsageError: it is relative, and the working directory has changed since the run began.
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
        """Like `named`, for a save.

        Raises:
            UsageError: also if it differs from the `save_dir` given in advance, or another run of this process has
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
        """Like `on_rank_0`, for actions on a root: see `Parts.on_nodes`."""
        parts = self.parts_of(root)
        return on_rank_0(function) if parts is None else parts.on_nodes(function)

    def mark_as_own(self, load_dir: str | os.PathLike[str]) -> None:
        """Record that the run resumes from this root, so that it may save there."""
        self._own.add(Path(load_dir).resolve())

    def is_own(self, root: Path) -> bool:
        """Whether the run resumes from this root, or has saved there."""
        return root.resolve() in self._own

    def let_go(self, root: Path) -> None:
        """Allow others to write to a root."""
        self._claimed.discard(root.resolve())
        if self._is_last(root):
            release(root)

    def close(self, seconds: float | None, *, is_saving: bool) -> None:
        """Finish the copies in this time, and let other jobs write to all roots, unless a save is in progress."""
        if self._copies is not None:
            self._copies.close(seconds)
        if not is_saving:
            for directory in filter(self._is_last, self._claimed):
                release(directory)


def _working_directory() -> str:
    """The base of relative paths; "" if that directory no longer exists."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""
