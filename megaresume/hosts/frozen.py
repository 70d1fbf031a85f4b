"""Weights that no checkpoint holds, such as the model below an adapter: does a resume find those of the run?

A save that leaves some out records their names, and for all tensors of one dtype and shape together their number, a
projection and the sum of squares. These see every value, tell how much has changed, and are sums, so that they do not
depend on how tensors are divided among ranks (FSDP2, ZeRO-3) or on the device. They are computed once in each start,
and again if a weight turns out to have changed: its first values are looked at in every save. The first step after a
load compares: see `FrozenWeights`.

    up to `EXACT`       the same
    up to `ROUNDING`    a warning: computed again on other hardware, or with another number of threads
    more                refused

Weights that are trained are refused at the save, see `unsaved`. Where a program may save them by itself, they are
compared like the others.

Values that cannot be read are counted and not compared: on the meta device, swapped out, divided in another way. Of
tensors that differ between ranks without torch or DeepSpeed knowing it (pipeline stages, slices), rank 0's count.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.saver import Save
from megaresume.hosts.unsaved import own_tensors
from megaresume.stream.errors import CheckpointError, StateError, listed

#: the names of a state's entries, as those of the weights that are given: see `unsaved`. Rank 0's count.
Saved = Callable[[Mapping[str, torch.Tensor]], Iterable[str]]
#: "bfloat16[64, 64]" -> number of tensors, projection, sum of squares; None: some of them cannot be read.
Summary = Mapping[str, Sequence[Any]]

#: largest differences, as parts of the norm of the tensors of one dtype and shape.
EXACT, ROUNDING = 1e-5, 3e-4

#: number of weights of the projection, a prime, after which they repeat; how many values are read at once.
_PERIOD, _AT_ONCE = 65_537, 1 << 20
#: how many values of each tensor a save looks at, to see whether it has changed.
_GLANCE = 1024
#: what DDP, FSDP, activation checkpointing and torch.compile add to names.
_WRAPPERS = {"module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"}

GO_ON = "to go on with these, as if they are not used: megaresume.Checkpoints(compare_frozen=False)"
AS_THEN = "make the models as when the run saved: from the same files, with the same dtype, and with seeds set before"


class FrozenWeights:
    """Those of one run: recorded in a save that leaves them out, compared before the first step after a load.

    Args:
        weights: returns those of the models, by names that do not depend on the number of ranks.
        action: what to do about others, in the words of the trainer.
    """

    def __init__(
        self, weights: Callable[[], Mapping[str, torch.Tensor]], action: str = f"{AS_THEN}; or, {GO_ON}"
    ) -> None:
        self._weights, self._action = weights, action
        #: names, their sums at a glance, and in full; None: nothing was summed up yet.
        self._known: tuple[Sequence[str], Summary, Summary] | None = None

    def note(
        self,
        save: Save,
        saved: Saved,
        optimizers: Iterable[Any] = (),
        *,
        may_be_elsewhere: Callable[[], bool] = lambda: False,
    ) -> None:
        """Add those that a save leaves out to its envelope, and warn if they change. Collective.

        Args:
            saved: what it holds; not called if there are no weights. May be collective.
            optimizers, may_be_elsewhere: see `unsaved`; with ``compare_frozen=False``, they always may.
        """

        def may_be() -> bool:
            return not save.compare_frozen or may_be_elsewhere()

        before = self._known
        save.envelope = replace(save.envelope, frozen=self.record(saved, optimizers, may_be_elsewhere=may_be))
        if is_rank_0() and (kinds := self._changed_since(before)) and not may_be():
            _warn(
                "megaresume: WARNING: weights that no checkpoint holds have changed since the last save or load: "
                f"{kinds}. So do the statistics of BatchNorm, except in eval(), and a teacher that follows its pupil. "
                "Unless the program saves and restores them by itself, the next resume will be refused: save them too, "
                "or keep them as they are"
            )

    def record(
        self, saved: Saved, optimizers: Iterable[Any] = (), *, may_be_elsewhere: Callable[[], bool] = lambda: False
    ) -> Mapping[str, Any] | None:
        """What a checkpoint records, as JSON; None: it leaves out none. See `note`."""
        weights = self._weights()

        def find() -> list[str]:
            names = saved(weights) if weights else ()
            return unsaved(weights, names, optimizers, may_be_elsewhere=may_be_elsewhere)

        found = on_all_ranks(find)
        if not (names := on_rank_0(lambda: found)):
            return None
        return {"names": names, "sums": self._sums_of(weights, names)}

    def check(self, recorded: Mapping[str, Any]) -> None:
        """Compare with what a checkpoint records. Collective; raises on every rank: see `check_frozen`."""
        check_frozen(recorded["sums"], self._sums_of(self._weights(), recorded["names"]), action=self._action)

    def _changed_since(self, before: tuple[Sequence[str], Summary, Summary] | None) -> str:
        """Which of them were others then, in words."""
        known = self._known
        if before is None or known is None or before is known or before[0] != known[0]:
            return ""
        changed = [kind for kind, of in known[1].items() if _change(before[1].get(kind), of) > EXACT]
        return listed([_words(kind, known[1][kind]) for kind in changed], 4)

    def _sums_of(self, weights: Mapping[str, torch.Tensor], names: Sequence[str]) -> Summary:
        tensors = [weights[name] for name in names if name in weights]
        glance = summarize(tensors, most=_GLANCE)
        if self._known is None or self._known[:2] != (names, glance):
            self._known = names, glance, summarize(tensors)
        return self._known[2]


def weights_of(modules: Mapping[str, torch.nn.Module]) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of modules, by name; tied ones by each of their names.

    FSDP1's are left out: they have another shape on each rank.
    """
    return {
        f"{place}.{key}": one
        for name, module in modules.items()
        if not any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules())
        for prefix, part in module.named_modules(remove_duplicate=False)
        for place in [f"{name}.{saved_name(prefix)}".removesuffix(".")]
        for key, one in own_tensors(part).items()
    }


def saved_name(key: str) -> str:
    """The name of a weight, or of its entry in a state, without what wrappers add."""
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def unsaved(
    weights: Mapping[str, torch.Tensor],
    saved: Iterable[str],
    optimizers: Iterable[Any] = (),
    *,
    may_be_elsewhere: Callable[[], bool] = lambda: False,
) -> list[str]:
    """The names of weights of which a state has no entry. Tied ones come once.

    Args:
        weights: see `weights_of`.
        saved: the names of its entries, as those of the weights: see `entries`.
        optimizers: what trains the weights. One without a state, such as SGD without momentum, shows only by gradients
            which ones it trains.
        may_be_elsewhere: whether the program, or something else in the checkpoint, may hold weights that are trained.

    Raises, on rank 0:
        CheckpointError: some of them are trained. If the state has entries of other names, which may hold them, or if
            they may be elsewhere, this is a warning.
    """
    names = set(saved)
    there = {id(one) for name, one in weights.items() if name in names}
    lost = {id(one): name for name, one in weights.items() if id(one) not in there}
    trained = _trained(optimizers) if lost and is_rank_0() else set()
    if names_of_trained := [name.partition(".")[2] for key, name in lost.items() if key in trained]:
        words = listed(names_of_trained, 3)
        if names.issubset(weights) and not may_be_elsewhere():
            raise CheckpointError(
                "the checkpoint lacks weights that are trained",
                found=f"a state without {words}",
                expected="every parameter that the optimizer changes",
                cause="the state_dict of the model leaves them out: every resume would start them afresh",
                action="a state_dict with them; or requires_grad_(False) from the start, if they need not be trained; "
                "or, if the program saves and restores them by itself: megaresume.Checkpoints(compare_frozen=False)",
            )
        _warn(
            f"megaresume: WARNING: the state of the model lacks weights that are trained: {words}. Unless the program "
            "saves and restores them by itself, every resume would start them afresh"
        )
    return list(lost.values())


def _trained(optimizers: Iterable[Any]) -> set[int]:
    """The ``id`` of each parameter that these optimizers of torch's have changed, as far as it shows.

    Some may be frozen by now. Adagrad has a state of those that it has not changed, too, with ``step`` 0.
    """
    return {
        id(one)
        for optimizer in optimizers
        if isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups
        for one in group["params"]
        if (one.requires_grad and one.grad is not None)
        or ((state := optimizer.state.get(one)) and state.get("step", 1) != 0)
    }


@cache
def _warn(words: str) -> None:
    """Print it, once."""
    print(words, flush=True)


def has_tensors(objects: Iterable[Any]) -> bool:
    """Whether the state of one of these has a tensor that is more than a number."""
    leaves = tree_leaves([one.state_dict() for one in objects])
    return any(isinstance(leaf, torch.Tensor) and leaf.numel() > 1 for leaf in leaves)


def entries(states: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The names of the entries of modules' states: see `unsaved`."""
    return [f"{name}.{saved_name(key)}" for name, state in states.items() for key in state]


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


def summarize(tensors: Iterable[torch.Tensor], *, most: int | None = None) -> Summary:
    """What a checkpoint records of these tensors; the same on every rank. Collective.

    ``most``: of the first values of each part of a tensor that a rank has; None: all.
    """
    own: dict[str, tuple[int, torch.Tensor | None]] = {}
    for tensor in tensors:
        kind = _kind(tensor)
        number, sums = own.get(kind, (0, torch.zeros(2, dtype=torch.float64)))
        part = None if sums is None else _sums(tensor, number, most)
        own[kind] = number + 1, None if sums is None or part is None else sums + part
    read = {kind: (number, None if sums is None else sums.tolist()) for kind, (number, sums) in own.items()}
    first, *others = gather(read)
    return {
        kind: (number, *_total([sums, *(other.get(kind, (0, None))[1] for other in others)]))
        for kind, (number, sums) in first.items()
    }


def _total(sums: Sequence[Sequence[float] | None]) -> tuple[float | str | None, float | str | None]:
    """The sums over all ranks; None if one of them cannot read its part; as text if they are no numbers."""
    known = [one for one in sums if one is not None]
    if len(known) < len(sums):
        return None, None
    projection, square = (sum(one[part] for one in known) for part in (0, 1))
    return _as_json(projection), _as_json(square)


def _as_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


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
            "the weights that no checkpoint holds are not those that the run was trained with",
            found=listed([_words(kind, now[kind], changes[kind]) for kind in others if kind in now], 4) or "none",
            expected=(listed([_words(kind, saved[kind]) for kind in others if kind in saved], 4) or "none")
            + ", as when the run saved",
            cause="the model was made otherwise than then: another revision, dtype or quantization; or with random "
            "numbers (a layer that its files lack; init_lora_weights='pissa_niter_4'); or the run has changed them, "
            "and what it saves leaves them out",
            action=action,
        )
    if (most := max(changes.values(), default=0.0)) > EXACT and is_rank_0():
        print(
            f"megaresume: WARNING: weights that no checkpoint holds differ by {100 * most:.0e} % from "
            "those that the run was trained with, as if computed on other hardware or with another number of threads: "
            "losses will not be the same to the last bit",
            flush=True,
        )


def _change(saved: Sequence[Any] | None, now: Sequence[Any] | None) -> float:
    """The difference as a part of the norm."""
    if saved is None or now is None or saved[0] != now[0]:
        return math.inf
    if None in (*saved[1:], *now[1:]):
        return 0.0
    values = [float(one) for one in (*saved[1:], *now[1:])]
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


def _sums(tensor: torch.Tensor, number: int, most: int | None) -> torch.Tensor | None:
    """Projection and sum of squares of this rank's part of a tensor; None: it cannot be read."""
    try:
        found = _part(tensor)
        if found is None or found[0].is_meta or found[0].dtype.is_complex:
            return None
        flat, first = found[0].detach().reshape(-1)[:most], found[1]
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
