"""Preference pairs in a batch: where chosen and rejected conversations are, kept apart as two documents are.

A pair is one document, so that it is never packed but whole; its `Spans` say where the rejected half begins.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from megaresume.corpora.spans import Spans
from megaresume.stream.errors import CorpusError, UsageError
from megaresume.stream.planning.kernel import DOCUMENT, LENGTH, OFFSET
from megaresume.stream.planning.plan import Plan

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]


def find_pairs(
    spans: Spans, mine: Int64Array, plan: Plan, rows: Int64Array, columns: Int64Array, lengths: Int64Array, name: str
) -> Int64Array:
    """The pairs among the segments of one source.

    Args:
        spans: of the segments' documents.
        mine: rows of the plan's table that are of this source.
        plan: of the batch.
        rows, columns: of its `Layout`.
        lengths: int64[k], tokens of the segments' documents.
        name: of the source, for errors.

    Returns:
        int64[p, 4]: row, columns at which the chosen and the rejected half begin, and the one after the pair.

    Raises:
        CorpusError: a pair is longer than a sample, or was cut to fill one; the spans are damaged.
    """
    empty = np.flatnonzero(spans.spans[:, 0] == spans.spans[:, 1])
    which = np.searchsorted(spans.starts, empty, side="right") - 1
    segments = plan.table[mine[which]]
    cut = np.flatnonzero((segments[:, OFFSET] != 0) | (segments[:, LENGTH] != lengths[which]))
    if cut.size:
        document, length = int(segments[cut[0], DOCUMENT]), int(lengths[which[cut[0]]])
        raise CorpusError(
            f"a preference pair of {name} does not stay in one sample",
            found=f"document {document} of {length} tokens, cut",
            expected="chosen and rejected in the same sample",
            cause="a pair longer than seq_length, or packing: split for this source",
            action="packing: best_fit, and leave longer pairs out: megaresume prepare --max-tokens N --too-long skip",
        )
    at = spans.spans[empty, 0]
    if ((at <= 0) | (at >= lengths[which])).any() or len(np.unique(which)) < len(which):
        raise CorpusError(
            f"the spans of {name} are damaged",
            found=f"rejected halves from tokens {at[:4].tolist()} of documents of {lengths[which][:4].tolist()} tokens",
            expected="one in each pair, within it",
            action="build the corpus again: megaresume prepare",
        )
    first = columns[mine[which]]
    halves = (rows[mine[which]], first, first + at, first + segments[:, LENGTH])
    return np.stack(halves, axis=1).astype(np.int64)


def refuse_pairs(names: Sequence[str]) -> UsageError:
    """For a loop that did not ask for pairs: it would train rejected answers as it does chosen ones."""
    return UsageError(
        "the blend has preference pairs, and this loop would train both of each",
        found=f"chosen and rejected conversations in {', '.join(names)}",
        expected="a loop whose loss tells them apart",
        action="ask where they are: fields=(*FIELDS, 'pairs'), see docs/conversations.md; or leave the source out",
    )


def separate(
    pairs: Int64Array,
    bounds: Int32Array,
    num_bounds: Int64Array,
    *,
    labels: Int64Array,
    loss_mask: npt.NDArray[np.float32],
    position_ids: Int64Array,
    align: int,
) -> tuple[Int32Array, Int64Array]:
    """Keep the halves of each pair apart: no label, no position and no attention leads from one to the other.

    Args:
        pairs: as `find_pairs` gives them.
        bounds, num_bounds: of a `Layout`.
        labels, loss_mask, position_ids: of `Arrays`, written.
        align: tokens that a segment's place is a multiple of.

    Returns:
        ``bounds`` and ``num_bounds``, with the rejected halves as segments of their own.

    Raises:
        UsageError: places must be multiples, which those of rejected halves are not.
    """
    if align > 1 and len(pairs):
        raise UsageError(
            "preference pairs cannot be aligned",
            found=f"packing.align: {align}",
            expected="align: 1: a rejected conversation begins right after the chosen one",
            action="leave packing.align out, or the source with the pairs",
        )
    for row, _, rejected, stop in pairs.tolist():
        if labels.size:
            labels[row, rejected - 1] = 0
        if loss_mask.size:
            loss_mask[row, rejected - 1] = 0
        if position_ids.size:
            position_ids[row, rejected:stop] = np.arange(stop - rejected)
    rows = np.concatenate([np.repeat(np.arange(len(num_bounds)), num_bounds), pairs[:, 0]])
    bounds = np.concatenate([bounds, pairs[:, 2].astype(np.int32)])
    return bounds[np.lexsort((bounds, rows))], num_bounds + np.bincount(pairs[:, 0], minlength=len(num_bounds))
