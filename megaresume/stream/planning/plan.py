"""`Plan`: what a run of consecutive samples holds, before any token is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaresume.stream.documents.order import Orders


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedSegment:
    """One segment of a sample, for people: `Plan.segments` gives these, the arrays are for machines."""

    #: index into the sources of the config.
    source: int
    epoch: int
    #: document number in the source.
    document: int
    #: tokens of the document before the segment.
    offset: int
    #: tokens.
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Samples ``first .. first + len(self)`` of the stream, s segments in all."""

    #: number of the first sample in the stream.
    first: int
    #: int64[samples + 1]: the segments of sample k are ``starts[k] .. starts[k + 1]``.
    starts: npt.NDArray[np.int64]
    #: int64[s, 5]: source, position in the source, document, offset, length.
    table: npt.NDArray[np.int64]
    #: uint64[samples]: hash of what each sample is, whatever came before.
    hashes: npt.NDArray[np.uint64]
    #: uint64[samples]: rolling digest of the stream after each sample.
    digests: npt.NDArray[np.uint64]
    #: of the sources: say which epoch a position is in.
    orders: Orders

    def __len__(self) -> int:
        """Samples."""
        return len(self.hashes)

    @property
    def stop(self) -> int:
        """Number of the first sample after these."""
        return self.first + len(self)

    def slice(self, first: int, stop: int) -> Plan:
        """Samples ``first .. stop`` (numbers in the stream, inside this plan); views, no copies."""
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

    def __iter__(self) -> Iterator[list[PlannedSegment]]:
        """The segments of each sample."""
        return (self.segments(sample) for sample in range(self.first, self.stop))

    def epochs(self) -> npt.NDArray[np.int64]:
        """The epoch of each segment: int64[s]."""
        return self.orders.epochs(self.table[:, 0], self.table[:, 1])

    def tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of documents in each sample: int64[samples]."""
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
        orders=plans[-1].orders,  # which know what was before them
    )
