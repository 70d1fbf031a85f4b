"""Compiled loops that turn samples of a stream into those of GPTDataset, a batch at a time."""

from __future__ import annotations

from megaresume.stream.compiled import compiled

__all__ = ["count_from", "cross_documents"]


@compiled
def cross_documents(bounds, num_bounds, filled, follows, tokens, labels, loss_mask):  # type: ignore[no-untyped-def]
    """Give the last token of every document the label that GPTDataset gives it: the token after it.

    Args:
        bounds, num_bounds: of the `Layout`.
        filled: int64[m], tokens of documents in each sample; behind them lies padding.
        follows: int64[m], the token behind the sample; -1: unknown, or not needed.
        tokens, labels: int64[m, S]. loss_mask: float32[m, S]. The last two are written.
    """
    first, length = 0, tokens.shape[1]
    for row in range(num_bounds.size):
        for k in range(first + 1, first + num_bounds[row] - 1):
            start = bounds[k]
            if start < filled[row]:
                labels[row, start - 1] = tokens[row, start]
                loss_mask[row, start - 1] = 1
        if follows[row] >= 0:
            labels[row, length - 1] = follows[row]
            loss_mask[row, length - 1] = 1
        first += num_bounds[row]


@compiled
def count_from(tokens, eod, position_ids):  # type: ignore[no-untyped-def]
    """Position ids that begin again behind every ``eod``: int64[m, S], written."""
    for row in range(tokens.shape[0]):
        position = 0
        for i in range(tokens.shape[1]):
            position_ids[row, i] = position
            position = 0 if tokens[row, i] == eod else position + 1
