"""A stream's position: planning samples block by block, snapshots to plan again from, and turning a state into arrays.

`Blocks` keeps the last blocks; earlier ones are planned again. A snapshot is taken at the start of each block.
`Anchors` keep past snapshots, dense near the front and ever sparser before it: going back by d blocks means planning
about d / `DENSITY` of them again, and the number of snapshots grows only with the logarithm of the distance.

`Fields` (``fields.py``) turns a planner's arrays into the fields of a `StreamState`; `arrays_of` is the inverse.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.stream import kernel
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError, StreamExhausted
from megaresume.stream.feed import fresh_arrays, kernel_config, put_tails, with_bins
from megaresume.stream.fields import Fields
from megaresume.stream.kernel import Arrays, trained_samples
from megaresume.stream.order import Orders, SourceOrder
from megaresume.stream.planner import Plan, Planner, concatenate, orders_of, past_orders
from megaresume.stream.progress import progress
from megaresume.stream.source import AbsentSource, LengthSource, PieceLists
from megaresume.stream.stages import Course
from megaresume.stream.state import Bin, Segment, SourceCursor, StreamState

#: Tokens and samples planned at a time, whichever is less: few, because taking a state may plan this much again.
BLOCK_TOKENS, BLOCK = 1 << 22, 1024
#: Samples planned at a time if a sample is one item: they are cheap, and a loader hands out thousands in a second.
ITEM_BLOCK = 4096
#: Samples planned at first, doubled up to `BLOCK`: a resume must not wait for an index that is read from disk.
FIRST_BLOCK = 8
#: Blocks kept before the front, and their bytes; earlier ones are planned again from an anchor.
KEPT_BLOCKS, KEPT_BYTES = 32, 24 << 20
#: A seek over more samples than this shows a progress advance.
LONG_SEEK = 200_000
#: The i-th snapshot is kept until the front is this many times 2**(trailing zeros of i) snapshots ahead of it.
DENSITY = 8
#: Snapshots added between two clean-ups.
CLEAN_UP = 8

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Block:
    snapshot: Arrays
    plan: Plan

    @property
    def nbytes(self) -> int:
        """Approximate bytes of its arrays."""
        return sum(array.nbytes for array in self.snapshot) + self.plan.table.nbytes


class Blocks:
    """Plans samples from a starting one on. Not thread-safe.

    Args:
        course: the stages.
        sources: those of every stage, in order.
        base: the planner's arrays to resume from; None: at sample 0.
        config: over all stages.
    """

    def __init__(
        self, course: Course, sources: Sequence[LengthSource], base: Arrays | None, config: StreamConfig
    ) -> None:
        self._course, self._sources, self._config = course, sources, config
        self._planner = Planner(course, sources, base)
        #: the starting sample: going back further is refused.
        self.start = self._planner.position
        self.kept: deque[_Block] = deque()
        self._kept_bytes = 0
        self._anchors = Anchors(self._planner.snapshot())
        #: the planner of the last state taken before the front.
        self._asked: Planner | None = None
        self._fields = Fields(course)

    @property
    def front(self) -> int:
        """The first sample that is not planned yet."""
        return self._planner.position

    @property
    def size(self) -> int:
        """The number of samples in a block."""
        config = self._config
        most = ITEM_BLOCK if config.is_of_items else BLOCK
        # A snapshot grows with the number of sources, so more sources mean longer blocks.
        return min(max(BLOCK_TOKENS // config.seq_length, 1), most) * (1 + len(self._sources) // BLOCK)

    def plan(self, first: int, stop: int) -> Plan:
        """Plan samples ``first .. stop``.

        Raises:
            StreamExhausted: the stream ends before ``stop``.
            StateError: ``first`` lies before the start.
        """
        parts = []
        while first < stop:
            block = self._block(first)
            end = min(stop, block.plan.stop)
            parts.append(block.plan.slice(first, end))
            first = end
        return concatenate(parts) if parts else replace(self._planner.advance(0), first=first)

    def digest_at(self, sample: int) -> int | None:
        """Rolling digest of all samples before one in the last block; None if it is in another block."""
        if not self.kept or not (plan := self.kept[-1].plan).first < sample <= plan.stop:
            return None
        return int(plan.digests[sample - plan.first - 1])

    def fields_at(self, sample: int) -> dict[str, Any]:
        """The fields of the state before a sample (see `Fields`). The front never moves back."""
        if sample > self.front:
            self.reach(sample - 1)  # no further: the stream may end here
        planner = self._planner
        if sample < planner.position:
            self._check_start(sample)
            planner, self._asked = self._planner_before(sample), None
            while planner.position < sample:
                planner.advance(min(sample - planner.position, self.size))
            self._asked = planner  # only once it has arrived
        return self._fields.of(planner.arrays)

    def _planner_before(self, sample: int) -> Planner:
        """A planner shortly before a sample in the past; the last one is reused if states are taken step by step."""
        last = self._asked
        if last is not None and 0 <= sample - last.position <= self.size:
            return last
        if self.kept and sample >= self.kept[0].plan.first:
            feeds, snapshot = self._planner.feeds, self._kept_block(sample).snapshot
        else:
            # Separate feeds, as a loader reads on at the front.
            feeds, snapshot = None, self._anchors.before(sample)
        return Planner(self._course, self._sources, snapshot, feeds=feeds)

    def _block(self, sample: int) -> _Block:
        """The block that holds ``sample``; plans forward, or again from an anchor."""
        if self.kept and (last := self.kept[-1].plan).first <= sample < last.stop:  # most often
            return self.kept[-1]
        self._check_start(sample)
        if self.kept and sample >= self.kept[0].plan.first:
            if sample < self.front:
                return self._kept_block(sample)
        elif sample < self.front:
            self._planner = Planner(self._course, self._sources, self._anchors.before(sample))
            self.kept.clear()
            self._kept_bytes = 0
            log.info("planning samples %d to %d again", self.front, sample)
        return self.reach(sample)

    def _check_start(self, sample: int) -> None:
        if sample < self.start:
            raise StateError(
                f"sample {sample} is before the state that the stream continues from",
                found=f"a stream restored at sample {self.start}",
                expected=f"a sample from {self.start} on",
                cause="a step counter went back, or a loader was built for a different position",
                action="restore the state of an earlier checkpoint, or none for the start of the stream",
            )

    def _kept_block(self, sample: int) -> _Block:
        if sample >= self.kept[-1].plan.first:
            return self.kept[-1]
        return self.kept[bisect_right(self.kept, sample, key=lambda block: block.plan.first) - 1]

    def reach(self, sample: int) -> _Block:
        """Plan forward up to and including a sample; return its block.

        Raises:
            StreamExhausted: the stream ends before it.
        """
        distance = sample - self.front
        shown = progress("seeking in the stream", distance, "samples") if distance > LONG_SEEK else nullcontext()
        with shown as advance:
            while self.front <= sample:
                num = self._plan_block(sample)
                if advance is not None:
                    advance(num)
        return self.kept[-1]

    def _plan_block(self, sample: int) -> int:
        """Plan the next block on the way to a sample; return its number of samples."""
        snapshot = self._planner.snapshot()
        # 8, 8, 16, 32, ..., 512, 1024, 1024, ...: blocks always begin at multiples of their length.
        size = min(max(self.front - self.start, FIRST_BLOCK), self.size)
        try:
            plan = self._planner.advance(size)
        except BaseException:  # half done, and a read-ahead thread may ignore the error and go on
            self._planner = Planner(self._course, self._sources, snapshot)
            raise
        if len(plan):
            self._keep(_Block(snapshot, plan))
            self._anchors.add(snapshot)
        if len(plan) < size and self.front <= sample:
            raise self._exhausted(sample)
        return len(plan)

    def _keep(self, block: _Block) -> None:
        self.kept.append(block)
        self._kept_bytes += block.nbytes
        while len(self.kept) > KEPT_BLOCKS or (self._kept_bytes > KEPT_BYTES and len(self.kept) > 1):
            self._kept_bytes -= self.kept.popleft().nbytes

    def _exhausted(self, sample: int) -> StreamExhausted:
        ended = [
            f"{s.name} ({s.max_epochs} epochs, {s.on_exhausted})"
            for s in self._config.sources
            if s.max_epochs is not None and s.on_exhausted != "repeat"
        ]
        return StreamExhausted(
            "the stream has ended",
            found=f"sample {sample} was asked for, the stream has {self.front} samples",
            expected=f"at most {self.front} samples",
            cause=f"sources with an end: {', '.join(ended)}",
            action="train fewer samples (StreamLoader(..., stop=SAMPLES) ends the loop there, whole steps; with "
            "megaresume.attach it ends with the data), raise max_epochs, or set on_exhausted: repeat",
        )


class Anchors:
    """Snapshots by position. The first one is kept forever."""

    def __init__(self, base: Arrays) -> None:
        # (running number, position in samples, snapshot), ascending
        self._kept: list[tuple[int, int, Arrays]] = [(0, trained_samples(base), base)]

    def __len__(self) -> int:
        """The number of snapshots that are kept."""
        return len(self._kept)

    def add(self, snapshot: Arrays) -> None:
        """Keep a snapshot; ignored unless it is further on than all others."""
        number, position, _ = self._kept[-1]
        if trained_samples(snapshot) <= position:
            return
        self._kept.append((number + 1, trained_samples(snapshot), snapshot))
        if number % CLEAN_UP == 0:
            front = number + 1
            self._kept = [a for a in self._kept if not a[0] or front - a[0] <= DENSITY * (a[0] & -a[0])]

    def before(self, sample: int) -> Arrays:
        """The last snapshot at or before ``sample``, which must not lie before the first."""
        return self._kept[bisect_right(self._kept, sample, key=lambda a: a[1]) - 1][2]


def arrays_of(
    state: StreamState, course: Course, sources: Sequence[LengthSource], lists: Sequence[PieceLists] | None = None
) -> Arrays:
    """The planner's arrays at a state: the inverse of `Fields`.

    Args:
        state: where to continue.
        course: the stages before and after it; gets the sources' orders.
        sources: of the course.
        lists: their long documents, if already known.

    Raises:
        StateError: the state's numbers contradict each other, the config or the sources.
    """
    stage = len(state.stages) - 1
    config = course.config(stage)
    constants = kernel_config(config)
    arrays = fresh_arrays(config)
    _check_stages(state)
    _restore_sources(arrays, state, config)
    _check_sums(state)
    known = orders_of(state, config, sources, lists) if course.past is None else past_orders(course, config, sources)
    orders = course.orders[stage] = known.known_in(stage)
    _check_sources(state, config, orders)
    scalars = arrays.scalars
    scalars[kernel.SAMPLES] = state.reached
    scalars[kernel.LEFT_OUT_SAMPLES] = state.reached - state.samples
    scalars[kernel.DOCUMENTS] = state.documents
    scalars[kernel.TOKENS] = state.tokens
    scalars[kernel.STAGE_UNITS] = arrays.sources[:, kernel.DRAWN_IN_STAGE].sum()
    arrays.digest[0] = int(state.digest, 16)
    scalars[kernel.STAGE] = stage
    if state.pending:
        rows = _rows_of(state.pending, orders)
        scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH] = rows[0]
        arrays = arrays._replace(carried=rows[1:])
    most = len(arrays.tails) + min(len(arrays.fillers), kernel.FILLERS + 1)
    if len(state.tails) > most:
        raise _contradiction(f"{len(state.tails)} ends of documents kept back", f"at most {most}")
    put_tails(arrays, _rows_of(state.tails, orders), orders)
    most_open = 0 if config.packing.traits.is_one_document else constants.open_bins
    opened = [b.opened_at for b in state.bins]
    if len(state.bins) > most_open or opened != sorted(opened):
        raise _contradiction(f"bins opened at samples {opened}", f"at most {most_open}, the oldest first")
    room = [_room(b, constants, state.reached) for b in state.bins]
    in_bins = _rows_of([s for b in state.bins for s in b.segments], orders)
    return with_bins(arrays, room, opened, in_bins, np.array([len(b.segments) for b in state.bins], np.int64))


def _room(open_bin: Bin, constants: kernel.Config, reached: int) -> int:
    """How many more tokens fit into an open bin."""
    used = sum(-(-s.length // constants.align) * constants.align for s in open_bin.segments)
    if not open_bin.segments or used >= constants.seq_length or open_bin.opened_at > reached:
        raise _contradiction(
            f"an open bin with {used} tokens, opened at sample {open_bin.opened_at}",
            f"1 to {constants.seq_length - 1} tokens, opened at sample {reached} or before",
        )
    return constants.seq_length - used


def _check_stages(state: StreamState) -> None:
    firsts = [record.first for record in state.stages]
    if not firsts or firsts[0] != 0 or firsts != sorted(firsts) or firsts[-1] > state.samples:
        raise _contradiction(
            f"stages that begin at samples {firsts}, at sample {state.samples}",
            "stages in order, the first at sample 0, the last at this sample or before",
        )


def _restore_sources(arrays: Arrays, state: StreamState, config: StreamConfig) -> None:
    if list(state.sources) != list(state.config["sources"]):
        raise _contradiction(f"sources {', '.join(state.sources)}", f"sources {', '.join(state.config['sources'])}")
    new = SourceCursor(position=0, epoch=0, documents=0, tokens=0, skipped=0, drawn_in_stage=0, exhausted=False)
    cursors = [state.sources.get(source.name, new) for source in config.sources]
    sources = arrays.sources
    sources[:, kernel.NEXT] = [c.position for c in cursors]
    sources[:, kernel.DRAWN_PIECES] = [c.position - c.skipped for c in cursors]
    sources[:, kernel.DRAWN_DOCUMENTS] = [c.documents for c in cursors]
    sources[:, kernel.DRAWN_TOKENS] = [c.tokens for c in cursors]
    sources[:, kernel.DRAWN_IN_STAGE] = [c.drawn_in_stage for c in cursors]
    sources[:, kernel.IS_EXHAUSTED] = [c.exhausted for c in cursors]
    sources[:, kernel.LEFT_OUT_DOCUMENTS] = [c.left_out_documents for c in cursors]
    sources[:, kernel.LEFT_OUT_TOKENS] = [c.left_out_tokens for c in cursors]
    sources[:, kernel.ACTIVE] &= ~sources[:, kernel.IS_EXHAUSTED] & 1
    if any(c.exhausted and s.on_exhausted == "stop" for c, s in zip(cursors, config.sources, strict=True)):
        sources[:, kernel.ACTIVE] = 0


def _rows_of(segments: Sequence[Segment], orders: Orders) -> npt.NDArray[np.int64]:
    """The segments in the planner's form: int64[n, SEGMENT_WIDTH]."""
    rows = np.array([[s.source, s.position, 0, s.offset, s.length] for s in segments], np.int64)
    rows = rows.reshape(-1, kernel.SEGMENT_WIDTH)
    for i in np.unique(rows[:, kernel.SOURCE]).tolist():
        if i >= len(orders) or not orders[i].eras or not rows[:, kernel.LENGTH].all():
            raise _contradiction(
                f"a segment of {rows[:, kernel.LENGTH].min()} tokens of source {i}",
                f"at least 1 token of a source below {len(orders)} that was drawn",
            )
        mine = rows[:, kernel.SOURCE] == i
        rows[mine, kernel.DOCUMENT] = orders[i].documents_at(rows[mine, kernel.POSITION])
    return rows


def _check_sums(state: StreamState) -> None:
    """Check that every token and document drawn is trained, left out, in an open bin, or being placed."""
    cursors, waiting = state.sources.values(), state.waiting
    tokens, documents = sum(s.length for s in waiting), sum(s.offset == 0 for s in waiting)
    for what, num_drawn, num_trained, num_waiting in (
        ("tokens", sum(c.tokens - c.left_out_tokens for c in cursors), state.tokens, tokens),
        ("documents", sum(c.documents - c.left_out_documents for c in cursors), state.documents, documents),
    ):
        if num_drawn != num_trained + num_waiting:
            raise _contradiction(
                f"{num_drawn} {what} drawn from the sources and not left out",
                f"{num_trained} {what} trained + {num_waiting} waiting = {num_trained + num_waiting}",
            )


def _check_sources(state: StreamState, config: StreamConfig, orders: Orders) -> None:
    """Check each source's numbers against each other, its size and the waiting segments."""
    waiting = state.waiting
    for i, (source, order) in enumerate(zip(config.sources, orders, strict=True)):
        if source.name not in state.sources:
            continue  # new, and not drawn yet
        c = state.sources[source.name]
        ends = source.max_epochs is not None and source.on_exhausted != "repeat"
        last = max((s.position for s in waiting if s.source == i), default=-1)
        documents = order.eras[-1].documents if order.eras else 0
        in_stage = c.documents if config.blend.unit == "documents" else c.tokens
        if (
            c.epoch != order.epoch_of(c.position)
            or (c.position > 0 and not order.eras)
            or not 0 <= c.position - c.documents - c.skipped <= (c.epoch + 1) * _most_later(order)
            or c.drawn_in_stage > in_stage
            or c.position <= last
            or (c.exhausted and not ends)
            # A later stage may allow fewer epochs than an earlier one went through.
            or (ends and len(state.stages) == 1 and order.eras and c.position > order.start_of(source.max_epochs or 0))
        ):
            raise _contradiction(
                f"source '{source.name}' of {documents} documents at {c}, its last waiting segment at position {last}",
                "the epoch of the position, position = documents + later pieces drawn + skipped and past what waits, "
                "no more drawn in the stage than in all, exhausted only at the end of its epochs",
            )


def _most_later(order: SourceOrder) -> int:
    """An upper bound on the pieces of an epoch that are not the first of their documents."""
    if isinstance(order.lists.source, AbsentSource):
        return 1 << 62  # unknown for a source that was removed
    # An era that began in the middle of an epoch holds only what was left of it.
    whole = (order.lists.num_pieces(e.documents, e.piece) if e.rest else e.pieces for e in order.eras)
    return max((pieces - e.documents for pieces, e in zip(whole, order.eras, strict=True)), default=0)


def _contradiction(found: str, expected: str) -> StateError:
    return StateError(
        "the data state contradicts itself",
        found=found,
        expected=expected,
        cause="it was edited, or written by a faulty program",
        action="load an older checkpoint: megaresume inspect DIR lists those that are whole",
    )
