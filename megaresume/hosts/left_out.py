"""What a checkpoint would leave out, so that a resume begins it anew or a step late, and nothing would say so: learning
rate schedulers, optimizers within optimizers, and whatever else its steps change.

torch's schedulers leave a mark in their optimizer, by which those are found of which no checkpoint knows;
``ReduceLROnPlateau`` leaves none.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_leaves

from megaresume.checkpoint.ranks import is_rank_0
from megaresume.hosts.attach import kind_of
from megaresume.stream.errors import UsageError


def check_all(
    modules: Iterable[torch.nn.Module],
    optimizers: Sequence[Any],
    kept: Sequence[Any],
    beginning: Beginning | None,
    *,
    scheduler: str,
    inner: str,
) -> None:
    """Refuse, or warn of, whatever a checkpoint would leave out. Searches all objects: a fifth of a second.

    Args:
        modules: in a checkpoint.
        optimizers, kept: see `check_schedulers`.
        beginning: of this start; None: no step was begun.
        scheduler, inner: for the errors, what to do about a scheduler, and about an optimizer within another one.

    Raises:
        UsageError: see `check_schedulers` and `check_inner`.
    """
    gc.collect()  # what a training that is over has left
    living = _living(*_SCHEDULERS, torch.optim.Optimizer, AveragedModel, torch.amp.GradScaler)
    check_schedulers(optimizers, kept, scheduler, living, beginning)
    check_inner(optimizers, kept, inner)
    warn_of_forgotten(modules, optimizers, kept, living, beginning)


def check_schedulers(
    optimizers: Sequence[Any],
    kept: Sequence[Any],
    action: str,
    living: Sequence[Any] | None = None,
    beginning: Beginning | None = None,
) -> None:
    """Refuse learning-rate schedulers of which no checkpoint knows: each resume would begin theirs anew.

    Args:
        optimizers: in a checkpoint.
        kept: whatever else is in a checkpoint; a scheduler may be an attribute of one, or in a list or mapping that is.
        action: for the error.
        living: objects of this process, among them its schedulers; None: they are looked for if an optimizer has the
            mark of one. ``ReduceLROnPlateau`` leaves none.
        beginning: of this start; None: not looked at.

    Raises:
        UsageError: one of torch's schedulers is of an optimizer of which none is kept; or was stepped since the
            beginning, and is not kept, whatever others of its optimizer are.
    """
    known = [_of(held, "optimizer") for one in kept for held in _parts(one)]
    unknown = [one for one in optimizers if not any(one is other for other in known)]
    if living is None:
        if not any(_is_scheduled(one) for one in unknown):
            return
        gc.collect()  # the mark stays when a scheduler is gone, as of a search for the first rate
        living = _living(*_SCHEDULERS)
    scheduled = [_of(one, "optimizer") for one in living if _is_scheduler(one)]
    found = [f"{kind_of(one)} with a scheduler" for one in unknown if any(one is other for other in scheduled)]
    if beginning is not None:
        action = action if found else f"{action}; the same for every scheduler of the optimizer"
        found += [
            f"{kind_of(_of(one, 'optimizer'))} with a {type(one).__name__} beside the scheduler that is saved,"
            for one in beginning.stepped(living)
            if not _is_in(one, kept) and any(_of(one, "optimizer") is other for other in optimizers)
        ]
    if found:
        raise UsageError(
            "a learning-rate scheduler would begin anew at each resume",
            found=f"{found[0]} that no checkpoint holds",
            expected="the scheduler in the checkpoint",
            action=action,
        )


def check_inner(optimizers: Sequence[Any], kept: Sequence[Any], action: str) -> None:
    """Refuse an optimizer that steps by another one, as SAM does, whose state it leaves out of its own.

    Args:
        optimizers, kept: see `check_schedulers`.
        action: for the error.

    Raises:
        UsageError: naming the first.
    """
    known = _known(optimizers, kept)
    for outer in optimizers:
        if not isinstance(outer, torch.optim.Optimizer):  # ZeRO's are saved in another way
            continue
        for inner in _parts(outer):
            if not issubclass(type(inner), torch.optim.Optimizer) or id(inner) in known:
                continue
            saved = {id(one) for one in tree_leaves(outer.state_dict())}
            state = tree_leaves(list(inner.state.values()))
            if any(isinstance(one, torch.Tensor) and id(one) not in saved for one in state):
                raise UsageError(
                    "the state of an optimizer within another one would begin anew at each resume",
                    found=f"{kind_of(outer)}, whose state_dict lacks that of its {kind_of(inner)}",
                    expected="both in the checkpoint",
                    action=action,
                )


def warn_of_forgotten(
    modules: Iterable[torch.nn.Module],
    optimizers: Sequence[Any],
    kept: Sequence[Any],
    living: Sequence[Any],
    beginning: Beginning | None = None,
) -> None:
    """Say which objects that steps of these modules change are in no checkpoint. Nothing is refused: they may be in
    a file of the program's own.

    Args:
        modules: in a checkpoint.
        optimizers, kept: see `check_schedulers`.
        living: objects of this process, among them those of which it is asked.
        beginning: of this start; None: not looked at.
    """
    parts = [part for module in modules for part in module.modules()]
    parameters = {id(one) for part in parts for one in part.parameters(recurse=False)}
    known = _known([*parts, *optimizers, *(held for one in optimizers for held in _parts(one))], kept)

    def trains(one: Any) -> bool:
        if isinstance(one, torch.optim.Optimizer):
            parameters_of = (p for group in _of(one, "param_groups") or () for p in group["params"])
            return any(id(parameter) in parameters for parameter in parameters_of) and bool(one.state)
        if isinstance(one, AveragedModel):
            return bool(_of(one, "n_averaged"))
        return isinstance(one, torch.amp.GradScaler) and _of(one, "_scale") is not None

    found = {kind_of(one) for one in living if id(one) not in known and trains(one)}
    if beginning is not None:
        found |= {kind_of(one) for one in beginning.changed() if id(one) not in known}
    if found and is_rank_0():
        print(
            f"megaresume: WARNING: no checkpoint holds the state of {', '.join(sorted(found))}: each resume would "
            "begin it anew. Give it to what saves, before the first step",
            flush=True,
        )


class Beginning:
    """The schedulers of this process, and its modules that no checkpoint holds, when a start begins its first step: to
    tell which of them steps change. Searches all objects, in 50 ms, and keeps none alive.

    Args:
        modules: in a checkpoint.
        kept: see `check_schedulers`.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], kept: Iterable[Any]) -> None:
        living = _living(*_SCHEDULERS, torch.nn.Module)
        self._schedulers = [(weakref.ref(one), _steps_of(one)) for one in living if _is_scheduler(one)]
        held = [*modules, *(part for one in kept for part in _parts(one) if issubclass(type(part), torch.nn.Module))]
        parts = {id(part): part for module in held for part in module.modules()}
        shared = {_storage(tensor) for part in parts.values() for tensor in _tensors(part)}
        others = [one for one in living if not _is_scheduler(one) and id(one) not in parts]
        inner = {id(child) for one in others for child in (_of(one, "_modules") or {}).values()}
        #: each with the parts of it, and some of their numbers.
        self._modules = [
            (weakref.ref(one), [(weakref.ref(part), _glimpse(part, shared)) for part in _modules(one)])
            for one in others
            if id(one) not in inner
        ]
        self._shared = shared

    def stepped(self, living: Iterable[Any]) -> list[Any]:
        """The schedulers among these objects that were stepped since."""
        before = {id(one): at for ref, at in self._schedulers if (one := ref()) is not None}
        return [one for one in living if _is_scheduler(one) and _steps_of(one) != before.get(id(one), 0)]

    def changed(self) -> list[Any]:
        """The modules that were changed since, and are not part of another one."""
        return [
            one
            for ref, parts in self._modules
            if (one := ref()) is not None
            and any((part := of()) is not None and _glimpse(part, self._shared) != was for of, was in parts)
        ]


def _modules(one: Any) -> list[torch.nn.Module]:
    try:
        return list(one.modules())
    except Exception:  # noqa: BLE001 (half-made)
        return []


def _tensors(part: Any) -> list[torch.Tensor]:
    """A module's own, of those that its state has."""
    passing = _of(part, "_non_persistent_buffers_set") or ()
    buffers = {name: one for name, one in (_of(part, "_buffers") or {}).items() if name not in passing}
    return [
        one
        for one in (*(_of(part, "_parameters") or {}).values(), *buffers.values())
        if isinstance(one, torch.Tensor) and not one.is_meta
    ]


def _storage(tensor: torch.Tensor) -> Any:
    """Where its numbers lie; None: it does not say so, as tensors of quantized or wrapped numbers."""
    try:
        return _local(tensor).untyped_storage().data_ptr()
    except Exception:  # noqa: BLE001
        return None


def _local(tensor: Any) -> torch.Tensor:
    """The part of a DTensor that this rank has, without a collective."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _glimpse(part: Any, shared: set[Any]) -> list[bytes]:
    """A few numbers of each of a module's own tensors that shares no memory with those in a checkpoint."""
    seen = []
    for tensor in _tensors(part):
        where = _storage(tensor)
        if where is None or where in shared or not (row := _local(tensor)).numel():
            continue
        while row.dim() > 1:
            row = row[0]
        seen.append(row.reshape(-1)[:16].contiguous().cpu().view(torch.uint8).numpy().tobytes())
    return seen


def stepped_after_save(kept: Iterable[Any]) -> Callable[[], bool]:
    """A save has ended: what is to be asked when the next step begins.

    Args:
        kept: see `check_schedulers`.

    Returns:
        whether a scheduler was stepped since, which its checkpoint does not know. It then says so.
    """
    saved = [(held, _steps_of(held)) for one in kept for held in _parts(one) if _is_scheduler(held)]

    def ask() -> bool:
        late = [held for held, at in saved if _steps_of(held) != at]
        if late and is_rank_0():
            print(
                f"megaresume: WARNING: {type(late[0]).__name__} was stepped between the save and the next step. A "
                "resume would begin that step with the learning rate as it was saved: from then on one step of the "
                "scheduler is missing. Step it before the save",
                flush=True,
            )
        return bool(late)

    return ask


def warn_of_scheduler(engine: Any, client_state: Mapping[str, Any]) -> None:
    """Say that DeepSpeed does not know, and so does not save, a learning-rate scheduler. Nothing is refused: it may be
    in a file of the program's own.

    Args:
        engine: DeepSpeed's.
        client_state: what the program saves in the checkpoint besides; if anything, it may be the scheduler.
    """
    if getattr(engine, "lr_scheduler", None) is not None or client_state:
        return
    optimizer = getattr(engine, "optimizer", None)
    while optimizer is not None:  # ZeRO's, and the one within it
        if _is_scheduled(optimizer):
            print(
                "megaresume: WARNING: the optimizer has a learning-rate scheduler that DeepSpeed does not know and so "
                "does not save: each resume would begin it anew. deepspeed.initialize(lr_scheduler=scheduler) saves it",
                flush=True,
            )
            return
        optimizer = getattr(optimizer, "optimizer", None)


_SCHEDULERS = LRScheduler, ReduceLROnPlateau


def _known(saved: Iterable[Any], kept: Iterable[Any]) -> set[int]:
    """By their ``id``: what was saved, and whatever else is in a checkpoint, or has a method there."""
    # A scheduler has its optimizer as an attribute, and not in its state.
    held = [held for one in kept for held in ([one] if _is_scheduler(one) else _parts(one))]
    return {id(one) for one in (*saved, *held, *(_of(one, "__self__") for one in held))}


def _is_scheduler(one: Any) -> bool:
    return issubclass(type(one), _SCHEDULERS)


def _steps_of(scheduler: Any) -> int:
    """How often it was stepped; 0 for a ``ChainedScheduler``, which leaves the count to its parts."""
    return _of(scheduler, "last_epoch") or 0


def _is_in(one: Any, kept: Sequence[Any]) -> bool:
    """Whether a scheduler is one of these, or in one of these, as those of a ``SequentialLR``."""
    seen: set[int] = set()
    to_come = list(kept)
    while to_come:
        holder = to_come.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        to_come += [part for part in _parts(holder) if _is_scheduler(part)]
    return id(one) in seen


def _is_scheduled(optimizer: Any) -> bool:
    return hasattr(getattr(optimizer, "step", None), "_wrapped_by_lr_sched")


def _parts(one: Any) -> Iterator[Any]:
    """An object, its attributes, and what is in those that are lists or mappings."""
    yield one
    for value in (_of(one, "__dict__") or {}).values():
        yield value
        if issubclass(type(value), (list, tuple, dict)):
            yield from value.values() if isinstance(value, dict) else value


def _of(one: Any, name: str) -> Any:
    """An attribute; None: an object of somebody else's has none, or raises whatever it likes, as a proxy does."""
    try:
        return getattr(one, name, None)
    except Exception:  # noqa: BLE001
        return None


def _living(*classes: type) -> list[Any]:
    """All objects of these classes. By their type: isinstance would ask proxies for their class."""
    return [one for one in gc.get_objects() if issubclass(type(one), classes)]
