"""megaresume's DataLoader, in the same loop and with the same checkpoints as the others."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.peers.launch import Plan
from benchmarks.peers.scenario import BEFORE, SEED
from benchmarks.peers.tools.base import Numbers, OwnState, Tool, numbers


class Exact(OwnState):
    """The state is the same for all ranks."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import megaresume

        del rank  # it asks torch.distributed
        self.loader = megaresume.DataLoader(
            Numbers(plan.layout.items),
            plan.layout.batch_size,
            seed=SEED,
            num_workers=plan.layout.workers,
            max_epochs=plan.epochs,
            # Without it, a dataset that has grown is refused.
            append="now" if plan.layout.items != BEFORE.items else None,
        )

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """What is left of it."""
        del epoch  # it counts by itself
        return map(numbers, self.loader)


TOOL = Tool(
    title="**megaresume** `DataLoader`",
    packages=("megaresume", "torch"),
    documentation=("data-loader.md",),
    loader=Exact,
)
