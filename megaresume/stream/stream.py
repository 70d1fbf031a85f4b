"""`Stream`: the one endless sequence of samples that exists before any rank does.

    permutation of each source -> blend -> lengths -> packer -> samples 0, 1, 2, ...

It answers three questions about any sample: its contents (`plan`), the state before it (`state_at`), and the digest up
to it (`digest_at`). `Blocks` plans, caches and plans again.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from megaresume.stream import cursor
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.changes import Reconciled, extended, reconcile
from megaresume.stream.config import OnChange, StreamConfig, resolved
from megaresume.stream.cursor import Blocks
from megaresume.stream.errors import ConfigError, MegaresumeError, StateError, StreamExhausted
from megaresume.stream.kernel import Arrays
from megaresume.stream.left_out import NO_FAULTS, NO_SKIPS, FaultRecord, Skips, check_documents, decide, no_schedule
from megaresume.stream.planner import Plan
from megaresume.stream.skips import NO_SKIP, Range, SkipConfig
from megaresume.stream.source import AbsentSource, LengthSource, PieceLists, fingerprint_of
from megaresume.stream.stages import Course, check_growing, check_remaining, check_trained, check_whole
from megaresume.stream.state import Fingerprint, StreamState


class _Opened(NamedTuple):
    """The parts of a stream that resumes from a state: see `Stream._restore`."""

    config: StreamConfig
    course: Course
    sources: list[LengthSource]
    base: Arrays | None
    accepted: tuple[str, ...]
    names: list[str]


class Stream:
    """The stream of a config over its sources.

    Safe to use from several threads. Cheap to build in every process that needs data: it reads lengths, no tokens.

    Args:
        config: what defines the order.
        sources: one for each of ``config.sources``, in that order.
        state: where to continue; None: at sample 0.
        origin: a data config that opens the same sources again (`megaresume.batches.open`), if there is one. Kept for
            `megaresume verify`; never part of a state.
        fingerprints: the result of `fingerprints`, if known already.
        on_change: what a restore does if the config differs from the one in the state; see `OnChange`.
        past: a state of the run; everything that led to it is planned again from sample 0.
        copied: the parts shared with the stream that this is a copy of.

    Raises:
        ConfigError, CorpusError: the config or a source is unusable.
        StateError: the state belongs to another config or other corpora, naming the fields that differ.
    """

    def __init__(
        self,
        config: StreamConfig,
        sources: Sequence[LengthSource],
        *,
        state: StreamState | None = None,
        origin: Mapping[str, Any] | None = None,
        fingerprints: dict[str, Fingerprint] | None = None,
        on_change: OnChange = "refuse",
        past: StreamState | None = None,
        copied: Mapping[str, Any] | None = None,
    ) -> None:
        if len(sources) != len(config.sources):
            raise ConfigError(
                "the number of sources differs from the config's",
                found=f"{len(sources)} sources",
                expected=f"{len(config.sources)}: {', '.join(s.name for s in config.sources)}",
                action="pass one source for each of the config's, in its order",
            )
        check_whole(config, sources)
        check_trained(config, sources)
        check_growing(config, sources)
        #: the current config over all sources that the run ever had; removed ones have weight 0.
        self.config = config
        self.origin = origin
        self.sources = list(sources)
        self.on_change = on_change
        self._given = config, tuple(sources), past
        copied = copied or {}
        self._skip: tuple[SkipConfig, ...] = copied.get("skip", ())
        self._end: int | None = copied.get("end")
        #: the samples of skipped steps, fixed when they are first needed.
        self._steps: dict[Range, Range] = dict(copied.get("steps", {}))
        self._fingerprints = fingerprints
        self._lock = threading.RLock()
        #: the state that the stream resumes from; None if it began at sample 0.
        self.base_state: StreamState | None = None
        #: accepted differences between that state and the current config, in words.
        self.accepted: tuple[str, ...] = ()
        self._schedule: BatchSchedule | None = copied.get("schedule")
        self._restore(state)

    def __reduce__(self) -> tuple[object, ...]:
        """Copy or pickle for another process: without the lock and the plans."""
        # With the fingerprints: a worker must not ask a slow source for all its lengths again.
        config, sources, past = self._given
        again = partial(
            Stream,
            state=self.base_state,
            origin=self.origin,
            fingerprints=self._fingerprints,
            on_change=self.on_change,
            past=past,
            copied={"schedule": self._schedule, "skip": self._skip, "steps": self._steps, "end": self._end},
        )
        return again, (config, sources)

    @property
    def fingerprints(self) -> dict[str, Fingerprint]:
        """The fingerprints of the sources, by name. The first use may read an index once from end to end."""
        if self._fingerprints is None:
            config, sources, *_ = self._given
            names = [s.name for s in config.sources]
            self._fingerprints = {name: fingerprint_of(s, name) for name, s in zip(names, sources, strict=True)}
        return self._fingerprints

    @property
    def schedule(self) -> BatchSchedule | None:
        """Global batch sizes of the run, which say where a stage begins that is declared by step."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: BatchSchedule | None) -> None:
        with self._lock:
            self._schedule = schedule
            if self._blocks.front == self.start:
                self._steps.clear()  # nothing after the first sample was used yet
            if any(stage.unit == "step" for stage in self._course.stages) or any(s.steps for s in self._skip):
                self._restore(self.base_state)  # what was planned may belong to another stage now

    @property
    def start(self) -> int:
        """The sample at which the stream was begun or restored: going back further is refused."""
        return self.base_state.samples if self.base_state is not None else 0

    def restore(self, state: StreamState | None) -> None:
        """Resume from a state (None: from sample 0). O(1): no sample before it is planned.

        Raises:
            StateError: as above; the stream stays as it was.
            ConfigError: a skip that cannot be; the stream stays as it was.
        """
        with self._lock:
            self._steps.clear()
            self._restore(state)

    def skip(self, *skip: SkipConfig, end: int | None = None) -> None:
        """Leave out more than the data config says. Call it before planning; a restore keeps it.

        Args:
            skip: what.
            end: samples that the run will train, if known: nothing beyond it can be skipped.

        Raises:
            StateError, ConfigError: as `restore`; the stream stays as it was.
        """
        with self._lock:
            before = self._skip, self._end
            self._skip, self._end = tuple(dict.fromkeys((*self._skip, *skip))), end
            try:
                self._restore(self.base_state)
            except MegaresumeError:
                self._skip, self._end = before
                raise

    def _restore(self, state: StreamState | None) -> None:
        config, course, here, base, accepted, names = self._open(state)
        with self._lock:
            self._blocks = Blocks(course, here, base, config)
            #: the sample up to which the stream is known to reach, as a loop asks before every step.
            self._reaches = 0
            self.config, self.sources, self._course, self.accepted = config, here, course, accepted
            #: the sources available: the run's name for each -> its name in the config as given.
            self._first_names = dict(zip(names, (s.name for s in self._given[0].sources), strict=True))
            self.base_state = state
            #: config and fingerprints of every state: the same objects each time, so that their text is cached.
            self._constants: tuple[dict[str, Any], dict[str, Fingerprint]] | None = None

    def _open(self, state: StreamState | None, lists: Mapping[str, PieceLists] | None = None) -> _Opened:
        """Prepare to resume from a state (None: from sample 0). Changes nothing.

        Args:
            state: the state.
            lists: of long documents, by the run's names of the sources; None: make them.
        """
        config, sources, past = self._given
        accepted: tuple[str, ...] = ()
        base: Arrays | None = None
        if state is not None:
            going_on = self._reconcile(state)
            given = resolved(config, state.config["sources"])
            config, course, accepted = going_on.config, going_on.course, going_on.accepted
        elif past is not None:
            course = Course.recorded(past)
            given = resolved(config, past.config["sources"])
            last = past.config_now
            config = extended(given, [s.name for s in last.sources], last)
        else:
            given, course = config, Course.of(config)
            course.skips, accepted = decide(
                NO_SKIPS,
                0,
                then=NO_SKIP,
                now=config.skip,
                given=self._skip,
                steps_to_samples=self._samples_of,
                end=self._end,
            )
        course.schedule = self._schedule
        names = [source.name for source in given.sources]
        by_name = dict(zip(names, sources, strict=True))
        check_documents(course.skips, {name: len(source) for name, source in by_name.items()})
        check_remaining(course, by_name, state)
        here = [by_name[s.name] if s.name in by_name else AbsentSource(s.name, state) for s in config.sources]
        if state is not None:
            known = None if lists is None else [lists[source.name] for source in config.sources]
            base = cursor.arrays_of(state, course, here, known)
        return _Opened(config, course, here, base, accepted, names)

    def read_back(self, state: StreamState) -> None:
        """Open a state of this stream as a resume with the same config would, from its text, and discard it.

        Raises:
            StateError: no run could resume from it.
        """
        with self._lock:
            orders = self._course.orders.get(len(state.stages) - 1)
            lists = None if orders is None else {order.name: order.lists for order in orders}
            try:
                self._open(StreamState.from_json(json.loads(json.dumps(state.to_dict()))), lists)
            except MegaresumeError as error:
                raise StateError(
                    "the data state that is to be saved cannot be read again",
                    found=error.line,
                    expected="a state that a run can resume from",
                    cause="a fault of megaresume, which this check keeps out of the checkpoint",
                    action="resume from the checkpoint before this one without the last change of the data config, and "
                    "report this with data.yaml and the output of: megaresume inspect DIR --json",
                ) from error

    def _reconcile(self, state: StreamState) -> Reconciled:
        config, sources, _ = self._given
        return reconcile(
            config,
            self.fingerprints,
            state,
            self.on_change,
            skip=self._skip,
            steps_to_samples=self._samples_of,
            end=self._end,
            sources=dict(zip((s.name for s in config.sources), sources, strict=True)),
        )

    def _samples_of(self, steps: Range) -> Range:
        """The samples of steps (first, last), by the schedule at the first call."""
        if steps not in self._steps:
            if self._schedule is None:
                raise no_schedule(steps)
            self._steps[steps] = self._schedule.after(0, steps[0] - 1), self._schedule.after(0, steps[1])
        return self._steps[steps]

    @property
    def block_samples(self) -> int:
        """The number of samples that are planned at a time."""
        return self._blocks.size

    def check(self, state: StreamState) -> None:
        """Raise a `StateError` naming what differs unless the stream can resume from the state."""
        self._reconcile(state)

    def config_at(self, sample: int) -> StreamConfig:
        """The config in the stage of a sample, which declares no stages."""
        if len(self._course.stages) == 1:
            return self._course.config(0)
        with self._lock:
            if sample >= self._blocks.front and len(self._course.began) < len(self._course.stages):
                self._blocks.reach(sample)
            return self._course.config(self._course.index_at(sample))

    def shape_at(self, sample: int) -> tuple[int, int]:
        """(tokens of a sample, alignment of segments in tokens)."""
        config = self.config_at(sample)
        return config.seq_length, config.packing.align

    @property
    def skips(self) -> Skips:
        """The skips of the stream."""
        return self._course.skips

    def plan(self, first: int, stop: int) -> Plan:
        """Plan samples ``first .. stop``.

        Raises:
            StreamExhausted: the stream ends before ``stop``.
            StateError: ``first`` lies before the state that the stream was restored from.
        """
        with self._lock:
            return self._blocks.plan(first, stop)

    def check_reaches(self, stop: int) -> None:
        """Raise StreamExhausted if the stream ends before ``stop``."""
        if stop <= self._reaches:
            return
        with self._lock:
            if stop > self._blocks.front:
                self._blocks.reach(stop - 1)
            self._reaches = self._blocks.front

    def reaches(self, stop: int) -> bool:
        """Whether the stream has all samples before ``stop``."""
        try:
            self.check_reaches(stop)
        except StreamExhausted:
            return False
        return True

    def digest_at(self, sample: int) -> str:
        """Rolling digest of all samples before ``sample``: 16 hex digits."""
        with self._lock:
            digest = self._blocks.digest_at(sample)
            return str(self.fields_at(sample)["digest"]) if digest is None else f"{digest:016x}"

    def state_at(
        self,
        sample: int,
        *,
        batches: Sequence[tuple[int, int]] = (),
        overrides: Sequence[str] = (),
        faults: Iterable[FaultRecord | tuple[Any, ...]] = (),
    ) -> StreamState:
        """The state before ``sample``, for a checkpoint after ``sample`` trained samples.

        Args:
            sample: number of samples trained.
            batches: (first sample, global batch size) segments up to here; see `BatchSchedule.until`.
            overrides: differences accepted at this start, added to those of the state resumed from.
            faults: documents, on all ranks, that a fault policy was applied to since the stream began or was restored;
                later ones, and repeats, are ignored. Added to those of the state resumed from.
        """
        fields = self.fields_at(sample)
        before = self.base_state
        plain, fingerprints = self._constants = self._constants or (self.config.to_dict(), self._all_fingerprints())
        return StreamState(
            config=plain,
            # In the order of the sources; a removed source keeps its last fingerprint.
            fingerprints=fingerprints,
            batches=tuple(batches) or (before.batches if before is not None else ()),
            skips=self._course.skips,
            overrides=(*(before.overrides if before is not None else ()), *self.accepted, *overrides),
            faults=(before.faults if before is not None else NO_FAULTS).with_new(faults, self.start, sample),
            **fields,
        )

    def _all_fingerprints(self) -> dict[str, Fingerprint]:
        """The fingerprints of all sources that the run ever had, by the run's names; removed ones keep their last."""
        before = {} if self.base_state is None else self.base_state.fingerprints
        return {
            s.name: self.fingerprints[self._first_names[s.name]] if s.name in self._first_names else before[s.name]
            for s in self.config.sources
        }

    def fields_at(self, sample: int) -> dict[str, Any]:
        """The fields of the state before ``sample`` that say where the stream is (see `Fields`)."""
        with self._lock:
            return self._blocks.fields_at(sample)
