"""Machines without a shared directory: which ranks see the same one, and what each machine does with its own.

    rank 0     its directory, the ledger, the store's lease; its machine is node 0
    node k     the lowest rank that sees its directory works for it: it *leads* the node

A save leaves a **part** on the disk of every node: the files of its own ranks, with a manifest that says so. In the
store the parts become one checkpoint (`store_place.StorePlace`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megaresume.checkpoint import system
from megaresume.checkpoint.lock.lock import take
from megaresume.checkpoint.lock.shared import leave, seen_within
from megaresume.checkpoint.ranks import gather, on_all_ranks, rank, world_size
from megaresume.checkpoint.records.names import records_dir
from megaresume.files import leftover_name, make_dir


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """The directories with the same name that the ranks of a job see."""

    #: the node of every rank; that of rank 0 is 0.
    of_rank: tuple[int, ...]
    #: the node of this rank.
    mine: int

    @property
    def number(self) -> int:
        """The number of nodes; 1: all ranks see the same directory."""
        return max(self.of_rank) + 1

    @property
    def are_many(self) -> bool:
        """Whether there is more than one."""
        return self.number > 1

    @property
    def leads(self) -> bool:
        """Whether this rank works for its node."""
        return self.of_rank.index(self.mine) == rank()

    @property
    def part(self) -> tuple[int, int] | None:
        """The part of a checkpoint on this node: (number, of how many); None: all of it."""
        return (self.mine, self.number) if self.are_many else None

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks of this node."""
        return frozenset(number for number, node in enumerate(self.of_rank) if node == self.mine)


def find_nodes(directory: str | os.PathLike[str]) -> Nodes:
    """Find out which ranks share a directory. Collective; after rank 0 has taken its lock.

    Raises, on every rank:
        CheckpointError: a rank cannot write there.
    """
    if world_size() == 1:
        return Nodes(of_rank=(0,), mine=0)
    root = Path(os.path.abspath(directory))

    def where() -> tuple[str, int, int]:
        make_dir(records_dir(root))
        return system.identity_of(records_dir(root))

    places = gather(on_all_ranks(where))
    lowest = _lowest_seen(records_dir(root), places)
    if min(lowest) < 0:  # machines that were cloned while they ran have the same boot: every rank looks for itself
        lowest = _lowest_seen(records_dir(root), range(world_size()))
    numbers = {leader: number for number, leader in enumerate(sorted(set(lowest)))}
    return Nodes(of_rank=tuple(numbers[leader] for leader in lowest), mine=numbers[lowest[rank()]])


def _lowest_seen(directory: Path, places: Sequence[object]) -> list[int]:
    """For each rank, the lowest one whose file it sees. Collective.

    Args:
        directory: of this rank.
        places: of each rank; of those with the same one, only the first leaves a file. -1 for a rank that does not see
            it: it is in another place after all.
    """
    first = places.index(places[rank()])
    name = leftover_name(f"seen-{rank()}")

    def make() -> None:
        if first == rank():
            leave(directory / name)

    on_all_ranks(make)
    names = gather(name if first == rank() else None)
    try:
        seen = seen_within(directory, names)
        return gather(min(seen) if first in seen else -1)
    finally:
        (directory / name).unlink(missing_ok=True)


def take_of_each(nodes: Nodes, root: Path) -> None:
    """Take the lock of every node's directory. Collective.

    Raises, on every rank:
        CheckpointError: another job writes there; names it.
    """
    on_all_ranks(lambda: take(root) if nodes.leads else None)
