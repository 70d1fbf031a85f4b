"""`Places`: planned samples -> the places of the items of each batch of this rank. See `ItemReader` for a place.

`Epochs`: where an epoch of a stream ends, in samples. Of one dataset: with the sample before which its last item was
drawn; the last epoch of all, with the stream. Of a blend: after as many samples as all datasets together make.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import xxhash

from megaresume.batches.items.source import ItemSource
from megaresume.stream.batches import Balance
from megaresume.stream.dealing import dealt_order, in_parts, part_of
from megaresume.stream.errors import StreamExhausted
from megaresume.stream.planning.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planning.plan import Plan
from megaresume.stream.stream import Stream

#: samples planned at a time.
BLOCK = 4096
#: samples looked at in one go for the end of an epoch.
STRIDE = 4096

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """What one rank is given."""

    #: samples of a micro-batch.
    batch_size: int
    #: micro-batches of a step.
    accumulation: int
    dp_rank: int
    dp_size: int
    #: a short step is dropped.
    drop_last: bool
    #: how the samples of a step are dealt to the ranks; None: as they come.
    balance: Balance | None

    @property
    def everybody(self) -> int:
        """Samples of a micro-batch of all ranks."""
        return self.batch_size * self.dp_size

    @property
    def step(self) -> int:
        """Samples of a step of all ranks."""
        return self.everybody * self.accumulation

    def steps(self, samples: int) -> int:
        """Samples of the fewest whole steps that hold so many."""
        return -(-samples // self.step) * self.step

    def of(self, samples: int) -> tuple[int, int]:
        """This rank's part of a micro-batch of so many samples: batch_size of a whole one, else dealt out evenly."""
        return part_of(samples, dp_rank=self.dp_rank, dp_size=self.dp_size)

    def parts(self, samples: int) -> list[int]:
        """The micro-batches of as many samples from the beginning of a step on: how many of all ranks each has."""
        short = samples % self.step
        last = in_parts(short, micro_batch_size=self.batch_size, dp_size=self.dp_size)
        return [self.everybody] * ((samples - short) // self.everybody) + last

    def dealt(self, plan: Plan) -> list[int]:
        """The samples of whole steps, and of one that may be short, in the order in which they are dealt out: by
        number in the plan."""
        order = [
            dealt_order(
                plan.slice(first, min(first + self.step, plan.stop)),
                self.balance,
                micro_batch_size=self.batch_size,
                dp_size=self.dp_size,
            )
            for first in range(plan.first, plan.stop, self.step)
        ]
        return list((np.concatenate(order) - plan.first).tolist()) if order else []


class Epochs:
    """The epochs of a stream.

    Args:
        stream: of items.
        size: samples that one epoch of all datasets makes; if they are packed, about so many.
        item_by_item: an item is a sample.
    """

    def __init__(self, stream: Stream, size: int, *, item_by_item: bool) -> None:
        self.stream, self.size = stream, size
        self._item_by_item = item_by_item
        self._has_end = any(
            source.max_epochs is not None and source.on_exhausted != "repeat" for source in stream.config.sources
        )
        #: a sample, and where its epoch ends, as it was planned last.
        self._planned = 0, 0

    def forget(self) -> None:
        """The stream was restored: what was planned is of another one."""
        self._planned = 0, 0

    def of(self, sample: int) -> int:
        """The epoch of a sample, from 0."""
        fields = self.stream.fields_at(sample)
        if len(fields["sources"]) > 1:
            return sample // self.size
        (cursor,), (source,) = fields["sources"].values(), self.stream.config.sources
        if source.max_epochs is None or source.on_exhausted == "repeat":
            return int(cursor.epoch)
        waits = fields["bins"] or fields["pending"] or fields["tails"]
        return int(min(cursor.epoch, source.max_epochs - 1) if waits else cursor.epoch)

    def known_end(self, first: int) -> int | None:
        """The first sample after ``first`` that is of a later epoch, if that takes no planning."""
        cursors = list(self.stream.fields_at(first)["sources"].values())
        if len(cursors) > 1:
            return (first // self.size + 1) * self.size
        return first + int(cursors[0].left) if self._item_by_item and not self.stream.skips else None

    def end(self, first: int, stop: int) -> int | None:
        """The same, if it is not after ``stop``; else None."""
        epoch = self.of(first)
        if self.of(stop) == epoch:
            return None
        low, high = first, stop  # low is of the epoch, high is of a later one
        while high - low > 1:
            middle = (low + high) // 2
            if self.of(middle) == epoch:
                low = middle
            else:
                high = middle
        return high

    def end_from(self, first: int) -> int:
        """The same, however far it is; the end of the stream, if that comes before."""
        if (known := self.known_end(first)) is not None:
            return known
        if not self._planned[0] <= first < self._planned[1]:
            self._planned = first, next(self._plan_ends(first))
        return self._planned[1]

    def ends(self, first: int) -> Iterator[int]:
        """Where the epoch of a sample ends, and each epoch after it; with the end of the stream the last one."""
        known = None if self._has_end else self.known_end(first)
        if known is None:
            yield from self._plan_ends(first)
            return
        while True:
            yield known
            known += self.size

    def _plan_ends(self, first: int) -> Iterator[int]:
        stream = copy.copy(self.stream)  # which a loop that reads from it does not notice
        stream.restore(self.stream.state_at(first))
        ahead, begin = Epochs(stream, self.size, item_by_item=self._item_by_item), first
        while True:
            there = available(stream, first, STRIDE)
            end = ahead.end(first, first + there)
            if end is not None:
                yield end
                begin = first = end
            elif there == STRIDE:
                first += there
            else:
                if first + there > begin or begin == stream.start:
                    yield first + there
                return


def available(stream: Stream, first: int, wanted: int) -> int:
    """How many of the samples from ``first`` on the stream has, at most ``wanted``."""
    low, high = 0, wanted + 1  # there are low; there are not high
    while high - low > 1:
        middle = wanted if high > wanted else (low + high) // 2
        try:
            stream.plan(first, first + middle)
            low = middle
        except StreamExhausted:
            high = middle
    return low


class Places:
    """What torch asks for the places of each batch, far ahead of the batches themselves: from `start` on, to the end of
    the epoch.

    Args:
        stream, epochs: of the items.
        sources: by the names of today, in the order in which places count them.
        share: of this rank.
        whole_rows: a place says epoch, offset, lengths and key as well.
    """

    def __init__(
        self, stream: Stream, epochs: Epochs, sources: dict[str, ItemSource], share: Share, *, whole_rows: bool
    ) -> None:
        self._stream, self._epochs, self._share = stream, epochs, share
        self._names, self._sources = list(sources), list(sources.values())
        self._whole_rows = whole_rows
        #: the next sample, the first one of its step, and the one with which the run ends; None: no end but those of
        #: the datasets.
        self.start = self.step_start = 0
        self.stop: int | None = None
        #: where each batch that is on its way ends, in samples, and how many items it has.
        self.ahead: deque[tuple[int, int]] = deque()

    def __iter__(self) -> Iterator[list[Any]]:
        """The places of each batch."""
        ahead: deque[tuple[int, int]] = deque()
        self.ahead = ahead
        share, position = self._share, self.step_start
        everybody, mine = share.everybody, share.of(share.everybody)
        known = self._epochs.known_end(position)
        while True:
            wanted = max(BLOCK // share.step, 1) * share.step
            if known is not None:
                wanted = min(wanted, share.steps(known - position))
            there = available(self._stream, position, self._until(position, wanted))
            end = known
            if end is None:
                end = self._epochs.end(position, position + there)
            samples = there if end is None else min(there, share.steps(end - position))
            if share.drop_last:
                samples -= samples % share.step
            plan = self._stream.plan(position, position + samples)
            places, starts = self._places(plan), plan.starts.tolist()
            order = None if share.balance is None else share.dealt(plan)
            first = 0
            for size in share.parts(samples):
                begin, stop = (first + k for k in (mine if size == everybody else share.of(size)))
                first += size
                if position + first <= self.start:
                    continue  # handed out before
                if order is None:
                    batch = places[starts[begin] : starts[stop]]
                else:
                    batch = [place for k in order[begin:stop] for place in places[starts[k] : starts[k + 1]]]
                ahead.append((position + first, len(batch)))
                yield batch
            if first < samples:
                self._say_left_over(samples - first)
                return
            position += samples
            if there < wanted or (end is not None and position >= end):
                return

    def _say_left_over(self, items: int) -> None:
        # Where the run says beforehand with which sample it ends, it has said this as well.
        if self.stop is None and not self._share.dp_rank:
            log.warning(
                "megaresume: the last %d items of the stream are not trained: there are %d ranks",
                items,
                self._share.dp_size,
            )

    def _until(self, position: int, wanted: int) -> int:
        return wanted if self.stop is None else max(min(wanted, self.stop - position), 0)

    def _places(self, plan: Plan) -> list[Any]:
        """Of all segments of a plan."""
        table = plan.table
        items = table[:, DOCUMENT]
        if not self._whole_rows and len(self._names) == 1:
            return list(items.tolist())
        # A source that the run had before, and has no more, has no dataset.
        sources = self._stream.config.sources
        labels = [source.label for source in sources]
        datasets = np.array([self._names.index(label) if label in self._names else -1 for label in labels])
        columns = [datasets[table[:, SOURCE]], items]
        if self._whole_rows:
            tokens = np.empty_like(items)
            for k, source in enumerate(self._sources):
                mine = columns[0] == k
                tokens[mine] = source.lengths(items[mine])
            seed = self._stream.config.seed
            keys = np.array([xxhash.xxh3_64_intdigest(f"{seed} {s.name}".encode()) >> 1 for s in sources])
            columns += [plan.epochs(), table[:, OFFSET], table[:, LENGTH], tokens, keys[table[:, SOURCE]]]
        return list(np.stack(columns, axis=1).tolist())
