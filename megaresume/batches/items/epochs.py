"""Where an epoch of a stream ends, in samples.

Of one dataset: with the sample before which its last item was drawn; the last epoch of all, with the stream. Of a
blend: after as many samples as all datasets together make.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

from megaresume.stream.errors import StreamExhausted
from megaresume.stream.stream import Stream

#: samples looked at in one go.
STRIDE = 4096


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
