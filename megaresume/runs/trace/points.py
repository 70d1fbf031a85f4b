"""Compares the recorded points of a run with its stream planned again: proof, or the first difference.

`read_points` reads them; `check_all` and `check_between` plan up to each and compare. `corpus_problems` names corpora
that have changed.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.checkpoint.records.branches import Branch, branches_of
from megaresume.checkpoint.records.ledger import LedgerProblem
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.names import manifest_path, records_dir
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.data.source import Source, TokenSource
from megaresume.runs.directory import Run
from megaresume.runs.history import History
from megaresume.runs.trace.replan import Replan
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CheckpointError, CorpusError, MegaresumeError, UsageError
from megaresume.stream.fields import comparable
from megaresume.stream.progress import Progress
from megaresume.stream.source import LengthSource, check_fingerprint
from megaresume.stream.state import SourceCursor, StreamState
from megaresume.stream.stream import Stream

#: Samples planned between two progress updates.
STRIDE = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPoint:
    """A point in the past of a run, as a checkpoint, a ledger line or a log records it."""

    #: where it was recorded, for people.
    origin: str
    #: the number of samples trained.
    sample: int
    #: rolling digest of these samples, 16 hex digits.
    digest: str
    #: the fields of the state for the position in the stream, if a whole state was recorded.
    position: dict[str, Any] | None = None
    #: the branch that the run abandoned when it went back to an earlier step; None if it was not abandoned.
    branch: Branch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedPoint:
    """A recorded point, and the result of planning up to it."""

    recorded: RecordedPoint
    #: the digest; None if the stream could not be planned that far.
    digest: str | None
    #: fields of the position that differ.
    fields: tuple[str, ...] = ()
    #: why it could not be planned.
    error: MegaresumeError | None = None

    @property
    def holds(self) -> bool:
        """Whether the recorded point is on the stream."""
        return self.digest == self.recorded.digest and not self.fields


def check_points(
    stream: Stream, recorded: Iterable[RecordedPoint], *, progress: Progress = lambda samples: None
) -> Iterator[CheckedPoint]:
    """Check recorded points in the order of their samples.

    Stops after a point that could not be planned: no later one can be.

    Args:
        stream: begins at or before the first point.
        recorded: the points.
        progress: called with the samples planned since the last call.
    """
    done = stream.start
    declared = {skip.at for skip in stream.skips.documents}
    for point in sorted(recorded, key=lambda r: r.sample):
        try:
            while done < point.sample:
                stop = min(done + STRIDE, point.sample)
                stream.plan(stop - 1, stop)
                progress(stop - done)
                done = stop
            position = comparable(stream.fields_at(point.sample))
        except MegaresumeError as error:
            yield CheckedPoint(recorded=point, digest=None, error=error)
            return
        yield CheckedPoint(recorded=point, digest=position["digest"], fields=_differ(position, point, declared))


def check_all(
    recorded: Iterable[RecordedPoint],
    state: StreamState,
    sources: Mapping[str, LengthSource],
    progress: Progress,
) -> tuple[list[CheckedPoint], list[str]]:
    """Check every recorded point against a stream planned from sample 0. Describes abandoned branches in words.

    An abandoned point that agrees proves as much as any other; one that does not is no longer part of the run.

    Args:
        recorded: the points.
        state: the newest state of the run.
        sources: its corpora, by name, in the order of its config.
        progress: called with the samples planned since the last call.
    """
    try:
        config = StreamConfig.from_dict(state.config)
        stream = Stream(config, list(sources.values()), past=state)
    except CorpusError:
        return [], []  # already among the corpus problems
    checked = list(check_points(stream, recorded, progress=progress))
    given_up = [c for c in checked if c.recorded.branch is not None and not c.holds]
    branches = dict.fromkeys(str(c.recorded.branch) for c in given_up)
    return [c for c in checked if c not in given_up], list(branches)


def check_between(
    recorded: Iterable[RecordedPoint], replan: Replan, first: int, stop: int, progress: Progress
) -> Iterator[CheckedPoint]:
    """Check the recorded points from sample ``first`` to ``stop``, planned from the nearest state before them.

    Args:
        recorded: points of the run.
        replan: the run, without its own points.
        first, stop: samples.
        progress: called with the samples planned since the last call.
    """
    wanted = sorted((p for p in recorded if first <= p.sample <= stop and p.branch is None), key=lambda p: p.sample)
    state = replan.history.before(first)
    at = 0 if state is None else state.samples
    digest = "0" * 16 if state is None else state.digest
    blocks = replan.plans(at, stop, progress=progress)
    plan = None
    for point in wanted:
        try:
            while at < point.sample:
                if plan is None or plan.stop < point.sample:
                    plan = next(blocks).plan
                at = min(plan.stop, point.sample)
                digest = f"{int(plan.digests[at - plan.first - 1]):016x}"
        except MegaresumeError as error:
            yield CheckedPoint(recorded=point, digest=None, error=error)
            return
        yield CheckedPoint(recorded=point, digest=digest)


def _begun(source: SourceCursor) -> SourceCursor:
    """A source with only the eras that have begun, as later ones may have been changed since."""
    eras = tuple(era for era in source.eras if era.first < max(source.position, 1))
    return source._replace(eras=eras)


def _differ(position: dict[str, Any], point: RecordedPoint, declared: Container[int]) -> tuple[str, ...]:
    """Names of the fields in which a recorded position differs from the planned one."""
    if point.position is None:
        return ()
    then, now = dict(point.position), dict(position)
    # A source added later was not drawn from yet, and is missing in configs of that time.
    now["sources"] = {name: cursor for name, cursor in now["sources"].items() if name in then["sources"]}
    for side in (then, now):
        side["sources"] = {name: _begun(cursor) for name, cursor in side["sources"].items()}
    then["stages"], now["stages"] = ([(s.first, s.name) for s in p["stages"]] for p in (then, now))
    names = list(now)
    # A list of documents to skip, declared there at a resume, is removed from the open bins.
    moved = [name for name in ("sources", "bins", "pending", "tails") if now[name] != then.get(name)]
    if moved and point.sample in declared:
        names = [name for name in names if name not in moved]
    later = now["stages"][len(then["stages"]) :]
    if later and now["stages"][: len(then["stages"])] == then["stages"] and all(s[0] == point.sample for s in later):
        # Recorded before a resume began a stage there, which resets the deficits to zero and may empty the bins.
        names = [name for name in names if name not in ("sources", "bins", "pending", "tails", "stages")]
    return tuple(name for name in names if now[name] != then.get(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Every recorded point of a run."""

    #: every existing data state.
    states: tuple[StepFile, ...]
    #: the recorded points: those of states, then those of the lines of the ledger.
    recorded: tuple[RecordedPoint, ...]
    #: unreadable lines of the ledger.
    unreadable: tuple[LedgerProblem, ...]
    #: missing or damaged files that ranks added to checkpoints whose weights exist; in words.
    lost: tuple[str, ...] = ()

    @property
    def newest(self) -> StreamState:
        """The newest state that counts."""
        present = [s for s, point in zip(self.states, self.recorded, strict=False) if point.branch is None]
        return max((step.stream for step in present or self.states), key=lambda state: state.samples)


def read_points(run: Run) -> Points:
    """Read every point from the records of a run.

    Raises:
        CheckpointError: there are no points.
        StateError: a record is damaged.
    """
    entries, records = run.ledger.entries, records_dir(run.root)
    branches = branches_of(entries)
    #: the branch of the last save under each name.
    saved = {(e.iteration, e.tag): b for e, b in zip(entries, branches, strict=True) if e.kind == "checkpoint"}
    states = tuple(run.state(path) for path in run.states)
    recorded = [
        RecordedPoint(
            origin=f"state of step {step.iteration}",
            sample=step.state.samples,
            digest=step.state.digest,
            position=comparable({f: getattr(step.stream, f) for f in step.stream.__dataclass_fields__}),
            branch=saved.get((step.iteration, step.tag)),
        )
        for step in states
    ]
    recorded += [
        RecordedPoint(
            origin=f"ledger: {entry.kind} at step {entry.iteration}",
            sample=entry.samples,
            digest=entry.digest,
            branch=branch,
        )
        for entry, branch in zip(entries, branches, strict=True)
    ]
    if not states:
        raise CheckpointError(
            "there is nothing to verify",
            found=f"no data state in {records}",
            expected="step_0000010.json or the like, written with a checkpoint",
            cause="not a directory of checkpoints, or the run has saved no checkpoint with megaresume",
            action=f"megaresume inspect {run.root}",
        )
    lost = tuple(words for step in states for words in _lost(run.root, step))
    return Points(states=states, recorded=tuple(recorded), unreadable=run.ledger.problems, lost=lost)


def _lost(root: Path, record: StepFile) -> list[str]:
    """Missing or damaged random states and loader states of one checkpoint, in words."""
    if not (root / record.tag).is_dir():
        return []
    try:
        manifest = read_manifest(manifest_path(root, record.iteration, record.tag))
    except CheckpointError:
        return []  # incomplete: never loaded
    return [f"{record.tag}: {problem.detail}" for problem in manifest.verify_beside(root)]


def between(history: History, first: int | None, last: int | None) -> tuple[int, int]:
    """The samples at two recorded steps; None: the beginning, the newest state.

    Raises:
        UsageError: no record has such a step (names the nearest); or they are in the wrong order.
    """
    by_step = {0: 0} | {point.iteration: point.samples for point in history.points}
    ends = []
    for step, otherwise in ((first, 0), (last, max(by_step))):
        step = otherwise if step is None else step
        if step not in by_step:
            below = max((s for s in by_step if s < step), default=None)
            above = min((s for s in by_step if s > step), default=None)
            near = " or ".join(str(s) for s in (below, above) if s is not None)
            raise UsageError(
                f"no record has step {step}",
                found=f"{len(by_step) - 1} recorded steps, {min(by_step)} to {max(by_step)}",
                expected=f"a step with a line in the ledger: {near} is the nearest",
                action=f"megaresume inspect {history.root} lists them",
            )
        ends.append(by_step[step])
    if ends[0] >= ends[1]:
        raise UsageError(
            "there is nothing between these steps",
            found=f"--from {first} --to {last}",
            expected="a step, and a later one",
            action="exchange the two" if ends[0] > ends[1] else None,
        )
    return ends[0], ends[1]


def corpus_problems(sources: Mapping[str, Source], state: StreamState, *, recompute: bool) -> list[str]:
    """Compare the current corpora with a state.

    Args:
        sources: opened, by name.
        state: of the run.
        recompute: read the whole index of each corpus; otherwise trust the records beside them.
    """
    problems = []
    for name, source in sources.items():
        try:
            check_fingerprint(name, state.fingerprints[name], source.fingerprint(recompute=recompute))
        except MegaresumeError as error:
            gap = _first_gap(source)
            problems.append(str(error) + ("" if gap is None else f"\n  {'where:':<14}{gap}"))
    return problems


def _first_gap(source: Source) -> str | None:
    """The first document that does not end where the next one starts, which means a damaged length; in words."""
    if not isinstance(source, TokenSource):
        return None
    chunk = 1 << 20
    for first in range(0, len(source), chunk):
        ids = np.arange(first, min(first + chunk + 1, len(source)))
        try:
            lengths = source.lengths(ids)
            ids, lengths = ids[lengths > 0], lengths[lengths > 0]
            starts = source.token_starts(ids)
        except CorpusError:
            return None  # the error already names the document
        gaps = np.flatnonzero(starts[:-1] + lengths[:-1] != starts[1:])
        if len(gaps):
            k = int(gaps[0])
            between = int(starts[k + 1] - starts[k])
            return f"document {ids[k]} has {lengths[k]} tokens, but {between} lie between its start and the next one's"
    return None
