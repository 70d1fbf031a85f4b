"""Frozen weights that no checkpoint holds, such as the model below an adapter: does a resume find those of the run?

Every start looks at them once, before its first step, and every checkpoint records the result: for all tensors of one
dtype and shape together their number, a projection and the sum of squares. These see every value, tell how much has
changed, and are sums, so that they do not depend on how tensors are divided among ranks (FSDP2, ZeRO-3) or on the
device.

    up to `EXACT`       the same
    up to `ROUNDING`    a warning: computed again on other hardware, or with another number of threads
    more                refused

Values that cannot be read are counted and not compared: on the meta device, swapped out, divided in another way.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from megaresume.checkpoint.ranks import gather, is_rank_0
from megaresume.stream.errors import StateError, listed

#: "bfloat16[64, 64]" -> number of tensors, projection, sum of squares; None: some of them cannot be read.
Summary = Mapping[str, Sequence[Any]]

#: largest differences, as parts of the norm of the tensors of one dtype and shape.
EXACT, ROUNDING = 1e-5, 3e-4

#: number of weights of the projection, a prime, after which they repeat; how many values are read at once.
_PERIOD, _AT_ONCE = 65_537, 1 << 20


def below_adapters(model: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The parameters of a PEFT model, with their names, that are not its adapters'; none of another model.

    Tied ones come once. Left out are the originals of ``modules_to_save``, in place of which copies are trained.
    """
    seen: set[int] = set()
    if not (hasattr(model, "peft_config") and isinstance(getattr(model, "base_model", None), torch.nn.Module)):
        return

    def walk(part: torch.nn.Module, name: str) -> Iterator[tuple[str, torch.nn.Parameter]]:
        children = dict(part.named_children())
        if hasattr(part, "adapter_layer_names"):  # a layer with adapters
            children = {"base_layer": children["base_layer"]} if "base_layer" in children else {}
        elif "original_module" in children:
            return
        else:
            for key, one in part.named_parameters(recurse=False):
                if id(one) not in seen:
                    seen.add(id(one))
                    yield f"{name}{key}", one
        for key, child in children.items():
            yield from walk(child, f"{name}{key}.")

    base = model.base_model
    if hasattr(base, "inject_adapter"):  # a tuner, which may have adapters' parameters of its own
        yield from walk(base.model, "base_model.model.")
    else:  # prompts alone are trained
        yield from walk(base, "base_model.")


def summarize(tensors: Iterable[torch.Tensor]) -> Summary:
    """What a checkpoint records of these tensors; the same on every rank. Collective."""
    own: dict[str, tuple[int, torch.Tensor | None]] = {}
    for tensor in tensors:
        kind = _kind(tensor)
        number, sums = own.get(kind, (0, torch.zeros(2, dtype=torch.float64)))
        part = None if sums is None else _sums(tensor, number)
        own[kind] = number + 1, None if sums is None or part is None else sums + part
    read = {kind: (number, None if sums is None else sums.tolist()) for kind, (number, sums) in own.items()}
    first, *others = gather(read)
    return {
        kind: (number, *_total([sums, *(other.get(kind, (0, None))[1] for other in others)]))
        for kind, (number, sums) in first.items()
    }


def _total(sums: Sequence[Sequence[float] | None]) -> tuple[float | None, float | None]:
    """The sums over all ranks; None if one of them cannot read its part."""
    known = [one for one in sums if one is not None]
    return (math.fsum(one[0] for one in known), math.fsum(one[1] for one in known)) if all(sums) else (None, None)


def check_frozen(saved: Summary, now: Summary, *, action: str) -> None:
    """Compare what a checkpoint records with what this start has. The same on every rank.

    Args:
        saved, now: see `summarize`.
        action: what to do about other weights, in the words of the trainer.

    Raises:
        StateError: tensors are others, by more than rounding.
    """
    changes = {kind: _change(saved.get(kind), now.get(kind)) for kind in sorted({*saved, *now})}
    if others := [kind for kind, change in changes.items() if change > ROUNDING]:
        raise StateError(
            "the frozen weights are not those that the run was trained with",
            found=listed([_words(kind, now[kind], changes[kind]) for kind in others if kind in now], 4) or "none",
            expected=(listed([_words(kind, saved[kind]) for kind in others if kind in saved], 4) or "none")
            + ", as when the run saved",
            cause="no checkpoint holds them, and the model was made otherwise than then: another revision, dtype or "
            "quantization; or with random numbers (a layer that its files lack; init_lora_weights='pissa_niter_4')",
            action=action,
        )
    if (most := max(changes.values(), default=0.0)) > EXACT and is_rank_0():
        print(
            f"megaresume: WARNING: frozen weights, which no checkpoint holds, differ by {100 * most:.0e} % from "
            "those that the run was trained with, as if computed on other hardware or with another number of threads: "
            "losses will not be the same to the last bit",
            flush=True,
        )


def _change(saved: Sequence[Any] | None, now: Sequence[Any] | None) -> float:
    """The difference as a part of the norm."""
    if saved is None or now is None or saved[0] != now[0]:
        return math.inf
    values: list[float] = [*saved[1:], *now[1:]]
    if None in values:
        return 0.0
    projection, square, projection_now, square_now = values
    if not all(map(math.isfinite, values)):
        return 0.0 if math.isfinite(square) == math.isfinite(square_now) else math.inf
    norm = math.sqrt(max(square, square_now)) or 1.0
    return max(abs(projection - projection_now) / norm, abs(square - square_now) / (2 * norm * norm))


def _words(kind: str, of: Sequence[Any], change: float = math.inf) -> str:
    return f"{of[0]} {kind}" + ("" if math.isinf(change) else f" (their values differ by {100 * change:.1g} %)")


def _kind(tensor: torch.Tensor) -> str:
    shape = getattr(tensor, "ds_shape", tensor.shape)
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(shape)}"


def _sums(tensor: torch.Tensor, number: int) -> torch.Tensor | None:
    """Projection and sum of squares of this rank's part of a tensor; None: it cannot be read."""
    try:
        found = _part(tensor)
        if found is None or found[0].is_meta or found[0].dtype.is_complex:
            return None
        flat, first = found[0].detach().reshape(-1), found[1]
        if flat.element_size() == 1:
            flat = flat.view(torch.uint8)  # torch converts floats of one byte at 60 MB/s
        kind = torch.float64 if flat.dtype == torch.float64 else torch.float32
        weights = _weights(flat.device, kind)
        total = torch.zeros(2, dtype=torch.float64, device=flat.device)
        for begin in range(0, flat.numel(), _AT_ONCE):
            row = flat[begin : begin + _AT_ONCE].to(kind)
            shift = (first + begin + 7919 * number) % _PERIOD  # so that tensors of one shape are not interchangeable
            total += torch.stack([(row * weights[shift : shift + row.numel()]).sum(), row.square().sum()])
        return total.cpu()
    except (RuntimeError, NotImplementedError, TypeError):  # a class of tensors of its own, as of quantized ones
        return None


@cache
def _weights(device: torch.device, kind: torch.dtype) -> torch.Tensor:
    draw = random.Random(0).random  # the same in every version of Python and torch
    period = torch.tensor([math.sqrt(12) * (draw() - 0.5) for _ in range(_PERIOD)], dtype=kind)
    return period.repeat(_AT_ONCE // _PERIOD + 2).to(device)


def _part(tensor: Any) -> tuple[torch.Tensor, int] | None:
    """The values of a tensor that this rank counts, and the number of the first one; None: they cannot be read."""
    if hasattr(tensor, "ds_tensor"):  # ZeRO-3
        part, size = tensor.ds_tensor, tensor.ds_numel
        first = part.ds_numel * dist.get_rank(tensor.ds_process_group)
        if part.numel() < part.ds_numel:
            return None  # swapped out
        return part.reshape(-1)[: max(size - first, 0)], first
    if not hasattr(tensor, "to_local"):
        return (tensor if is_rank_0() else tensor.new_empty(0)), 0
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    mesh, placements = tensor.device_mesh, tensor.placements
    where = mesh.get_coordinate()
    if where is None or not all(
        isinstance(one, Replicate) or (type(one) is Shard and one.dim == 0) for one in placements
    ):
        return None
    local = tensor.to_local()
    if any(isinstance(one, Replicate) and at for one, at in zip(placements, where, strict=True)):
        return local.new_empty(0), 0
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    return local, (offset[0] if offset else 0) * math.prod(tensor.shape[1:])
