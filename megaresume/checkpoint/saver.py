"""`Saver`: writes the files of a checkpoint, then commits it.

rank 0       the marker: until the commit, it marks the tag directory as incomplete
all ranks    each rank's files beside the checkpoint; then the host writes its model files
rank 0       the commit: manifest, pointers, ledger. For a deferred `Save`, by whoever waits for its files
background   makes files durable, removes older checkpoints, makes copies

If each node has its own directory, the leader of every node does what rank 0 does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from megaresume.checkpoint.file_errors import writing
from megaresume.checkpoint.host import Data, Host, Loaded
from megaresume.checkpoint.lock.lock import take
from megaresume.checkpoint.random_state import RandomState
from megaresume.checkpoint.ranks import gather, on_rank_0, written_by_all
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.names import manifest_path, same_place, step_path
from megaresume.checkpoint.records.step_file import read_step_file
from megaresume.checkpoint.roots import Roots
from megaresume.checkpoint.save.commit import PendingCheckpoint, begin_save, commit_save
from megaresume.checkpoint.save.durability import Durability
from megaresume.checkpoint.save.retention import KEEP_ALL, Retention, make_room
from megaresume.checkpoint.save.retries import Retries
from megaresume.checkpoint.starts import give_up
from megaresume.checkpoint.stopping import Stopper
from megaresume.checkpoint.system import Topology

T = TypeVar("T")

#: most bytes of a checkpoint whose checksums its commit computes, from memory: about 20 ms. Others follow later.
SUMMED_AT_ONCE = 64 << 20


class Save:
    """A save that has begun, with everything that its commit will write.

    A host that finishes it later (`defer`) calls `commit` on rank 0 once all ranks have written their files.
    """

    def __init__(self, saver: Saver, envelope: Envelope, data: Data, pending: PendingCheckpoint, began: float) -> None:
        self.envelope, self.pending = envelope, pending
        self.is_deferred = False
        #: the result of the host's writer.
        self.result: Any = None
        #: the files that every rank wrote beside the tag directory.
        self.rank_files: tuple[FileEntry, ...] = ()
        #: each rank's files in the tag directory, and all files under this root; None if unknown.
        self.files_of_ranks: list[Sequence[str] | None] = []
        self.expected: tuple[str, ...] | None = None
        #: this node's part, if every node has its own directory: see `Manifest.part`.
        self.part: tuple[int, int] | None = None
        #: start by the monotonic clock, in seconds.
        self.began = began
        self._saver, self._data = saver, data

    @property
    def save_dir(self) -> Path:
        """The checkpoint root."""
        return self.pending.save_dir

    @property
    def tag(self) -> str:
        """Name of the tag directory."""
        return self.pending.record.tag

    @property
    def tag_dir(self) -> Path:
        """The tag directory."""
        return self.pending.tag_dir

    @property
    def save_id(self) -> str:
        """The id of this save."""
        return self.pending.record.save_id

    @property
    def compare_frozen(self) -> bool:
        """Whether weights that no checkpoint holds are compared at a resume."""
        return self._saver.compare_frozen

    def defer(self) -> None:
        """Leave the commit to whoever waits for the files, which are written in the background."""
        self.is_deferred = True

    def commit(self) -> bool:
        """Commit the save. On rank 0; and before that on the leaders of nodes with their own directory. Returns True.

        Raises:
            CheckpointError: files are missing or empty, another job writes there, or a write fails.
        """
        saver = self._saver
        commit_save(
            self.pending,
            expected_files=self.expected,
            beside=self.rank_files,
            origin=self._data.origin,
            sum_bytes=SUMMED_AT_ONCE if saver.checksums else 0,
            part=self.part,
        )
        if self.pending.marker.latest:
            saver.host.committed(self.save_dir)
        if (copies := saver.roots.copies_of(self.save_dir)) is not None:
            copies.submit(self.envelope.iteration, self.tag)
        saver.on_commit(self)
        return True


class Saver:
    """Saves checkpoints, for one session.

    Args:
        host: the trainer.
        roots: the directories of this process, with their copies.
        durability: makes complete checkpoints durable.
        random: the generators of this rank, notified of every save (`RandomState.saving`); None if the framework saves
            them itself.
        retention: which older checkpoints to keep.
        checksums: compute checksums of all files.
        compare_frozen: see `Save.compare_frozen`.
        retries: what to do if a save fails for a reason that may pass.
        stopper: knows when the run is to stop, if it listens for that.
        on_commit: called for every committed save, where it is committed.
    """

    def __init__(
        self,
        host: Host,
        roots: Roots,
        durability: Durability,
        *,
        random: RandomState | None,
        retention: Retention,
        checksums: bool,
        compare_frozen: bool,
        retries: Retries,
        stopper: Callable[[], Stopper | None],
        on_commit: Callable[[Save], None],
    ) -> None:
        self.host, self.roots, self.durability, self.checksums = host, roots, durability, checksums
        self.on_commit, self.compare_frozen = on_commit, compare_frozen
        self._random, self._retention, self._retries, self._stopper = random, retention, retries, stopper

    def save(
        self,
        root: Path,
        envelope: Envelope,
        write: Callable[[Save], Any],
        *,
        data: Data,
        tag: str,
        latest: bool,
        tracker: bool,
        before: Callable[[], None],
    ) -> Save | None:
        """Save a checkpoint; commit it, unless it is deferred. Collective.

        Args:
            root: the checkpoint root.
            envelope: the state of the data.
            write: see `Session.save`.
            data: the data being trained on.
            tag, latest, tracker: see `Session.save`.
            before: called first, once the lock of the root is held.

        Returns:
            the save; None if it failed, and the run is to continue.
        """

        def write_once() -> Save:
            began = time.monotonic()
            self.roots.claim(root)
            before()
            self.roots.on_nodes(root, prepare)
            pending = self._announce(root, envelope, tag, latest=latest, tracker=tracker)
            save = Save(self, envelope, data, pending, began)
            parts = self.roots.parts_of(root)
            nodes = None if parts is None else parts.nodes
            save.part = None if nodes is None else nodes.part
            save.rank_files = written_by_all(write_rank_files, None if nodes is None else nodes.ranks)
            save.files_of_ranks = gather(self.host.expected_files(root, tag))
            here = [names for number, names in enumerate(save.files_of_ranks) if nodes is None or number in nodes.ranks]
            if None not in here:
                save.expected = tuple(sorted({name for names in here for name in names or ()}))
            with writing(root / tag):
                save.result = write(save)
            return save

        def prepare() -> None:
            take(root)  # held since the start, unless the session was closed in the meantime
            self.durability.wait_for(root, tag)
            make_room(root, envelope.iteration, tag)

        def write_rank_files() -> tuple[FileEntry, ...]:
            files = data.write_files(root, envelope.iteration, tag)
            if self._random is None:
                return files
            return (*files, self._random.write(root, envelope.iteration, tag))

        save = self._with_retries(write_once, root, envelope.iteration, tag)
        if save is None:
            return None
        if not save.is_deferred:
            gather(None)  # all ranks have written
            if not self.commit(save):
                return None
        self.durability.submit(
            root,
            save.pending.record.saved,
            expected=save.files_of_ranks,
            # With copies, old ones are removed after they are copied.
            retention=self._retention if self.roots.copies_of(root) is None else KEEP_ALL,
        )
        return save

    def commit(self, save: Save) -> bool:
        """Commit a save whose files are written. Only the commit is retried: a host's pointer may already name the
        files.

        Returns:
            whether it was committed; False: it failed, and the run is to continue (see `Retries`).

        Raises, on every rank:
            CheckpointError: see `Save.commit`.
        """
        root, record = save.save_dir, save.pending.record
        parts = self.roots.parts_of(root)

        def commit() -> bool:
            if parts is not None:
                parts.check_files(save.tag_dir)
            return self.roots.on_nodes(root, save.commit)

        return self._with_retries(commit, root, record.iteration, record.tag) is not None

    def _announce(self, root: Path, envelope: Envelope, tag: str, **pointers: bool) -> PendingCheckpoint:
        """Write the marker on rank 0, and on the leaders of other nodes."""
        topology, boots = self.host.topology(), self.durability.machines.boots
        parts = self.roots.parts_of(root)
        pending = on_rank_0(lambda: announce(root, envelope, tag, topology, boots=boots, **pointers))
        return pending if parts is None else parts.join(pending, root, boots=boots)

    def _with_retries(self, attempt: Callable[[], T], root: Path, iteration: int, tag: str) -> T | None:
        stopper, holds_parts = self._stopper(), self.roots.parts_of(root) is not None
        return self._retries.run(
            attempt,
            tag=tag,
            is_last=stopper is not None and stopper.stopping,
            seconds_left=lambda: None if stopper is None else stopper.seconds_left(),
            give_up=lambda: self.roots.on_nodes(root, lambda: give_up(root, iteration, tag, holds_parts=holds_parts)),
        )


def announce(root: Path, envelope: Envelope, tag: str, topology: Topology | None, **kwargs: Any) -> PendingCheckpoint:
    """Write the marker of a save: see `begin_save`. On rank 0."""
    return begin_save(
        root,
        tag=tag,
        iteration=envelope.iteration,
        state=envelope.state,
        framework=envelope.framework,
        topology=topology,
        **kwargs,
    )


def record_loaded(root: Path, loaded: Loaded, *, beside: Sequence[FileEntry], replaces: bool) -> Loaded:
    """Write the records of a loaded checkpoint in the root where the run saves, if a kill or a copy lost them.

    On rank 0, after `Session.resume`: for a host whose framework moves its own pointer, which makes a checkpoint valid.

    Args:
        root: where the run saves; nothing is written if the checkpoint was loaded from elsewhere.
        loaded: the loaded checkpoint.
        beside: files of that save in ``<save>/megaresume``.
        replaces: also replace records of another save of the step.

    Returns:
        the loaded checkpoint with its current records.

    Raises:
        CheckpointError: see `commit_save`.
    """
    envelope, tag = loaded.envelope, loaded.choice.tag
    if not same_place(loaded.choice.load_dir, root) or not (root / tag).is_dir():
        return loaded
    path = step_path(root, envelope.iteration, tag)
    if path.exists() and manifest_path(root, envelope.iteration, tag).exists():
        record = read_step_file(path, iteration=envelope.iteration, tag=tag)
        if record.state == envelope.state or not replaces:
            return loaded
    pending = announce(root, envelope, tag, loaded.topology, latest=False, tracker=False)
    commit_save(pending, beside=beside)
    return replace(loaded, choice=replace(loaded.choice, record=pending.record))
