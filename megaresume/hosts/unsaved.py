"""Finds what a checkpoint would leave out, so that a resume would silently start it afresh or a step late: learning
rate schedulers, optimizers inside optimizers, and anything else that the steps change.

torch's schedulers mark their optimizer, which shows those that are in no checkpoint; ``ReduceLROnPlateau`` does not.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel
from torch.utils._pytree import tree_flatten_with_path, tree_leaves

from megaresume.checkpoint.ranks import is_rank_0
from megaresume.hosts.attach import kind_of
from megaresume.hosts.importing import contents
from megaresume.stream.errors import UsageError


def check_all(
    modules: Iterable[torch.nn.Module],
    optimizers: Sequence[Any],
    kept: Sequence[Any],
    beginning: Beginning | None,
    *,
    scheduler: str,
    inner: str,
    writers: Iterable[Callable[..., Any]] = (),
) -> None:
    """Refuse, or warn of, whatever a checkpoint would leave out. Searches all objects, which takes a fifth of a second.

    Args:
        modules: those in a checkpoint.
        optimizers, kept: see `check_schedulers`.
        beginning: this start's; None: no step was begun.
        scheduler, inner: for the errors, what to do about a scheduler, and about an optimizer inside another one.
        writers: functions of the program that write files in a save.

    Raises:
        UsageError: see `check_schedulers` and `check_inner`.
    """
    gc.collect()  # remains of earlier trainings
    classes = (*_SCHEDULERS, torch.optim.Optimizer, AveragedModel, torch.amp.GradScaler)
    living = living_objects(lambda kind: issubclass(kind, classes))
    check_schedulers(optimizers, kept, scheduler, living, beginning)
    check_inner(optimizers, kept, inner)
    warn_of_forgotten(modules, optimizers, kept, living, beginning, writers)


def check_schedulers(
    optimizers: Sequence[Any],
    kept: Sequence[Any],
    action: str,
    living: Sequence[Any] | None = None,
    beginning: Beginning | None = None,
) -> None:
    """Refuse learning-rate schedulers that are in no checkpoint, as every resume would start them afresh.

    Args:
        optimizers: those in a checkpoint.
        kept: everything else in a checkpoint; a scheduler may be an attribute of one of these, or in a list or mapping
            that is.
        action: what to do, for the error.
        living: objects of this process, including its schedulers; None: they are searched for if an optimizer has a
            scheduler's mark, which ``ReduceLROnPlateau`` does not leave.
        beginning: this start's; None: ignored.

    Raises:
        UsageError: an optimizer has one of torch's schedulers, but none of its schedulers is kept; or one was stepped
            since the beginning and is not kept, even if others of its optimizer are.
    """
    known = [_of(held, "optimizer") for one in kept for held in _parts(one)]
    unknown = [one for one in optimizers if not any(one is other for other in known)]
    if living is None:
        if not any(_is_scheduled(one) for one in unknown):
            return
        gc.collect()  # the mark outlives a scheduler, such as that of a learning-rate search
        living = living_objects(lambda kind: issubclass(kind, _SCHEDULERS))
    scheduled = [_of(one, "optimizer") for one in living if _is_scheduler(one)]
    found = [f"{kind_of(one)} with a scheduler" for one in unknown if any(one is other for other in scheduled)]
    if beginning is not None:
        action = action if found else f"{action}; the same for every scheduler of the optimizer"
        found += [
            f"{kind_of(_of(one, 'optimizer'))} with a {type(one).__name__} in addition to the scheduler that is saved,"
            for one in beginning.stepped(living)
            if not _is_in(one, kept) and any(_of(one, "optimizer") is other for other in optimizers)
        ]
    if found:
        raise UsageError(
            "a learning-rate scheduler would start afresh at each resume",
            found=f"{found[0]} that no checkpoint holds",
            expected="the scheduler in the checkpoint",
            action=action,
        )


def check_inner(optimizers: Sequence[Any], kept: Sequence[Any], action: str) -> None:
    """Refuse an optimizer that steps another one inside it, like SAM, but leaves that one's state out of its own.

    Args:
        optimizers, kept: see `check_schedulers`.
        action: what to do, for the error.

    Raises:
        UsageError: names the first.
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
                    "the state of an optimizer inside another one would start afresh at each resume",
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
    writers: Iterable[Callable[..., Any]] = (),
) -> None:
    """Warn of objects that are changed by steps of these modules but are in no checkpoint. Nothing is refused, as they
    may be in a file of the program's own.

    Args:
        modules: those in a checkpoint.
        optimizers, kept: see `check_schedulers`.
        living: objects of this process, among them those to check.
        beginning: this start's; None: ignored.
        writers: functions of the program that write files in a save: what they name may be in these files.
    """
    parts = [part for module in modules for part in module.modules()]
    parameters = {id(one) for part in parts for one in part.parameters(recurse=False)}
    known = _known([*parts, *optimizers, *(held for one in optimizers for held in _parts(one))], kept)
    known |= {id(held) for function in writers for one in _named_in(function) for held in _parts(one)}

    def trains(one: Any) -> bool:
        if isinstance(one, torch.optim.Optimizer):
            parameters_of = (p for group in _of(one, "param_groups") or () for p in group["params"])
            return any(id(parameter) in parameters for parameter in parameters_of) and bool(one.state)
        if isinstance(one, AveragedModel):
            return bool(_of(one, "n_averaged"))
        return isinstance(one, torch.amp.GradScaler) and _of(one, "_scale") is not None

    found = {kind_of(one) for one in living if id(one) not in known and trains(one)}
    found |= {kind_of(one) for one in _left_inside(kept)}
    found |= {name for part in parts for name in _scores_of_ranks(part, known)}
    if beginning is not None:
        found |= {kind_of(one) for one in beginning.changed() if id(one) not in known}
    if found and is_rank_0():
        print(
            f"megaresume: WARNING: no checkpoint holds the state of {', '.join(sorted(found))}: each resume would "
            "start it afresh. Give it to what saves, before the first step",
            flush=True,
        )


def _scores_of_ranks(part: Any, known: set[int]) -> Iterator[str]:
    """What PEFT moves the ranks of adapters by, where it has been collected: AdaLoRA's allocator, AdaMSS's layers."""
    allocator = _of(part, "rankallocator")
    if _of(allocator, "exp_avg_ipt") and id(allocator) not in known:
        yield kind_of(allocator)
    scores = _of(part, "exp_avg_ipt_A")
    if isinstance(scores, dict) and any(one is not None for each in scores.values() for one in each):
        yield f"{kind_of(part)}, its exp_avg_ipt"


def _left_inside(kept: Sequence[Any]) -> Iterator[Any]:
    """The schedulers inside of other objects that leave their state out, as timm's ``PlateauLRScheduler`` does."""
    for one in kept:
        inner = [held for held in _parts(one) if _is_scheduler(held) and not any(held is other for other in kept)]
        if inner and not _is_scheduler(one):
            leaves = tree_flatten_with_path(one.state_dict())[0]
            saved = {id(leaf) for _, leaf in leaves}
            keys = {str(key) for path, _ in leaves for key in path}
            yield from (
                held
                for held in inner
                if id(held) not in saved
                and not keys.issuperset(str(path[-1]) for path, _ in tree_flatten_with_path(held.state_dict())[0])
            )


class Beginning:
    """The schedulers of this process, and its modules and averages of weights that are in no checkpoint, as they are
    when a start begins its first step, to tell which of them are changed by steps. Searches all objects, 440,000 in
    0.14 s, and keeps none alive.

    Args:
        modules: those in a checkpoint.
        kept: see `check_schedulers`.
    """

    def __init__(self, modules: Iterable[torch.nn.Module], kept: Iterable[Any]) -> None:
        living = living_objects(_can_change)
        self._schedulers = [(weakref.ref(one), _steps_of(one)) for one in living if _is_scheduler(one)]
        held = [*modules, *(part for one in kept for part in _parts(one) if _is_module(part))]
        parts = {id(part): part for module in held for part in module.modules()}
        shared = {_storage(tensor) for part in parts.values() for tensor in _tensors(part)}
        shapes = {_of(tensor, "shape") for part in parts.values() for tensor in _tensors(part)}
        others = [one for one in living if not _is_scheduler(one) and id(one) not in parts]
        others = [one for one in others if _is_module(one) or _is_average(one, shapes)]
        inner = {id(child) for one in others for child in (_of(one, "_modules") or {}).values()}
        #: Each module or average with its parts and a few of their values.
        self._holders = [
            (weakref.ref(one), [(weakref.ref(part), _glimpse(part, shared)) for part in _modules(one)])
            for one in others
            if id(one) not in inner
        ]
        self._shared = shared

    def stepped(self, living: Iterable[Any]) -> list[Any]:
        """Those of these objects that are schedulers and were stepped since."""
        before = {id(one): at for ref, at in self._schedulers if (one := ref()) is not None}
        return [one for one in living if _is_scheduler(one) and _steps_of(one) != before.get(id(one), 0)]

    def changed(self) -> list[Any]:
        """The modules and averages that were changed since and are not part of another one."""
        return [
            one
            for ref, parts in self._holders
            if (one := ref()) is not None
            and any((part := of()) is not None and _glimpse(part, self._shared) != was for of, was in parts)
        ]


def _modules(one: Any) -> list[Any]:
    """A module with all within it; an average alone."""
    if not _is_module(one):
        return [one]
    try:
        return list(one.modules())
    except Exception:  # noqa: BLE001 (half-made)
        return []


def _tensors(part: Any) -> list[torch.Tensor]:
    """A module's own tensors, of those in its state; those in the lists of an average."""
    if not _is_module(part):
        return [one for row in _rows(part) for one in row]
    return [one for one in own_tensors(part).values() if not one.is_meta]


def own_tensors(part: Any) -> dict[str, torch.Tensor]:
    """A module's parameters and persistent buffers, by name, without those of modules within it."""
    passing = _of(part, "_non_persistent_buffers_set") or ()
    held = {**(_of(part, "_parameters") or {}), **(_of(part, "_buffers") or {})}
    return {name: one for name, one in held.items() if isinstance(one, torch.Tensor) and name not in passing}


def _rows(one: Any) -> list[list[torch.Tensor]]:
    """The lists of tensors, and mappings to tensors, that an object has as attributes."""
    values = (_of(one, "__dict__") or {}).values()
    rows = [list(value.values()) if isinstance(value, dict) else value for value in values]
    return [list(row) for row in rows if _is_row(row)]


def _is_row(row: Any) -> bool:
    is_list = issubclass(type(row), (list, tuple)) and bool(row)
    return is_list and all(issubclass(type(one), torch.Tensor) and not one.is_meta for one in row)


def _is_average(one: Any, shapes: set[Any]) -> bool:
    """Whether an object lists tensors that have the shapes of parameters: diffusers' and torch_ema's averages are no
    modules."""
    return any(shapes.issuperset(_of(tensor, "shape") for tensor in row) for row in _rows(one))


def _storage(tensor: torch.Tensor) -> Any:
    """The address of its values; None if it gives none, like tensors of quantized or wrapped values."""
    try:
        return _local(tensor).untyped_storage().data_ptr()
    except Exception:  # noqa: BLE001
        return None


def _local(tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor, without a collective."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


def _glimpse(part: Any, shared: set[Any]) -> list[bytes]:
    """A few values of each of a module's own tensors that shares no memory with tensors in a checkpoint."""
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
    """Prepare a check, at the end of a save, to be made when the next step begins.

    Args:
        kept: see `check_schedulers`.

    Returns:
        whether a scheduler was stepped since, which its checkpoint does not include; it then also warns.
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


def gradients_at_save(optimizers: Iterable[Any], unreduced: Iterable[torch.Tensor]) -> dict[Any, Callable[[], bool]]:
    """Of each of these optimizers that has gradients, whether it still has one of them.

    Args:
        optimizers: at a save, those that are yet to step.
        unreduced: parameters with gradients that are not yet in ``grad``: see `parallelism.unreduced`.
    """
    awaiting = {id(one) for one in unreduced}
    found: dict[Any, Callable[[], bool]] = {}
    for optimizer in optimizers:
        known = [weakref.ref(grad) for grad in _gradients_of(optimizer)]
        if any(id(p) in awaiting for group in optimizer.param_groups for p in group["params"]):
            found[optimizer] = lambda: True  # ``zero_grad`` does not reach them
        elif known:
            found[optimizer] = partial(_has_one_of, optimizer, known)
    return found


def _has_one_of(optimizer: Any, gradients: Iterable[weakref.ref[torch.Tensor]]) -> bool:
    known = {id(ref()) for ref in gradients}
    return any(id(grad) in known for grad in _gradients_of(optimizer))


def warn_of_gradients(optimizer: Any) -> None:
    """Warn on rank 0 that an optimizer is about to step with gradients from before a save."""
    if is_rank_0():
        print(
            f"megaresume: WARNING: {kind_of(optimizer)} accumulates gradients across a save, and no checkpoint "
            "holds them: a resume would make this step without those from before the save. Tell the loader, "
            "DataLoader(accumulation=...), and call loop.stepped() if loop.ends_step; or save when every optimizer "
            "has just made a step",
            flush=True,
        )


def _gradients_of(optimizer: Any) -> Iterator[torch.Tensor]:
    return (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)


def warn_of_scheduler(engine: Any, client_state: Mapping[str, Any]) -> None:
    """Warn of a learning-rate scheduler that DeepSpeed does not know, and so does not save. Nothing is refused, as it
    may be in a file of the program's own.

    Args:
        engine: DeepSpeed's.
        client_state: what the program itself saves in the checkpoint; if not empty, it may be the scheduler.
    """
    if getattr(engine, "lr_scheduler", None) is not None or client_state:
        return
    optimizer = getattr(engine, "optimizer", None)
    while optimizer is not None:  # ZeRO's, and the one inside it
        if _is_scheduled(optimizer):
            print(
                "megaresume: WARNING: the optimizer has a learning-rate scheduler that DeepSpeed does not know, and so "
                "does not save: each resume would start it afresh. To save it: "
                "deepspeed.initialize(lr_scheduler=scheduler)",
                flush=True,
            )
            return
        optimizer = getattr(optimizer, "optimizer", None)


_SCHEDULERS = LRScheduler, ReduceLROnPlateau


def _known(saved: Iterable[Any], kept: Iterable[Any]) -> set[int]:
    """The ``id`` of everything in a checkpoint, including objects that have a bound method there."""
    # A scheduler's attributes include its optimizer, but its state does not.
    held = [held for one in kept for held in ([one] if _is_scheduler(one) else _parts(one))]
    return {id(one) for one in (*saved, *held, *(_of(one, "__self__") for one in held))}


def _named_in(function: Any) -> Iterator[Any]:
    """What a function refers to: as variables around it, as global ones, or as the object that it is a method of."""
    yield _of(function, "__self__")
    function = _of(function, "__func__") or function
    if (code := _of(function, "__code__")) is not None:
        around = _of(function, "__globals__") or {}
        yield from (around[name] for name in code.co_names if name in around)
    yield from contents(_of(function, "__closure__"))


def _is_scheduler(one: Any) -> bool:
    return issubclass(type(one), _SCHEDULERS)


def _is_module(one: Any) -> bool:
    return issubclass(type(one), torch.nn.Module)


def _steps_of(scheduler: Any) -> int:
    """How often a scheduler was stepped; 0 for a ``ChainedScheduler``, which leaves counting to its parts."""
    return _of(scheduler, "last_epoch") or 0


def _is_in(one: Any, kept: Sequence[Any]) -> bool:
    """Whether a scheduler is one of these, or is inside one, like those of a ``SequentialLR``."""
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
    """An object, its attributes, and the contents of those that are lists or mappings."""
    yield one
    for value in (_of(one, "__dict__") or {}).values():
        yield value
        if issubclass(type(value), (list, tuple, dict)):
            yield from value.values() if isinstance(value, dict) else value


def _of(one: Any, name: str) -> Any:
    """An attribute, or None: foreign objects may lack it or, like a proxy, raise anything."""
    try:
        return getattr(one, name, None)
    except Exception:  # noqa: BLE001
        return None


def _can_change(kind: type) -> bool:
    """Whether this is a class of schedulers, of modules, or of other objects that can be saved."""
    if issubclass(kind, (*_SCHEDULERS, torch.nn.Module)):
        return True
    methods = (_of(kind, name) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, methods)) and not issubclass(kind, (torch.optim.Optimizer, torch.amp.GradScaler))


def living_objects(is_wanted: Callable[[type], bool]) -> list[Any]:
    """All objects of the wanted classes, by type(), as isinstance() would ask proxies for their class."""
    kinds: dict[type, bool] = {}
    found = []
    for one in gc.get_objects():
        kind = type(one)
        if kind not in kinds:
            kinds[kind] = is_wanted(kind)
        if kinds[kind]:
            found.append(one)
    return found
