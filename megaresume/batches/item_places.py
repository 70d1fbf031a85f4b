"""`Places`: from planned samples to the places of the items in each batch of this rank, up to the end of an epoch.

`ItemEpochs`: where an epoch of a stream ends, in samples. For one dataset: before the sample that follows the draw of
its last item; the last epoch ends with the stream. For a blend: after as many samples as all datasets together make.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import xxhash

from megaresume.batches.item_batches import Asked
from megaresume.batches.items import ItemSource
from megaresume.batches.rank_loader import RankLoader, available
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan
from megaresume.stream.stream import Stream

#: The number of samples that are planned at a time.
BLOCK = 4096
#: The number of samples searched at a time for the end of an epoch.
STRIDE = 4096


class ItemEpochs:
    """The epochs of a stream.

    Args:
        stream: of items.
        size: samples in one epoch of all datasets; an estimate if they are packed.
        item_by_item: an item is a sample.
    """

    def __init__(self, stream: Stream, size: int, *, item_by_item: bool) -> None:
        self.stream, self.size = stream, size
        self._item_by_item = item_by_item
        self._has_end = any(
            source.max_epochs is not None and source.on_exhausted != "repeat" for source in stream.config.sources
        )
        #: a sample and the end of its epoch, as last planned.
        self._planned = 0, 0
        #: samples known to be in one epoch, and that epoch, as a Trainer asks after every step.
        self._known, self._known_epoch = range(0), 0

    def forget(self) -> None:
        """Clear the caches after the stream was restored."""
        self._planned, self._known = (0, 0), range(0)

    def of(self, sample: int) -> int:
        """The epoch of a sample, from 0."""
        if sample not in self._known:
            epoch = self._epoch_of(sample)
            end = None if self._has_end and len(self.stream.config.sources) > 1 else self.known_end(sample)
            self._known, self._known_epoch = range(sample, sample + 1 if end is None else end), epoch
        return self._known_epoch

    def _epoch_of(self, sample: int) -> int:
        fields = self.stream.fields_at(sample)
        if len(fields["sources"]) > 1:
            return sample // self.size
        (cursor,), (source,) = fields["sources"].values(), self.stream.config.sources
        if source.max_epochs is None or source.on_exhausted == "repeat":
            return int(cursor.epoch)
        waits = fields["bins"] or fields["pending"] or fields["tails"]
        return int(min(cursor.epoch, source.max_epochs - 1) if waits else cursor.epoch)

    def known_end(self, first: int) -> int | None:
        """The first sample after ``first`` of a later epoch, if it is known without planning."""
        cursors = list(self.stream.fields_at(first)["sources"].values())
        if len(cursors) > 1:
            return (first // self.size + 1) * self.size
        return first + int(cursors[0].left) if self._item_by_item and not self.stream.skips else None

    def end(self, first: int, stop: int) -> int | None:
        """The end of a sample's epoch, if that is not after ``stop``; else None."""
        epoch = self.of(first)
        if self.of(stop) == epoch:
            return None
        low, high = first, stop  # low is in the epoch, high in a later one
        while high - low > 1:
            middle = (low + high) // 2
            if self.of(middle) == epoch:
                low = middle
            else:
                high = middle
        return high

    def end_from(self, first: int) -> int:
        """The end of a sample's epoch, or of the stream if that comes before, however far it is."""
        if (known := self.known_end(first)) is not None:
            return known
        if not self._planned[0] <= first < self._planned[1]:
            self._planned = first, next(self._plan_ends(first))
        return self._planned[1]

    def ends(self, first: int) -> Iterator[int]:
        """The end of a sample's epoch, and of each later one; the last is the end of the stream."""
        known = None if self._has_end else self.known_end(first)
        if known is None:
            yield from self._plan_ends(first)
            return
        while True:
            yield known
            known += self.size

    def _plan_ends(self, first: int) -> Iterator[int]:
        stream = copy.copy(self.stream)  # so that a loop reading from it is not affected
        stream.restore(self.stream.state_at(first))
        ahead, begin = ItemEpochs(stream, self.size, item_by_item=self._item_by_item), first
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


class Places:
    """The places of the items of each batch of one rank.

    Args:
        loader: of this rank.
        epochs: of its stream.
        sources: by current names, in the order in which places number them.
        whole_rows: places include epoch, offset, lengths and key.
    """

    def __init__(
        self, loader: RankLoader, epochs: ItemEpochs, sources: dict[str, ItemSource], *, whole_rows: bool
    ) -> None:
        self._loader, self._epochs = loader, epochs
        self._names, self._sources = list(sources), list(sources.values())
        self._whole_rows = whole_rows

    def to_epoch_end(self, start: int, step_start: int, ahead: deque[tuple[int, int]]) -> Iterator[Asked]:
        """The samples of each batch, up to the step that reaches the end of the epoch.

        Args:
            start: the next sample.
            step_start: the first one of its step. The samples between were handed out before.
            ahead: gets appended, per batch, its end in samples and its number of items.
        """
        loader, known = self._loader, self._epochs.known_end(step_start)
        ends = [loader.stop] if loader.stop is not None else []
        if known is not None:
            ends.append(step_start + _whole(known - step_start, loader.schedule.size_at(step_start)))
        for samples, step in loader.runs_of_steps(step_start, end=min(ends, default=None), most=BLOCK):
            end = self._epochs.end(samples.start, samples.stop) if known is None else None
            reaches = end is not None and _whole(end - samples.start, step) <= len(samples)
            if end is not None and reaches:
                samples = samples[: _whole(end - samples.start, step)]
            plan = loader.stream.plan(samples.start, samples.stop)
            places, starts, first = self.of(plan, loader.stream), plan.starts.tolist(), plan.first
            for stop, mine in loader.deal(samples, step):
                if stop <= start:
                    continue
                if type(mine) is range:
                    batch = places[starts[mine.start - first] : starts[mine.stop - first]]
                else:
                    batch = [place for k in mine for place in places[starts[k - first] : starts[k - first + 1]]]
                ahead.append((stop, len(batch)))
                yield Asked(mine[0], batch)
            if reaches:
                return

    def of(self, plan: Plan, stream: Stream) -> list[Any]:
        """The places of all segments of a plan."""
        table = plan.table
        items = table[:, DOCUMENT]
        if not self._whole_rows and len(self._names) == 1:
            return list(items.tolist())
        # A source that was removed from the run has no dataset.
        sources = stream.config.sources
        labels = [source.label for source in sources]
        datasets = np.array([self._names.index(label) if label in self._names else -1 for label in labels])
        columns = [datasets[table[:, SOURCE]], items]
        if self._whole_rows:
            tokens = np.empty_like(items)
            for k, source in enumerate(self._sources):
                mine = columns[0] == k
                tokens[mine] = source.lengths(items[mine])
            seed = stream.config.seed
            keys = np.array([xxhash.xxh3_64_intdigest(f"{seed} {s.name}".encode()) >> 1 for s in sources])
            columns += [plan.epochs(), table[:, OFFSET], table[:, LENGTH], tokens, keys[table[:, SOURCE]]]
        return list(np.stack(columns, axis=1).tolist())


def _whole(samples: int, step: int) -> int:
    """The number of samples, rounded up to whole steps."""
    return -(-samples // step) * step
