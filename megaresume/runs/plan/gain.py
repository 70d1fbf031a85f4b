"""What balanced ranks would gain in the coming steps, by the lengths of the run's own data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaresume.runs.plan.data import PlannedData
from megaresume.runs.plan.start import PlannedLaunch
from megaresume.stream.batches import Balance, BatchSchedule, Objective
from megaresume.stream.errors import StreamExhausted

if TYPE_CHECKING:
    from megaresume.stream.stream import Stream


#: least gain that shows in the time of steps: on a GPU they follow the prediction to about this (docs/performance.md).
NOTICEABLE = 0.01
#: steps to plan for the estimate, and most samples.
_STEPS, _SAMPLES = 20, 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """The work of the slowest rank, by the costs of its samples, relative to the mean over ranks."""

    objective: Objective
    token_cost: int
    #: the number of steps that were planned.
    steps: int
    #: the cost for the slowest rank: in stream order, and balanced.
    before: float
    after: float

    def __str__(self) -> str:
        waits = "a step" if self.objective == "step" else "a micro-step"
        return (
            f"the slowest rank of {waits} has {self.before:.3f} times the work of the mean in the order of the stream, "
            f"{self.after:.3f} with --balance {self.objective} (next {self.steps:,} steps)"
            + ("" if self.before - self.after >= NOTICEABLE else ": too little to notice in the time of a step")
        )


def gain(launch: PlannedLaunch, data: PlannedData) -> Gain | None:
    """Plan the next steps with and without balanced ranks. None, with a note, if something is unknown."""
    now, balance = launch.now, launch.findings.attempt(lambda: launch.flags.balanced)
    if balance is None:
        return None
    stream = None if launch.schedule is None else data.stream(launch)
    if now.micro_batch_size is None or launch.schedule is None or stream is None:
        launch.findings.note(
            "what balanced ranks gain is not known: the corpora were not opened, or the batches are not recorded",
            action="--data DATA.yaml --micro-batch-size M --global-batch-size B",
        )
        return None
    first, micro = launch.state.samples, now.micro_batch_size
    return _expected(stream, launch.schedule, balance, sample=first, micro=micro, dp=now.dp)


def _expected(
    stream: Stream, schedule: BatchSchedule, balance: Balance, *, sample: int, micro: int, dp: int
) -> Gain | None:
    """The gain for the steps from a sample on; None if there are none, which other findings report."""
    from megaresume.stream.dealing import costs, dealt_order

    waited, means, steps, first = [0, 0], 0.0, 0, sample
    while steps < _STEPS and (not steps or sample - first < _SAMPLES):
        size = schedule.size_at(sample)
        if size % (micro * dp):
            break
        try:
            plan = stream.plan(sample, sample + size)
        except StreamExhausted:
            break
        cost = costs(plan, balance)
        for k, how in enumerate((None, balance)):
            order = dealt_order(plan, how, micro_batch_size=micro, dp_size=dp) - sample
            parts = cost[order].reshape(-1, dp, micro).sum(axis=2)
            waited[k] += int(parts.sum(axis=0).max() if balance.objective == "step" else parts.max(axis=1).sum())
        means += float(cost.sum()) / dp
        steps, sample = steps + 1, sample + size
    if not steps:
        return None
    return Gain(
        objective=balance.objective,
        token_cost=balance.token_cost,
        steps=steps,
        before=waited[0] / means,
        after=waited[1] / means,
    )
