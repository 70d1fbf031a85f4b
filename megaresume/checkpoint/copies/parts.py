"""Checkpoints in parts: every node saves to its own directory, and they only share an object store.

    save     rank 0 announces it, and so does the leading rank of each other node there; if no two nodes have written
             different files with one name, each commits its part, rank 0 last: from then on all parts are complete
    copy     every node's thread uploads its part, then its manifest; rank 0's commits the checkpoint of all parts in
             the store: from then on it is valid (`places`)
    load     what the nodes hold together, and the store lacks, is copied first. Then one checkpoint in the store is
             chosen, and every node downloads, once, what it lacks of it
    old ones are removed once rank 0 no longer has them

A node that dies in between leaves an invalid checkpoint, which is removed when there is a newer one. The ranks never
need to meet in a thread: the objects in the store tell which parts exist.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from megaresume.checkpoint.copies.fetch import fetch
from megaresume.checkpoint.copies.places import missing_lines
from megaresume.checkpoint.copies.session_copies import Staged
from megaresume.checkpoint.copies.stager import committed_in, remove_soon, stage
from megaresume.checkpoint.copies.store_place import StorePlace, join_files
from megaresume.checkpoint.load.choose import different_runs_error
from megaresume.checkpoint.load.search import Choice, Search
from megaresume.checkpoint.ranks import (
    gather,
    is_rank_0,
    known_to_all,
    on_all_ranks,
    on_all_ranks_for_long,
    on_rank_0,
    on_rank_0_for_long,
)
from megaresume.checkpoint.records.branches import saves_given_up
from megaresume.checkpoint.records.candidates import Candidate, examine, list_candidates, run_of
from megaresume.checkpoint.records.ledger import add_lines
from megaresume.checkpoint.records.manifest import FileEntry, checksum_files, list_files, read_manifest
from megaresume.checkpoint.records.names import Saved, ledger_path, manifest_path, marker_path
from megaresume.checkpoint.records.rank_files import remove_orphans
from megaresume.checkpoint.save.commit import PendingCheckpoint, join_save
from megaresume.checkpoint.store.objects import NotAsSavedError
from megaresume.files import read_error
from megaresume.stream.errors import CheckpointError, MegaresumeError, listed

log = logging.getLogger(__name__)

T = TypeVar("T")


class Parts:
    """Handles the parts of checkpoints. On all ranks; the ranks that lead a node do the work.

    Args:
        copies: of a job whose nodes have their own directories.
    """

    def __init__(self, copies: Staged) -> None:
        self.copies, self.nodes, self.local = copies, copies.nodes, copies.local

    def on_nodes(self, function: Callable[[], T]) -> T:
        """Run on the leading rank of each node, rank 0 last; every rank gets rank 0's result, or its error."""
        on_all_ranks(lambda: function() if self.leads_other else None)
        return on_rank_0(function)

    def bring(
        self,
        pick: Callable[[], T],
        passed: dict[Path, str],
        needs: Callable[[Choice], Collection[str] | None] | None = None,
    ) -> T:
        """Like `Staged.bring`, to every node. Collective.

        Args:
            pick, passed: see there.
            needs: the files of a choice that this rank reads; None: all.

        Raises, on every rank:
            CheckpointError: from ``pick``; or a file cannot be written.
            SetupError: the store does not answer, or refuses.
        """
        if not on_rank_0(lambda: self.copies.is_started):
            self._complete_newest()
        while True:
            found = on_rank_0_for_long(lambda _: self._picked(pick), "looked at the copies")
            if found is None:
                self._check_nothing_held()
            if not isinstance(found, Choice):
                return found
            doing = "brought a checkpoint from the store"
            asked = gather(on_all_ranks(lambda: None if needs is None else needs(found)))  # noqa: B023
            here = [asked[number] for number in self.nodes.ranks]
            files = None if None in here else frozenset(name for names in here for name in names)
            words = gather(on_all_ranks_for_long(lambda beat: self._bring_here(found, files, beat), doing))  # noqa: B023
            wrong = next((number for number, one in enumerate(words) if one), None)
            if wrong is None:
                return replace(found, load_dir=self.local)
            passed[found.tag_dir] = f"rank {wrong}: {words[wrong]}"

    def _check_nothing_held(self) -> None:
        """Refuse a fresh start next to checkpoints on other nodes' disks. Collective."""
        candidates = list_candidates(self.local) if self.nodes.leads else []
        there = [candidate.tag for candidate in candidates if candidate.has_dir and not candidate.unfinished]
        hosts = gather((self.nodes.mine, os.uname().nodename, there))
        held = [f"{listed(tags, 3)} on node {node}, {host}" for node, host, tags in hosts if tags]
        if held:
            raise known_to_all(
                CheckpointError(
                    "the nodes hold checkpoints of which other parts are nowhere",
                    found=f"in {self.local}: {listed(held, 5, '; ')}; none on node 0, and none in {self._url}",
                    expected="all parts of one on the disks of this start's nodes, or a copy of it",
                    cause="the disk of a node was lost or emptied before its part was copied, or another machine took "
                    "its place",
                    action=f"start on the machines that saved them; to start over, empty {self.local} on every node",
                )
            )

    @property
    def _url(self) -> str:
        return "the store" if self.copies.place is None else self.copies.place.name

    def _picked(self, pick: Callable[[], T]) -> T:
        with self.copies.by_name():
            found = pick()
        if not isinstance(found, Choice):
            return found
        # The local directory only has parts, so nothing is loaded from there.
        rejected = [
            replace(r, reason=self.copies.named(r.reason)) for r in found.rejected if r.iteration != found.iteration
        ]
        notes = tuple(self.copies.named(note) for note in found.notes if str(self.local) not in note)
        return replace(found, rejected=tuple(rejected), notes=notes)

    def _bring_here(self, found: Choice, files: frozenset[str] | None, beat: Callable[[], None]) -> str:
        """Why a checkpoint cannot be downloaded to this node's directory; "": it is there."""
        if not self.nodes.leads or found.record is None:
            return ""
        place = self.copies.place
        assert isinstance(place, StorePlace)
        record, path = found.record, manifest_path(place.root, found.record.iteration, found.tag)
        if not is_rank_0():  # only rank 0 writes the records
            place.mirror.refresh()
        if not path.is_file() or (manifest := read_manifest(path)).save_id != record.save_id:
            return f"{place.name} does not hold it as a whole"
        some = tuple(entry for entry in manifest.files if files is None or entry.path in files)
        if len(some) < len(manifest.files):
            manifest = replace(manifest, files=some, part=self.nodes.part)
        if run_of(self.local) not in (None, record.run):
            raise different_runs_error(self.local, run_of(self.local), place.name, record.run)
        try:
            fetch(place, self.local, replace(found, load_dir=place.root, manifest=manifest), beat)
        except NotAsSavedError as error:
            return error.headline
        if is_rank_0():
            print(f"megaresume: {found.tag} is brought from {place.name} to {self.nodes.number} nodes", flush=True)
        return ""

    def _complete_newest(self) -> None:
        """Copy the newest valid checkpoint that the nodes hold together, if newer than the store's. Collective."""
        parts = gather(_parts(self.local) if self.nodes.leads else {})
        told = gather(on_all_ranks(lambda: self._told() if self.leads_other else (None, [])))
        together, newest = on_rank_0(lambda: self._together(parts, told))
        if isinstance(self.copies.place, StorePlace):
            self.copies.place.together = frozenset(save.save_id for save in together)
        if newest is None:
            return

        def copy(beat: Callable[[], None], *, is_mine: bool) -> str:
            place = self.copies.place
            if place is None or not is_mine:
                return ""
            try:
                step = newest.iteration
                stage(self.local, place, step, newest.tag, gives_way=lambda: _never(beat), goal=step)
            except (MegaresumeError, OSError) as error:
                return str(error)
            return ""

        others = on_all_ranks_for_long(lambda beat: copy(beat, is_mine=not is_rank_0()), "copied its part")
        wrong = [words for words in gather(others) if words]
        wrong = wrong or [on_rank_0_for_long(lambda beat: copy(beat, is_mine=True), "copied a checkpoint")]
        if any(wrong) and is_rank_0():
            log.warning("megaresume: %s could not be copied: %s", newest.tag, wrong[0])

    def _told(self) -> tuple[str | None, list[bytes]]:
        """Ledger lines of this node, which may have been rank 0's, that the store lacks; and its run."""
        assert self.copies.place is not None
        return run_of(self.local), missing_lines(self.local, self.copies.place.root)

    def _together(
        self, parts: Sequence[Mapping[Saved, tuple[int, int]]], told: Iterable[tuple[str | None, list[bytes]]]
    ) -> tuple[list[Saved], Saved | None]:
        """Complete checkpoints of all nodes on the current branch; and which one to copy first. On rank 0."""
        place = self.copies.place
        assert isinstance(place, StorePlace)
        ledger, own = ledger_path(self.local), run_of(self.local)
        for run, lines in told:
            if run == own and ledger.exists():  # otherwise the nodes hold nothing together
                add_lines(ledger, lines)
        given_up, head = saves_given_up(self.local), place.lease.head
        together = [
            save
            for save, (_, nodes) in parts[0].items()
            if _is_whole(save, nodes, parts) and save.save_id not in given_up
        ]
        named = Search(self.local, None, None, checksums=False, progress=None).named_by_pointers()
        done = {saved.save_id for saved in (*head.saves, *head.removed)}
        newest = max(
            (save for save in together if named is None or self._is_of_present(save, named)),
            key=lambda save: save.iteration,
            default=None,
        )
        if newest is None or newest.save_id in done:
            return together, None
        is_older = any(s.iteration > newest.iteration and s.save_id not in given_up for s in head.saves)
        return together, None if is_older else newest

    def _is_of_present(self, save: Saved, named: Candidate) -> bool:
        """Whether the pointers lead to a save, or a kill came before they were moved to it: the rule of `search`."""
        return save.iteration <= named.order or marker_path(self.local, save.iteration, save.tag).exists()

    @property
    def leads_other(self) -> bool:
        """Whether this rank leads a node other than rank 0's."""
        return self.nodes.leads and not is_rank_0()

    def join(self, pending: PendingCheckpoint, root: Path, *, boots: Iterable[str]) -> PendingCheckpoint:
        """Announce a save on the other nodes, and remove there what rank 0 no longer keeps. Collective.

        Args:
            pending: that of rank 0.
            root: the local directory.
            boots: of this node's machine.

        Returns:
            the same save, for this node.

        Raises, on every rank:
            CheckpointError: a directory cannot be written, or has another owner by now.
        """
        kept = on_rank_0(lambda: [(iteration, candidate.tag) for iteration, candidate in committed_in(root)])

        mine = replace(pending, save_dir=root, marker=replace(pending.marker, boots=tuple(boots)))

        def announce() -> None:
            if self.leads_other:
                self._follow(kept, mine.record.iteration)
                join_save(mine)

        on_all_ranks(announce)
        return mine

    def check_files(self, tag_dir: Path) -> None:
        """Check, before the commit, that the parts of all nodes can become one checkpoint. Collective.

        Only files that several nodes have written are read.

        Raises, on every rank:
            CheckpointError: nodes have written different files with the same name, or a file cannot be read.
        """
        mine = on_all_ranks(lambda: _files(tag_dir) if self.nodes.leads else ())
        times = Counter(entry.path for files in gather(mine) for entry in files)
        several = [entry for entry in mine if times[entry.path] > 1]
        if len(times) == times.total():
            return
        read = gather(on_all_ranks(lambda: _summed(tag_dir, several)))
        parts = {node: read[self.nodes.of_rank.index(node)] for node in range(self.nodes.number)}
        try:
            join_files(tag_dir.name, parts)
        except CheckpointError as error:
            raise known_to_all(error) from None

    def _follow(self, kept: Iterable[tuple[int, str]], before: int) -> None:
        """Delete the checkpoints here before a step that rank 0 no longer keeps."""
        if not self.copies.retention:
            return
        known = set(kept)
        for iteration, candidate in committed_in(self.local):
            if iteration < before and (iteration, candidate.tag) not in known:
                remove_soon(self.local, candidate.tag)
        remove_orphans(self.local)


def _never(beat: Callable[[], None]) -> bool:
    beat()
    return False


def _files(tag_dir: Path) -> tuple[FileEntry, ...]:
    """The files of this node's part; a node may have nothing to save."""
    try:
        return list_files(tag_dir)
    except (FileNotFoundError, NotADirectoryError):
        return ()
    except OSError as error:
        raise read_error(tag_dir, error) from error


def _summed(tag_dir: Path, entries: Sequence[FileEntry]) -> tuple[FileEntry, ...]:
    """The same files, with checksums."""
    sums = checksum_files(tag_dir, [entry.path for entry in entries])
    for path, checksum in sums.items():
        if isinstance(checksum, OSError):
            raise read_error(tag_dir / path, checksum) from checksum
    return tuple(replace(entry, checksum=str(sums[entry.path])) for entry in entries)


def _parts(root: Path) -> dict[Saved, tuple[int, int]]:
    """The parts of checkpoints on this node; on rank 0 also whole ones, from when it was the only node."""
    found: dict[Saved, tuple[int, int]] = {}
    for _, candidate in committed_in(root):
        one = examine(root, candidate)
        if one.record is None or one.manifest is None or not one.is_settled:
            continue
        part = one.manifest.part or ((0, 1) if is_rank_0() else None)
        if part is not None:
            found[one.record.saved] = part
    return found


def _is_whole(save: Saved, nodes: int, parts: Iterable[Mapping[Saved, tuple[int, int]]]) -> bool:
    return {some[save][0] for some in parts if save in some} == set(range(nodes))
