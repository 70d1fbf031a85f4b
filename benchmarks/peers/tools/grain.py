"""Grain's datasets with worker processes, and its iterator for other numbers of ranks and other batch sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.scenario import SEED
from benchmarks.peers.tools.base import Numbers, Tool, numbers


class Pipeline:
    """Shuffled, repeated, sharded, batched, and read by processes; one iterator goes through all epochs."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self.iterator = self.made(plan, rank)

    def made(self, plan: Plan, rank: int) -> Any:
        """The iterator."""
        import grain

        shuffled = grain.MapDataset.source(Numbers(plan.layout.items)).shuffle(seed=SEED).repeat(plan.epochs)
        batched = shuffled[rank :: plan.layout.ranks].batch(plan.layout.batch_size)
        return iter(
            batched.to_iter_dataset().mp_prefetch(grain.MultiprocessingOptions(num_workers=plan.layout.workers))
        )

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """What is left of all epochs."""
        del epoch
        return map(numbers, self.iterator)

    def state_dict(self) -> Any:
        """Of this rank."""
        return self.iterator.get_state()

    def load_state_dict(self, state: Any) -> None:
        """Before the first batch."""
        self.iterator.set_state(state)


class Elastic(Pipeline):
    """The state is one number, the same for all ranks."""

    def made(self, plan: Plan, rank: int) -> Any:
        """The iterator."""
        import grain
        from grain import experimental

        return iter(
            experimental.ElasticIterator(
                grain.MapDataset.source(Numbers(plan.layout.items)).shuffle(seed=SEED).repeat(plan.epochs),
                plan.layout.global_batch,
                grain.sharding.ShardOptions(shard_index=rank, shard_count=plan.layout.ranks),
                multiprocessing_options=grain.MultiprocessingOptions(num_workers=plan.layout.workers),
            )
        )


PIPELINE = Tool(
    title="Grain",
    packages=("grain",),
    documentation=("https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html",),
    loader=Pipeline,
)
ELASTIC = Tool(
    title="Grain, its experimental `ElasticIterator`",
    packages=("grain",),
    documentation=("https://google-grain.readthedocs.io/en/latest/grain.experimental.html",),
    loader=Elastic,
)
