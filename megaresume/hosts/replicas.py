"""States that a checkpoint saves once for all ranks: are they equal on every rank?

The first save compares them, and only warns, since a state may differ on purpose, as a clock does:

    scheduler, scaler, a metric     the hash of ``state_dict()``                     rank 0's is saved
    parameters, optimizer states    shape and a few elements of each plain tensor    one rank's is saved

`check_parameters` refuses models of which a file of one rank would hold a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from megaresume.batches.item_hash import item_hash
from megaresume.checkpoint.ranks import gather, is_rank_0, known_to_all
from megaresume.stream.errors import UsageError, listed

#: name of an object -> name of its part -> hash.
Hashes = Mapping[str, Mapping[str, int | None]]
#: number of elements compared per tensor.
ELEMENTS = 16


def hashes_of_states(objects: Mapping[str, Any]) -> Hashes:
    """The hash of ``state_dict()`` of each object."""
    return {name: {"": _hash_of(one.state_dict)} for name, one in objects.items()}


def hashes_of_tensors(named: Iterable[tuple[str, torch.Tensor]]) -> Mapping[str, int | None]:
    """Hashes of the shape and up to `ELEMENTS` elements of each tensor, so that it need not be read whole."""
    return {name: _hash_of(partial(_glance, one)) for name, one in named}


def warn_of_differing(hashes: Hashes, *, joins: bool = False) -> None:
    """Warn on rank 0 about objects whose states differ. Collective.

    Args:
        hashes: of this rank.
        joins: whether the checkpoint also has the parts that only some ranks have, as with
            torch.distributed.checkpoint.
    """
    whole = gather(item_hash(hashes))
    if all(one == whole[0] for one in whole):
        return

    def is_lost(first: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
        return any(other.get(part, one) != one for part, one in first.items()) if joins else first != other

    first, *others = gather(hashes)
    for name in first:
        ranks = [k for k, one in enumerate(others, 1) if is_lost(first[name], one[name])]
        if ranks and is_rank_0():
            where = f"rank {ranks[0]}" + (f" and {len(ranks) - 1} more" if ranks[1:] else "")
            print(
                f"megaresume: WARNING: the state of '{name}' is another one on {where}, and checkpoints hold one "
                "for all ranks: after a resume, every rank has that one. In its place, pass an object whose "
                "state_dict gathers what all ranks need",
                flush=True,
            )


def check_parameters(modules: Mapping[str, torch.nn.Module]) -> None:
    """Refuse models with other parameters on another rank, before rank 0 saves its own alone. Collective.

    Raises, on every rank:
        UsageError: names the first such model and rank.
    """
    own = {name: [key for key, _ in module.named_parameters()] for name, module in modules.items()}
    first, *others = gather(own)
    for name, keys in first.items():
        for rank, other in enumerate(others, 1):
            if other[name] != keys:
                differ = sorted({*keys} ^ {*other[name]})
                error = UsageError(
                    "the checkpoint would hold only the parameters of rank 0",
                    found=f"'{name}' has others on rank {rank}; not on both: {listed(differ, 3)}",
                    expected="the same on every rank, with writer='torch'",
                    cause="the model is divided among ranks, as into the stages of a pipeline",
                    action="megaresume.attach(..., writer='dcp')",
                )
                raise known_to_all(error)


def _hash_of(state: Callable[[], Any]) -> int | None:
    """The hash of its result; None if that cannot be compared."""
    try:
        return item_hash(state())
    except Exception:  # noqa: BLE001  a sharded tensor, say: it is saved all the same
        return None


def _glance(tensor: torch.Tensor) -> list[Any]:
    flat = tensor.detach().reshape(-1)
    return [*tensor.shape, flat[:: max(1, flat.numel() // ELEMENTS)][:ELEMENTS].tolist()]
