"""`Staged`: the second storage of a session. Rank 0 does the work:

    start      check that only this job uses both; every rank sees the local directory and the shared one
    load       whichever has the newest complete checkpoint
    commit     rank 0 passes it to the copying thread
    close      rank 0 waits for the copies for a while; so does the end of the program

The local directory is one that all ranks see: one node, or a fast filesystem of all nodes. If the copies go to an
object store, every node may have its own (`nodes`), and the lowest rank of each does its part of the work:

    start      check that only this job uses each directory
    load       what all nodes hold together, and the store lacks, is copied first; then one checkpoint in the store is
               chosen, and every node downloads what it lacks of it
    commit     every node passes its part to its own copying thread; rank 0's commits when all parts are there
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megaresume.checkpoint.copies.fetch import fetch
from megaresume.checkpoint.copies.places import DirectoryPlace, Place, share_ledger
from megaresume.checkpoint.copies.stager import PATIENCE, Stager, adopt
from megaresume.checkpoint.copies.store_place import NodePlace, StorePlace, place_of
from megaresume.checkpoint.ending import before_end, not_before_end
from megaresume.checkpoint.load.choose import choose_of_two
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import claim_directory, hold_directory, release, say
from megaresume.checkpoint.nodes import Nodes, find_nodes, take_of_each
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, on_rank_0_for_long, world_size
from megaresume.checkpoint.records.candidates import run_of
from megaresume.checkpoint.save.retention import Retention
from megaresume.checkpoint.starts import record_cut_commits
from megaresume.checkpoint.store.mirror import by_name
from megaresume.checkpoint.store.objects import NotAsSavedError, is_store
from megaresume.stream.errors import MegaresumeError, SetupError, UsageError

T = TypeVar("T")

#: seconds that the end of a program waits after an error.
_PATIENCE_IN_ERROR = 20.0


class Staged:
    """Copies the checkpoints of an engine to a second storage. On all ranks; rank 0 does the work. Collective.

    Args:
        save_dir: where the engine saves: fast storage that every rank sees.
        stage_to: where the copies go: an existing directory, or a URL of an object store.
        retention: which old checkpoints to keep, in both.

    Raises, on every rank:
        UsageError: both are the same directory.
        SetupError: a rank does not see one of the two.
        CheckpointError: another job writes to one of the two, or it cannot be written.
    """

    def __init__(self, save_dir: str, stage_to: str | os.PathLike[str], retention: Retention) -> None:
        self.local, self.is_remote = Path(os.path.abspath(save_dir)), is_store(stage_to)
        #: where this rank reads the copies; those in a store are only read on rank 0, see `bring`.
        self.shared = self.local if self.is_remote else DirectoryPlace(stage_to).root
        if not self.is_remote:
            on_all_ranks(self._check_shared)
        #: which ranks share the local directory. Only a store can combine the parts of several nodes.
        self.nodes = Nodes(of_rank=(0,) * world_size(), mine=0)
        if self.is_remote:
            hold_directory(self.local)
            try:
                self.nodes = find_nodes(self.local)
                take_of_each(self.nodes, self.local)
            except MegaresumeError:
                release(self.local)
                raise
        else:
            shared = "save to the shared storage itself: remove stage_to (--megaresume-stage-to)"
            claim_directory(self.local, action=f"{shared}; or stage_to the URL of an object store")
        self.retention = retention
        #: on rank 0; and if every node has its own directory, on the ranks that lead one.
        self.place: Place | None = None
        self.stager: Stager | None = None
        self.is_started = False
        on_rank_0_for_long(lambda beat: self._hold(stage_to, retention, beat), "looked at the copies")
        if self.nodes.are_many:
            on_all_ranks(lambda: self._join(stage_to))

    def _check_shared(self) -> None:
        local, shared = self.local.resolve(), self.shared.resolve()
        if local == shared or local in shared.parents or shared in local.parents:
            raise UsageError(
                "checkpoints cannot be copied to where they are",
                found=f"saved to {self.local}, copied to {self.shared}",
                expected="two directories, on two storages, neither inside the other",
                action="set stage_to to a directory on other storage, or leave it out",
            )
        if not self.shared.is_dir():
            raise SetupError(
                "the directory to copy checkpoints to does not exist",
                found=f"no directory {self.shared} on {os.uname().nodename}",
                expected="an existing directory: storage that is not mounted must not look like a fresh start",
                cause="the first start of a run, or the storage is not mounted on this node",
                action=f"mount it; for a new run: mkdir -p {self.shared}",
            )

    def _hold(self, stage_to: str | os.PathLike[str], retention: Retention, beat: Callable[[], None]) -> None:
        self.place = place_of(stage_to, say)
        self.place.hold(self.local, beat)
        self.shared = self.place.root
        self.stager = Stager(self.local, self.place, retention)
        self._learn(self.shared)

    def _learn(self, root: Path) -> None:
        """Add to the local ledger what other machines have done since."""
        if run_of(self.local) is not None and run_of(self.local) == run_of(root):
            record_cut_commits(self.local)
            share_ledger(root, self.local)

    def _join(self, stage_to: str | os.PathLike[str]) -> None:
        if is_rank_0():
            say(f"{self.nodes.number} nodes save to disks of their own: each copies its part to {stage_to}")
        elif self.nodes.leads:
            self.place = NodePlace(os.fspath(stage_to), say)
            self.place.hold(self.local, lambda: None)
            self._learn(self.place.root)
            self.stager = Stager(self.local, self.place)

    def bring(self, pick: Callable[[], T], passed: dict[Path, str], beat: Callable[[], None]) -> T:
        """Choose from the local storage and a store; a checkpoint in the store is downloaded. On rank 0.

        Args:
            pick: chooses. Any result other than a `Choice` is returned unchanged.
            passed: unreadable tag directories -> the reason; a checkpoint that the store no longer has as it was saved
                is added, and another one chosen.
            beat: called whenever data has arrived.

        Raises:
            CheckpointError: from ``pick``; or a file cannot be written.
            SetupError: the store does not answer, or refuses.
        """
        place = self.place
        assert isinstance(place, StorePlace)
        while True:
            with self.by_name():
                found = pick()
            if not isinstance(found, Choice):
                return found
            rejected = tuple(replace(one, reason=self.named(one.reason)) for one in found.rejected)
            choice = replace(found, rejected=rejected, notes=tuple(map(self.named, found.notes)))
            if choice.load_dir == self.local:
                return choice
            try:
                fetch(place, self.local, choice, beat)
            except NotAsSavedError as error:
                passed[choice.tag_dir] = error.headline
                continue
            print(f"megaresume: {choice.tag} is brought from {place.name}", flush=True)
            return replace(choice, load_dir=self.local)

    def by_name(self) -> contextlib.AbstractContextManager[None]:
        """A context in which errors name the place, not a store's mirror. On rank 0."""
        return by_name(self.shared, str(self.shared) if self.place is None else self.place.name)

    def named(self, words: str) -> str:
        """The text with the name of the place instead of a store's mirror."""
        return words if self.place is None else words.replace(str(self.shared), self.place.name)

    def holds(self, directory: str | os.PathLike[str]) -> bool:
        """Whether a directory is the local one, under any name."""
        return Path(directory).resolve() == self.local.resolve()

    def adopt(self, *, is_fresh: bool) -> None:
        """Check the copies on rank 0, before the start is recorded.

        Args:
            is_fresh: nothing was loaded, and nothing was looked for.

        Raises:
            CheckpointError: ``is_fresh``, and one of the two mentions checkpoints that are no longer complete.
        """
        with self.by_name():
            if is_fresh:
                choose_of_two(self.local, self.shared)
            if (words := adopt(self.local, self.shared)) is not None:
                print(f"megaresume: {self.named(words)}", flush=True)

    def start(self, began: int | None = None, past: frozenset[str] = frozenset()) -> None:
        """Begin to copy, starting with what an earlier process left. On rank 0; again if the run goes back. If every
        node has its own directory, also on the others.

        Args:
            began, past: the step that training begins from, and the saves that led there, see `Stager.start`.
        """
        if self.stager is None:
            return
        if self.is_started:
            self.stager.go_back(began, past)
        else:
            self.is_started = True
            if self.nodes.are_many and is_rank_0():
                with contextlib.suppress(MegaresumeError):  # before the others upload, not during that
                    self.stager.place.begin()
            self.stager.start(began, past)
            before_end(self._at_exit)

    def submit(self, iteration: int, tag: str) -> None:
        """Pass on a checkpoint that was committed. On rank 0."""
        if self.stager is not None:
            self.stager.submit(iteration, tag)

    def close(self, timeout: float | None = None) -> None:
        """Wait a limited time for the copies; log those that are missing."""
        not_before_end(self._at_exit)
        self._close(PATIENCE if timeout is None else max(timeout, 0.0))

    def _close(self, timeout: float) -> None:
        if self.stager is not None and self.is_started:
            self.stager.close(timeout)
        if self.place is not None:
            self.place.release()

    def _at_exit(self) -> None:
        self._close(PATIENCE if getattr(sys, "last_value", None) is None else _PATIENCE_IN_ERROR)
