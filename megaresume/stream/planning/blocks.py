"""`Blocks`: samples planned forward a block at a time; the last blocks are kept, what lies before is planned again.

A snapshot is taken at the start of each block. `Anchors` keep those of the past, dense near the front and ever sparser
before it: going back by d blocks then costs planning about d / `DENSITY` of them again, wherever the front is, and the
number kept grows only with the logarithm of the distance.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import StateError, StreamExhausted
from megaresume.stream.planning.kernel import Arrays, trained_samples
from megaresume.stream.planning.plan import Plan, concatenate
from megaresume.stream.planning.planner import Planner
from megaresume.stream.planning.stages import Course
from megaresume.stream.progress import progress
from megaresume.stream.source import LengthSource

#: Tokens and samples planned at a time, whichever is less: little, because a state plans up to this much again.
BLOCK_TOKENS, BLOCK = 1 << 22, 1024
#: The same where a sample is an item: they are cheap, and a loader hands out thousands of them in a second.
ITEM_BLOCK = 4096
#: Samples planned at first, doubled until they are `BLOCK`: a resume must not wait for an index that lies on disk.
FIRST_BLOCK = 8
#: Blocks kept before the front, and bytes; what lies before them is planned again from an anchor.
KEPT_BLOCKS, KEPT_BYTES = 32, 24 << 20
#: A seek over more samples than this shows a progress bar.
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
        """Bytes of its arrays, nearly."""
        return sum(array.nbytes for array in self.snapshot) + self.plan.table.nbytes


class Blocks:
    """Plans any sample from the one on with which it begins. For one thread at a time.

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
        #: the sample with which it begins: going back further is refused.
        self.start = self._planner.position
        self.kept: deque[_Block] = deque()
        self._kept_bytes = 0
        self._anchors = Anchors(self._planner.snapshot())
        #: where the last state was taken, if that was before the front.
        self._asked: Planner | None = None

    @property
    def front(self) -> int:
        """The first sample that is not planned yet."""
        return self._planner.position

    @property
    def size(self) -> int:
        """Samples of a block."""
        config = self._config
        most = ITEM_BLOCK if config.packing.traits.is_one_document and config.seq_length == 1 else BLOCK
        # A snapshot grows with the sources: the more there are, the longer the blocks.
        return min(max(BLOCK_TOKENS // config.seq_length, 1), most) * (1 + len(self._sources) // BLOCK)

    def plan(self, first: int, stop: int) -> Plan:
        """What samples ``first .. stop`` hold.

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
        """Rolling digest of all samples before one in the last block; None if it is in another one."""
        if not self.kept or not (plan := self.kept[-1].plan).first < sample <= plan.stop:
            return None
        return int(plan.digests[sample - plan.first - 1])

    def arrays_at(self, sample: int) -> Arrays:
        """The planner's arrays before a sample, of which they are a copy. The front stays where it is, or is ahead."""
        if sample > self.front:
            self.reach(sample - 1)  # no further: the stream may end here
        planner = self._planner
        if sample < planner.position:
            self._check_start(sample)
            planner, self._asked = self._planner_before(sample), None
            while planner.position < sample:
                planner.advance(min(sample - planner.position, self.size))
            self._asked = planner  # not if it stopped half-way
        return planner.snapshot()

    def _planner_before(self, sample: int) -> Planner:
        """One that stands not far before a sample before the front: the last one, if states are taken step by step."""
        last = self._asked
        if last is not None and 0 <= sample - last.position <= self.size:
            return last
        if self.kept and sample >= self.kept[0].plan.first:
            feeds, snapshot = self._planner.feeds, self._kept_block(sample).snapshot
        else:
            # Feeds of their own: beside the front, which a loader resumes from.
            feeds, snapshot = None, self._anchors.before(sample)
        return Planner(self._course, self._sources, snapshot, feeds=feeds)

    def _block(self, sample: int) -> _Block:
        """The block that holds ``sample``; plans forward, or again from an anchor."""
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
        """Plan forward up to and with a sample that is not planned yet; the block that holds it.

        Raises:
            StreamExhausted: the stream ends before it.
        """
        distance = sample - self.front
        shown = progress("seeking in the stream", distance, "samples") if distance > LONG_SEEK else nullcontext()
        with shown as bar:
            while self.front <= sample:
                num = self._plan_block(sample)
                if bar is not None:
                    bar.update(num)
        return self.kept[-1]

    def _plan_block(self, sample: int) -> int:
        """Plan the next block on the way to a sample; how many samples it has."""
        snapshot = self._planner.snapshot()
        # 8, 8, 16, 32, ..., 512, 1024, 1024, ...: so that longer blocks still begin at multiples of their length.
        size = min(max(self.front - self.start, FIRST_BLOCK), self.size)
        try:
            plan = self._planner.advance(size)
        except BaseException:  # half done, and whoever reads ahead may continue without the error
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
            action="train fewer samples, raise max_epochs, or set on_exhausted: repeat",
        )


class Anchors:
    """Snapshots by position. The first one is kept forever."""

    def __init__(self, base: Arrays) -> None:
        # (running number, position in samples, snapshot), ascending
        self._kept: list[tuple[int, int, Arrays]] = [(0, trained_samples(base), base)]

    def __len__(self) -> int:
        """Snapshots kept."""
        return len(self._kept)

    def add(self, snapshot: Arrays) -> None:
        """Keep a snapshot further on than all others; one that is not is passed over."""
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
