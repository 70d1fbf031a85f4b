"""Plans the stream of a run again.

`Replan`: the past from the nearest state, through the stages that were; the future from the newest state, through
declared stages. `Past` reads it in order. Also finds the run's corpora, wherever they are now.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from megaresume.checkpoint.records.names import data_path
from megaresume.data.catalog import open_sources
from megaresume.data.data_config import DataConfig
from megaresume.data.source import Source
from megaresume.data.split import range_of
from megaresume.runs.history import History
from megaresume.stream import cursor
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.changes import reconcile
from megaresume.stream.config import StreamConfig, resolved
from megaresume.stream.errors import CheckpointError, ConfigError, StreamExhausted, UsageError
from megaresume.stream.order import Orders
from megaresume.stream.planner import Plan, Planner, orders_of
from megaresume.stream.progress import Progress
from megaresume.stream.skips import trained
from megaresume.stream.source import AbsentSource, LengthSource, check_fingerprint, fingerprint_of, may_be_cut
from megaresume.stream.stages import Course
from megaresume.stream.state import StreamState


def open_corpora(
    root: Path, state: StreamState, *, data: str | None, split: str | None, need_all: bool = False
) -> dict[str, Source]:
    """The corpora of a run by name, without documents added after a state.

    Args:
        root: the run's ``--save`` directory.
        state: a state of the run.
        data: ``--data``, if given; None: the data config recorded beside the checkpoints.
        split: the run's split, if neither has one.
        need_all: also require sources that the data config no longer has.

    Raises:
        UsageError: there is no data config.
        ConfigError: it cannot be read, or lacks a required source.
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
    # Under the run's names for its sources.
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


#: Samples and tokens planned at a time, whichever limit comes first.
BLOCK, BLOCK_TOKENS = 1 << 13, 1 << 26
FEWEST = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """Consecutive samples of one stage."""

    plan: Plan
    stage: str
    config: StreamConfig
    #: whether the samples are left out of the stream, so that their numbers are absolute.
    left_out: bool = False


class Replan:
    """Plans any range of a run's stream.

    Args:
        history: the run.
        sources: the corpora, by name; a missing one raises when a sample needs it.
        schedule: batch sizes, for declared stages that begin at a step.
        compare: check the plan against every recorded point.

    Raises:
        StateError: a corpus has changed.
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
        # The order comes from the records; the data config says where the corpora are.
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
        """Name of the last known stage, begun or declared."""
        return self._stages[-1].name

    @property
    def last_config(self) -> StreamConfig:
        """The config of the last known stage, begun or declared."""
        return self._stages[-1].config

    @cached_property
    def orders(self) -> Orders:
        """The orders of the sources: those in the newest state, or those that they will begin with."""
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
        progress: Progress = lambda samples: None,
        left_out: bool = False,
    ) -> Iterator[Planned]:
        """Plan samples ``first .. stop`` in order, in blocks of one stage.

        Args:
            first: first sample.
            stop: one after the last; None: until the caller stops, or the stream ends.
            start: a state at or before ``first`` to plan from; None: the nearest.
            progress: called with the samples planned since the last call, including those before ``first``.
            left_out: also yield samples that were left out just before one of them.

        Raises:
            StreamExhausted: the stream ends before ``stop``.
            CheckpointError: the plan differs from a record.
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
        """Compare the digests in a plan with the recorded ones."""
        # After `plan.first`, up to and including `plan.stop`.
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
    """Plans a run forward without keeping the plan; plans again for an earlier sample.

    Args:
        replan: the run.
    """

    def __init__(self, replan: Replan) -> None:
        self._replan = replan
        #: the first sample of the last request.
        self._first: int | None = None

    def blocks(self, first: int, stop: int) -> list[Planned]:
        """Samples ``first .. stop``, split at stages.

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
    # Samples left out come before the one that replaced them.
    before = {at: [p for place, p in given_up if place == at] for at, _ in given_up}
    for first, stop in itertools.pairwise(sorted(cuts | set(before))):
        index = course.index_at(first)
        for part in before.get(first, ()):
            yield Planned(plan=part, stage=course.stages[index].name, config=course.config(index), left_out=True)
        yield Planned(plan=plan.slice(first, stop), stage=course.stages[index].name, config=course.config(index))


def _ended(position: int, stop: int | None, history: History) -> StreamExhausted:
    return StreamExhausted(
        "the stream ends before that",
        found=f"the stream has {position} samples" + ("" if stop is None else f"; samples up to {stop} are asked for"),
        expected=f"samples up to {position}",
        cause="a source has a max_epochs with on_exhausted: stop, or all sources have ended",
        action=f"megaresume inspect {history.root} shows the sources",
    )
