"""`Dealt`: where in its global batch each sample of a run was dealt out, also with balanced ranks.

Those are dealt by the lengths of all samples of the global batch, which are planned again for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaresume.runs.steps import UNKNOWN, Span
from megaresume.stream.dealing.deal import dealt_order
from megaresume.stream.errors import StreamExhausted
from megaresume.stream.planning.plan import concatenate
from megaresume.trace.replan import Past, Replan

Int64Array = npt.NDArray[np.int64]


class Dealt:
    """The deal of a run.

    Args:
        replan: plans its samples again.
    """

    def __init__(self, replan: Replan) -> None:
        self._past = Past(replan)
        #: of the last global batch: its first sample, and the places of its samples.
        self._last: tuple[int, Int64Array] | None = None

    def places(self, span: Span, first: int, stop: int) -> Int64Array:
        """The places of samples in their global batches, from 0: int64[n]; `UNKNOWN` where no record tells.

        Args:
            span: that they lie in.
            first, stop: the samples.

        Raises:
            StateError: ranks were balanced by another version of megaresume.
        """
        if span.batch_size is None or span.ranks is None:
            return np.full(stop - first, UNKNOWN, np.int64)
        size = span.batch_size
        inside = (np.arange(first, stop) - span.step_sample) % size
        if span.topology is None or span.topology.balance is None:
            return inside
        begin = first - int(inside[0]) if stop > first else stop
        parts = [self._of_step(span, sample, size) for sample in range(begin, stop, size)]
        places = np.concatenate(parts) if parts else inside
        return places[first - begin : stop - begin]

    def _of_step(self, span: Span, sample: int, size: int) -> Int64Array:
        if self._last is None or self._last[0] != sample or len(self._last[1]) != size:
            self._last = sample, self._dealt(span, sample, size)
        return self._last[1]

    def _dealt(self, span: Span, sample: int, size: int) -> Int64Array:
        assert span.topology is not None and span.ranks is not None
        places = np.full(size, UNKNOWN, np.int64)
        try:
            plan = concatenate([block.plan for block in self._past.blocks(sample, sample + size)])
        except StreamExhausted:  # nobody trains a step that the stream does not have
            return places
        dp, micro = span.ranks
        order = dealt_order(plan, span.topology.balance, micro_batch_size=micro, dp_size=dp)
        places[order - sample] = np.arange(size)
        return places
