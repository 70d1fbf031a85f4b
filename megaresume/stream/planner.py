"""`Planner`: drives the planning loop forward from a snapshot, feeding it documents; and `Plan`, its result.

A plan says what a run of consecutive samples holds, before any token is read.

A planner only moves forward, from stage to stage. `snapshot` is a copy of its few small arrays (microseconds); a
planner built on a snapshot continues exactly from there, whatever was looked ahead before.

Samples to be left out are planned like all others and then discarded, just before the next sample that stays: a planner
that stands before them has not decided about them yet.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megaresume.stream import kernel
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import CorpusError
from megaresume.stream.feed import (
    DocumentFeed,
    enter,
    fresh_arrays,
    grown,
    kernel_config,
    without_documents,
)
from megaresume.stream.kernel import Arrays
from megaresume.stream.order import Orders, SourceOrder
from megaresume.stream.selection import NEVER
from megaresume.stream.source import AbsentSource, LengthSource, PieceLists, may_be_cut
from megaresume.stream.stages import Course, Stage
from megaresume.stream.state import StreamState


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSegment:
    """One segment of a sample, for people: `Plan.segments` returns these; code uses the arrays."""

    #: the source, as an index into the sources of the config.
    source: int
    epoch: int
    #: document number in the source.
    document: int
    #: tokens of the document before the segment.
    offset: int
    #: tokens of the segment.
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The plan of samples ``first .. first + len(self)`` of the stream, with s segments in all."""

    #: number of the first sample in the stream.
    first: int
    #: int64[samples + 1]: the segments of sample k are ``starts[k] .. starts[k + 1]``.
    starts: npt.NDArray[np.int64]
    #: int64[s, 5]: source, position in the source, document, offset, length.
    table: npt.NDArray[np.int64]
    #: uint64[samples]: hash of each sample's identity, independent of what came before.
    hashes: npt.NDArray[np.uint64]
    #: uint64[samples]: rolling digest of the stream after each sample.
    digests: npt.NDArray[np.uint64]
    #: the orders of the sources, which say what epoch a position is in.
    orders: Orders

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.hashes)

    @property
    def stop(self) -> int:
        """Number of the first sample after these."""
        return self.first + len(self)

    def slice(self, first: int, stop: int) -> Plan:
        """The part of this plan for samples ``first .. stop`` (numbers in the stream); its arrays are views, not
        copies."""
        a, b = first - self.first, stop - self.first
        begin, end = int(self.starts[a]), int(self.starts[b])
        return Plan(
            first=first,
            starts=self.starts[a : b + 1] - begin,
            table=self.table[begin:end],
            hashes=self.hashes[a:b],
            digests=self.digests[a:b],
            orders=self.orders,
        )

    def segments(self, sample: int) -> list[PlannedSegment]:
        """The segments of one sample (its number in the stream), in the order in which they lie in it."""
        begin, end = self.starts[sample - self.first : sample - self.first + 2]
        return [
            PlannedSegment(
                source=source,
                epoch=self.orders[source].epoch_of(position),
                document=document,
                offset=offset,
                length=length,
            )
            for source, position, document, offset, length in self.table[begin:end].tolist()
        ]

    def _repr_html_(self) -> str:
        """The plan as a picture, for Jupyter."""
        from megaresume.stream.pictures import picture_of_plan

        return picture_of_plan(self)

    def __iter__(self) -> Iterator[list[PlannedSegment]]:
        """The segments of each sample."""
        return (self.segments(sample) for sample in range(self.first, self.stop))

    def epochs(self) -> npt.NDArray[np.int64]:
        """The epoch of each segment: int64[s]."""
        return self.orders.epochs(self.table[:, 0], self.table[:, 1])

    def tokens(self) -> npt.NDArray[np.int64]:
        """The tokens of documents in each sample: int64[samples]."""
        if not len(self):
            return np.zeros(0, np.int64)
        total = np.concatenate([[0], np.cumsum(self.table[:, 4])])
        return np.asarray(total[self.starts[1:]] - total[self.starts[:-1]], np.int64)


def concatenate(plans: list[Plan]) -> Plan:
    """Consecutive plans as one."""
    if len(plans) == 1:
        return plans[0]
    offsets = np.cumsum([0, *(len(p.table) for p in plans)])
    starts = [p.starts[:-1] + o for p, o in zip(plans, offsets[:-1], strict=True)]
    return Plan(
        first=plans[0].first,
        starts=np.concatenate([*starts, offsets[-1:]]),
        table=np.concatenate([p.table for p in plans]),
        hashes=np.concatenate([p.hashes for p in plans]),
        digests=np.concatenate([p.digests for p in plans]),
        orders=plans[-1].orders,  # which include the earlier ones
    )


#: Documents looked ahead in all sources together (48 bytes each), and the least and most in each: fewer mean more calls
#: from the loop into Python.
LOOK_AHEAD, LOOK_AHEAD_LOW, LOOK_AHEAD_HIGH = 1 << 21, 32, 8192
#: Look-ahead of a planner with shared feeds: it plans a few samples again, from what the feeds have cached.
LOOK_AGAIN = 1024
#: A source is nearly used up when less than one part in this many of its look-ahead is left.
TOP_UP = 16
#: How many samples to be left out are planned at a time.
LEAVE_OUT = 1 << 13
#: Rows allocated for a plan, relative to the last plan's average.
SPARE = 1.1


@lru_cache(maxsize=4096)
def source_key(name: str) -> int:
    """64-bit hash of a source's name: its part in the identity of a sample."""
    digest = hashlib.blake2b(f"megaresume.source.1|{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def orders_of(
    state: StreamState | None,
    config: StreamConfig,
    sources: Sequence[LengthSource],
    lists: Sequence[PieceLists] | None = None,
) -> Orders:
    """The orders that a state knows; of the other sources, and without a state, nothing is known yet.

    Args:
        state: None if the run begins.
        config: of the stage of the state.
        sources: of the config.
        lists: of their long documents, if they are known already.

    Raises:
        StateError: what the state knows does not fit these sources.
    """
    cursors = {} if state is None else state.sources
    orders = Orders(
        SourceOrder(
            entry.name,
            config.seed,
            entry.shuffle,
            PieceLists(source) if lists is None else lists[i],
            cursors[entry.name].eras if entry.name in cursors else (),
            entry.group_by_length,
        )
        for i, (entry, source) in enumerate(zip(config.sources, sources, strict=True))
    )
    for order, entry in zip(orders, config.sources, strict=True):
        if entry.weight > 0 and not isinstance(order.lists.source, AbsentSource):
            order.check()
    return orders


def past_orders(course: Course, config: StreamConfig, sources: Sequence[LengthSource]) -> Orders:
    """The final orders of a course's past, made once, as they keep the lists of long documents."""
    if course.past_orders is None:
        course.past_orders = orders_of(course.past, config, sources)
    return course.past_orders


def revised_orders(orders: Orders, stage: Stage, sources: Sequence[LengthSource], arrays: Arrays) -> Orders:
    """The orders of the sources from a stage on, revised for those that are drawn in it or grow with it."""
    config, number = stage.config, int(arrays.scalars[kernel.STAGE])
    positions = arrays.sources[:, kernel.NEXT].tolist()
    return Orders(
        order.revised(
            position,
            documents=len(source),
            piece=config.seq_length if may_be_cut(source) else 0,
            now=entry.name in stage.grown_now,
            stage=number,
        )
        # A source that pauses has grown all the same: its new documents join when it continues.
        if entry.weight > 0 or (entry.name in stage.grown_now and order.eras)
        else order
        for order, entry, source, position in zip(orders, config.sources, sources, positions, strict=True)
    )


class Planner:
    """Plans samples one after another.

    Args:
        course: the stages of the stream.
        sources: lengths by document, in the order of the sources of every stage.
        arrays: where to start (`snapshot`, or ``cursor.arrays_of`` a state); None: at sample 0. Copied.
        feeds: of another planner of the same sources, to share their caches.

    Raises:
        CorpusError: a source with a positive weight has no documents.
    """

    def __init__(
        self,
        course: Course,
        sources: Sequence[LengthSource],
        arrays: Arrays | None = None,
        *,
        feeds: Sequence[DocumentFeed] | None = None,
    ) -> None:
        first = course.config(0)
        self.course = course
        self._sources = sources
        self.feeds = feeds or [
            DocumentFeed(source, entry.name) for source, entry in zip(sources, first.sources, strict=True)
        ]
        self._keys = np.array([source_key(s.name) for s in first.sources], np.uint64)
        most = LOOK_AHEAD_HIGH if feeds is None else LOOK_AGAIN
        num = min(max(LOOK_AHEAD // len(sources), LOOK_AHEAD_LOW), most)
        self._ahead = np.zeros((len(sources), num, kernel.AHEAD_WIDTH), np.int64)
        self._arrays = Arrays._make(array.copy() for array in arrays or fresh_arrays(first))
        #: average segments per sample that a plan has room for.
        self._segments_a_sample = 16.0
        #: int64[n]: ranks of the names, to break ties.
        self._by_name = np.array(sorted(range(len(sources)), key=lambda i: first.sources[i].name), np.int64)
        self._masks = course.masks_at(self.position)
        #: called with the samples left out; ``first`` of such a plan counts them too.
        self.on_left_out: Callable[[Plan], object] = lambda plan: None
        self._set_stage()
        # A stage that begins right here may lack a source of the previous one, so look ahead only after this.
        if not self._arrive():
            self._look_ahead()

    def _set_stage(self) -> None:
        self._stage = int(self._arrays.scalars[kernel.STAGE])
        self._config = self.course.config(self._stage)
        self._constants = kernel_config(self._config)
        for entry, source in zip(self._config.sources, self._sources, strict=True):
            if entry.weight > 0 and len(source) == 0:
                raise CorpusError(
                    f"source '{entry.name}' has no documents",
                    found="0 documents",
                    expected="at least one, since its weight is positive",
                    action="give it weight 0, or check its path and split",
                )
        orders, past = self.course.orders, self.course.past
        if self._stage not in orders and past is not None and self._stage < len(past.stages):
            orders[self._stage] = past_orders(self.course, self._config, self._sources).known_in(self._stage)
        elif self._stage not in orders:
            before = orders.get(self._stage - 1) or orders_of(past, self._config, self._sources)
            stage = self.course.stages[self._stage]
            orders[self._stage] = revised_orders(before, stage, self._sources, self._arrays)
        self._orders = orders[self._stage]

    def _arrive(self) -> bool:
        """Begin the stages and skips due here, so that every snapshot belongs to the next sample's stage."""
        entered, position = False, self.position
        masks = self.course.masks_at(position)
        if masks is not self._masks:
            self._masks, entered = masks, True
        if new := self.course.masks_from(position):
            self._arrays = without_documents(self._arrays, self._constants, new, self._orders)
        while self.course.is_due(self._stage + 1, position, self._tokens):
            self._arrays = enter(self._arrays, self._config, self.course.config(self._stage + 1))
            self.course.reached(self._stage + 1, position)
            self._set_stage()
            entered = True
        if entered:
            self._refill_all()
        return entered

    @property
    def position(self) -> int:
        """Number of the next sample."""
        return kernel.trained_samples(self._arrays)

    @property
    def _tokens(self) -> int:
        return int(self._arrays.scalars[kernel.TOKENS])

    @property
    def reached(self) -> int:
        """Number of the next sample, counting those left out."""
        return int(self._arrays.scalars[kernel.SAMPLES])

    @property
    def arrays(self) -> Arrays:
        """The arrays that it works on: read them before it advances."""
        return self._arrays

    def snapshot(self) -> Arrays:
        """A copy of the planner's arrays, without the placed part of `Arrays.carried`."""
        now = self._arrays
        rest = now._replace(carried=now.carried[int(now.scalars[kernel.NEXT_CARRIED]) :])
        arrays = Arrays._make(array.copy() for array in rest)
        arrays.scalars[kernel.NEXT_CARRIED] = 0
        return arrays

    def advance(self, num_samples: int) -> Plan:
        """Plan the next samples: as many as requested, fewer only if the stream ends."""
        plans: list[Plan] = []
        while True:
            if num_samples and not self._leave_out():
                return concatenate([*plans, self._advance(0)])  # an empty plan: the stream has ended
            num = min([num_samples, *self._limits()])
            plan = self._advance(num)
            plans.append(plan)
            num_samples -= len(plan)
            self._arrive()
            if not num_samples or len(plan) < num:
                return concatenate(plans)

    def _limits(self) -> list[int]:
        """The number of samples until the next change: a stage, a list of documents to skip, samples to leave out."""
        left = self.course.samples_left(self._stage, self.position, self._tokens)
        changes, ranges = self.course.skips.changes(), self.course.skips.ranges
        limits = [] if left is None else [left]
        if (k := bisect_right(changes, self.position)) < len(changes):
            limits.append(changes[k] - self.position)
        if (k := bisect_left(ranges, (self.reached,))) < len(ranges):
            limits.append(ranges[k][0] - self.reached)
        return limits

    def _leave_out(self) -> bool:
        """Discard the samples to be left out here; False, with nothing done, if the stream ends in them."""
        ranges = self.course.skips.ranges
        k = bisect_right(ranges, self.reached, key=lambda r: r[0]) - 1
        if k < 0 or self.reached >= ranges[k][1]:
            return True
        before, first, stop = self.snapshot(), self.reached, ranges[k][1]
        while self.reached < stop:
            num = min(stop - self.reached, LEAVE_OUT)
            at = self.reached
            plan = self._advance(num)
            if len(plan) < num:
                self._arrays = before
                self._set_stage()
                self._refill_all()
                return False
            source, length = plan.table[:, kernel.SOURCE], plan.table[:, kernel.LENGTH]
            np.add.at(self._arrays.sources[:, kernel.LEFT_OUT_TOKENS], source, length)
            np.add.at(self._arrays.sources[:, kernel.LEFT_OUT_DOCUMENTS], source, plan.table[:, kernel.OFFSET] == 0)
            self.on_left_out(replace(plan, first=at))
        scalars = self._arrays.scalars
        scalars[kernel.LEFT_OUT_SAMPLES] += stop - first
        for counter in kernel.COUNTS_OF_TRAINED:
            scalars[counter] = before.scalars[counter]
        self._arrays.digest[:] = before.digest
        return True

    def _advance(self, num_samples: int) -> Plan:
        """Plan samples of the current stage."""
        scalars = self._arrays.scalars
        scalars[kernel.OUT_SAMPLES] = scalars[kernel.OUT_SEGMENTS] = 0
        first = self.position
        # A little larger than the last plan: most plans are then kept as they are, without a copy.
        room = int(self._segments_a_sample * num_samples) + len(self._arrays.link) + 1
        table = np.empty((room, kernel.SEGMENT_WIDTH), np.int64)
        starts = np.zeros(num_samples + 1, np.int64)
        while True:
            arguments = self._arrays, self._constants, self._by_name, self._ahead
            status = kernel.advance(*arguments, num_samples, table, starts)
            if status == kernel.REFILL:
                self._refill(int(scalars[kernel.REFILL_SOURCE]))
                if len(self._by_name) > kernel.FEW:  # few are looked far ahead in, and seldom used up
                    self._top_up()
            elif status == kernel.GROW_OUT:
                table = np.concatenate([table, np.empty_like(table), np.empty_like(self._arrays.segments)])
            elif status == kernel.GROW_BINS:
                self._arrays = grown(self._arrays)
            else:
                break
        num, num_segments = int(scalars[kernel.OUT_SAMPLES]), int(scalars[kernel.OUT_SEGMENTS])
        if num:
            self._segments_a_sample = SPARE * num_segments / num
        starts, used = starts[: num + 1], table[:num_segments]
        table = used if len(table) <= SPARE**2 * num_segments else used.copy()  # plans are kept, so no unused rows are
        hashes, digests = np.empty(num, np.uint64), np.empty(num, np.uint64)
        kernel.hash_samples(table, starts, self._keys, self._arrays.digest, hashes, digests)
        return Plan(first=first, starts=starts, table=table, hashes=hashes, digests=digests, orders=self._orders)

    def _look_ahead(self) -> None:
        """Look ahead. A snapshot has the deadlines, so documents are looked up as they are drawn, not all now."""
        sources = self._arrays.sources
        num_ahead = sources[sources[:, kernel.ACTIVE] > 0, kernel.NUM_AHEAD]
        if len(num_ahead) and num_ahead.all():
            sources[:, kernel.HEAD] = sources[:, kernel.NUM_AHEAD]
        else:
            self._refill_all()

    def _refill_all(self) -> None:
        sources = self._arrays.sources
        sources[:, kernel.HEAD] = sources[:, kernel.NUM_AHEAD] = 0
        self._activate()
        for i in np.flatnonzero(sources[:, kernel.ACTIVE]).tolist():
            self._refill(i)

    def _activate(self) -> None:
        """Set the shares of the sources that are drawn, and make the others never due."""
        sources = self._arrays.sources
        kernel.set_shares(sources)
        sources[sources[:, kernel.ACTIVE] == 0, kernel.RELEASE] = NEVER

    def _refill(self, i: int) -> None:
        sources = self._arrays.sources
        num = self._fill(i, int(sources[i, kernel.NEXT]), self._ahead[i])
        sources[i, kernel.HEAD], sources[i, kernel.NUM_AHEAD] = 0, num
        if num:
            self._set_dues(i)
        else:
            self._exhaust(i)

    def _set_dues(self, i: int) -> None:
        source = self._arrays.sources[i]
        if source[kernel.ACTIVE]:
            kernel.set_dues(source, self._ahead[i, source[kernel.HEAD] : source[kernel.NUM_AHEAD]])

    def _fill(self, i: int, position: int, out: npt.NDArray[np.int64]) -> int:
        config, masks = self._config, self._masks.get(i, ())
        return self.feeds[i].fill(position, out, config.sources[i], self._orders[i], masks, config.blend.unit)

    def _top_up(self) -> None:
        """Look further ahead in all sources that are nearly used up, so that the loop is not interrupted for few."""
        sources = self._arrays.sources
        heads, stops = sources[:, kernel.HEAD], sources[:, kernel.NUM_AHEAD]
        nearly = np.flatnonzero((heads < stops) & ((stops - heads) * TOP_UP < stops))
        for i, head, stop in zip(nearly.tolist(), heads[nearly].tolist(), stops[nearly].tolist(), strict=True):
            ahead, left = self._ahead[i], stop - head
            ahead[:left] = ahead[head:stop]
            heads[i], stops[i] = 0, left + self._fill(i, int(ahead[left - 1, 0]) + 1, ahead[left:])
            self._set_dues(i)

    def _exhaust(self, i: int) -> None:
        """End a source: the stream ends with it, or the others continue with deficits from zero."""
        sources = self._arrays.sources
        sources[i, kernel.IS_EXHAUSTED] = 1
        stop = self._config.sources[i].on_exhausted == "stop"
        sources[slice(None) if stop else i, kernel.ACTIVE] = 0
        sources[:, kernel.DRAWN_IN_STAGE : kernel.RELEASE + 1] = 0
        self._arrays.scalars[kernel.STAGE_UNITS] = 0
        self._activate()
        for j in np.flatnonzero(sources[:, kernel.ACTIVE]).tolist():
            if sources[j, kernel.HEAD] < sources[j, kernel.NUM_AHEAD]:
                self._set_dues(j)
            elif sources[j, kernel.NUM_AHEAD]:  # not looked up yet: see `_look_ahead`
                self._refill(j)
