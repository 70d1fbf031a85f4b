"""Which ranks look at the built indexes, and how the others hear of it."""

from __future__ import annotations

import socket
from typing import Any

import torch.distributed as dist

from megaresume.integrations.ranks import gather, world_size

__all__ = ["broadcast", "leaders"]


def broadcast(value: Any, source: int) -> Any:
    """The value of rank ``source``, on every rank. Collective."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=source)
    return box[0]


def leaders(built: bool) -> list[int]:
    """The lowest rank of every host that built something, ascending. Collective.

    One rank a host is enough to find a cache that differs between nodes, and reading 10^8 entries on all of them at
    once would only burden the filesystem.
    """
    hosts = gather(socket.gethostname() if built else None)
    first: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        if host is not None:
            first.setdefault(host, rank)
    return sorted(first.values())
