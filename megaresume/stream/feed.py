"""The input of the planning loop: the pieces of each source, a chunk at a time, and the loop's arrays.

`DocumentFeed` supplies the pieces of one source in stream order, with their lengths. It passes over documents that are
skipped by number, as it does empty ones (`Mask`); those already in open bins when the skip is declared are removed.

The arrays are made for sample 0, for the beginning of a stage, and when open bins change. Open bins share one
pool of segments, with a linked list through it for each bin:
pool of segments, and a linked list through it for each bin:

    head  tail          segments, link                 a pool of 6
     0     3            0 -> 2 -> 3                    bin 0: three segments
     1     1            1                              bin 1: one
    FREE                4 -> 5                         free rows

So the cost of many tiny documents in one bin depends only on how many there are, not on the number of bins.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaresume.stream import kernel
from megaresume.stream.arrays import Int64Array
from megaresume.stream.compiled import compiled
from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.data_yaml import BlendUnit
from megaresume.stream.errors import CorpusError
from megaresume.stream.kernel import Arrays
from megaresume.stream.order import Orders, SourceOrder
from megaresume.stream.skips import DocumentList, Range
from megaresume.stream.source import LengthSource, count_trained

#: Longer documents would overflow int64 in the arithmetic of the blend.
MAX_DOCUMENT_TOKENS = (1 << 31) - 1

#: Documents in the first look-ahead: few, so that a resume reads few pages of a large index.
FIRST_CHUNK = 16
#: Chunks cached, so that a state a little before the front can be planned again without asking the source.
RECENT_CHUNKS = 2

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """A list of documents of one source to pass over."""

    #: the documents, int64[m], ascending.
    ids: Int64Array
    #: [first, stop) epochs; None: all.
    epochs: Range | None

    def hits(self, documents: Int64Array, epochs: Int64Array | int) -> npt.NDArray[np.bool_]:
        """Whether each document is masked in its epoch: bool[n]."""
        at = np.minimum(self.ids.searchsorted(documents), len(self.ids) - 1)
        hit = self.ids[at] == documents
        if self.epochs is not None:
            hit = hit & (np.asarray(epochs) >= self.epochs[0]) & (np.asarray(epochs) < self.epochs[1])
        return np.asarray(hit, np.bool_)


Masks = Sequence[Mask]


def masks_of(lists: Sequence[DocumentList], names: Sequence[str]) -> Mapping[int, Masks]:
    """Lists of documents in the planner's form, by source number."""
    masks: dict[int, list[Mask]] = {}
    for documents in lists:
        ids = np.array(documents.numbers(), np.int64)
        masks.setdefault(names.index(documents.source), []).append(Mask(ids, documents.epochs))
    return masks


class _Chunk(NamedTuple):
    """Looked-up pieces at consecutive positions of one epoch."""

    first: int
    #: int64[n] each; the lengths are those of whole documents, and 0 for a masked one.
    documents: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    masks: Masks
    order: SourceOrder


class DocumentFeed:
    """Looks ahead in one source. Holds no state of the stream: everything follows from the requested position.

    Not thread-safe.
    """

    def __init__(self, source: LengthSource, name: str) -> None:
        self.source = source
        self.name = name
        self.num_documents = len(source)
        self.chunk = FIRST_CHUNK
        #: the chunks read last, the newest at the end.
        self._recent: deque[_Chunk] = deque(maxlen=RECENT_CHUNKS)

    def fill(
        self,
        position: int,
        out: Int64Array,
        config: SourceConfig,
        order: SourceOrder,
        masks: Masks = (),
        unit: BlendUnit = "tokens",
    ) -> int:
        """Write the next non-empty pieces, from ``position`` on.

        Args:
            position: in the source, epochs included.
            out: int64[A, AHEAD_WIDTH]: position, document, offset, length, units of the blend; unused rows are not
                written.
            config: sets how many epochs the source has in the current stage.
            order: maps positions to pieces.
            masks: documents to pass over as if they were empty.
            unit: what the blend counts.

        Returns:
            Rows written: at least 1, or 0 if the source has no more documents.

        Raises:
            CorpusError: a length that is negative or too large; nothing but empty documents.
        """
        ends = config.max_epochs is not None and config.on_exhausted != "repeat"
        limit = order.start_of(config.max_epochs or 0) if ends else None
        if limit is not None and position >= limit:
            return 0
        if rows := self._remembered(position, out, masks, order, unit):
            return rows
        start = begin = position
        while limit is None or position < limit:
            self._note_repeat(position, config, order)
            num = min(self.chunk, len(out), order.left(position))
            chunk = self._look_up(position, num, order, masks)
            rows = self._write(chunk, position, out, unit)
            self.chunk = min(2 * self.chunk, len(out))
            if rows:
                self._recent.append(chunk)
                return rows
            position += num
            # Any two epochs' worth of positions holds a whole epoch; a single one may miss the only document.
            if position >= order.end_of_epoch(order.end_of_epoch(begin)):
                begin = position = self._after_skips(position, order, masks)
        if start == 0:
            raise self._only_empty()
        return 0

    def _after_skips(self, position: int, order: SourceOrder, masks: Masks) -> int:
        """The start of the next epoch in which other documents are skipped: until then, all are."""
        epoch = order.epoch_of(position)
        following = min((bound for mask in masks for bound in mask.epochs or () if bound >= epoch), default=None)
        if following is None:
            raise self._only_empty()
        return max(order.start_of(following), position)

    def _look_up(self, position: int, num: int, order: SourceOrder, masks: Masks) -> _Chunk:
        """Ask for ``num`` pieces of one epoch."""
        documents, offsets = order.pieces_at(np.arange(position, position + num))
        lengths = np.ascontiguousarray(self.source.lengths(documents), np.int64)
        for mask in masks:
            lengths = np.where(mask.hits(documents, order.epoch_of(position)), 0, lengths)
        return _Chunk(position, documents, offsets, lengths, masks, order)

    def _write(self, chunk: _Chunk, position: int, out: Int64Array, unit: BlendUnit) -> int:
        """Write the rows of `fill` from a position in the chunk on; return their number."""
        skip, piece = position - chunk.first, chunk.order.piece_length(chunk.first)
        documents, offsets, lengths = chunk.documents[skip:], chunk.offsets[skip:], chunk.lengths[skip:]
        rows = int(_write(out, position, documents, offsets, lengths, piece))
        if rows < 0:
            raise self._impossible(documents, lengths)
        if unit != "tokens":
            self._count_units(out[:rows], unit)
        return rows

    def _only_empty(self) -> CorpusError:
        return CorpusError(
            f"source '{self.name}' has only empty documents",
            found=f"{self.num_documents} documents, all without a token or skipped by number",
            expected="at least one token, since its weight is positive",
            action="give it weight 0, or check how it was prepared and what is skipped",
        )

    def _count_units(self, rows: Int64Array, unit: BlendUnit) -> None:
        """Write what the blend counts for each piece, unless that is its tokens."""
        documents, offsets, lengths, units = rows[:, 1:5].T
        if unit == "documents":
            units[:] = offsets == 0  # only a document's first piece counts
        else:
            units[:] = count_trained(self.source, documents, offsets, lengths)

    def _remembered(self, position: int, out: Int64Array, masks: Masks, order: SourceOrder, unit: BlendUnit) -> int:
        """Answer from a cached chunk; 0 if none has the position."""
        for chunk in self._recent:
            here = chunk.first <= position < chunk.first + len(chunk.documents)
            if here and chunk.masks == masks and chunk.order is order:
                return self._write(chunk, position, out, unit)
        return 0

    def _impossible(self, documents: Int64Array, lengths: Int64Array) -> CorpusError:
        worst = int(np.flatnonzero((lengths < 0) | (lengths > MAX_DOCUMENT_TOKENS))[0])
        return CorpusError(
            f"source '{self.name}' has a document of an impossible length",
            found=f"document {documents[worst]} with {lengths[worst]} tokens",
            expected=f"0 to {MAX_DOCUMENT_TOKENS} tokens",
            cause="the index is damaged",
            action="build the index again: megaresume prepare",
        )

    def _note_repeat(self, position: int, config: SourceConfig, order: SourceOrder) -> None:
        if config.max_epochs is None or config.on_exhausted != "repeat":
            return
        # Only at the beginning of the epoch, or every checkpoint in it would repeat the message.
        if position == order.start_of(config.max_epochs):
            log.warning(
                "source '%s' has been seen for max_epochs %d and is repeated (on_exhausted: repeat)",
                self.name,
                config.max_epochs,
            )


@compiled
def _write(out, position, documents, offsets, lengths, piece):  # type: ignore[no-untyped-def]
    """Write the rows of `DocumentFeed.fill` from ``position`` on, as many as fit, with tokens as units.

    Returns:
        Number of rows; or -1 for an impossible length.
    """
    rows = 0
    for k in range(documents.size):
        length = lengths[k]
        if length < 0 or length > MAX_DOCUMENT_TOKENS:
            return -1
        length -= offsets[k]
        if piece:
            length = min(length, piece)
        if length > 0:
            if rows == out.shape[0]:
                break
            out[rows, 0], out[rows, 1], out[rows, 2], out[rows, 3] = position + k, documents[k], offsets[k], length
            out[rows, 4] = length
            rows += 1
    return rows


#: Initial rows of a pool.
LEAST_ROWS = 64
#: One part in this many of a sample may stay free rather than cutting a piece to fill it.
SPARE = 512


def kernel_config(config: StreamConfig) -> kernel.Config:
    """The constants that the loop needs."""
    packing = config.packing
    traits = packing.traits
    # Every document that waits has a bin of its own, or shares one with other small ones.
    group = min(2 * config.seq_length // packing.num_bins, config.seq_length) if traits.groups else 0
    return kernel.Config(
        mode=kernel.MODE_NUMBERS[packing.mode],
        seq_length=config.seq_length,
        open_bins=packing.num_bins,
        max_age=(1 << 62) if traits.bins is None else packing.max_age,
        align=packing.align,
        fills=any(config.fillers),
        least=config.least_part,
        spare=config.seq_length // SPARE,
        group=group,
    )


def fresh_arrays(config: StreamConfig) -> Arrays:
    """The arrays at sample 0."""
    sources = np.zeros((len(config.sources), kernel.SOURCE_WIDTH), np.int64)
    _weigh(sources, config)
    scalars = np.zeros(kernel.NUM_SCALARS, np.int64)
    scalars[kernel.FREE] = -1
    carried = np.zeros((0, kernel.SEGMENT_WIDTH), np.int64)
    return Arrays(scalars=scalars, digest=np.zeros(1, np.uint64), sources=sources, carried=carried, **_fresh(config))


def enter(arrays: Arrays, before: StreamConfig, after: StreamConfig) -> Arrays:
    """The arrays at the beginning of a stage.

    Args:
        arrays: at the end of the stage before.
        before, after: the configs of the two stages, with the same sources in the same order.
    """
    scalars, sources = arrays.scalars.copy(), arrays.sources.copy()
    scalars[kernel.STAGE] += 1
    _weigh(sources, after)
    sources[:, kernel.IS_EXHAUSTED] = 0
    sources[:, kernel.DRAWN_IN_STAGE : kernel.RELEASE + 1] = 0
    scalars[kernel.STAGE_UNITS] = 0
    arrays = arrays._replace(scalars=scalars, sources=sources)
    if after.packs_as(before):
        return arrays
    # In the order in which they were placed.
    waiting = np.concatenate([segments_of(arrays)[0], tail_segments(arrays), pending_segments(arrays)])
    for row in (kernel.NUM_OPEN, kernel.NUM_WAITING, kernel.NUM_TAILS, kernel.FIRST_TAIL, kernel.NUM_FILLERS):
        scalars[row] = 0
    scalars[kernel.NEXT_CARRIED], scalars[kernel.FREE] = 0, -1
    scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH] = 0
    return arrays._replace(carried=waiting, **_fresh(after))


def _weigh(sources: Int64Array, config: StreamConfig) -> None:
    sources[:, kernel.WEIGHT] = [s.weight for s in config.sources]
    sources[:, kernel.FILLS] = config.fillers
    sources[:, kernel.ACTIVE] = sources[:, kernel.WEIGHT] > 0


def _fresh(config: StreamConfig) -> dict[str, Any]:
    """Free bins, an empty pool, and room for the tails that packing ``split`` keeps back."""
    num_bins, fills = kernel_config(config).open_bins + 1, any(config.fillers)
    num_tails = kernel.TAILS if fills or config.packing.traits.cuts else 0
    return {name: np.zeros(num_bins, np.int64) for name in ("room", "opened", "head", "tail")} | {
        "segments": np.zeros((0, kernel.SEGMENT_WIDTH), np.int64),
        "link": np.zeros(0, np.int64),
        "tails": np.zeros((num_tails, kernel.SEGMENT_WIDTH), np.int64),
        # One more for a piece being cut, and the tails of a state that does not tell the two kinds apart.
        "fillers": np.zeros((kernel.TAILS + kernel.FILLERS + 1 if fills else 0, kernel.SEGMENT_WIDTH), np.int64),
    }


def segments_of(arrays: Arrays) -> tuple[Int64Array, Int64Array]:
    """The segments in the open bins, as rows.

    Returns:
        int64[w, SEGMENT_WIDTH], bins in opening order, each in filling order; int64[b], the number of segments of each
        bin.
    """
    num_open, num_waiting = int(arrays.scalars[kernel.NUM_OPEN]), int(arrays.scalars[kernel.NUM_WAITING])
    rows, counts = np.empty((num_waiting, kernel.SEGMENT_WIDTH), np.int64), np.zeros(num_open, np.int64)
    _collect(arrays.head, arrays.link, arrays.segments, rows, counts)
    return rows, counts


@compiled
def _collect(head, link, segments, rows, counts):  # type: ignore[no-untyped-def]
    num = 0
    for b in range(counts.size):
        k = head[b]
        while k >= 0:
            for column in range(rows.shape[1]):
                rows[num, column] = segments[k, column]
            num += 1
            counts[b] += 1
            k = link[k]


def with_bins(
    arrays: Arrays, room: npt.ArrayLike, opened: npt.ArrayLike, rows: Int64Array, counts: Int64Array
) -> Arrays:
    """The arrays with exactly these bins open, in a pool of just their segments.

    Args:
        arrays: supplies the others; its ``scalars`` is changed in place.
        room, opened: of each bin, in opening order.
        rows, counts: as of `segments_of`; no bin is empty.
    """
    num_open, stops = len(counts), np.cumsum(counts)
    link = np.arange(1, len(rows) + 1)
    link[stops - 1] = -1
    bins: dict[str, Any] = {name: np.zeros(len(arrays.room), np.int64) for name in ("room", "opened", "head", "tail")}
    bins["room"][:num_open], bins["opened"][:num_open] = room, opened
    bins["head"][:num_open], bins["tail"][:num_open] = stops - counts, stops - 1
    arrays.scalars[kernel.NUM_OPEN], arrays.scalars[kernel.NUM_WAITING] = num_open, len(rows)
    arrays.scalars[kernel.FREE] = -1
    return arrays._replace(**bins, segments=rows, link=link)


def grown(arrays: Arrays) -> Arrays:
    """The arrays with the pool doubled, when none of it is free; ``scalars`` is changed in place."""
    num = len(arrays.link)
    more = max(num, LEAST_ROWS)
    link = np.arange(num + 1, num + more + 1)
    link[-1] = -1
    arrays.scalars[kernel.FREE] = num
    segments = np.concatenate([arrays.segments, np.zeros((more, kernel.SEGMENT_WIDTH), np.int64)])
    return arrays._replace(segments=segments, link=np.concatenate([arrays.link, link]))


def tail_segments(arrays: Arrays) -> Int64Array:
    """The pieces that wait to fill, then the tails kept back, each oldest first: int64[t, SEGMENT_WIDTH]."""
    first, num = arrays.scalars[kernel.FIRST_TAIL], arrays.scalars[kernel.NUM_TAILS]
    rows = arrays.tails[(first + np.arange(num)) % max(len(arrays.tails), 1)]
    return np.concatenate([arrays.fillers[: arrays.scalars[kernel.NUM_FILLERS]], rows])


def put_tails(arrays: Arrays, rows: Int64Array, orders: Orders) -> None:
    """Restore what `tail_segments` returns; ``scalars`` is changed in place.

    The rows determine where the two kinds meet: a tail is the rest of a piece, and tails wait to fill only once
    `kernel.TAILS` are kept back.
    """
    num = len(rows)
    if len(arrays.fillers):
        num = 0
        for source, position, _, offset, _ in rows[::-1].tolist():
            piece = orders[source].piece_length(position)
            if num == kernel.TAILS or not (offset % piece if piece else offset):
                break
            num += 1
    first = len(rows) - num
    arrays.fillers[:first], arrays.tails[:num] = rows[:first], rows[first:]
    scalars = arrays.scalars
    scalars[kernel.NUM_FILLERS], scalars[kernel.FIRST_TAIL], scalars[kernel.NUM_TAILS] = first, 0, num


def pending_segments(arrays: Arrays) -> Int64Array:
    """The segments that are to be placed: the current document, then those carried over: int64[w, SEGMENT_WIDTH]."""
    scalars = arrays.scalars
    at_hand = scalars[kernel.PENDING : kernel.PENDING + kernel.SEGMENT_WIDTH]
    num = int(at_hand[kernel.LENGTH] > 0)
    return np.concatenate([at_hand[None][:num], arrays.carried[int(scalars[kernel.NEXT_CARRIED]) :]])


def without_documents(arrays: Arrays, config: kernel.Config, masks: Mapping[int, Masks], orders: Orders) -> Arrays:
    """The arrays without the waiting segments of some documents, which are counted as left out.

    Args:
        arrays: of a stage.
        config: its constants.
        masks: by source number.
        orders: of the sources.
    """
    arrays = Arrays._make(array.copy() for array in arrays)
    scalars = arrays.scalars

    def kept(rows: Int64Array) -> Int64Array:
        """Rows that stay; the rest are counted."""
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
    put_tails(arrays, kept(tail_segments(arrays)), orders)
    scalars[kernel.NEXT_CARRIED] = 0
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
