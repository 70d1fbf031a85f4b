"""`Feed`: the documents of one source in stream order, a chunk at a time, with their lengths."""

from __future__ import annotations

import logging
from collections import deque

import numpy as np
import numpy.typing as npt

from megaresume.stream.block_shuffle import documents_at
from megaresume.stream.config import SourceConfig
from megaresume.stream.errors import CorpusError
from megaresume.stream.masking import Masks, masked
from megaresume.stream.source import LengthSource

__all__ = ["Feed"]

#: Longer documents would leave int64 in the arithmetic of the blend.
MAX_DOCUMENT_TOKENS = (1 << 31) - 1

#: Documents that the first look ahead fetches: few, so that a resume touches few pages of a large index.
FIRST_CHUNK = 16
#: Chunks remembered: a state a little behind the front is planned again without asking the source.
RECENT_CHUNKS = 2

log = logging.getLogger(__name__)


class Feed:
    """Looks ahead in one source. Holds no state of the stream: all follows from the position asked for.

    Not safe to use from several threads at once.
    """

    def __init__(self, source: LengthSource, name: str, seed: int) -> None:
        self.source = source
        self.name = name
        self.seed = seed
        self.num_documents = len(source)
        self.chunk = FIRST_CHUNK
        #: (first position, position after the last, int64[n, 3] rows of `fill`, its masks), the latest last.
        self._recent: deque[tuple[int, int, npt.NDArray[np.int64], Masks]] = deque(maxlen=RECENT_CHUNKS)

    def _limit(self, config: SourceConfig) -> int | None:
        """The position at which the source ends, if it does."""
        if config.max_epochs is None or config.on_exhausted == "repeat":
            return None
        return config.max_epochs * self.num_documents

    def fill(self, position: int, out: npt.NDArray[np.int64], config: SourceConfig, masks: Masks = ()) -> int:
        """Write the next documents that are not empty, from ``position`` on.

        Args:
            position: in the source, epochs included.
            out: int64[A, 3]: position, document, length.
            config: how often the source is gone through, in the stage at hand.
            masks: documents to pass over as if they were empty.

        Returns:
            Rows written: at least 1, or 0 when the source has no more documents.

        Raises:
            CorpusError: a length that is negative or too large; nothing but empty documents.
        """
        limit = self._limit(config)
        if limit is not None and position >= limit:
            return 0
        if rows := self._remembered(position, out, masks):
            return rows
        start = position
        while limit is None or position < limit:
            # Two epochs hold a whole one wherever they begin; a single one may miss its only document.
            if position - start >= 2 * self.num_documents:
                raise self._only_empty()
            epoch, index = divmod(position, self.num_documents)
            self._note_repeat(position, config)
            num = min(self.chunk, len(out), self.num_documents - index)
            documents = documents_at(index, num, self.num_documents, self.seed, self.name, epoch, config.shuffle)
            lengths = masked(self.source.lengths(documents), documents, epoch, masks)
            self.chunk = min(2 * self.chunk, len(out))
            positions = np.arange(position, position + num)
            if lengths.min() <= 0 or lengths.max() > MAX_DOCUMENT_TOKENS:
                self._check(documents, lengths)
                keep = lengths > 0
                positions, documents, lengths = positions[keep], documents[keep], lengths[keep]
            rows = len(documents)
            out[:rows, 0], out[:rows, 1], out[:rows, 2] = positions, documents, lengths
            if rows:
                self._recent.append((position, position + num, out[:rows].copy(), masks))
                return rows
            position += num
        if start == 0:
            raise self._only_empty()
        return 0

    def _only_empty(self) -> CorpusError:
        return CorpusError(
            f"source '{self.name}' has only empty documents",
            found=f"{self.num_documents} documents without a token, or skipped by their number",
            expected="at least one token, since its weight is positive",
            action="give it weight 0, or check how it was prepared and what is skipped",
        )

    def _remembered(self, position: int, out: npt.NDArray[np.int64], masks: Masks) -> int:
        """Answer from a remembered chunk; 0 if there is none."""
        for first, stop, known, its_masks in self._recent:
            if first <= position < stop and its_masks == masks:
                # Empty documents are not among the rows: the first at or after the position.
                rows = known[int(known[:, 0].searchsorted(position)) :][: len(out)]
                out[: len(rows)] = rows
                return len(rows)
        return 0

    def _check(self, documents: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> None:
        bad = (lengths < 0) | (lengths > MAX_DOCUMENT_TOKENS)
        if bad.any():
            worst = int(np.flatnonzero(bad)[0])
            raise CorpusError(
                f"source '{self.name}' has a document of an impossible length",
                found=f"document {documents[worst]} with {lengths[worst]} tokens",
                expected=f"0 to {MAX_DOCUMENT_TOKENS} tokens",
                cause="the index is damaged",
                action="build the index again: megaresume prepare",
            )

    def _note_repeat(self, position: int, config: SourceConfig) -> None:
        if config.max_epochs is None or config.on_exhausted != "repeat":
            return
        # Only where the epoch begins, or every checkpoint taken in it would say so again.
        if position == config.max_epochs * self.num_documents:
            log.warning(
                "source '%s' has been seen for max_epochs %d and goes on (on_exhausted: repeat)",
                self.name,
                config.max_epochs,
            )
