"""A compiled search for the documents that later pieces are of. Apart: who plans nothing imports no compiler."""

from __future__ import annotations

import numpy as np

from megaresume.stream.compiled import compiled


@compiled
def resolve(numbers, parts, num_documents, ids, ends, guide, stride):  # type: ignore[no-untyped-def]
    """See `LongDocuments.resolve`."""
    for j in range(numbers.size):
        later = numbers[j] - num_documents
        if later < 0:
            continue
        g = np.searchsorted(guide, later, side="right")
        first, stop = g * stride, min((g + 1) * stride, ends.size)
        at = first + np.searchsorted(ends[first:stop], later, side="right")
        if at == ends.size:
            raise IndexError("a piece beyond the last one")
        numbers[j], parts[j] = ids[at], later + 1 - (ends[at - 1] if at > 0 else 0)
