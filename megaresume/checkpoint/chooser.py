"""`Chooser`: what all ranks load. Rank 0 decides, and every rank checks that it sees the same.

rank 0   `choose` in the root, and in its copies; a checkpoint that is only in the store is fetched
all      `confirm_choice`: the files that this rank would read are those of the choice
all      checksums of the choice; a damaged one is skipped, and rank 0 decides again
"""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from megaresume.checkpoint.host import Host, ReadsSome
from megaresume.checkpoint.load.choose import choose, choose_of_two, confirm_choice
from megaresume.checkpoint.load.damage import compared, find_damage
from megaresume.checkpoint.load.search import Choice, ForeignCheckpoint
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, on_rank_0, on_rank_0_for_long
from megaresume.checkpoint.records.names import records_dir
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.replay import Replay
from megaresume.checkpoint.roots import Roots
from megaresume.checkpoint.save.retention import has_older
from megaresume.checkpoint.starts import restore_if_unlocked, restore_older

log = logging.getLogger(__name__)

#: decides what to load, given the place of the copies, and the tag directories that could not be read, with reasons.
#: None if there is no checkpoint at all.
Pick = Callable[[Path | None, Mapping[Path, str]], Choice | ForeignCheckpoint | None]


class Chooser:
    """Chooses what all ranks load.

    Args:
        host: the trainer; it may need only some files of a checkpoint (`ReadsSome`).
        roots: the directories of this process, with their copies.
        replay: the steps to repeat: their checkpoint is chosen, whatever else is requested.
        checksums: compare the files' checksums with the manifest.
    """

    def __init__(self, host: Host, roots: Roots, replay: Replay | None, *, checksums: bool) -> None:
        self._host, self._roots, self._replay, self._checksums = host, roots, replay, checksums

    def choose(
        self, load_dir: str | os.PathLike[str], pick: Pick | None, damaged: Mapping[Path, str]
    ) -> tuple[Choice | None, StepFile | None]:
        """Choose, on every rank: see `Session.choose`."""
        root = on_all_ranks(lambda: self._roots.named(load_dir if self._replay is None else self._replay.source))
        passed = dict(damaged)
        while True:
            found, place = self._decide(root, self._pick(root, pick), passed)
            if isinstance(found, ForeignCheckpoint):
                return None, None
            # Each rank looks at its own path: that may be another mount, or show files that rank 0's does not.
            choice = None if found is None else replace(found, load_dir=place)
            beside = on_all_ranks(functools.partial(confirm_choice, place, choice))
            if choice is None or (reason := self._damage(root, choice)) is None:
                break
            passed[choice.tag_dir] = reason
        if choice is None:
            self._roots.mark_as_own(root)
        if is_rank_0():
            self._tell(root, choice)
        return choice, beside

    def _pick(self, root: Path, pick: Pick | None) -> Pick:
        if (replay := self._replay) is not None:
            return lambda _, damaged: choose(replay.source, tag=replay.tag, damaged=damaged)
        if pick is not None:
            return pick
        return lambda shared, damaged: (
            choose(root, damaged=damaged) if shared is None else choose_of_two(root, shared, damaged=damaged)
        )

    def _decide(
        self, root: Path, pick: Pick, passed: dict[Path, str]
    ) -> tuple[Choice | ForeignCheckpoint | None, Path]:
        """The choice, on every rank as rank 0 names it, and the root that contains it, as this rank names it."""
        copies, parts = self._roots.copies_of(root), self._roots.parts_of(root)
        roots = [root] if copies is None else [root, copies.shared]

        def on_disks() -> tuple[Choice | ForeignCheckpoint | None, int]:
            self._put_back(root)
            found = pick(None if copies is None else copies.shared, passed)
            return found, roots.index(found.load_dir) if isinstance(found, Choice) else 0

        if copies is None or not copies.is_remote:
            found, number = on_rank_0(on_disks)
            return found, roots[number]
        if parts is not None:
            needs = self._host.needed_files if isinstance(self._host, ReadsSome) else None
            return parts.bring(lambda: pick(copies.shared, passed), passed, needs), root

        def in_store(beat: Callable[[], None]) -> Choice | ForeignCheckpoint | None:
            self._put_back(root)
            return copies.bring(lambda: pick(copies.shared, passed), passed, beat)

        return on_rank_0_for_long(in_store, "brought a checkpoint from the store"), root

    def _put_back(self, root: Path) -> None:
        """Restore an older checkpoint that a killed save moved aside."""
        if self._roots.holds_lock_of(root):
            restore_older(root)
        elif self._replay is None and has_older(root):
            restore_if_unlocked(root)

    def _damage(self, root: Path, choice: Choice) -> str | None:
        """Why the choice cannot be read; None if it can. What a node fetched was verified on the way."""
        is_compared = self._roots.parts_of(root) is not None
        return None if is_compared or not self._checksums else find_damage(choice)

    def _tell(self, root: Path, choice: Choice | None) -> None:
        if choice is None:
            print(f"megaresume: nothing is loaded: no checkpoint in {root}", flush=True)
            if (earlier := run_of_another_time(root)) is not None:
                log.warning(
                    "megaresume: a run is in %s: if this start was to resume it, give every start the same directory, "
                    "without a time in its name",
                    earlier,
                )
            return
        for line in (*(f"passed over {rejected}" for rejected in choice.rejected), *choice.notes):
            log.warning("megaresume: %s", line)
        if self._checksums and choice.manifest is not None:
            print(f"megaresume: {compared(choice.tag, choice.manifest)}", flush=True)


def run_of_another_time(root: Path) -> Path | None:
    """The newest directory with a run's records whose name differs only in digits, if these may be a time."""
    shape = re.sub(r"\d", "0", root.name)
    if shape.count("0") < len("20261231"):
        return None
    try:
        beside = [path for path in root.parent.iterdir() if re.sub(r"\d", "0", path.name) == shape and path != root]
    except OSError:
        return None
    return max((path for path in beside if records_dir(path).is_dir()), key=lambda path: path.name, default=None)
