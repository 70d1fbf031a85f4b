"""`DocumentFeed`: the pieces of one source in stream order, a chunk at a time, with their lengths.

Documents that are skipped by their number are passed over here, as empty ones are (`Mask`); those that wait in open
bins when that is declared are taken out of them by ``arrays.py``.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaresume.stream.compiled import compiled
from megaresume.stream.config import SourceConfig
from megaresume.stream.data_yaml import BlendUnit
from megaresume.stream.documents.order import SourceOrder
from megaresume.stream.errors import CorpusError
from megaresume.stream.ranges import Range
from megaresume.stream.skips import DocumentList
from megaresume.stream.source import LengthSource, count_trained

Int64Array = npt.NDArray[np.int64]

#: Longer documents would leave int64 in the arithmetic of the blend.
MAX_DOCUMENT_TOKENS = (1 << 31) - 1

#: Documents that the first look ahead fetches: few, so that a resume touches few pages of a large index.
FIRST_CHUNK = 16
#: Chunks remembered: a state a little before the front is planned again without asking the source.
RECENT_CHUNKS = 2

log = logging.getLogger(__name__)


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


def masks_of(lists: Sequence[DocumentList], names: Sequence[str]) -> Mapping[int, Masks]:
    """Lists of documents as the planner needs them, by source number."""
    masks: dict[int, list[Mask]] = {}
    for documents in lists:
        ids = np.array(documents.numbers(), np.int64)
        masks.setdefault(names.index(documents.source), []).append(Mask(ids, documents.epochs))
    return masks


class _Chunk(NamedTuple):
    """Pieces at consecutive positions of one epoch, as they were looked up."""

    first: int
    #: int64[n] each; the lengths are those of the documents, and 0 of one that is masked.
    documents: Int64Array
    offsets: Int64Array
    lengths: Int64Array
    masks: Masks
    order: SourceOrder


class DocumentFeed:
    """Looks ahead in one source. Holds no state of the stream: all follows from the position asked for.

    Not safe to use from several threads at once.
    """

    def __init__(self, source: LengthSource, name: str) -> None:
        self.source = source
        self.name = name
        self.num_documents = len(source)
        self.chunk = FIRST_CHUNK
        #: the latest last.
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
        """Write the next pieces that are not empty, from ``position`` on.

        Args:
            position: in the source, epochs included.
            out: int64[A, AHEAD_WIDTH]: position, document, offset, length, units of the blend.
            config: how often the source is gone through, in the current stage.
            order: what comes at a position.
            masks: documents to pass over as if they were empty.
            unit: what the blend counts.

        Returns:
            Rows written: at least 1, or 0 when the source has no more documents.

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
            # Two epochs hold a whole one wherever they begin; a single one may miss its only document.
            if position >= order.end_of_epoch(order.end_of_epoch(begin)):
                begin = position = self._after_skips(position, order, masks)
        if start == 0:
            raise self._only_empty()
        return 0

    def _after_skips(self, position: int, order: SourceOrder, masks: Masks) -> int:
        """Where after a whole epoch of nothing other documents are skipped than in it: it is the same until then."""
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
        """Write the rows of `fill` from a position in the chunk on; how many they are."""
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
        """Write into the last column what the blend counts of each piece, where that is not its tokens."""
        _, documents, offsets, lengths, units = rows.T
        if unit == "documents":
            units[:] = offsets == 0  # a later piece is no further document
        else:
            units[:] = count_trained(self.source, documents, offsets, lengths)

    def _remembered(self, position: int, out: Int64Array, masks: Masks, order: SourceOrder, unit: BlendUnit) -> int:
        """Answer from a remembered chunk; 0 if there is none."""
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
        # Only where the epoch begins, or every checkpoint taken in it would say so again.
        if position == order.start_of(config.max_epochs):
            log.warning(
                "source '%s' has been seen for max_epochs %d and is repeated (on_exhausted: repeat)",
                self.name,
                config.max_epochs,
            )


@compiled
def _write(out, position, documents, offsets, lengths, piece):  # type: ignore[no-untyped-def]
    """Write the rows of `DocumentFeed.fill` from ``position`` on, as many as there is room for, the units being tokens.

    Returns:
        How many; or -1 for a length that cannot be.
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
