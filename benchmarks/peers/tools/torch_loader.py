"""torch's DataLoader, which has no state: what its users do.

`BEGUN_AGAIN` is what torch's own tutorial of fault tolerance does: the epoch is in the checkpoint, the position in it
is not. `SKIPPED` passes over as many batches as the checkpoint says, with Accelerate's function for that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.scenario import SEED
from benchmarks.peers.tools.base import Numbers, Tool, numbers


class BegunAgain:
    """The epoch of the checkpoint, from its beginning."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import torch.utils.data as data

        dataset: Any = Numbers(plan.layout.items)
        self.sampler: Any = data.DistributedSampler(dataset, plan.layout.ranks, rank, shuffle=True, seed=SEED)
        self.loader: Any = data.DataLoader(
            dataset, plan.layout.batch_size, sampler=self.sampler, num_workers=plan.layout.workers
        )

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """All of the epoch."""
        self.sampler.set_epoch(epoch)
        return map(numbers, self.loader)

    def state_dict(self) -> Any:
        """The loop's checkpoint has the epoch already."""

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


class Skipped(BegunAgain):
    """The epoch of the checkpoint, without as many batches as were trained."""

    def __init__(self, plan: Plan, rank: int) -> None:
        super().__init__(plan, rank)
        self.trained = self.to_skip = 0

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """What is left of it."""
        import accelerate

        self.sampler.set_epoch(epoch)
        loader = accelerate.skip_first_batches(self.loader, self.to_skip)
        self.trained, self.to_skip = self.to_skip, 0
        for batch in loader:
            self.trained += 1
            yield numbers(batch)

    def state_dict(self) -> Any:
        """Batches of this epoch."""
        return self.trained

    def load_state_dict(self, state: Any) -> None:
        """Before the first epoch."""
        self.to_skip = state


BEGUN_AGAIN = Tool(
    title="torch `DataLoader`, the epoch begun again",
    packages=("torch",),
    documentation=("https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html",),
    loader=BegunAgain,
)
SKIPPED = Tool(
    title="torch `DataLoader`, batches skipped",
    packages=("torch", "accelerate"),
    documentation=("https://huggingface.co/docs/accelerate/usage_guides/checkpoint",),
    loader=Skipped,
)
