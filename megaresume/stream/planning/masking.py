"""Documents that are skipped by their number: passed over where they would be drawn, taken out of open bins.

a list is declared where t samples were trained
    drawn after that             passed over, as an empty document is           `masked`
    drawn, in an open bin        taken out of it                                `without_documents`
    in a sample                  was trained
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaresume.stream.documents.order import Orders
from megaresume.stream.planning import kernel
from megaresume.stream.planning.bins import segments_of, tail_segments, with_bins
from megaresume.stream.planning.kernel import Arrays
from megaresume.stream.ranges import Range

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A list of documents of one source."""

    #: int64[m], ascending.
    ids: Int64Array
    #: [first, stop) epochs; None: all.
    epochs: Range | None

    def hits(self, documents: Int64Array, epochs: Int64Array | int) -> npt.NDArray[np.bool_]:
        """Which of the documents, in their epochs, are meant: bool[n]."""
        at = np.minimum(self.ids.searchsorted(documents), len(self.ids) - 1)
        hit = self.ids[at] == documents
        if self.epochs is not None:
            hit = hit & (np.asarray(epochs) >= self.epochs[0]) & (np.asarray(epochs) < self.epochs[1])
        return np.asarray(hit, np.bool_)


Masks = Sequence[Mask]


def masked(lengths: Int64Array, documents: Int64Array, epoch: int, masks: Masks) -> Int64Array:
    """Lengths with 0 for the documents of an epoch that are skipped: int64[n]."""
    for mask in masks:
        lengths = np.where(mask.hits(documents, epoch), 0, lengths)
    return lengths


def without_documents(arrays: Arrays, config: kernel.Config, masks: Mapping[int, Masks], orders: Orders) -> Arrays:
    """The planner's arrays without what waits of some documents; counted as left out.

    Args:
        arrays: of a stage.
        config: its constants.
        masks: by source number.
        orders: of the sources.
    """
    arrays = Arrays._make(array.copy() for array in arrays)
    scalars = arrays.scalars

    def kept(rows: Int64Array) -> Int64Array:
        """Rows that stay; the others are counted."""
        hit = np.zeros(len(rows), np.bool_)
        for source, of_source in masks.items():
            mine = np.flatnonzero(rows[:, kernel.SOURCE] == source)
            if not len(mine):
                continue
            epochs = orders[source].epochs(rows[mine, kernel.POSITION])
            for mask in of_source:
                hit[mine] |= mask.hits(rows[mine, kernel.DOCUMENT], epochs)
        for row in rows[hit]:
            arrays.sources[row[kernel.SOURCE], kernel.LEFT_OUT_TOKENS] += row[kernel.LENGTH]
            arrays.sources[row[kernel.SOURCE], kernel.LEFT_OUT_DOCUMENTS] += row[kernel.OFFSET] == 0
        return rows[~hit]

    at_hand = scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH]
    if at_hand[kernel.LENGTH] and not len(kept(at_hand[None])):
        at_hand[:] = 0
    carried = kept(arrays.carried[int(scalars[kernel.NEXT_CARRIED]) :])
    tails = kept(tail_segments(arrays))
    arrays.tails[: len(tails)] = tails
    scalars[kernel.NEXT_CARRIED] = scalars[kernel.FIRST_TAIL] = 0
    scalars[kernel.NUM_TAILS] = len(tails)
    rows, counts = segments_of(arrays)
    room, opened, staying = [], [], [rows[:0]]
    for rows_of, opened_at in zip(np.split(rows, np.cumsum(counts)), arrays.opened.tolist(), strict=False):
        if len(rows := kept(rows_of)):
            used = int((-(-rows[:, kernel.LENGTH] // config.align) * config.align).sum())
            room.append(config.seq_length - used)
            opened.append(opened_at)
            staying.append(rows)
    sizes = np.array([len(rows) for rows in staying[1:]], np.int64)
    return with_bins(arrays._replace(carried=carried), room, opened, np.concatenate(staying), sizes)
