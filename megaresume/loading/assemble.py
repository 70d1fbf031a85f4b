"""`Assembler`: from what samples hold to arrays of tokens. Stateless: the same plan gives the same bytes anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from megaresume.loading.kernels import copy_segments, finish_rows, lay_out
from megaresume.sources.base import Source, TokenSource
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET
from megaresume.stream.plan import Plan

__all__ = ["Arrays", "Assembler", "Layout"]

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """A batch of m samples of S tokens, before torch."""

    #: int64[m, S].
    tokens: Int64Array
    #: int64[m, S]: the next token of the same document; 0 where there is none.
    labels: Int64Array
    #: float32[m, S]: 1 where the label counts: never at the last token of a document, never at padding.
    loss_mask: npt.NDArray[np.float32]
    #: int64[m, S]: from 0 in every segment.
    position_ids: Int64Array

    @classmethod
    def empty(cls, num_samples: int, seq_length: int) -> Arrays:
        """Not initialised."""
        shape = (num_samples, seq_length)
        return cls(
            tokens=np.empty(shape, np.int64),
            labels=np.empty(shape, np.int64),
            loss_mask=np.empty(shape, np.float32),
            position_ids=np.empty(shape, np.int64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where the n segments of m samples go."""

    #: int64[n], in samples from the first of the batch.
    rows: Int64Array
    #: int64[n], in tokens.
    columns: Int64Array
    #: int32[sum of num_bounds]: of each sample the starts of its segments, of the padding behind them if any, and S.
    bounds: npt.NDArray[np.int32]
    #: int64[m].
    num_bounds: Int64Array
    #: int64[n]: the segments grouped by source.
    order: Int64Array
    #: int64[sources]: segments of each source.
    num_of_source: Int64Array


class Assembler:
    """Reads the tokens of planned samples.

    Args:
        sources: in the order of the stream's config.
        seq_length: tokens a sample.
        align: tokens that a segment's place is a multiple of (``packing.align``).
        pad_id: token written where there is no document.
    """

    def __init__(self, sources: Sequence[Source], *, seq_length: int, align: int = 1, pad_id: int = 0) -> None:
        self.sources = list(sources)
        self.seq_length = seq_length
        self.align = align
        self.pad_id = pad_id
        self._in_one_array: dict[int, bool] = {}

    def lay_out(self, plan: Plan) -> Layout:
        """Where the segments of a plan go."""
        num_segments, num_samples = len(plan.table), len(plan)
        rows, columns, order = np.empty((3, num_segments), np.int64)
        bounds, num_bounds = np.empty(num_segments + 2 * num_samples, np.int32), np.empty(num_samples, np.int64)
        num_of_source = np.zeros(len(self.sources), np.int64)
        written = lay_out(
            plan.table,
            plan.starts,
            self.align,
            self.seq_length,
            rows,
            columns,
            bounds,
            num_bounds,
            order,
            num_of_source,
        )
        return Layout(
            rows=rows,
            columns=columns,
            bounds=bounds[:written],
            num_bounds=num_bounds,
            order=order,
            num_of_source=num_of_source,
        )

    def fill(self, plan: Plan, out: Arrays) -> Layout:
        """Write the samples of a plan into arrays of as many rows.

        Raises:
            CorpusError: a document is damaged, or not as long as the index says.
        """
        layout = self.lay_out(plan)
        first = 0
        for i, num in enumerate(layout.num_of_source.tolist()):
            if num:
                self._fill_from(i, layout.order[first : first + num], plan, layout, out)
            first += num
        finish_rows(
            plan.starts,
            layout.columns,
            plan.table,
            self.align,
            self.pad_id,
            out.tokens,
            out.labels,
            out.loss_mask,
            out.position_ids,
        )
        return layout

    def _fill_from(self, i: int, mine: Int64Array, plan: Plan, layout: Layout, out: Arrays) -> None:
        source = self.sources[i]
        if i not in self._in_one_array:  # the check is slow, and opens the file of tokens
            self._in_one_array[i] = isinstance(source, TokenSource)
        if not self._in_one_array[i]:
            self._read(source, mine, plan, layout, out)
            return
        documents = plan.table[:, DOCUMENT][mine]  # three times as fast as [mine, DOCUMENT]
        corpus = cast(TokenSource, source)
        copy_segments(
            corpus.token_view,
            corpus.token_starts(documents),
            corpus.lengths(documents),
            mine,
            plan.table,
            layout.rows,
            layout.columns,
            out.tokens,
            out.labels,
            out.loss_mask,
        )

    def _read(self, source: Source, mine: Int64Array, plan: Plan, layout: Layout, out: Arrays) -> None:
        """A source without one array of tokens: a call for each segment, with the token after it where there is one."""
        totals = source.lengths(plan.table[mine, DOCUMENT]).tolist()
        for k, total in zip(mine.tolist(), totals, strict=True):
            document, offset, length = plan.table[k, [DOCUMENT, OFFSET, LENGTH]].tolist()
            row, column = int(layout.rows[k]), int(layout.columns[k])
            end = column + length
            read: npt.NDArray[Any] = source.read(document, offset, min(length + 1, total - offset))
            out.tokens[row, column:end] = read[:length]
            out.labels[row, column : column + len(read) - 1] = read[1:]
            out.loss_mask[row, column:end] = 1
            if len(read) == length:
                out.labels[row, end - 1] = 0
                out.loss_mask[row, end - 1] = 0
