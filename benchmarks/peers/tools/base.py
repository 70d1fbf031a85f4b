"""What a tool brings to the comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.peers.launch import Plan


class Loader(Protocol):
    """The loader of one rank, as the tool's documentation says to make, save and load it."""

    def batches(self, epoch: int) -> Iterator[list[int]]:
        """The batches that are left of an epoch: the numbers of their samples."""

    def state_dict(self) -> Any:
        """What the documentation says to save in a checkpoint."""

    def load_state_dict(self, state: Any) -> None:
        """Called once, before the first `batches`, with what `state_dict` gave."""


class OwnState:
    """A loader that saves and loads itself. What its state is of, its subclass says."""

    loader: Any

    def state_dict(self) -> Any:
        """The loader's."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Into the loader, before its first batch."""
        self.loader.load_state_dict(state)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A row of the table."""

    #: as people know it, in Markdown.
    title: str
    #: distributions, whose versions are reported.
    packages: tuple[str, ...]
    #: where the way of resuming that is tried here is described.
    documentation: tuple[str, ...]
    loader: Callable[[Plan, int], Loader] | None = None
    #: trains by itself: (plan, rank).
    own_loop: Callable[[Plan, int], None] | None = None
    #: write a dataset of so many samples to a directory; or, if it has one already, let it grow to them.
    prepare: Callable[[Path, int], None] | None = None
    #: parts of the messages with which the tool says that it does not resume so.
    refusals: tuple[str, ...] = ()
    #: which Python environment has it: their requirements contradict each other.
    environment: str = "main"


class Numbers:
    """The map-style dataset: item i is i."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.items:
            raise IndexError(index)
        return int(index)


def numbers(batch: Any) -> list[int]:
    """A batch of any tool as the numbers of its samples."""
    return [int(number) for number in batch]
