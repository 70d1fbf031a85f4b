"""MosaicML's StreamingDataset and StreamingDataLoader, over shards that MDSWriter writes.

Its documentation asks for a fixed ``num_canonical_nodes`` and the same global batch for an order that is the same on
other numbers of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.scenario import SEED
from benchmarks.peers.tools.base import OwnState, Tool


class Streaming(OwnState):
    """The state is the same for all ranks."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import streaming
        import streaming.base.util

        del rank  # it asks torch.distributed
        # As its page on shared memory says, after a run that was killed; on every rank, as there is a barrier in it.
        streaming.base.util.clean_stale_shared_memory()
        dataset = streaming.StreamingDataset(
            local=str(plan.data / "shards"),
            shuffle=True,
            shuffle_seed=SEED,
            batch_size=plan.layout.batch_size,
            num_canonical_nodes=1,
        )
        self.loader: Any = streaming.StreamingDataLoader(
            dataset, batch_size=plan.layout.batch_size, num_workers=plan.layout.workers
        )

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """It counts epochs by itself."""
        del epoch
        for batch in self.loader:
            yield [int(number) for number in batch["number"]]


def prepare(directory: Path, items: int) -> None:
    """Write a group of shards, beside those that are there, and one index of all groups."""
    import streaming
    import streaming.base.util

    shards = directory / "shards"
    groups = sorted(shards.glob("group-*"))
    first = sum(int(group.name.split("-")[2]) for group in groups)
    group = shards / f"group-{len(groups)}-{items - first}"
    with streaming.MDSWriter(out=str(group), columns={"number": "int"}, size_limit=1024) as writer:
        for number in range(first, items):
            writer.write({"number": number})
    (shards / "index.json").unlink(missing_ok=True)
    streaming.base.util.merge_index(str(shards))


TOOL = Tool(
    title="MosaicML Streaming",
    packages=("mosaicml-streaming", "torch"),
    documentation=(
        "https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/fast_resumption.html",
        "https://docs.mosaicml.com/projects/streaming/en/stable/distributed_training/elastic_determinism.html",
    ),
    loader=Streaming,
    prepare=prepare,
    environment="mosaicml",
)
