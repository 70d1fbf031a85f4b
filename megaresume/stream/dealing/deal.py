"""Which samples of a global batch go to which rank and micro-step.

A step takes as long as its slowest rank, and a sample as long as its documents ask for: attention costs the square of
a document's tokens, so samples of one length take different times. Every rank plans the lengths of all samples, so it
knows the assignment of all ranks by itself:

    samples of the global batch -> their costs -> groups of equal size and cost -> the places of the usual deal

The same samples stay in the same global batch. Which is whose is a function of the global batch and of the layout
alone: it is in no state, and a resume may change ranks, micro-batches, and balance itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from megaresume.stream.batches import micro_batches
from megaresume.stream.dealing.balance import ALGORITHM, Balance
from megaresume.stream.errors import StateError

if TYPE_CHECKING:
    from megaresume.stream.planning.plan import Plan
    from megaresume.stream.stream import Stream

Int64Array = npt.NDArray[np.int64]


def deal(
    stream: Stream,
    sample: int,
    global_batch_size: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    balance: Balance | None,
) -> Sequence[Sequence[int]]:
    """The samples of each micro-step of one rank for the step at ``sample``.

    Args:
        balance: None: in the order of the stream, as `micro_batches` says.

    Raises:
        UsageError: the global batch is not a multiple of micro-batch size times data-parallel size.
        StreamExhausted: the stream ends within the global batch.
    """
    places = micro_batches(
        sample, global_batch_size, micro_batch_size=micro_batch_size, dp_rank=dp_rank, dp_size=dp_size
    )
    if balance is None:
        return places
    plan = stream.plan(sample, sample + global_batch_size)
    order = dealt_order(plan, balance, micro_batch_size=micro_batch_size, dp_size=dp_size).tolist()
    return [order[place.start - sample : place.stop - sample] for place in places]


def in_part(samples: int, *, micro_batch_size: int, dp_size: int) -> int:
    """How many of so few samples for a step can be dealt out: of a last micro-batch, every rank must be given some."""
    rest = samples % (micro_batch_size * dp_size)
    return samples - rest if rest < dp_size else samples


def deal_in_part(
    stream: Stream,
    sample: int,
    samples: int,
    *,
    micro_batch_size: int,
    dp_rank: int,
    dp_size: int,
    balance: Balance | None,
) -> list[list[int]]:
    """The samples of each micro-step of one rank for a short step, of as many samples as `in_part` says.

    Micro-batches are whole, up to the last, which is dealt out evenly.
    """
    plan = stream.plan(sample, sample + samples)
    order = dealt_order(plan, balance, micro_batch_size=micro_batch_size, dp_size=dp_size).tolist()
    everybody = micro_batch_size * dp_size
    sizes = [(first, min(everybody, samples - first)) for first in range(0, samples, everybody)]
    return [order[a + n * dp_rank // dp_size : a + n * (dp_rank + 1) // dp_size] for a, n in sizes]


def dealt_order(plan: Plan, balance: Balance | None, *, micro_batch_size: int, dp_size: int) -> Int64Array:
    """The samples of a global batch in the order in which `micro_batches` hands them out.

    Args:
        plan: of the global batch. One that is no whole number of micro-batches for every rank (the last one of all)
            stays as it is.
        balance: None: as it is.
        micro_batch_size: samples.
        dp_size: data-parallel size.

    Returns:
        int64[samples]: numbers in the stream.

    Raises:
        StateError: the assignment was made by another version of megaresume.
    """
    samples = np.arange(plan.first, plan.stop)
    if balance is None or len(plan) % (micro_batch_size * dp_size):
        return samples
    groups = dp_size if balance.objective == "step" else len(plan) // micro_batch_size
    if groups <= 1:
        return samples
    if balance.algorithm != ALGORITHM:
        raise StateError(
            "which rank got which samples is not known to this version of megaresume",
            found=f"ranks balanced by algorithm {balance.algorithm}",
            expected=f"algorithm {ALGORITHM}",
            action="use the version of megaresume that the run was trained with",
        )
    from megaresume.stream.dealing.even import alike, even_groups

    cost = costs(plan, balance)
    members, sums = even_groups(cost, np.argsort(-cost, kind="stable"), groups)
    if balance.objective == "step":
        # Each rank begins with its largest samples, as all others do.
        places = members.reshape(dp_size, -1, micro_batch_size).transpose(1, 0, 2)
    else:
        places = members[alike(sums, dp_size)]
    return np.asarray(samples[places.ravel()], np.int64)


def costs(plan: Plan, balance: Balance) -> Int64Array:
    """What each sample costs: int64[samples]. Padding costs nothing."""
    from megaresume.stream.dealing.even import sums_of_squares

    return np.asarray(sums_of_squares(plan.table, plan.starts, balance.token_cost), np.int64)
