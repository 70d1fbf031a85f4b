"""What the benchmarks share: how large things are, where they lie, the corpora."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from benchmarks.corpora import write_corpora
from benchmarks.lengths import write_lengths
from megaresume.data.split import IndexedSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much is measured."""

    #: documents of the corpora whose tokens are read (600 tokens each, 4 bytes a token).
    corpus_documents: int
    #: documents of the corpora of which only lengths are read.
    index_documents: int
    #: documents of the lengths on disk (4 bytes each).
    most_documents: int
    #: samples planned in one repetition of the planning benchmark.
    planned_samples: int
    #: samples read in one repetition of assembly and loader.
    read_samples: int
    #: documents packed for the packing efficiency.
    packed_documents: int
    #: batches of items read in one repetition.
    item_batches: int
    #: steps of a Trainer that resumes.
    trainer_steps: int
    #: repetitions of what takes milliseconds, and of what takes seconds.
    repetitions: int
    slow_repetitions: int


FULL = Sizes(
    corpus_documents=350_000,
    index_documents=10_000_000,
    most_documents=1_000_000_000,
    planned_samples=65_536,
    read_samples=1024,
    packed_documents=200_000,
    item_batches=20_000,
    trainer_steps=4000,
    repetitions=15,
    slow_repetitions=5,
)
QUICK = Sizes(
    corpus_documents=3_000,
    index_documents=3_000,
    most_documents=30_000,
    planned_samples=256,
    read_samples=32,
    packed_documents=3_000,
    item_batches=80,
    trainer_steps=4,
    repetitions=2,
    slow_repetitions=1,
)


class Setup:
    """Sizes, and files made when they are first asked for.

    Args:
        directory: an empty directory that the caller removes.
        sizes: how much is measured.
        cores: the cores that this process may use in benchmarks of several processes; it is pinned to the last.
    """

    def __init__(self, directory: Path, sizes: Sizes, cores: set[int]) -> None:
        self.directory = directory
        self.sizes = sizes
        self.cores = cores

    @cached_property
    def corpora(self) -> dict[str, Path]:
        """The three sources, with tokens."""
        return write_corpora(self._room("corpora", 2400 * self.sizes.corpus_documents), self.sizes.corpus_documents)

    @cached_property
    def index_corpora(self) -> dict[str, Path]:
        """The three sources, large, with indexes but without tokens."""
        # 20 bytes a document in the .idx, and 8 in Megatron's own index.
        directory = self._room("indexes", 28 * self.sizes.index_documents)
        return write_corpora(directory, self.sizes.index_documents, sparse=True)

    @cached_property
    def lengths(self) -> Path:
        """Lengths of ``most_documents`` documents: int32, nothing else."""
        return write_lengths(self._room("lengths", 4 * self.sizes.most_documents) / "all", self.sizes.most_documents)

    def sources(self, paths: dict[str, Path]) -> list[IndexedSource]:
        """Opened anew."""
        return [IndexedSource(path) for path in paths.values()]

    def _room(self, name: str, num_bytes: int) -> Path:
        free = shutil.disk_usage(self.directory).free
        if free < 1.2 * num_bytes + (1 << 30):
            raise SystemExit(
                f"benchmarks: {self.directory} has {free / 1e9:.1f} GB free, {name} need "
                f"{1.2 * num_bytes / 1e9:.1f} GB and 1 GB in reserve: pass --directory on a larger disk, or --only NAME"
            )
        path = self.directory / name
        path.mkdir()
        return path
