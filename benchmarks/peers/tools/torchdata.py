"""torchdata's StatefulDataLoader, with the sampler that torchdata has for several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.scenario import SEED
from benchmarks.peers.tools.base import Numbers, OwnState, Tool, numbers


class Stateful(OwnState):
    """Each rank saves and loads its own state."""

    def __init__(self, plan: Plan, rank: int) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader
        from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

        dataset: Any = Numbers(plan.layout.items)
        self.sampler = StatefulDistributedSampler(dataset, plan.layout.ranks, rank, shuffle=True, seed=SEED)
        self.loader: Any = StatefulDataLoader(
            dataset, plan.layout.batch_size, sampler=self.sampler, num_workers=plan.layout.workers
        )

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """As of torch's."""
        self.sampler.set_epoch(epoch)
        return map(numbers, self.loader)


TOOL = Tool(
    title="torchdata `StatefulDataLoader`",
    packages=("torchdata", "torch"),
    documentation=("https://docs.pytorch.org/data/main/stateful_dataloader_tutorial.html",),
    loader=Stateful,
    refusals=("assert self._num_workers == state_dict",),
)
