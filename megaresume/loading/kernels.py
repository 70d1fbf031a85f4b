"""Compiled loops that lay out and write whole batches, without holding the GIL."""

from __future__ import annotations

import numpy as np

from megaresume.stream.compiled import compiled
from megaresume.stream.kernel import LENGTH, OFFSET, SOURCE

__all__ = ["copy_segments", "finish_rows", "lay_out"]


@compiled
def lay_out(table, starts, align, seq_length, rows, columns, bounds, num_bounds, order, num_of_source):  # type: ignore[no-untyped-def]
    """Where each segment of a plan goes, and where attention must not look across.

    Args:
        table, starts: of the `Plan`: int64[n, SEGMENT_WIDTH], int64[m + 1].
        align: tokens that a segment's place is a multiple of.
        seq_length: S.
        rows, columns: int64[n], written.
        bounds: int32[n + 2 * m], written: for each sample the starts of its segments, that of the padding behind
            them if any, and S.
        num_bounds: int64[m], written: how many of ``bounds`` are each sample's.
        order: int64[n], written: the segments grouped by source.
        num_of_source: int64[sources], zeros; written: segments of each source.

    Returns:
        How many of ``bounds`` were written.
    """
    written = 0
    for row in range(starts.size - 1):
        column = 0
        before = written
        for k in range(starts[row], starts[row + 1]):
            rows[k], columns[k] = row, column
            bounds[written] = column
            written += 1
            end = column + table[k, LENGTH]
            column = -(-end // align) * align
        if column < seq_length:  # also the padding begins at a multiple: kernels for packed attention count on it
            bounds[written] = column
            written += 1
        bounds[written] = seq_length
        written += 1
        num_bounds[row] = written - before
    for k in range(table.shape[0]):
        num_of_source[table[k, SOURCE]] += 1
    place = np.cumsum(num_of_source) - num_of_source
    for k in range(table.shape[0]):
        source = table[k, SOURCE]
        order[place[source]] = k
        place[source] += 1
    return written


@compiled
def copy_segments(  # type: ignore[no-untyped-def]
    stored, document_starts, document_lengths, which, table, rows, columns, tokens, labels, loss_mask
):
    """Copy the segments of one source into their places.

    The label of a token is the next token of its document; the last token of a document has none.

    Args:
        stored: [tokens of the corpus], any integer dtype.
        document_starts, document_lengths: int64[k], where each segment's document lies in ``stored``, in tokens.
        which: int64[k], rows of ``table`` that are of this source.
        table: int64[n, SEGMENT_WIDTH], all segments of the batch. rows, columns: int64[n], where they go.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S].
    """
    for j in range(which.size):
        k = which[j]
        offset, length = table[k, OFFSET], table[k, LENGTH]
        first = document_starts[j] + offset
        source = stored[first : first + length]
        row, column = rows[k], columns[k]
        to_tokens = tokens[row, column : column + length]
        to_labels = labels[row, column : column + length]
        to_mask = loss_mask[row, column : column + length]
        for i in range(length):
            to_tokens[i] = source[i]
        for i in range(length - 1):
            to_labels[i] = source[i + 1]
        for i in range(length):
            to_mask[i] = 1
        if offset + length < document_lengths[j]:
            to_labels[length - 1] = stored[first + length]
        else:
            to_labels[length - 1] = 0
            to_mask[length - 1] = 0


@compiled
def finish_rows(starts, columns, table, align, pad_id, tokens, labels, loss_mask, position_ids):  # type: ignore[no-untyped-def]
    """Write padding and position ids; positions start again at every segment, and at the padding at the end.

    Args:
        starts: int64[m + 1], the segments of each row. columns: int64[n], where each lies. table: of the `Plan`.
        align: tokens that a segment's place is a multiple of.
        pad_id: token written where there is no document.
        tokens, labels, position_ids: int64[m, S]. loss_mask: float32[m, S].
    """
    seq_length = tokens.shape[1]
    for row in range(tokens.shape[0]):
        written = end = 0
        for k in range(starts[row], starts[row + 1]):
            # Padding up to an aligned column belongs to the segment before it.
            _pad(row, written, columns[k], pad_id, tokens, labels, loss_mask)
            written = columns[k] + table[k, LENGTH]
            end = columns[k] + -(-table[k, LENGTH] // align) * align
            _count(position_ids[row, columns[k] : end])
        _pad(row, written, seq_length, pad_id, tokens, labels, loss_mask)
        _count(position_ids[row, end:])


@compiled
def _count(out):  # type: ignore[no-untyped-def]
    for i in range(out.size):
        out[i] = i


@compiled
def _pad(row, start, stop, pad_id, tokens, labels, loss_mask):  # type: ignore[no-untyped-def]
    for i in range(start, stop):
        tokens[row, i] = pad_id
        labels[row, i] = 0
        loss_mask[row, i] = 0
