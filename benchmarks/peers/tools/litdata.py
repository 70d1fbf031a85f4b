"""litData's StreamingDataset and StreamingDataLoader, over files that `optimize` writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.peers.launch import Plan
from benchmarks.peers.scenario import SEED
from benchmarks.peers.tools.base import OwnState, Tool

#: samples of a chunk, the file that litData deals to ranks and workers.
CHUNK = 20


class Streaming(OwnState):
    """Each rank saves and loads its own state."""

    def __init__(self, plan: Plan, rank: int) -> None:
        import litdata

        del rank  # it asks torch.distributed
        dataset = litdata.StreamingDataset(str(plan.data / "chunks"), shuffle=True, seed=SEED, drop_last=False)
        self.loader: Any = litdata.StreamingDataLoader(
            dataset, batch_size=plan.layout.batch_size, num_workers=plan.layout.workers
        )

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """It counts epochs by itself."""
        del epoch
        for batch in self.loader:
            yield [int(number) for number in batch["number"]]


def sample(number: int) -> dict[str, int]:
    """What a chunk holds of an item."""
    return {"number": number}


def prepare(directory: Path, items: int) -> None:
    """Write chunks, or append to those that are there."""
    import litdata

    chunks = directory / "chunks"
    begun = chunks / "index.json"
    first = len(litdata.StreamingDataset(str(chunks))) if begun.exists() else 0
    litdata.optimize(
        fn=sample,
        inputs=list(range(first, items)),
        output_dir=str(chunks),
        chunk_size=CHUNK,
        num_workers=1,
        mode="append" if first else None,
    )


TOOL = Tool(
    title="litData",
    packages=("litdata", "torch"),
    documentation=(
        "https://github.com/Lightning-AI/litData#features-for-optimizing-and-streaming-datasets-for-model-training",
    ),
    loader=Streaming,
    prepare=prepare,
    refusals=("doesn't match the current one",),
)
