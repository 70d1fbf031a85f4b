"""Looking at built indexes together: one rank of every host looks, all know, and they must have seen the same.

One rank a host is enough to find a cache that differs between nodes; reading 10^8 entries on every rank at once would
only burden the filesystem.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist
import xxhash

from megaresume.integrations.ranks import gather, on_all_ranks, world_size
from megaresume.stream.errors import StateError

__all__ = ["agreed", "broadcast", "from_leaders"]

T = TypeVar("T")


def agreed(datasets: Iterable[Any], look: Callable[[], T]) -> T:
    """What ``look`` returns where datasets were built, on all ranks. Collective.

    Raises:
        StateError: two hosts see different things.
    """
    leaders = _leaders(datasets)
    mine = on_all_ranks(lambda: look() if _rank() in leaders else None)
    seen = gather(None if mine is None else xxhash.xxh3_64_hexdigest(repr(mine).encode()))
    for rank in leaders:
        if seen[rank] != seen[leaders[0]]:
            raise StateError(
                "the nodes have built different orders",
                found=f"rank {leaders[0]}: {seen[leaders[0]]}; rank {rank}: {seen[rank]}",
                expected="the same index on every node",
                cause="index caches on the nodes' own disks, from different times",
                action="delete the index caches (--data-cache-path) on all nodes, or put them on a shared filesystem",
            )
    value: T = broadcast(mine, leaders[0])
    return value


def from_leaders(datasets: Iterable[Any], look: Callable[[], T]) -> list[T]:
    """What ``look`` returns on one rank of every host, all of it on all ranks. Collective."""
    leaders = _leaders(datasets)
    found = gather(on_all_ranks(lambda: look() if _rank() in leaders else None))
    return [found[rank] for rank in leaders]


def broadcast(value: Any, source: int) -> Any:
    """The value of rank ``source``, on every rank. Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def _rank() -> int:
    return 0 if world_size() == 1 else dist.get_rank()


def _leaders(datasets: Iterable[Any]) -> list[int]:
    """The lowest rank of every host that built something, ascending; rank 0 if nobody did."""
    built = any(dataset is not None for dataset in datasets)
    first: dict[str, int] = {}
    for rank, host in enumerate(gather(socket.gethostname() if built else None)):
        if host is not None:
            first.setdefault(host, rank)
    return sorted(first.values()) or [0]
