"""`RunFacts`: the story of a run for its report, from the records beside its checkpoints.

Reads no corpus and plans nothing again: the points are saved states, a few hundred of them, spread over the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from megaresume.checkpoint.records.ledger import LedgerEntry
from megaresume.checkpoint.records.position import reached, reached_of
from megaresume.checkpoint.system import Topology
from megaresume.runs.answer import Answer, optional
from megaresume.runs.directory import Run
from megaresume.runs.history import History, Membership, memberships
from megaresume.runs.losses import Loss, LossLog
from megaresume.runs.report_figures import RunFigures, read_figures
from megaresume.stream.changes import outlook
from megaresume.stream.config import StreamConfig
from megaresume.stream.state import StreamState

#: Most states to read, spread evenly and including the newest.
MOST_POINTS = 300
#: Most losses to draw; of a longer log, every n-th.
MOST_LOSSES = 4000


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPoint:
    """The position of the run when a state was saved."""

    step: int
    samples: int
    tokens: int
    #: the number of tokens drawn from each source.
    sources: dict[str, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunInterval:
    """The samples between two points."""

    #: the steps of the two points.
    steps: tuple[int, int]
    #: the share of the tokens, by source.
    share: dict[str, float]
    #: tokens of documents divided by positions; None: no samples.
    fill: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStage:
    """A stage of the stream."""

    name: str
    first_sample: int
    seq_length: int
    packing: str
    #: the unit of the weights.
    unit: str
    #: the weights of the sources; they sum to 1.
    weights: dict[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSource:
    """A source, its weight, and how long it will last."""

    name: str
    #: the weight, as a fraction.
    weight: float
    documents: int
    tokens: int
    epoch: int
    epochs: float
    #: pieces left in this epoch, and for how many samples they last; None: it is not drawn from.
    remaining: int
    samples_left: int | None
    #: documents that were skipped, and that are left out.
    passed_over: int
    left_out_documents: int
    exhausted: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStart:
    """A start of the run, and the steps that had to be repeated."""

    time: str
    step: int
    samples: int
    #: the tag of the checkpoint; None: from the beginning.
    tag: str | None
    topology: Topology
    lost: int
    #: whether a log says so; otherwise only steps that were saved and then abandoned count.
    lost_is_exact: bool

    def to_dict(self) -> dict[str, Any]:
        """The start as JSON."""
        return {
            "time": self.time,
            "step": self.step,
            "samples": self.samples,
            "from": self.tag,
            "layout": str(self.topology),
            "topology": self.topology.to_dict(),
            "lost": self.lost,
            "lost_is_exact": self.lost_is_exact,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSkips:
    """What the user asked to leave out."""

    samples: int
    ranges: list[tuple[int, int]]
    #: each request, in words.
    asked: list[str]
    documents: list[str]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFacts(Answer):
    """The facts in the records beside the checkpoints of a run."""

    dir: str
    run: str | None
    step: int
    samples: int
    tokens: int
    documents: int
    #: the time when the newest state was saved.
    saved: str
    fill: float | None
    stages: list[RunStage]
    #: (first sample, samples per step).
    batches: list[tuple[int, int]]
    sources: list[RunSource]
    points: list[RunPoint]
    intervals: list[RunInterval]
    starts: list[RunStart]
    #: the replicas that trained together; empty if none leave and join while the run continues.
    memberships: list[Membership]
    #: the number of saved checkpoints.
    checkpoints: int
    left_out: RunSkips
    #: the faults in the state.
    faults: dict[str, Any]
    overrides: list[str]
    #: (step, loss); None: there is no log.
    losses: list[tuple[int, float]] | None
    #: the validation losses, by validation set.
    validations: dict[str, list[tuple[int, float]]]
    notes: list[str]
    #: steps done since ``step`` but not saved, as far as recorded; None: unknown.
    unsaved: int | None = optional()
    #: the figures of a run that was measured, or whose position was recorded.
    figures: RunFigures | None = optional()


def collect(run: Run, log: LossLog | None = None) -> RunFacts:
    """The facts of a run.

    Args:
        run: the run.
        log: its losses, if there is a log.

    Raises:
        CheckpointError, StateError: see `Run.history`.
    """
    history, ledger = run.history, run.ledger
    state = history.state
    points = _points(history)
    return RunFacts(
        dir=str(run.root),
        run=ledger.run,
        step=history.newest.iteration,
        samples=state.samples,
        tokens=state.tokens,
        documents=state.documents,
        saved=history.newest.saved_at,
        fill=_fill(state, 0, state.samples, state.tokens),
        stages=[_stage(record.first, record.name, record.config) for record in state.stages],
        batches=list(state.batches),
        sources=_sources(state),
        points=points,
        intervals=[_interval(state, a, b) for a, b in pairwise(points)],
        starts=_starts(ledger.entries, log),
        memberships=memberships(ledger.entries),
        checkpoints=sum(entry.kind == "checkpoint" for entry in ledger.entries),
        left_out=_left_out(state),
        faults=state.faults.to_plain(),
        overrides=list(state.overrides),
        losses=None if log is None else _thinned(log.steps),
        validations={} if log is None else {name: _thinned(by) for name, by in log.validations.items()},
        notes=history.notes,
        unsaved=_unsaved(run, history.newest.iteration),
        figures=read_figures(run),
    )


def _unsaved(run: Run, saved: int) -> int | None:
    newest = reached(run.root)
    return None if newest is None or newest["iteration"] <= saved else int(newest["iteration"]) - saved


def _points(history: History) -> list[RunPoint]:
    """The positions of the run, from its beginning to its newest state."""
    records = list(history.saved)
    stride = -(-len(records) // MOST_POINTS) or 1
    chosen = records[::-1][::stride][::-1]  # counted from the newest
    points = [RunPoint(step=0, samples=0, tokens=0, sources={})]
    for record in chosen:
        state = history.state if record.samples == history.state.samples else history.read(record)
        if state is None or state.samples <= points[-1].samples:
            continue
        drawn = {name: source.tokens for name, source in state.sources.items()}
        points.append(RunPoint(step=record.iteration, samples=state.samples, tokens=state.tokens, sources=drawn))
    return points


def _interval(state: StreamState, before: RunPoint, after: RunPoint) -> RunInterval:
    """Shares and fill between two points."""
    drawn = {name: tokens - before.sources.get(name, 0) for name, tokens in after.sources.items()}
    total = sum(drawn.values())
    return RunInterval(
        steps=(before.step, after.step),
        share={name: tokens / total if total else 0.0 for name, tokens in drawn.items()},
        fill=_fill(state, before.samples, after.samples, after.tokens - before.tokens),
    )


def _fill(state: StreamState, first: int, stop: int, tokens: int) -> float | None:
    """The tokens of documents divided by the positions in samples ``first .. stop``; None: no samples."""
    places = state.places(first, stop)
    return tokens / places if places else None


def _stage(first: int, name: str, config: Any) -> RunStage:
    weights = {source: entry["weight"] for source, entry in config["sources"].items()}
    total = sum(weights.values())
    return RunStage(
        name=name,
        first_sample=first,
        seq_length=config["seq_length"],
        packing=StreamConfig.recorded(config).packed_by,
        unit=config["blend"]["unit"],
        weights={source: weight / total for source, weight in weights.items()},
    )


def _sources(state: StreamState) -> list[RunSource]:
    rows = []
    for source in outlook(state, state.config_now):
        cursor = state.sources[source.name]
        rows.append(
            RunSource(
                name=source.name,
                weight=source.share,
                documents=source.documents,
                tokens=source.tokens,
                epoch=source.epoch,
                epochs=cursor.epochs,
                remaining=source.remaining,
                samples_left=source.samples_left,
                passed_over=cursor.skipped,
                left_out_documents=cursor.left_out_documents,
                exhausted=cursor.exhausted,
            )
        )
    return rows


def _starts(entries: Sequence[LedgerEntry], log: LossLog | None) -> list[RunStart]:
    """Every start of the run, and the steps that it lost: done, but not saved."""
    #: the steps lost by each restart at a step, the last restart first, by step.
    restarts: dict[int, list[int]] = {}
    for step, lost in reversed(log.restarts if log is not None else ()):
        restarts.setdefault(step, []).append(lost)
    starts: list[RunStart] = []
    saved = 0
    for entry in entries:
        if entry.kind == "checkpoint":
            saved = entry.iteration
        if entry.kind != "start":
            continue
        known = restarts.get(entry.iteration)
        exact = known.pop() if known and starts else None
        before = reached_of(entry.details) if starts else None
        if before is not None:
            saved = max(saved, before[0])
            if exact is None and before[3] == 1:
                exact = max(before[0] - entry.iteration, 0)
        starts.append(
            RunStart(
                time=entry.time,
                step=entry.iteration,
                samples=entry.samples,
                tag=entry.tag,
                topology=entry.topology,
                # Without a log, only steps that were saved and then abandoned are known.
                lost=exact if exact is not None else max(saved - entry.iteration, 0),
                lost_is_exact=exact is not None or not starts,
            )
        )
        saved = entry.iteration
    return starts


def _left_out(state: StreamState) -> RunSkips:
    skips = state.skips
    return RunSkips(
        samples=sum(stop - first for first, stop in skips.ranges),
        ranges=list(skips.ranges),
        asked=[str(record) for record in skips.log],
        documents=[str(skip.documents) for skip in skips.documents if skip.until is None],
    )


def _thinned(losses: Mapping[int, Loss]) -> list[tuple[int, float]]:
    """Some of the losses as (step, loss), ascending."""
    steps = sorted(losses)
    stride = -(-len(steps) // MOST_LOSSES)
    return [(step, losses[step].value) for step in steps[::stride]]
