"""`History`: the path of a run from its first sample to its newest state, reconstructed from its records.

A run that was killed and resumed trains some steps again. Only the path to the present counts: saves on an abandoned
branch (`abandoned_checkpoints`), and those made again with other data, are left out.

`StepMap`: which step trained a sample, and with which layout of ranks and micro-batches.
"""

from __future__ import annotations

import itertools
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint.records.branches import abandoned_checkpoints
from megaresume.checkpoint.records.ledger import LedgerEntry, LedgerReading
from megaresume.checkpoint.records.names import records_dir, step_path
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.system import Topology
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import CheckpointError, MegaresumeError, NewerFormatError, StateError, UsageError
from megaresume.stream.skips import Ranges, common
from megaresume.stream.state import StreamState

ReadStep = Callable[[Path], StepFile]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A checkpoint on the path to the present."""

    iteration: int
    #: the number of samples trained.
    samples: int
    #: the digest of those samples, 16 hex digits.
    digest: str
    #: the file of its data state, read when needed.
    path: Path


@dataclass(kw_only=True, slots=True)
class History:
    """The path of a run to the present."""

    root: Path
    #: reads a state, with caching.
    read_step: ReadStep
    #: every checkpoint on the path, also where its state is gone; ascending.
    points: list[Point]
    #: the points whose states are there, ascending. One that turns out to be damaged is left out from then on.
    saved: list[Point]
    #: the newest of them.
    newest: StepFile
    #: (samples trained before, layout from there on); ascending. Earlier layouts are unknown.
    topologies: list[tuple[int, Topology]]
    #: batch size that the last start announced for samples after the newest state, if it did.
    next_batch_size: int | None
    #: sentences about unusable records.
    notes: list[str]

    @property
    def state(self) -> StreamState:
        """The newest state."""
        return self.newest.stream

    def before(self, sample: int) -> StreamState | None:
        """The last usable state at or before a sample; None if there is none, so that the stream begins at 0."""
        while index := bisect_right(self.saved, sample, key=lambda p: p.samples):
            state = self.read(self.saved[index - 1])
            if state is not None:
                return state
        return None

    def before_drawing(self, source: str, position: int) -> Point | None:
        """The last point before a position of a source was drawn; None: only the beginning.

        Uses a binary search, as ``SourceCursor.position`` never falls.
        """
        low, high = 0, len(self.saved)
        while low < high:
            middle = (low + high) // 2
            state = self.read(self.saved[middle])
            if state is None:
                high -= 1
                continue
            cursor = state.sources.get(source)
            if cursor is None or cursor.position <= position:
                low = middle + 1
            else:
                high = middle
        return self.saved[low - 1] if low else None

    def read(self, point: Point) -> StreamState | None:
        """Read the state of a point. If it contradicts the ledger: add a note, drop the point from ``saved``, and
        return None."""
        try:
            state = self.read_step(point.path).stream
        except NewerFormatError:
            raise
        except StateError as error:
            reason = error.line
        else:
            if (state.samples, state.digest) != (point.samples, point.digest):
                reason = f"holds another state than its line of the ledger says (digest {state.digest})"
            elif not _leads_to(state, self.state):
                reason = "has stages that are not those of the newest state"
            else:
                return state
        first = bisect_left(self.saved, point.samples, key=lambda p: p.samples)
        del self.saved[self.saved.index(point, first)]
        self.notes.append(f"not used: {point.path.name}: {reason}")
        return None


def _leads_to(before: StreamState, newest: StreamState) -> bool:
    """Whether a state has the newest state's stages up to its sample; one that begins right there may be missing."""
    if not _same_skips(before, newest):
        return False
    firsts = [stage.first for stage in before.stages]
    expected = [stage.first for stage in newest.stages if stage.first < before.samples]
    return firsts[: len(expected)] == expected and all(first == before.samples for first in firsts[len(expected) :])


def _same_skips(before: StreamState, newest: StreamState) -> bool:
    """Whether a state left out the same samples as the newest state did up to there."""
    past: Ranges = ((0, before.reached),)
    if common(before.skips.ranges, past) != common(newest.skips.ranges, past):
        return False
    lists = [
        [(d.at, d.documents) for d in state.skips.documents if d.at < before.samples] for state in (before, newest)
    ]
    return lists[0] == lists[1]


def read_history(root: Path, ledger: LedgerReading, states: Sequence[Path], read_step: ReadStep) -> History:
    """Read the records of a run.

    Args:
        root: the checkpoint root.
        ledger: of it.
        states: all its data-state files.
        read_step: reads one of them.

    Raises:
        CheckpointError: no data state can be read.
        NewerFormatError: a record was written by a newer megaresume.
    """
    notes = [str(problem) for problem in ledger.problems if problem.kind == "damaged"]
    path = _path(root, ledger)
    # Without a ledger, the existing states are the path.
    saved = [point for point in path if point.path.exists()] if ledger.entries else _readable(states, read_step, notes)
    newest = _newest(root, ledger, states, read_step, saved, notes)
    state = newest.stream
    points = {point.samples: point for point in path if point.samples <= state.samples}
    points[state.samples] = _point(step_path(root, newest.iteration, newest.tag), newest)
    topologies = _topologies(ledger, path) if ledger.entries else _topologies_of_states(saved, read_step)
    last = next(reversed(ledger.events), None)
    if last is None or newest.saved_at > last.time:
        # A save without a line belongs to the last start.
        _append(topologies, min(topologies[-1][0] if topologies else 0, state.samples), newest.topology)
    announced = last is not None and last.kind == "start" and last.samples == state.samples
    return History(
        root=root,
        read_step=read_step,
        points=[points[samples] for samples in sorted(points)],
        saved=[point for point in saved if point.samples <= state.samples],
        newest=newest,
        topologies=topologies,
        next_batch_size=last.topology.global_batch_size if last is not None and announced else None,
        notes=notes,
    )


def _path(root: Path, ledger: LedgerReading) -> list[Point]:
    """The checkpoint lines that lead to the present, the last one of each."""
    given_up = abandoned_checkpoints(ledger.entries)
    last = {(e.iteration, e.tag): e for e in ledger.entries if e.kind == "checkpoint" and e.tag is not None}
    points = [
        Point(iteration=iteration, samples=e.samples, digest=e.digest, path=step_path(root, iteration, str(tag)))
        for (iteration, tag), e in last.items()
        if (iteration, str(tag)) not in given_up
    ]
    return sorted(points, key=lambda p: (p.samples, p.iteration))


def _point(path: Path, record: StepFile) -> Point:
    return Point(iteration=record.iteration, samples=record.state.samples, digest=record.state.digest, path=path)


def _usable(path: Path, read_step: ReadStep, notes: list[str]) -> StepFile | None:
    """Read a state; if it cannot be read, return None and add a note to the history."""
    try:
        return read_step(path)
    except NewerFormatError:
        raise
    except StateError as error:
        notes.append(f"not used: {path.name}: {error.line}")
        return None


def _readable(states: Sequence[Path], read_step: ReadStep, notes: list[str]) -> list[Point]:
    steps = [(path, _usable(path, read_step, notes)) for path in states]
    points = [_point(path, step) for path, step in steps if step is not None]
    return sorted(points, key=lambda p: (p.samples, p.iteration))


def _newest(
    root: Path,
    ledger: LedgerReading,
    states: Sequence[Path],
    read_step: ReadStep,
    saved: list[Point],
    notes: list[str],
) -> StepFile:
    """The newest state of the path, even if its save was killed before the ledger got its line."""
    entries = ledger.events
    known = {point.path: point for point in saved}
    last_time = entries[-1].time if entries else ""
    candidates: list[tuple[int, Path]] = [(p.samples, p.path) for p in saved]
    # A step saved after the last line: at most one, but its name does not tell which one.
    spoken_of = {step_path(root, e.iteration, e.tag) for e in entries if e.kind == "checkpoint" and e.tag}
    for path in states if entries else ():
        if path not in spoken_of:
            step = _usable(path, read_step, notes)
            if step is not None and step.saved_at > last_time and step.run == ledger.run:
                candidates.append((step.state.samples, path))
    problems: list[str] = []
    for _, path in sorted(candidates, reverse=True):
        point = known.get(path)
        step = _usable(path, read_step, problems)
        if step is None:
            continue
        found = _point(path, step)
        if point is not None and found != point and step.saved_at <= last_time:
            problems.append(f"not used: {path.name}: another state than its line of the ledger says")
            continue
        notes += problems
        if found != point:
            saved[:] = [p for p in saved if p.path != path and p.samples < found.samples] + [found]
        return step
    raise CheckpointError(
        "there is no data state to trace from",
        found="; ".join((*notes, *problems)) or f"no step_*.json in {records_dir(root)}",
        expected="step_0000010.json or the like, written with a checkpoint",
        cause="not a directory of checkpoints; or no checkpoint was saved with megaresume's stream (a guarded run "
        "has none)"
        if not (notes or problems)
        else None,
        action=f"megaresume inspect {root}",
    )


def _topologies(ledger: LedgerReading, path: list[Point]) -> list[tuple[int, Topology]]:
    """The layouts of a run from its starts. A start counts once it has saved, and voids what lay beyond its
    beginning."""
    topologies: list[tuple[int, Topology]] = []
    start: LedgerEntry | None = None
    saved = 0
    for entry in ledger.events:
        if entry.kind == "start":
            start = entry
            continue
        if entry.kind == "finished":
            continue
        if entry.kind == "membership":  # since the step that ends there
            _append(topologies, entry.samples - (entry.topology.global_batch_size or 0), entry.topology)
            continue
        _append(topologies, min(start.samples, entry.samples) if start is not None else saved, entry.topology)
        start, saved = None, entry.samples
    if start is not None:
        # It may have gone back; but until it saves, earlier saves are the past.
        _append(topologies, max(start.samples, *(p.samples for p in path), 0), start.topology)
    return topologies


def _append(topologies: list[tuple[int, Topology]], first: int, topology: Topology) -> None:
    while topologies and topologies[-1][0] >= first:
        topologies.pop()
    if not topologies or topologies[-1][1] != topology:
        topologies.append((first, topology))


def _topologies_of_states(saved: list[Point], read_step: ReadStep) -> list[tuple[int, Topology]]:
    """The layouts of a run without a ledger: each state has that of the steps before it."""
    topologies: list[tuple[int, Topology]] = []
    first = 0
    for point in saved:
        _append(topologies, first, read_step(point.path).topology)
        first = point.samples
    return topologies


@dataclass(frozen=True, kw_only=True, slots=True)
class Membership:
    """Replicas that began to train together."""

    #: their first step together, and when its line was written.
    step: int
    time: str
    replicas: int


def memberships(entries: Iterable[LedgerEntry]) -> list[Membership]:
    """The memberships in a ledger, in order; empty if the replicas of the run are fixed."""
    return [
        Membership(
            step=entry.iteration, time=entry.time, replicas=int(entry.details.get("replicas", entry.topology.dp))
        )
        for entry in entries
        if entry.kind == "membership"
    ]


#: stands for an unrecorded step, rank or micro-batch.
UNKNOWN = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Consecutive samples of one batch size and one layout."""

    #: the samples, [first, stop).
    first: int
    stop: int
    #: first sample and number (from 1) of a step at or before ``first`` since which all steps have this size.
    step_sample: int
    step: int
    #: the number of samples of a step.
    batch_size: int | None
    topology: Topology | None

    @property
    def ranks(self) -> tuple[int, int] | None:
        """(data-parallel size, micro-batch size) of a sample, if they are known and divide the batch size."""
        if self.topology is None or self.batch_size is None:
            return None
        dp, micro = self.topology.dp, self.topology.micro_batch_size
        if micro is None or micro < 1 or dp < 1 or self.batch_size % (dp * micro):
            return None
        return dp, micro


def schedule_of(history: History) -> BatchSchedule | None:
    """The recorded batch sizes of a run, the last one without end. None if none is recorded."""
    state = history.state
    segments = list(state.batches)
    if not segments:
        for first, topology in history.topologies:
            size = topology.global_batch_size
            if size is None or (not segments and first):
                return None
            if not segments or segments[-1][1] != size:
                segments.append((first, size))
    if not segments:
        return None
    schedule = BatchSchedule(tuple(segments))
    size = history.next_batch_size
    if size is not None and schedule.size_at(state.samples) != size:
        schedule = BatchSchedule((*schedule.until(state.samples), (state.samples, size)))
    return schedule


class StepMap:
    """Maps samples to steps and back, over a whole run."""

    def __init__(self, history: History) -> None:
        self.history = history
        self.schedule = schedule_of(history)
        #: (first sample, steps before it, size) of runs of steps of one size
        self._runs: list[tuple[int, int, int]] = []
        self._contradiction: MegaresumeError | None = None
        self._offset = 0
        if self.schedule is not None:
            steps = 0
            for sample, size, number in self.schedule.runs(sys.maxsize):
                self._runs.append((sample, steps, size))
                steps += number
            self._set_offset()

    def _set_offset(self) -> None:
        """Iterations and samples may start from different counts, if a run began with another run's weights."""
        assert self.schedule is not None
        try:
            offsets = {
                self.schedule.steps_before(point.samples) - point.iteration: point.iteration
                for point in self.history.points
            }
        except StateError as error:
            self._contradiction = error
            return
        self._offset = next(iter(offsets))
        if len(offsets) > 1:
            self._contradiction = StateError(
                "the iterations and the batch sizes of the records do not match",
                found="; ".join(f"{o:+} steps at step {i}" for o, i in list(offsets.items())[:4]),
                expected="one count of steps over the whole run",
                cause="the iteration was set back or forth in the middle of the run",
                action="trace by samples: --samples A:B",
            )

    @property
    def known(self) -> bool:
        """Whether samples can be mapped to steps."""
        return self.schedule is not None and self._contradiction is None

    def samples(self, first: int, stop: int) -> tuple[int, int]:
        """The samples of steps ``first .. stop`` (numbers from 1).

        Raises:
            UsageError, StateError: steps before the first one; or the batch sizes are not recorded.
        """
        if self._contradiction is not None:
            raise self._contradiction
        if self.schedule is None:
            raise StateError(
                "the batch sizes of the run are not known",
                found="data states without batches, and no global batch size in the ledger",
                expected="(first sample, global batch size), as training records it",
                cause="the states were not saved by a training program",
                action="trace by samples: --samples A:B",
            )
        if first + self._offset < 1:
            raise UsageError(
                f"there is no step {first}",
                found=f"steps {first} to {stop - 1}",
                expected=f"steps from {1 - self._offset} on",
                cause="steps are counted from 1, as training prints them" if not self._offset else None,
                action=f"begin at step {1 - self._offset} or later",
            )
        return tuple(self.schedule.after(0, n - 1 + self._offset) for n in (first, stop))  # type: ignore[return-value]

    def spans(self, first: int, stop: int) -> list[Span]:
        """Samples ``first .. stop`` split where the batch size, the layout, or the past changes."""
        cuts = {first for first, _ in self.history.topologies} | {run[0] for run in self._runs}
        cuts.add(self.history.state.samples)
        edges = [first, *sorted(cut for cut in cuts if first < cut < stop), stop]
        return [self._span(a, b) for a, b in itertools.pairwise(edges) if a < b]

    def _span(self, first: int, stop: int) -> Span:
        topologies = self.history.topologies
        index = bisect_right(topologies, first, key=lambda entry: entry[0]) - 1
        sample, step, size = 0, UNKNOWN, None
        if self.known:
            sample, before, size = self._runs[bisect_right(self._runs, first, key=lambda run: run[0]) - 1]
            step = before + 1 - self._offset
        return Span(
            first=first,
            stop=stop,
            step_sample=sample,
            step=step,
            batch_size=size,
            topology=topologies[index][1] if index >= 0 else None,
        )

    def span(self, sample: int) -> Span:
        """The span that a sample is in."""
        return self._span(sample, sample + 1)

    def step_of(self, sample: int) -> int | None:
        """The step of a sample; None if it is not recorded."""
        span = self.span(sample)
        if span.batch_size is None:
            return None
        step = span.step + (sample - span.step_sample) // span.batch_size
        return step if step > 0 else None
