"""The ledger of prompts: what happened to every ordinal of a run, one line for each state that was taken.

    {"format": "megaresume.prompts", "version": 1, "id": "9f..", "parent": "3c..", "step": 20, "next": 180, "open": 12,
     "trained": {"19": "120:126 128", "20": "127 129:133"}, "dropped": {"stale": "118"}, "staleness": {"0": 40, "1": 8},
     "checksum": "..."}

A line has what was settled since its parent, and a state names its line. So the past of a checkpoint is its line and
that line's ancestors; other lines belong to a part of the run that a crash threw away. Each ordinal below ``next`` is
at one place of a path, trained at a step or dropped for a reason, or one of the ``open`` in flight. ``staleness``:
trained rollouts, by how many versions newer the weights were than those that made them.

A ledger can be added to a run that had none: its first line has in ``before`` which ordinals were settled by then,
about which nothing else is known.

The line is on the disk before the state is handed out: no checkpoint names a missing one.
"""

from __future__ import annotations

import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from megaresume.checkpoint.records.ledger import append_lines
from megaresume.checkpoint.records.sealed import SealError, seal, unseal
from megaresume.files import READABLE, read_file
from megaresume.stream.errors import StateError, UsageError, as_count
from megaresume.stream.skips import union
from megaresume.stream.state import is_version

FORMAT, VERSION = "megaresume.prompts", 1
#: its name, in the directory of a run.
PROMPTS = "prompts.jsonl"
#: the file with the prompts' state in a checkpoint's directory, under trainers that write it there.
STATE = "prompts.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptLine:
    """What was settled between two states."""

    id: str
    #: the line of the state before; None: the start of the run.
    parent: str | None
    #: the last trained step, the next ordinal, and how many below it are in flight.
    step: int
    next: int
    open: int
    trained: Mapping[int, Sequence[int]] = field(default_factory=dict)
    dropped: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: trained rollouts, by versions of the weights.
    staleness: Mapping[int, int] = field(default_factory=dict)
    #: what was settled before the ledger began: ranges, ascending.
    before: Sequence[tuple[int, int]] = ()

    def to_bytes(self) -> bytes:
        """The line, with its newline."""
        fields: dict[str, Any] = {"format": FORMAT, "version": VERSION, "id": self.id, "parent": self.parent}
        fields |= {"step": self.step, "next": self.next, "open": self.open}
        fields["trained"] = {str(step): to_text(ordinals) for step, ordinals in self.trained.items()}
        fields["dropped"] = {reason: to_text(ordinals) for reason, ordinals in self.dropped.items()}
        fields["staleness"] = {str(versions): rollouts for versions, rollouts in self.staleness.items()}
        if self.before:
            fields["before"] = _ranges_text(self.before)
        return seal(fields)


def to_text(ordinals: Iterable[int]) -> str:
    """Ordinals as ranges: ``0:16 18``."""
    return _ranges_text(union((ordinal, ordinal + 1) for ordinal in ordinals))


def _ranges_text(ranges: Iterable[tuple[int, int]]) -> str:
    return " ".join(str(first) if stop == first + 1 else f"{first}:{stop}" for first, stop in ranges)


def from_text(text: str) -> Iterator[int]:
    """The ordinals in ranges. Raises ValueError: these are not ranges."""
    for first, stop in _ranges(text):
        yield from range(first, stop)


def _ranges(text: str) -> Iterator[tuple[int, int]]:
    for one in text.split():
        first, _, stop = one.partition(":")
        yield as_count(int(first)), int(stop) if stop else int(first) + 1


class PromptLedger:
    """The ledger of prompts, written by one process.

    Args:
        path: of the file; created at the first write.

    Raises:
        UsageError: it is a directory, which would otherwise only fail at the first save; or a URL.
    """

    def __init__(self, path: str | Path) -> None:
        if re.match(r"[a-z0-9]+:/", str(path)):  # pathlib leaves one slash of two
            raise UsageError(
                "the ledger of prompts cannot be a URL",
                found=f"ledger={str(path)!r}",
                expected="a file: a line is added to it with every state, and is on the disk before the state is given",
                action="name a local file, and copy it with each checkpoint, after the state: docs/rl.md",
            )
        path = Path(path)
        if path.is_dir():
            raise UsageError(
                "the ledger of prompts is a file",
                found=f"a directory, {path}",
                expected="a path of a file",
                action=f"pass ledger={str(path / PROMPTS)!r}",
            )
        self.path = path
        #: the line of the last state that was taken or loaded.
        self.id: str | None = None
        #: the first line of a ledger that begins in the middle of a run, until it is written.
        self._first: PromptLine | None = None

    def append(self, **fields: Any) -> str:
        """Add the line of a state that is about to be handed out; returns its id. On the disk when this returns.

        Raises:
            CheckpointError: it cannot be written.
        """
        lines = [] if self._first is None else [self._first]
        parent = lines[0].id if lines else self.id
        lines.append(PromptLine(id=secrets.token_hex(8), parent=parent, **fields))
        append_lines(self.path, [line.to_bytes() for line in lines])
        self.id, self._first = lines[-1].id, None
        return self.id

    def check_begins(self) -> None:
        """Check that a run may begin here: no prompt in the ledger was settled. Empty or torn lines do not matter.

        Raises:
            StateError: some were settled, and would be trained again.
        """
        lines = [line for line in PromptHistory.read(self.path).lines.values() if line.trained or line.dropped]
        if lines:
            raise StateError(
                "the ledger has prompts that were trained, and no state was loaded",
                found=f"{self.path}, with {len(lines)} lines of what was trained or dropped, up to step "
                f"{max(line.step for line in lines)}",
                expected="prompts.load_state_dict before the first issue; or a ledger without such lines",
                cause="the state in the checkpoint was not loaded; or the run was killed while it saved its first one",
                action="load the state of the checkpoint; to start afresh, remove the ledger, or name another one",
            )

    def check_has(self, state_id: str) -> None:
        """Check that the ledger has the line of a state, and all lines that lead to it.

        Raises:
            StateError: one is missing.
        """
        history = PromptHistory.read(self.path)
        if state_id not in history.lines and not history.problems:
            raise StateError(
                "the ledger does not know this state of the prompts",
                found=f"{self.path}, without a line {state_id}",
                expected="the ledger that was written when the state was taken",
                cause="the ledger was not copied with the checkpoint, or is another run's",
                action="copy it along; or leave ledger= out: the run continues, without a proof of what came before",
            )
        history.path_to(state_id)

    def go_on_from(self, state_id: str | None, *, step: int, next: int, open: Collection[int]) -> None:
        """Continue from a state. If it was taken without a ledger, begin in the middle of the run: that line is written
        with the next one.

        Args:
            state_id: see `check_has`; None: there was no ledger.
            step, next: of the state.
            open: the ordinals in flight.
        """
        self.id, self._first = state_id, None
        if state_id is not None:
            return
        settled = pairwise([-1, *sorted(open), next])
        before = [(last + 1, following) for last, following in settled if last + 1 < following]
        self._first = PromptLine(
            id=secrets.token_hex(8), parent=None, step=step, next=next, open=len(open), before=before
        )


@dataclass(frozen=True, slots=True)
class PromptHistory:
    """The content of a ledger of prompts.

    Args:
        lines: id -> line, in the order of the file.
        problems: unusable lines, in words.
    """

    lines: Mapping[str, PromptLine]
    problems: tuple[str, ...] = ()

    @classmethod
    def read(cls, path: Path) -> PromptHistory:
        """Read every readable line; a missing ledger has none.

        Raises:
            StateError: it cannot be read at all.
            NewerFormatError: a line has a newer version.
        """
        try:
            data = read_file(path)
        except FileNotFoundError:
            return cls({})
        except OSError as error:
            raise StateError.unreadable(
                "the ledger of prompts", error, "a readable file", at=path, action=READABLE
            ) from error
        lines: dict[str, PromptLine] = {}
        problems = []
        for number, raw in enumerate(data.split(b"\n"), start=1):
            if not raw:
                continue
            try:
                line = _line(path, unseal(raw))
                lines[line.id] = line
            except (SealError, KeyError, TypeError, ValueError, AttributeError) as error:
                problems.append(f"line {number} of {path.name} {error}")
        return cls(lines, tuple(problems))

    @property
    def last(self) -> str | None:
        """The id of the newest line."""
        return next(reversed(list(self.lines)), None)

    def path_to(self, state_id: str) -> list[PromptLine]:
        """The lines that lead to a state, from the start of the run.

        Raises:
            StateError: one is missing.
        """
        path: list[PromptLine] = []
        wanted: str | None = state_id
        while wanted is not None:
            line = self.lines.get(wanted)
            if line is None or len(path) > len(self.lines):
                raise StateError(
                    "the ledger of prompts has a gap",
                    found=f"no line {wanted}" + (f", the parent of {path[-1].id}" if path else ""),
                    expected="every line from the beginning of the run",
                    cause="; ".join(self.problems) or "lines were removed, or the ledger is another run's",
                    action="copy the whole ledger back; or leave ledger= out: the run continues, without a proof of "
                    "what came before",
                )
            path.append(line)
            wanted = line.parent
        return path[::-1]

    def fates(self, state_id: str) -> Fates:
        """What happened to every ordinal before a state.

        Raises:
            StateError: a line is missing.
        """
        return Fates(self.path_to(state_id))


class Fates:
    """What happened to every ordinal before a state: trained at a step, dropped for a reason, or in flight.

    Args:
        path: the lines that lead to the state.
    """

    def __init__(self, path: Sequence[PromptLine]) -> None:
        last = path[-1]
        self.step, self.next, self._open = last.step, last.next, last.open
        self.trained: dict[int, int] = {}
        self.dropped: dict[int, str] = {}
        self._before = path[0].before
        #: number settled before the ledger began.
        self.before = sum(stop - first for first, stop in self._before)
        #: trained rollouts, by how many versions newer the weights were.
        self.staleness: Counter[int] = Counter()
        #: contradictions, in words.
        self.problems: list[str] = []
        for line in path:
            self.staleness.update(line.staleness)
            for step, ordinals in line.trained.items():
                for ordinal in ordinals:
                    self._once(ordinal, f"trained at step {step}")
                    self.trained[ordinal] = step
            for reason, ordinals in line.dropped.items():
                for ordinal in ordinals:
                    self._once(ordinal, f"dropped ({reason})")
                    self.dropped[ordinal] = reason
        settled = len(self.trained.keys() | self.dropped.keys()) + self.before
        if settled + self._open != self.next:
            missing = self.next - settled - self._open
            what = f"{missing} are lost" if missing > 0 else f"{-missing} are too many"
            self.problems.append(f"of {self.next} prompts {settled} are settled and {self._open} in flight: {what}")

    def _once(self, ordinal: int, now: str) -> None:
        if ordinal in self.trained or ordinal in self.dropped or self._is_before(ordinal):
            self.problems.append(f"prompt {ordinal} is {self.of(ordinal)}, and {now}")
        if ordinal >= self.next:
            self.problems.append(f"prompt {ordinal} is {now}, and was never issued")

    def of(self, ordinal: int) -> str:
        """What happened to an ordinal, in words."""
        if ordinal in self.trained:
            return f"trained at step {self.trained[ordinal]}"
        if ordinal in self.dropped:
            return f"dropped ({self.dropped[ordinal]})"
        if self._is_before(ordinal):
            return "settled before the ledger began"
        return "in flight" if ordinal < self.next else "not issued"

    def in_flight(self) -> Iterator[int]:
        """The ordinals in flight."""
        after = pairwise([(0, 0), *self._before, (self.next, self.next)])
        later = chain.from_iterable(range(stop, first) for (_, stop), (first, _) in after)
        return (k for k in later if k not in self.trained and k not in self.dropped)

    def _is_before(self, ordinal: int) -> bool:
        at = bisect_right(self._before, ordinal, key=lambda one: one[0]) - 1
        return at >= 0 and ordinal < self._before[at][1]


def _line(path: Path, fields: Mapping[str, Any]) -> PromptLine:
    if fields["format"] != FORMAT or not is_version(fields["version"], VERSION, "the ledger of prompts", path):
        raise ValueError(f"is a {fields['format']!r}, version {fields['version']!r}")
    parent = fields["parent"]
    if not isinstance(fields["id"], str) or not (parent is None or isinstance(parent, str)):
        raise ValueError("has an id that is not a text")
    return PromptLine(
        id=fields["id"],
        parent=parent,
        step=as_count(fields["step"]),
        next=as_count(fields["next"]),
        open=as_count(fields["open"]),
        trained={as_count(int(step)): tuple(from_text(text)) for step, text in fields["trained"].items()},
        dropped={reason: tuple(from_text(text)) for reason, text in fields["dropped"].items()},
        staleness={int(versions): as_count(rollouts) for versions, rollouts in fields["staleness"].items()},
        before=list(_ranges(fields.get("before", ""))),
    )
