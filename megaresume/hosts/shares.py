"""Whether the loaders of all processes make one run: each sample of a step is trained by one rank, and by no other.

Every loader deals out by itself, by its number among the data-parallel ranks; here the processes compare these numbers,
and what else they deal by. Processes that train the same samples together (tensor, pipeline, context parallelism) have
the same number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from megaresume.checkpoint.session.ranks import gather, known_to_all, on_all_ranks, same_on_all_ranks
from megaresume.hosts.feeds import Feed
from megaresume.stream.errors import UsageError

_LEAVE_OUT = "leave dp_rank and dp_size out: they are then torch.distributed's"


def check_shares(feed: Feed) -> None:
    """Refuse loaders with which samples would be trained twice, or by nobody. Collective.

    Raises, on every rank:
        UsageError: they are those of other ranks.
        StateError: they make other steps.
    """
    shares = gather((feed.loader.dp_rank, feed.loader.dp_size))
    size, times = shares[0][1], Counter(rank for rank, _ in shares)
    if any(other != size for _, other in shares) or times != dict.fromkeys(range(size), len(shares) / size):
        found = [f"process {number}: {rank} of {of}" for number, (rank, of) in enumerate(islice(shares, 8))]
        error = UsageError(
            "the loaders of the processes do not cover all data-parallel ranks",
            found=", ".join(found) + (f", and {len(shares) - 8} more" if len(shares) > 8 else ""),
            expected="one dp_size, and each dp_rank from 0 to dp_size - 1 in as many processes as any other",
            cause="dp_rank is the number on a node (LOCAL_RANK), or one that was written down",
            action=f"{_LEAVE_OUT}; with tensor, pipeline or context parallelism, take them from the mesh",
        )
        raise known_to_all(error)
    same_on_all_ranks(
        feed.layout,
        "the batches",
        cause="the loaders were made with other numbers",
        action="make them with the same ones on every rank",
    )


def check_averaged(modules: Iterable[torch.nn.Module], dp_size: int, context_parallel: int) -> None:
    """Refuse a model whose gradients are averaged over processes that train the same samples. Collective.

    Args:
        modules: on this rank, wrapped.
        dp_size: of its loader.
        context_parallel: processes that train the same samples together, and whose gradients are averaged all the same.

    Raises, on every rank:
        UsageError: DDP or FSDP averages over more processes than the loaders deal samples out to; or FSDP1.
    """

    def check() -> None:
        averaged = max((_averaged(part) for module in modules for part in module.modules()), default=1)
        if averaged > dp_size * context_parallel:
            raise UsageError(
                "every sample would be trained by several processes",
                found=f"DDP or FSDP over {averaged} processes, and a loader with dp_size={dp_size}",
                expected=f"dp_size={averaged // context_parallel}",
                cause="dp_rank and dp_size are those of a node, or were written down for one process",
                action=f"{_LEAVE_OUT}; if processes train the same samples together: attach(..., context_parallel=...)",
            )

    on_all_ranks(check)


def _averaged(module: torch.nn.Module) -> int:
    """Processes over which the gradients of a module are averaged; 1: it is not wrapped itself."""
    if isinstance(module, DistributedDataParallel):
        return dist.get_world_size(module.process_group)
    if isinstance(module, FullyShardedDataParallel):
        raise UsageError(
            "FSDP1 cannot be used in your own loop",
            found="a module in torch.distributed.fsdp.FullyShardedDataParallel",
            expected="DDP, FSDP2 or neither",
            cause="what its state dict holds cannot be saved while training goes on",
            action="torch.distributed.fsdp.fully_shard(model)",
        )
    if isinstance(module, FSDPModule):
        state: Any = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        return max((_mesh_size(group.mesh_info) for group in groups if group is not None), default=1)
    return 1


def _mesh_size(info: Any) -> int:
    """Of the dimensions over which FSDP2 shards and replicates."""
    return int(getattr(info, "shard_mesh_size", 1)) * int(getattr(info, "replicate_mesh_size", 1))
