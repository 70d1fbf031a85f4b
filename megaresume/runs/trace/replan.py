"""The stream of a run planned again, and compared with what was recorded: proof, or the first difference.

`Replan`: the past from the nearest state, through the stages that were; the future from the newest state, through those
that are declared. `Past` reads it from front to back. The corpora of a run are looked for wherever they are now.

`replay` plans every recorded point again and compares; `corpus_problems` says which corpora are not those of then.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.checkpoint.records.branches import Branch, branches_of
from megaresume.checkpoint.records.ledger import LedgerProblem
from megaresume.checkpoint.records.manifest import read_manifest
from megaresume.checkpoint.records.names import data_path, manifest_path, records_dir
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.data.catalog import open_sources
from megaresume.data.data_config import DataConfig
from megaresume.data.source import Source, TokenSource
from megaresume.data.split import range_of
from megaresume.runs.directory import Run
from megaresume.runs.history import History
from megaresume.stream import cursor
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.changes import reconcile
from megaresume.stream.config import StreamConfig, resolved
from megaresume.stream.errors import (
    CheckpointError,
    ConfigError,
    CorpusError,
    MegaresumeError,
    StreamExhausted,
    UsageError,
)
from megaresume.stream.fields import comparable
from megaresume.stream.order import Orders
from megaresume.stream.planner import Plan, Planner, orders_of
from megaresume.stream.skips import trained
from megaresume.stream.source import AbsentSource, LengthSource, check_fingerprint, fingerprint_of, may_be_cut
from megaresume.stream.stages import Course
from megaresume.stream.state import SourceCursor, StreamState
from megaresume.stream.stream import Stream


def open_corpora(
    root: Path, state: StreamState, *, data: str | None, split: str | None, need_all: bool = False
) -> dict[str, Source]:
    """The corpora of a run by name, without documents that came to them after a state.

    Args:
        root: the run's ``--save`` directory.
        state: a state of the run.
        data: ``--data``, if it was given; None: the data config that was recorded beside the checkpoints.
        split: that of the run, where neither says it.
        need_all: also of sources that the data config no longer has.

    Raises:
        UsageError: there is no data config.
        ConfigError: it cannot be read, or lacks a source that is needed.
    """
    path = Path(data) if data else data_path(root)
    if not path.is_file():
        raise UsageError(
            "it is not known where the corpora are",
            found=f"no file {path}",
            expected="the data config of the run",
            cause="a source is a Python object, or the run was saved by another program" if not data else None,
            action="pass --data DATA.yaml",
        )
    named = DataConfig.of(path)
    config = named.stream_config(seq_length=named.mapping.get("seq_length", state.config["seq_length"]))
    # Under the names that the run knows its sources by.
    config = resolved(config, state.config["sources"])
    known = {name: fingerprint.documents for name, fingerprint in state.fingerprints.items()}
    specs = {source.name: source.options for source in config.sources if source.name in known}
    missing = [name for name in known if name not in specs]
    if missing and need_all:
        raise ConfigError(
            "the data config lacks sources of the run",
            found=", ".join(source.name for source in config.sources),
            expected=", ".join(known),
            cause="sources that were removed in the middle of the run" if data is None else None,
            action=f"--data with a copy of {path} that has {', '.join(missing)} too, with the path of that time",
        )
    opened = open_sources(specs, base_dir=named.directory, split=split)
    return {
        name: range_of(opened[name], 0, documents) if len(opened[name]) > documents else opened[name]
        for name, documents in known.items()
        if name in opened
    }


#: The samples, and tokens, planned at a time: whichever is less.
BLOCK, BLOCK_TOKENS = 1 << 13, 1 << 26
FEWEST = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Consecutive samples of one stage."""

    plan: Plan
    stage: str
    config: StreamConfig
    #: whether the samples are left out of the stream: their numbers are absolute ones.
    left_out: bool = False


class Replan:
    """Plans any range of a run's stream.

    Args:
        history: the run.
        sources: the corpora, by name; those that are missing are missed where a sample needs them.
        schedule: batch sizes, for stages to come that are declared by step.
        compare: whether what is planned is checked against every recorded point.

    Raises:
        StateError: a corpus is not the one of the run.
    """

    def __init__(
        self,
        history: History,
        sources: Mapping[str, LengthSource],
        schedule: BatchSchedule | None = None,
        *,
        compare: bool = True,
    ) -> None:
        self.history = history
        state = history.state
        for name in state.sources:
            if name in sources:
                check_fingerprint(name, state.fingerprints.get(name), fingerprint_of(sources[name], name))
        # The order is that of the records; the data config says where the corpora are.
        going_on = reconcile(StreamConfig.from_dict(state.config), {}, state, "refuse")
        self._stages, self.skips = going_on.course.stages, going_on.course.skips
        self._schedule = schedule
        self.names = [source.name for source in going_on.config.sources]
        self.sources = [sources[n] if n in sources else AbsentSource(n, state) for n in self.names]
        self._points = list(history.points) if compare else []

    @property
    def config_now(self) -> StreamConfig:
        """The config of the stage at the newest state."""
        return self._stages[len(self.history.state.stages) - 1].config

    @property
    def last_stage(self) -> str:
        """Name of the last stage that is known, begun or declared."""
        return self._stages[-1].name

    @property
    def last_config(self) -> StreamConfig:
        """The config of the last stage that is known, begun or declared."""
        return self._stages[-1].config

    @cached_property
    def orders(self) -> Orders:
        """The orders of the sources: as the newest state has them, or as they will begin."""
        piece = self.last_config.seq_length
        return Orders(
            order if order.eras else order.revised(0, documents=len(source), piece=piece if may_be_cut(source) else 0)
            for order, source in zip(
                orders_of(self.history.state, self.config_now, self.sources), self.sources, strict=True
            )
        )

    def plans(
        self,
        first: int,
        stop: int | None,
        *,
        start: StreamState | None = None,
        progress: Callable[[int], object] = lambda samples: None,
        left_out: bool = False,
    ) -> Iterator[Planned]:
        """Plan samples ``first .. stop`` in order, in blocks of one stage.

        Args:
            first: first sample.
            stop: one after the last; None: as long as the caller asks, or the stream continues.
            start: a state at or before ``first`` to plan from; None: the nearest.
            progress: called with the samples planned since the last call, those before ``first`` included.
            left_out: also what was left out just before one of them.

        Raises:
            StreamExhausted: the stream ends before ``stop``.
            CheckpointError: what is planned is not what was recorded.
        """
        state = start or self.history.before(first)
        course = Course(self._stages, [r.first for r in state.stages] if state is not None else [0], self._schedule)
        course.skips, course.past = self.skips, self.history.state
        arrays = None if state is None else cursor.arrays_of(state, course, self.sources)
        planner = Planner(course, self.sources, arrays)
        given_up: list[tuple[int, Plan]] = []
        if left_out:
            planner.on_left_out = lambda plan: given_up.append((trained(self.skips.ranges, plan.first), plan))
        while stop is None or planner.position < stop:
            at = planner.position
            size = max(min(BLOCK_TOKENS // course.config(course.index_at(at)).seq_length, BLOCK), FEWEST)
            size = min(size, (first if at < first else at + size if stop is None else stop) - at)
            plan = planner.advance(size)
            self._check(plan)
            progress(len(plan))
            if len(plan) and at >= first:
                yield from _by_stage(plan, course, given_up)
            given_up.clear()
            if len(plan) < size:
                raise _ended(planner.position, stop, self.history)

    def _check(self, plan: Plan) -> None:
        """Compare the digests of a point with the recorded ones."""
        # Beyond `plan.first`, up to `plan.stop`.
        low, high = (bisect_right(self._points, end, key=lambda p: p.samples) for end in (plan.first, plan.stop))
        for point in self._points[low:high]:
            digest = f"{int(plan.digests[point.samples - plan.first - 1]):016x}"
            if digest != point.digest:
                raise CheckpointError(
                    "the stream that was planned is not the one that was recorded",
                    found=f"digest {digest} up to sample {point.samples}",
                    expected=f"digest {point.digest}, recorded at step {point.iteration}",
                    cause="a record or a corpus was changed",
                    action=f"megaresume verify {self.history.root} finds the first difference",
                )


class Past:
    """Plans a run forward, without keeping what it planned: asked again, it plans again.

    Args:
        replan: the run.
    """

    def __init__(self, replan: Replan) -> None:
        self._replan = replan
        #: the first sample that was asked for last.
        self._first: int | None = None

    def blocks(self, first: int, stop: int) -> list[Planned]:
        """Samples ``first .. stop``, cut where a stage begins.

        Raises:
            StreamExhausted: the stream ends before ``stop``.
        """
        if self._first is None or first < self._first:
            self._blocks: Iterator[Planned] = self._replan.plans(first, None)
            self._kept: list[Planned] = []
        self._first = first
        self._kept = [block for block in self._kept if block.plan.stop > first]
        while not self._kept or self._kept[-1].plan.stop < stop:
            block = next(self._blocks)
            if block.plan.stop > first:
                self._kept.append(block)
        return [
            replace(block, plan=block.plan.slice(max(first, block.plan.first), min(stop, block.plan.stop)))
            for block in self._kept
            if block.plan.first < stop
        ]


def _by_stage(plan: Plan, course: Course, given_up: list[tuple[int, Plan]]) -> Iterator[Planned]:
    cuts = {plan.first, plan.stop, *(first for first in course.began if plan.first < first < plan.stop)}
    # What was left out stands before the sample that came in its place.
    before = {at: [p for place, p in given_up if place == at] for at, _ in given_up}
    for first, stop in itertools.pairwise(sorted(cuts | set(before))):
        index = course.index_at(first)
        for part in before.get(first, ()):
            yield Planned(plan=part, stage=course.stages[index].name, config=course.config(index), left_out=True)
        yield Planned(plan=plan.slice(first, stop), stage=course.stages[index].name, config=course.config(index))


def _ended(position: int, stop: int | None, history: History) -> StreamExhausted:
    return StreamExhausted(
        "the stream ends before that",
        found=f"the stream has {position} samples" + ("" if stop is None else f", {stop} were asked for"),
        expected=f"samples up to {position}",
        cause="a source has a max_epochs with on_exhausted: stop, or all sources have ended",
        action=f"megaresume inspect {history.root} shows the sources",
    )


#: The number of samples planned between two signs of life.
STRIDE = 1 << 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A point in the past of a run, as a checkpoint, a ledger line or a log records it."""

    #: the place where it was recorded, for people.
    origin: str
    #: the number of samples trained.
    sample: int
    #: rolling digest of them, 16 hex digits.
    digest: str
    #: the fields of the state that say where the stream was, if it was recorded as a whole.
    position: dict[str, Any] | None = None
    #: the branch that the run gave up when it began again from an earlier step. None if it is the present.
    branch: Branch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """A recorded point, and what planning gave for it."""

    recorded: Recorded
    #: the digest; None if the stream could not be planned up to here.
    digest: str | None
    #: fields of the position that differ.
    fields: tuple[str, ...] = ()
    #: why it could not be planned.
    error: MegaresumeError | None = None

    @property
    def holds(self) -> bool:
        """Whether the recorded point is that of the stream."""
        return self.digest == self.recorded.digest and not self.fields


def replay(
    stream: Stream, recorded: Iterable[Recorded], *, progress: Callable[[int], object] = lambda samples: None
) -> Iterator[Replayed]:
    """Check recorded points in the order of their samples.

    Ends after a point that could not be planned: nothing after it can be either.

    Args:
        stream: a stream that begins at or before the first point.
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
            yield Replayed(recorded=point, digest=None, error=error)
            return
        yield Replayed(recorded=point, digest=position["digest"], fields=_differ(position, point, declared))


def replay_all(
    recorded: Iterable[Recorded],
    state: StreamState,
    sources: Mapping[str, LengthSource],
    progress: Callable[[int], object],
) -> tuple[list[Replayed], list[str]]:
    """Check every recorded point in a stream planned from sample 0. Branches that were given up are reported in words.

    What was given up and is the same proves as much as the rest; what is not is no longer part of the run.

    Args:
        recorded: the points.
        state: the newest of the run.
        sources: its corpora, by name, in the order of its config.
        progress: called with the samples planned since the last call.
    """
    try:
        config = StreamConfig.from_dict(state.config)
        stream = Stream(config, list(sources.values()), past=state)
    except CorpusError:
        return [], []  # already among the problems of the corpora
    checked = list(replay(stream, recorded, progress=progress))
    given_up = [c for c in checked if c.recorded.branch is not None and not c.holds]
    branches = dict.fromkeys(str(c.recorded.branch) for c in given_up)
    return [c for c in checked if c not in given_up], list(branches)


def replay_between(
    recorded: Iterable[Recorded], replan: Replan, first: int, stop: int, progress: Callable[[int], object]
) -> Iterator[Replayed]:
    """Check the recorded points from sample ``first`` to ``stop``, planned from the nearest state before them.

    Args:
        recorded: points of the run.
        replan: the run, without points of its own.
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
            yield Replayed(recorded=point, digest=None, error=error)
            return
        yield Replayed(recorded=point, digest=digest)


def _begun(source: SourceCursor) -> SourceCursor:
    """A source with only the eras that have begun, since later ones may have been changed."""
    eras = tuple(era for era in source.eras if era.first < max(source.position, 1))
    return source._replace(eras=eras)


def _differ(position: dict[str, Any], point: Recorded, declared: Container[int]) -> tuple[str, ...]:
    """Names of the fields of a recorded position that are not those found."""
    if point.position is None:
        return ()
    then, now = dict(point.position), dict(position)
    # A source that came later was not drawn yet, and is in no config of the time.
    now["sources"] = {name: cursor for name, cursor in now["sources"].items() if name in then["sources"]}
    for side in (then, now):
        side["sources"] = {name: _begun(cursor) for name, cursor in side["sources"].items()}
    then["stages"], now["stages"] = ([(s.first, s.name) for s in p["stages"]] for p in (then, now))
    names = list(now)
    # A list of documents to skip that is declared there, at a resume, is taken out of the open bins.
    moved = [name for name in ("sources", "bins", "pending", "tails") if now[name] != then.get(name)]
    if moved and point.sample in declared:
        names = [name for name in names if name not in moved]
    later = now["stages"][len(then["stages"]) :]
    if later and now["stages"][: len(then["stages"])] == then["stages"] and all(s[0] == point.sample for s in later):
        # It was recorded before a resume began a stage there, which starts the deficits at zero and may empty the bins.
        names = [name for name in names if name not in ("sources", "bins", "pending", "tails", "stages")]
    return tuple(name for name in names if now[name] != then.get(name))


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Every recorded point of a run."""

    #: every data state that is there.
    states: tuple[StepFile, ...]
    #: the recorded points: those of states, then those of the lines of the ledger.
    recorded: tuple[Recorded, ...]
    #: lines of the ledger that say nothing.
    unreadable: tuple[LedgerProblem, ...]
    #: what ranks added to checkpoints whose weights are there, and is missing or damaged; in words.
    lost: tuple[str, ...] = ()

    @property
    def newest(self) -> StreamState:
        """The newest state on the path to the present."""
        present = [s for s, point in zip(self.states, self.recorded, strict=False) if point.branch is None]
        return max((step.stream for step in present or self.states), key=lambda state: state.samples)


def read_points(run: Run) -> Points:
    """Read every point from the records of a run.

    Raises:
        CheckpointError: there is nothing to verify.
        StateError: a record is damaged.
    """
    entries, records = run.ledger.entries, records_dir(run.root)
    branches = branches_of(entries)
    #: of what was saved last under a name.
    saved = {(e.iteration, e.tag): b for e, b in zip(entries, branches, strict=True) if e.kind == "checkpoint"}
    states = tuple(run.state(path) for path in run.states)
    recorded = [
        Recorded(
            origin=f"state of step {step.iteration}",
            sample=step.state.samples,
            digest=step.state.digest,
            position=comparable({f: getattr(step.stream, f) for f in step.stream.__dataclass_fields__}),
            branch=saved.get((step.iteration, step.tag)),
        )
        for step in states
    ]
    recorded += [
        Recorded(
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
    """Find what is missing or damaged in the random states and loader states of one checkpoint."""
    if not (root / record.tag).is_dir():
        return []
    try:
        manifest = read_manifest(manifest_path(root, record.iteration, record.tag))
    except CheckpointError:
        return []  # incomplete: never taken
    return [f"{record.tag}: {problem.detail}" for problem in manifest.verify_beside(root)]


def between(history: History, first: int | None, last: int | None) -> tuple[int, int]:
    """The samples at two recorded steps; None: the beginning, the newest state.

    Raises:
        UsageError: no record is of such a step, naming the nearest; or they stand the wrong way round.
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
    """Compare the corpora as they are with what a state knows of them.

    Args:
        sources: opened, by name.
        state: of the run.
        recompute: read the corpora's indexes from end to end; else the records beside them are trusted.
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
    """The first document that does not end where the next one starts: a damaged length, in words."""
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
