"""`Starter`: records a start in the ledger of every root that the run saves to, before its first save there.

rank 0       checks that the root has no checkpoints that the run did not resume from; settles interrupted commits;
             writes a ledger line; tells the copies where the run begins
each node    with its own directory: the same there, without the ledger
all ranks    make durable what an earlier process left complete but not durable
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megaresume.checkpoint.host import Host
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import release
from megaresume.checkpoint.ranks import on_all_ranks, on_rank_0
from megaresume.checkpoint.records.branches import saves_of_present
from megaresume.checkpoint.records.envelope import DataState
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import Saved, ledger_path
from megaresume.checkpoint.roots import Roots
from megaresume.checkpoint.save.durability import Durability
from megaresume.checkpoint.save.forcing import not_durable
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN, check_fresh_start, record_start, tidy

if TYPE_CHECKING:
    from megaresume.checkpoint.copies.session_copies import Staged


class Starter:
    """Records the start of one process.

    Args:
        host: the trainer.
        roots: the directories of this process.
        durability: makes complete checkpoints durable.
        state_at: returns the state of the data after this many samples.
    """

    def __init__(self, host: Host, roots: Roots, durability: Durability, state_at: Callable[[int], DataState]) -> None:
        self._host, self._roots, self._durability, self._state_at = host, roots, durability, state_at
        #: number of starts in the run's ledger, including this one; None if none is recorded yet.
        self.attempt: int | None = None
        #: optimizer steps and samples at which this process began; None if it has not.
        self._first: tuple[int, int] | None = None
        #: roots whose ledger has this start.
        self._recorded: set[Path] = set()

    def begin_at(self, iteration: int, samples: int) -> None:
        """Set where the process begins, not yet in any ledger: after a load, or when it continues in another root."""
        self._first = iteration, samples
        self._recorded.clear()

    def began_at(self) -> tuple[int, int]:
        """The optimizer steps and samples at which this process began; the current ones if it has not begun."""
        if self._first is None:
            self._first = self._host.iteration(), self._host.samples()
        return self._first

    def record(self, root: Path, choice: Choice | None, *, trains: bool = True) -> None:
        """Record this start in a root, once. Collective.

        Args:
            root: where the run saves.
            choice: what was loaded; None: nothing.
            trains: False: nothing is left to train.

        Raises, on every rank:
            UsageError: nothing was loaded, and the run would overwrite existing checkpoints.
            CheckpointError: the directory cannot be written.
        """
        if root.resolve() in self._recorded:
            return
        copies, parts = self._roots.copies_of(root), self._roots.parts_of(root)
        is_fresh = not self._roots.is_own(root)
        cause = self._host.forgotten if choice is None else f"{choice.tag} was loaded, from {choice.load_dir}"
        iteration, samples = self.began_at()
        topology = self._host.topology()

        def record() -> _Recorded:
            if is_fresh:
                self._check_fresh(root, copies, cause)
            if copies is not None:
                copies.adopt(is_fresh=is_fresh)
            # Settles what a killed save's marker says, before the next save could overwrite it.
            record_start(
                root,
                iteration=iteration,
                state=self._state_at(samples),
                choice=choice,
                topology=topology,
                details=None if trains else {NOTHING_TO_TRAIN: True},
            )
            entries = read_ledger(ledger_path(root)).entries
            saved = [entry.iteration for entry in entries if entry.kind == "checkpoint"]
            if saved and saved[-1] > iteration:  # not true for a start that was refused
                print(f"megaresume: the run goes back: step {saved[-1]} -> {iteration}", flush=True)
            past = frozenset[str]()
            if copies is not None:
                past = saves_of_present(root)
                copies.start(iteration, past)
            elif not trains:
                release(root)  # nothing more is written
            starts = sum(entry.kind == "start" for entry in entries)
            return _Recorded(starts, past, _left(root) if trains else [])

        def follow() -> list[Saved]:
            if parts is None or copies is None or not parts.leads_other:
                return done.left
            if is_fresh:
                check_fresh_start(root, cause=cause, load=self._load(root))
            tidy(root)
            copies.start(iteration, done.past)
            return _left(root) if trains else []

        done = on_rank_0(record)
        left = done.left if parts is None else on_all_ranks(follow)
        for saved in left:  # by a process that was killed before
            self._durability.submit(root, saved)
        self.attempt = done.starts
        self._roots.mark_as_own(root)
        self._recorded.add(root.resolve())

    def _check_fresh(self, root: Path, copies: Staged | None, cause: str) -> None:
        """Check on rank 0 that the root and its copies have no checkpoints of another run."""
        check = functools.partial(check_fresh_start, cause=cause, load=self._load(root))
        if copies is None:
            check(root.resolve())
            return
        with copies.by_name():
            check(root.resolve())
            check(copies.shared)

    def _load(self, root: Path) -> str:
        return self._host.load.format(directory=str(root))


@dataclass(frozen=True, slots=True)
class _Recorded:
    """What rank 0 tells the others about a start."""

    #: number in the run's ledger, including this one.
    starts: int
    #: ids of the saves that the run builds on.
    past: frozenset[str]
    left: list[Saved]


def _left(root: Path) -> list[Saved]:
    """Checkpoints that earlier processes left complete but not durable."""
    return [manifest.saved for manifest in not_durable(root)]
