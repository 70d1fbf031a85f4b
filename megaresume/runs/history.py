"""What the records of a checkpoint root say about a run: its states, its layouts, and what of it was given up.

A run that was killed and resumed has retraced its steps. Only the path to the present counts: what was saved on a
branch that was given up (`abandoned_checkpoints`), or was saved again with other data, is left out.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from megaresume.checkpoint.layout import ledger_path, parse_record_name, records_dir, step_path
from megaresume.checkpoint.ledger import LedgerEntry, LedgerReading, abandoned_checkpoints, read_ledger
from megaresume.checkpoint.sealed import NewerFormatError
from megaresume.checkpoint.state_file import StepFile, read_step_file
from megaresume.checkpoint.topology import Topology
from megaresume.stream.errors import CheckpointError, StateError, UsageError
from megaresume.stream.ranges import Ranges, common
from megaresume.stream.state import StreamState

__all__ = ["History", "Layout", "Record", "read_history"]

#: States kept in memory: a search by halves comes back to few of them.
KEPT_STATES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A state on the path to the present; read when it is needed."""

    path: Path
    iteration: int
    #: samples trained.
    samples: int
    #: of them, 16 hex digits.
    digest: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """How the run was laid out from a sample on."""

    #: samples trained before.
    first: int
    topology: Topology


@dataclass
class History:
    """The path of a run to the present."""

    root: Path
    #: ascending.
    records: list[Record]
    #: the newest of them.
    newest: StepFile
    #: ascending; what lies before the first is not known.
    layouts: list[Layout]
    #: (iteration, samples, digest) of every checkpoint on the path, also where its state is gone; ascending.
    points: list[tuple[int, int, str]]
    #: batch size that the last start announced for what follows the newest state, where it did.
    next_batch_size: int | None
    #: sentences about records that could not be used.
    notes: list[str] = field(default_factory=list)
    _states: dict[Path, StreamState] = field(default_factory=dict)

    @property
    def state(self) -> StreamState:
        """The newest state."""
        return self.newest.state

    def before(self, sample: int) -> StreamState | None:
        """The last usable state at or before a sample; None: there is none, the stream begins at 0."""
        while index := bisect_right(self.records, sample, key=lambda r: r.samples):
            state = self.read(self.records[index - 1])
            if state is not None:
                return state
        return None

    def before_drawing(self, source: str, position: int) -> Record | None:
        """The last record that had not drawn a position of a source yet; None: the beginning alone.

        ``SourceCursor.position`` never falls, so that halving finds the place. Records that cannot be read are left
        out of ``records`` on the way.
        """
        low, high = 0, len(self.records)
        while low < high:
            middle = (low + high) // 2
            state = self.read(self.records[middle])
            if state is None:
                high -= 1
                continue
            cursor = state.sources.get(source)
            if cursor is None or cursor.position <= position:
                low = middle + 1
            else:
                high = middle
        return self.records[low - 1] if low else None

    def read(self, record: Record) -> StreamState | None:
        """The state of a record; None, a note and one record less where it is not what the ledger says."""
        if record.path in self._states:
            return self._states[record.path]
        try:
            step = read_step_file(record.path)
            found, reason = step.state, ""
            if (step.state.samples, step.state.digest) != (record.samples, record.digest):
                reason = f"holds another state than its line of the ledger says (digest {step.state.digest})"
            elif not _leads_to(step.state, self.state):
                reason = "has stages that are not those of the newest state"
        except NewerFormatError:
            raise
        except StateError as error:
            reason = f"{error.headline}: {error.found}"
        if reason:
            self.records.remove(record)
            self.notes.append(f"not used: {record.path.name}: {reason}")
            return None
        if len(self._states) >= KEPT_STATES:
            self._states.pop(next(iter(self._states)))
        self._states[record.path] = found
        return found


def _leads_to(before: StreamState, newest: StreamState) -> bool:
    """Whether the stages up to a state are those of the newest one; one that begins right there may come after it."""
    if not _same_skips(before, newest):
        return False
    firsts = [stage.first for stage in before.stages]
    expected = [stage.first for stage in newest.stages if stage.first < before.samples]
    return firsts[: len(expected)] == expected and all(first == before.samples for first in firsts[len(expected) :])


def _same_skips(before: StreamState, newest: StreamState) -> bool:
    """Whether what a state has left out is what the run has left out up to there."""
    past: Ranges = ((0, before.reached),)
    if common(before.skips.ranges, past) != common(newest.skips.ranges, past):
        return False
    lists = [
        [(d.at, d.documents) for d in state.skips.documents if d.at < before.samples] for state in (before, newest)
    ]
    return lists[0] == lists[1]


def read_history(root: Path) -> History:
    """Read the records of a checkpoint root.

    Args:
        root: what ``--save`` named.

    Raises:
        UsageError: no such directory.
        CheckpointError: it has no data state that can be read.
        NewerFormatError: a record was written by a newer megaresume.
    """
    if not root.is_dir():
        raise UsageError(
            "no such directory", found=str(root), expected="the --save directory of a run", action="check the path"
        )
    ledger = read_ledger(ledger_path(root))
    notes = [str(problem) for problem in ledger.problems if problem.kind == "damaged"]
    records = _listed(root, ledger)
    newest = _newest(root, records, ledger, notes)
    path = _path(ledger)
    points = {entry.samples: (entry.iteration, entry.samples, entry.digest) for entry in path}
    state = newest.state
    points = {samples: point for samples, point in points.items() if samples <= state.samples}
    points[state.samples] = (newest.iteration, state.samples, state.digest)
    layouts = _layouts(ledger) if ledger.entries else _layouts_of_states(records)
    last = ledger.entries[-1] if ledger.entries else None
    if last is None or newest.saved_at > last.time:
        _append(layouts, _begin_of_save(layouts, newest), newest.topology)
    announced = last is not None and last.kind == "start" and last.samples == state.samples
    return History(
        root=root,
        records=[record for record in records if record.samples <= state.samples],
        newest=newest,
        layouts=layouts,
        points=[points[samples] for samples in sorted(points)],
        next_batch_size=last.topology.global_batch_size if last is not None and announced else None,
        notes=notes,
    )


def _path(ledger: LedgerReading) -> list[LedgerEntry]:
    """The checkpoint lines that lead to the present, the last one of each."""
    given_up = abandoned_checkpoints(ledger.entries)
    last = {(e.iteration, e.tag): e for e in ledger.entries if e.kind == "checkpoint" and e.tag is not None}
    return sorted(
        (entry for (iteration, tag), entry in last.items() if (iteration, str(tag)) not in given_up),
        key=lambda e: (e.samples, e.iteration),
    )


def _listed(root: Path, ledger: LedgerReading) -> list[Record]:
    """The states on the path that are there, ascending; those that no line speaks of only where no line is later."""
    records = [
        Record(path=path, iteration=entry.iteration, samples=entry.samples, digest=entry.digest)
        for entry in _path(ledger)
        if entry.tag is not None and (path := step_path(root, entry.iteration, entry.tag)).exists()
    ]
    if not ledger.entries:
        for path in sorted(records_dir(root).glob("step_*.json")):
            name = parse_record_name(path.name)
            if name is None or name.kind != "state":
                continue
            try:
                step = read_step_file(path)
            except NewerFormatError:
                raise
            except StateError:
                continue  # named where the newest is looked for
            records.append(_record_of(path, step))
        records.sort(key=lambda r: (r.samples, r.iteration))
    return records


def _record_of(path: Path, step: StepFile) -> Record:
    return Record(path=path, iteration=step.iteration, samples=step.state.samples, digest=step.state.digest)


def _newest(root: Path, records: list[Record], ledger: LedgerReading, notes: list[str]) -> StepFile:
    """The newest state of the path; one whose save was killed before its line is taken in."""
    known = {record.path: record for record in records}
    last_time = ledger.entries[-1].time if ledger.entries else ""
    candidates: list[tuple[int, Path]] = [(r.samples, r.path) for r in records]
    # A step that was saved behind the last line: at most one, but which one its name does not say.
    spoken_of = {step_path(root, e.iteration, e.tag) for e in ledger.entries if e.kind == "checkpoint" and e.tag}
    for path in records_dir(root).glob("step_*.json"):
        name = parse_record_name(path.name)
        if name is not None and name.kind == "state" and path not in spoken_of and ledger.entries:
            try:
                step = read_step_file(path)
            except NewerFormatError:
                raise
            except StateError as error:
                notes.append(f"not used: {path.name}: {error.headline}: {error.found}")
                continue
            if step.saved_at > last_time and step.run == ledger.run:
                candidates.append((step.state.samples, path))
    problems = []
    for _, path in sorted(candidates, reverse=True):
        record = known.get(path)
        try:
            step = read_step_file(path)
        except NewerFormatError:
            raise
        except StateError as error:
            problems.append(f"not used: {path.name}: {error.headline}: {error.found}")
            continue
        found = _record_of(path, step)
        if record is not None and found != record and step.saved_at <= last_time:
            problems.append(f"not used: {path.name}: another state than its line of the ledger says")
            continue
        notes += problems
        if found != record:
            records[:] = [r for r in records if r.path != path and r.samples < found.samples] + [found]
        return step
    raise CheckpointError(
        "there is no data state to trace from",
        found="; ".join(problems) if problems else f"no step_*.json in {records_dir(root)}",
        expected="step_0000010.json or the like, written with a checkpoint",
        cause="not a --save directory; or no checkpoint was saved with megaresume's stream (a guarded run has none)"
        if not problems
        else None,
        action=f"megaresume inspect {root}",
    )


def _layouts(ledger: LedgerReading) -> list[Layout]:
    """A start holds from where it began, once a checkpoint followed it; what was beyond it then was given up."""
    layouts: list[Layout] = []
    start: LedgerEntry | None = None
    saved = 0
    for entry in ledger.entries:
        if entry.kind == "start":
            start = entry
            continue
        _append(layouts, min(start.samples, entry.samples) if start is not None else saved, entry.topology)
        start, saved = None, entry.samples
    if start is not None:
        # It may have gone back; but until it saves, what was saved is the past.
        last = max((entry.samples for entry in _path(ledger)), default=0)
        _append(layouts, max(start.samples, last), start.topology)
    return layouts


def _append(layouts: list[Layout], first: int, topology: Topology) -> None:
    layouts[:] = [layout for layout in layouts if layout.first < first]
    if not layouts or layouts[-1].topology != topology:
        layouts.append(Layout(first=first, topology=topology))


def _layouts_of_states(records: list[Record]) -> list[Layout]:
    """Without a ledger: a state tells the layout of the steps before it."""
    layouts: list[Layout] = []
    first = 0
    for record in records:
        _append(layouts, first, read_step_file(record.path).topology)
        first = record.samples
    return layouts


def _begin_of_save(layouts: list[Layout], newest: StepFile) -> int:
    """Where the layout of a save without a line began: where the last start did."""
    return min(layouts[-1].first if layouts else 0, newest.state.samples)
