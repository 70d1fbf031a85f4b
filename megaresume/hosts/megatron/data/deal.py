"""`RankDeal`: balanced ranks under Megatron's sampler.

    sampler: consumed + k*D*m + r*m .. + m     the places of rank r in micro-step k, whatever lies there
      -> the step that a place is of           by the planned global batch sizes
      -> the deal of its samples               `dealt_order`: by their costs, the same on every rank
      -> the sample at that place

A function of the place and of the layout alone: no process keeps any of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megaresume.stream.batches import Balance
from megaresume.stream.dealing import Int64Array, dealt_order
from megaresume.stream.errors import UsageError
from megaresume.stream.stream import Stream


class RankDeal:
    """The samples of one data-parallel rank.

    Args:
        balance: how the samples of a step are dealt.
        micro_batch_size: samples.
        dp_rank, dp_size: of this rank, as Megatron's sampler sees them.
    """

    def __init__(self, balance: Balance, *, micro_batch_size: int, dp_rank: int, dp_size: int) -> None:
        self.balance = balance
        self.micro_batch_size = micro_batch_size
        self.dp_rank, self.dp_size = dp_rank, dp_size
        #: of the last step: its first sample, and its samples in the order of their places.
        self._last: tuple[int, Int64Array] = (0, np.zeros(0, np.int64))

    def samples(self, stream: Stream, places: Sequence[int]) -> list[int]:
        """The samples at these places, which count from the beginning of the stream as samples do.

        Raises:
            StreamExhausted: the stream ends within their step; on every rank alike.
            UsageError: they are not places of this rank.
        """
        return [self._sample(stream, place) for place in places]

    def _sample(self, stream: Stream, place: int) -> int:
        assert stream.schedule is not None, "an order has set it"
        first, stop = stream.schedule.step_of(place)
        if (place - first) // self.micro_batch_size % self.dp_size != self.dp_rank:
            raise self._foreign(place, first, stop)
        if (first, stop - first) != (self._last[0], len(self._last[1])):
            plan = stream.plan(first, stop)
            order = dealt_order(plan, self.balance, micro_batch_size=self.micro_batch_size, dp_size=self.dp_size)
            self._last = first, order
        return int(self._last[1][place - first])

    def _foreign(self, place: int, first: int, stop: int) -> UsageError:
        micro, size = self.micro_batch_size, self.dp_size
        return UsageError(
            "Megatron's sampler deals the samples in another way than balanced ranks count on",
            found=f"sample {place}, of the step with {first} to {stop - 1}, on data-parallel rank {self.dp_rank}",
            expected=f"it on rank {(place - first) // micro % size}: {size} ranks get micro-batches of {micro} in turn",
            cause="a sampler of a fork; or a global batch size that the arguments do not tell",
            action="leave out --megaresume-balance",
        )
