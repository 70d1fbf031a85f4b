"""Branches of a run: which save follows which, and which of them were abandoned.

A start names the save that it loaded, and a save the start that made it. So each save has a predecessor:

    loaded nothing   10 a --> 20 a --> 30 a
    loaded 10 a       `-> 15 b --> 25 b         from 15 b on, 20 a and 30 a are abandoned
    loaded 30 a                         `-> 40 c    from 40 c on, 15 b and 25 b are, and 20 a and 30 a no longer

A start alone abandons nothing: only the first checkpoint after it does.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.records.ledger import LedgerEntry, read_ledger
from megaresume.checkpoint.records.names import ledger_path


@dataclass(frozen=True, kw_only=True, slots=True)
class Branch:
    """An abandoned part of the run: a start loaded another save, and its first checkpoint took another branch."""

    #: in the order in which they were abandoned, from 1.
    number: int
    #: the last step that both branches have in common, and the time of the start.
    after: int
    time: str
    #: the last known step of the branch.
    last: int

    def __str__(self) -> str:
        steps = f"steps {self.after + 1} to {self.last}"
        return f"branch {self.number}, {steps}: the start of {self.time} resumed from another save"


class _Ways:
    """The branches of a run, read line by line."""

    def __init__(self, entries: Sequence[LedgerEntry]) -> None:
        self.entries = [entries[line] for line in _by_start(entries)]
        #: for every line, its branch; None if it leads to the present.
        self.branches: list[Branch | None] = [None] * len(entries)
        #: for every line, the line that it follows; -1: it is the first. A start follows the save that it loaded.
        self._before = [-1] * len(entries)
        self._last, self._number = -1, 0
        #: (-iteration, line) of the lines that lead to the present, highest iteration first.
        self._live: list[tuple[int, int]] = []
        #: save -> line.
        self._saved: dict[str | None, int] = {}
        start: int | None = None
        for line, entry in enumerate(self.entries):
            if entry.kind == "durable":
                # A separate, later line: it belongs to the branch of its checkpoint.
                self._before[line] = self._saved.get(_save_of(entry), -1)
                continue
            self._follow(line)
            if entry.kind == "start":
                start = line
            elif entry.kind == "checkpoint":
                if start is not None:
                    self._give_up(start)
                start = None
                self._saved[_save_of(entry)] = line
            heapq.heappush(self._live, (-entry.iteration, line))
            self._last = line
        for line, entry in enumerate(self.entries):
            if entry.kind == "durable" and self._before[line] >= 0:
                self.branches[line] = self.branches[self._before[line]]

    def _follow(self, line: int) -> None:
        """Find the line that a line follows."""
        entry, before = self.entries[line], self._last
        if entry.kind == "start":
            loaded = self._saved.get(_save_of(entry), -1)
            if loaded < 0:  # by other means, or its line is damaged
                there = ((-one, other) for one, other in self._live if -one <= entry.iteration)
                loaded = max(there, default=(0, -1))[1]
            before = loaded
        while before >= 0 and self.entries[before].iteration > entry.iteration:
            before = self._before[before]
        self._before[line] = before

    def _give_up(self, start: int) -> None:
        """Note that a start has saved: lines that do not lead to it no longer lead to the present."""
        entry, back = self.entries[start], list[int]()
        fork = self._before[start]
        while fork >= 0 and self.branches[fork] is not None:
            back.append(fork)
            fork = self._before[fork]
        after = entry.iteration if fork < 0 else self.entries[fork].iteration
        lost: list[int] = []
        while self._live and -self._live[0][0] > after:
            one = heapq.heappop(self._live)[1]
            (lost if one < start else back).append(one)
        if lost:
            self._number += 1
            last = self.entries[lost[0]].iteration
            branch = Branch(number=self._number, after=after, time=entry.time, last=last)
            for line in lost:
                self.branches[line] = branch
        for line in back:
            self.branches[line] = None
            heapq.heappush(self._live, (-self.entries[line].iteration, line))

    def to_present(self) -> Iterator[LedgerEntry]:
        """The last line and those that it follows, backwards."""
        line = self._last
        while line >= 0:
            yield self.entries[line]
            line = self._before[line]


def _by_start(entries: Sequence[LedgerEntry]) -> list[int]:
    """The lines of a ledger, grouped by start. Lines that another machine wrote before it was killed may have been
    added later than those of subsequent starts.
    """
    last, order, starts = -1, list[int](), dict[str | None, int]()
    for line, entry in enumerate(entries):
        start = entry.details.get("start")
        named = start if isinstance(start, str) else None
        if entry.kind == "start":
            starts[named] = last = line
        order.append(last if named is None else starts.get(named, last))
    return sorted(range(len(entries)), key=order.__getitem__)


def _save_of(entry: LedgerEntry) -> str | None:
    """The save that was made, or loaded."""
    save = entry.details.get("loaded" if entry.kind == "start" else "save_id")
    return save if isinstance(save, str) else None


def branches_of(entries: Sequence[LedgerEntry]) -> list[Branch | None]:
    """For every line of a ledger, its branch; None if it leads to the present."""
    found = dict(zip(_by_start(entries), _Ways(entries).branches, strict=True))
    return [found[line] for line in range(len(entries))]


def abandoned_checkpoints(entries: Sequence[LedgerEntry]) -> frozenset[tuple[int, str]]:
    """(iteration, tag) of the checkpoints on abandoned branches that were not saved again since."""
    known: dict[tuple[int, str], bool] = {}
    for entry, branch in zip(entries, branches_of(entries), strict=True):
        if entry.kind == "checkpoint" and entry.tag is not None:
            known[entry.iteration, entry.tag] = branch is not None
    return frozenset(place for place, is_given_up in known.items() if is_given_up)


def saves_given_up(root: Path) -> frozenset[str]:
    """The saves on abandoned branches, by the ledger of a root. Another save of the same step may lead to the present.

    Raises:
        StateError: the ledger cannot be read.
    """
    entries = read_ledger(ledger_path(root)).entries
    saves = zip(entries, branches_of(entries), strict=True)
    given_up = (_save_of(entry) for entry, branch in saves if entry.kind == "checkpoint" and branch is not None)
    return frozenset(save for save in given_up if save is not None)


def saves_of_present(root: Path) -> frozenset[str]:
    """The saves that led to the last line of a ledger: for a start, the one that it loaded, and those before it.

    Raises:
        StateError: the ledger cannot be read.
    """
    way = map(_save_of, _Ways(read_ledger(ledger_path(root)).entries).to_present())
    return frozenset(save for save in way if save is not None)
