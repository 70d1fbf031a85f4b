"""`Run`: a directory of checkpoints and its records. Each part is read on first use, and cached.

    pointers, candidates        by their names alone
    choice, examine, newest     whether each is complete, and which one a resume takes
    ledger, states              what was recorded
    history                     the path from the first sample to the present

``inspect``, ``latest``, ``plan``, ``trace``, ``verify``, ``report`` and ``doctor`` all begin here.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

from megaresume.checkpoint.load.search import Choice, Search
from megaresume.checkpoint.lock.lock import Holder, holder_of
from megaresume.checkpoint.records.candidates import Candidate, Examined, resolve_pointer, run_of
from megaresume.checkpoint.records.ledger import LedgerReading, read_ledger
from megaresume.checkpoint.records.names import ledger_path, parse_record_name, records_dir
from megaresume.checkpoint.records.pointers import Pointer, read_pointers
from megaresume.checkpoint.records.step_file import StepFile, read_step_file
from megaresume.files import is_leftover
from megaresume.runs.history import History, read_history
from megaresume.stream.errors import MegaresumeError, NewerFormatError, StateError, UsageError
from megaresume.stream.progress import Progress

#: states kept in memory, as a binary search returns to a few of them.
_KEPT_STATES = 64


class Run:
    """A directory of checkpoints and its records. Reads only, and unpickles nothing.

    Args:
        root: what ``--save`` named.
        tag: the checkpoint that a resume was told to take; None: the newest complete one.
        checksums: read every file that has a checksum in its manifest, not only its size.
        progress: for checksums: called with the bytes just read, from several threads.

    Raises:
        UsageError: no such directory. One that cannot be listed is a CheckpointError, on first use.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        tag: str | None = None,
        *,
        checksums: bool = False,
        progress: Progress | None = None,
    ) -> None:
        #: the directory, absolute.
        self.root = Path(os.path.abspath(root))
        if not self.root.is_dir():
            raise UsageError(
                "no such directory",
                found=f"{root} is a file" if self.root.exists() else str(root),
                expected="the directory where a run saves its checkpoints",
                action="check the path",
            )
        self.tag, self.checksums, self._progress = tag, checksums, progress
        #: why the run's identity is unknown.
        self._nameless: StateError | None = None
        self._states: dict[Path, StepFile] = {}

    @cached_property
    def _search(self) -> Search:
        name = None
        try:
            name = run_of(self.root)
        except StateError as error:
            self._nameless = error
        search = Search(self.root, name, self.tag, checksums=self.checksums, progress=self._progress)
        search.pointers = self.pointers
        with contextlib.suppress(StateError):
            search.ledger = self.ledger
        return search

    @cached_property
    def pointers(self) -> tuple[Pointer, Pointer]:
        """What ``latest`` and the tracker name."""
        return read_pointers(self.root)

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Everything that may be a checkpoint, newest first, by name alone."""
        return self._search.candidates

    @cached_property
    def ledger(self) -> LedgerReading:
        """Every checkpoint and every start, in order.

        Raises:
            StateError: it cannot be read, or was written by a newer megaresume.
        """
        return read_ledger(self.ledger_path)

    @cached_property
    def _decided(self) -> tuple[Choice | None, MegaresumeError | None]:
        try:
            return self.choose(), None
        except MegaresumeError as error:
            return None, error

    @property
    def choice(self) -> Choice | None:
        """The checkpoint that a resume would load; None if there is none, or it is refused: see ``error``."""
        return self._decided[0]

    @property
    def error(self) -> MegaresumeError | None:
        """Why a resume would be refused; None if it would not."""
        return self._decided[1]

    def choose(self, iteration: int | None = None) -> Choice | None:
        """Choose the checkpoint that a resume would load.

        Args:
            iteration: the one that it was told to take; None: that of the tag, or the newest complete one.

        Raises:
            CheckpointError, StateError: see `megaresume.checkpoint.load.choose`.
        """
        search = self._search
        if self._nameless is not None:
            raise self._nameless
        search.notes, search.examined = [], {}
        if self.tag is not None:
            return search.exactly_tag(self.tag, iteration)
        return search.newest() if iteration is None else search.exactly_iteration(iteration)

    @property
    def resumable(self) -> bool:
        """Whether a resume would find weights *and* their data state."""
        return self.choice is not None and self.choice.state is not None

    def examine(self, candidate: Candidate) -> Examined:
        """Check whether a checkpoint is complete."""
        _ = self._decided  # the choice has the reasons for exactly those checkpoints that it passed over
        try:
            return self._search.examine(candidate)
        except NewerFormatError as error:
            return Examined(candidate=candidate, status="newer", reasons=(f"{error.headline} ({error.found})",))

    @cached_property
    def present(self) -> tuple[Candidate, ...]:
        """The candidates whose weights exist, or were never committed; with a tag, only that one."""
        return tuple(c for c in self._asked_for if c.has_dir or "manifest" not in c.records)

    @property
    def num_pruned(self) -> int:
        """Number of checkpoints whose weights were deleted and whose records were kept."""
        return len(self._asked_for) - len(self.present)

    @property
    def _asked_for(self) -> list[Candidate]:
        return [c for c in self.candidates if self.tag in (None, c.tag)]

    def newest(self, limit: int | None = None) -> Sequence[Examined]:
        """The newest of ``present``, and the one that a resume would load; with None, all."""
        shown = list(self.present[:limit])
        if self.choice is not None:
            shown += [c for c in self.present[len(shown) :] if c.tag == self.choice.tag]
        return [self.examine(candidate) for candidate in shown]

    @property
    def named(self) -> tuple[Examined | None, ...]:
        """The checkpoint that each pointer names; None if it is missing."""
        found = [resolve_pointer(pointer, self.candidates) for pointer in self.pointers]
        return tuple(None if c is None else self.examine(c) for c in found)

    @cached_property
    def states(self) -> tuple[Path, ...]:
        """The files of all data states, by name."""
        found = []
        for path in sorted(records_dir(self.root).glob("step_*.json")):
            name = parse_record_name(path.name)
            if name is not None and name.kind == "state":
                found.append(path)
        return tuple(found)

    def state(self, path: Path) -> StepFile:
        """Read one of ``states``.

        Raises:
            StateError: it is damaged, or (`NewerFormatError`) was written by a newer megaresume.
        """
        if path not in self._states:
            record = read_step_file(path)
            if len(self._states) >= _KEPT_STATES:
                self._states.pop(next(iter(self._states)))
            self._states[path] = record
        return self._states[path]

    @cached_property
    def history(self) -> History:
        """The path from the first sample to the present, without branches that later starts abandoned.

        Raises:
            CheckpointError: no data state can be read.
            NewerFormatError: a record was written by a newer megaresume.
        """
        return read_history(self.root, self.ledger, self.states, self.state)

    def holder(self, *, ask_slurm: bool = False) -> Holder | None:
        """The job that writes here, or was the last to; None if none ever did. See `holder_of`."""
        return holder_of(self.root, ask_slurm=ask_slurm)

    @cached_property
    def leftovers(self) -> tuple[str, ...]:
        """Temporary files of killed writers; harmless."""
        found: list[str] = []
        for directory in (self.root, records_dir(self.root)):
            with contextlib.suppress(OSError):
                names = [name for name in os.listdir(directory) if is_leftover(name)]
                found += [os.path.relpath(directory / name, self.root) for name in names]
        return tuple(sorted(found))

    @property
    def ledger_path(self) -> Path:
        """The path of the ledger."""
        return ledger_path(self.root)
