"""A `megaresume.DataLoader` under a trainer that counts steps and has no epochs: DeepSpeed's engine, Megatron.

`Endless`: its micro-batches, one epoch after the other. When the loader is given, it is checked against the trainer:
it has no end (`check_endless`), and its rank and its steps (`check_steps`) agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.ranks import world_size
from megaresume.hosts.feeds import ItemFeed
from megaresume.stream.errors import UsageError

_END = object()


class Endless:
    """The micro-batches of this rank.

    Args:
        feed: of its loader.
    """

    def __init__(self, feed: ItemFeed) -> None:
        self._feed = feed
        self._batches: Iterator[Any] | None = None

    def next(self, sample: int) -> Any:
        """The micro-batch that begins at this sample, which must follow the previous one."""
        batch = _END
        while batch is _END:
            if self._batches is None:
                self._batches = self._feed.read(sample)
            if (batch := next(self._batches, _END)) is _END:  # end of the epoch
                self._batches = None
        return batch

    def close(self, sample: int) -> None:
        """Stop reading ahead; the next micro-batch begins at this sample."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()  # type: ignore[attr-defined]
            self._feed.loader.rewind(sample)


def check_endless(loader: Any, trainer: str, ranks: tuple[int, int], end: str, given: str) -> None:
    """Raise a UsageError unless it is a `DataLoader` without an end, for this data-parallel rank.

    Args:
        loader: of this rank.
        trainer: for people: "the engine".
        ranks: data-parallel rank of this process, and their number.
        end: how the trainer is told when to end.
        given: the arguments ``dp_rank`` and ``dp_size`` of a loader, in the words of the trainer.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            "some ranks have a megaresume.DataLoader, and others have not",
            found="None" if loader is None else type(loader).__name__,
            expected="a megaresume.DataLoader on every rank, also on those whose batches other ranks read as well",
            action=f"make it on every rank, with {given}; on a pipeline's middle stages it reads nothing",
        )
    if any(source.max_epochs is not None for source in loader.stream.config.sources):
        raise UsageError(
            f"a loader that ends cannot be given to {trainer}",
            found="DataLoader(max_epochs=...)",
            expected=f"a DataLoader without max_epochs: the batches of {trainer} never end",
            cause=f"{trainer} counts steps, and the last one of the data may be short",
            action=f"leave max_epochs out, and {end}",
        )
    if (own := (loader.dp_rank, loader.dp_size)) != ranks:
        raise UsageError(
            f"the loader and {trainer} are on different data-parallel ranks",
            found="rank {} of {}".format(*own),
            expected="rank {} of {}".format(*ranks),
            action="leave dp_rank and dp_size out" if ranks[1] == world_size() else f"DataLoader({given})",
        )


def check_steps(loader: DataLoader, trainer: str, micro: int, accumulation: int, said: str) -> None:
    """Raise a UsageError if the loader's steps differ from the trainer's.

    Args:
        loader: of this rank.
        trainer: for people.
        micro: samples in a micro-batch.
        accumulation: micro-batches per step.
        said: where the trainer has these numbers from.
    """
    if (loader.micro_batch_size, loader.accumulation) != (micro, accumulation):
        raise UsageError(
            f"the loader and {trainer} have different batch sizes",
            found=f"DataLoader(batch_size={loader.micro_batch_size}, accumulation={loader.accumulation})",
            expected=said,
            action=f"DataLoader(batch_size={micro}, accumulation={accumulation})",
        )
