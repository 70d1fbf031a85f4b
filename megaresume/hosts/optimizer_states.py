"""The state of an optimizer in a checkpoint: the result of its ``state_dict``, keyed by parameter names.

It is restored with ``load_state_dict``. torch's own ``get_optimizer_state_dict`` is not used: to have tensors to read
into, it makes a step with zero gradients, which not every optimizer survives, and it leaves out the states of frozen
parameters and whatever belongs to no parameter. Here the state itself says which tensors it has:

    named     the state, keyed by names
    apart     without its tensors, which torch.distributed.checkpoint writes and reads in shards; each is replaced by a
              `SLOT`
    rooms     tensors to read them into
    load      puts the state into today's optimizer, once `check` has found that optimizer to match
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map_with_path,
    tree_unflatten,
)

from megaresume.checkpoint.ranks import gather
from megaresume.hosts.attach import kind_of
from megaresume.stream.errors import StateError, UsageError, listed

#: Marks a tensor's place in a state: a mapping of its key, shape, dtype, device, and how it was sharded.
SLOT = "megaresume tensor"
#: How a tensor was sharded, if not differently from its parameter: the same way; or not at all, though its parameter
#: was.
AS_PARAMETER, WHOLE = "as its parameter", "whole"

State = dict[str, Any]


class Named:
    """An optimizer and the names of its parameters, in the order of their numbers in its state.

    Args:
        optimizer: torch's, or one like it.
        module: the module that has its parameters.
    """

    def __init__(self, optimizer: Any, module: torch.nn.Module) -> None:
        from torch.distributed.checkpoint.state_dict import _get_fqns  # without what DDP and torch.compile add

        keys: dict[Any, str] = {parameter: key for key, parameter in module.named_parameters()}
        self.optimizer = optimizer
        self.parameters: dict[str, torch.Tensor] = {
            next(iter(_get_fqns(module, keys[parameter]))): parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        self.names = list(self.parameters)

    @property
    def groups(self) -> list[list[str]]:
        """The parameter names of each group."""
        names = iter(self.names)
        return [[next(names) for _ in group["params"]] for group in self.optimizer.param_groups]

    def state(self) -> State | None:
        """The result of ``state_dict``, with names in place of numbers; None if it is not in torch's format.

        Raises:
            UsageError: it is not, and its parameters are sharded.
        """
        state = self.optimizer.state_dict()
        try:
            groups = [{**group, "params": [self.names[i] for i in group["params"]]} for group in state["param_groups"]]
            # In order of the numbers, so that all ranks come to a sharded tensor at the same time.
            numbers = sorted(key for key in state["state"] if type(key) is int)
            others = {key: one for key, one in state["state"].items() if type(key) is not int}
            of_parameters = {self.names[i]: state["state"][i] for i in numbers}
            return {**state, "state": {**of_parameters, **others}, "param_groups": groups}
        except (KeyError, IndexError, TypeError, AttributeError):
            pass
        if any(map(_is_sharded, self.parameters.values())):
            raise UsageError(
                "the state of an optimizer cannot be saved",
                found=f"{kind_of(self.optimizer)}: its state_dict has its own form, and its parameters are sharded",
                expected="state and param_groups, as torch's optimizers have them",
                action="give megaresume.attach the optimizer within it; or train with DDP",
            )
        return None

    def own(self, state: State) -> State:
        """A state without its entries for parameters of other ranks."""
        others = trained(state) - self.parameters.keys()
        return {**state, "state": {key: one for key, one in state["state"].items() if key not in others}}


def whole(state: State, *, keep: bool) -> State:
    """A state with its tensors unsharded, on the CPU. Collective.

    Args:
        keep: False: this rank only contributes its shards.
    """

    def gathered(one: Any, *_: Any) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        if _is_sharded(one):
            mesh = one.device_mesh.device_type  # type: ignore[attr-defined]  # where the others' shards come by
            one = (one if one.device.type == mesh else one.to(mesh)).full_tensor()  # type: ignore[attr-defined]
        return one.detach().cpu() if keep else None

    return _mapped(gathered, state, {})


def apart(state: State, named: Named) -> tuple[dict[str, torch.Tensor], State]:
    """The tensors of a state, by unique keys, and the rest of it with a `SLOT` in place of each tensor."""
    tensors: dict[str, torch.Tensor] = {}

    def emptied(one: Any, key: str, parameter: torch.Tensor | None) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        while key in tensors:
            key += "'"
        tensors[key] = one.detach()
        words = {"shape": tuple(one.shape), "dtype": one.dtype, "device": one.device.type}
        return {SLOT: key, **words, "shards": _shards(one, parameter)}

    rest = _mapped(emptied, state, named.parameters)
    return tensors, rest


def joined(parts: Iterable[State]) -> State:
    """Join the states saved by ranks with different ones. If several have an entry, the first counts."""
    result: State = {}
    for part in parts:
        states = {**part["state"], **result.get("state", {})}
        before = result.get("param_groups", [])
        members = [group["params"] for group in before]
        result = {
            **part,
            **result,
            "state": states,
            "param_groups": before + [group for group in part["param_groups"] if group["params"] not in members],
        }
    return result


def rooms(state: State, named: Named) -> tuple[State, dict[str, torch.Tensor]]:
    """A state with an empty tensor for each `SLOT`, as today's parameters need it, and these tensors by key."""
    tensors: dict[str, torch.Tensor] = {}
    first = named.parameters[named.names[0]]

    def filled(one: Any, _: str, parameter: torch.Tensor | None) -> Any:
        if not _is_slot(one):
            return one
        tensors[one[SLOT]] = room = _room(one, first if parameter is None else parameter)
        return room

    return _mapped(filled, state, named.parameters), tensors


def shards_of(state: State, named: Named) -> dict[str, Any]:
    """How the tensors of a state were sharded, by key, where their shape does not tell: see `spread`."""
    shards: dict[str, Any] = {}

    def noted(one: Any, key: str, parameter: torch.Tensor | None) -> None:
        how = _shards(one, parameter) if isinstance(one, torch.Tensor) and one.dim() else None
        if how not in (None, AS_PARAMETER):
            shards[key] = how

    _mapped(noted, state, named.parameters)
    return shards


def spread(state: State, named: Named, shards: Mapping[str, Any]) -> State:
    """Copy an unsharded state out of the file it is mapped from, sharded like today's parameters. Collective.

    Args:
        state: with this rank's parameters only.
        named: today's optimizer.
        shards: see `shards_of`.
    """

    def sharded(one: Any, key: str, parameter: torch.Tensor | None) -> Any:
        if not isinstance(one, torch.Tensor):
            return one
        places = None if parameter is None else _places(tuple(one.shape), shards.get(key), parameter)
        return one.clone() if places is None or parameter is None else _distributed(one, *places).to(parameter.device)

    return _mapped(sharded, state, named.parameters)


def trained(state: State) -> set[str]:
    """The names of all parameters in a state's groups."""
    return set(chain.from_iterable(group["params"] for group in state["param_groups"]))


def check(states: Mapping[str, State], named: Mapping[str, Named], kinds: Mapping[str, str]) -> None:
    """Refuse a state of an optimizer with other parameters, groups or options. Collective.

    Args:
        states: the saved states.
        named: today's optimizers.
        kinds: the classes of the saved optimizers.

    Raises, on every rank:
        StateError: names them.
    """
    today = {f"{name}.{one}" for name in states for one in named[name].names}
    saved = {f"{name}.{one}" for name, state in states.items() for one in trained(state)}
    whose = differing(saved, today, today)
    other = next(filter(None, gather(_other_groups(states, named, kinds))), "")
    if whose or other:
        raise StateError(
            "an optimizer is not the one that was saved",
            found=whose or other,
            expected="the parameters, groups and options of the optimizer that was saved",
            cause="layers were added or left out, or add_param_group is called later than loop.load()"
            if whose
            else "the optimizer is of another class, or its groups were changed",
            action="make the optimizer as it was when the checkpoint was saved, with all groups, before loop.load(): "
            "those without gradients are not stepped",
        )


def differing(saved: set[str], today: set[str], needed: set[str]) -> str:
    """How the names in a checkpoint differ from today's; empty if they do not. Collective.

    Args:
        saved: the names in the checkpoint.
        today: those that this rank has. Of models whose parts differ by rank, each rank has its own.
        needed: those of them that must be in the checkpoint.
    """
    of_ranks = gather((sorted(saved - today), sorted(needed - saved)))
    lost = sorted(set.intersection(*(set(missing) for missing, _ in of_ranks)))
    new = sorted(set().union(*(added for _, added in of_ranks)))
    words = [f"{listed(lost, 4)}: in the checkpoint alone"] * bool(lost)
    words += [f"{listed(new, 4)}: not in the checkpoint"] * bool(new)
    return "; ".join(words)


def load(state: State, named: Named, saved_types: Mapping[str, torch.dtype]) -> None:
    """Put a state into an optimizer.

    Args:
        state: keyed by parameter names, with tensors sharded as today.
        named: the optimizer.
        saved_types: dtypes of the parameters when it was saved.
    """
    numbers = {name: i for i, name in enumerate(named.names)}
    groups = []
    for i, (names, group) in enumerate(zip(named.groups, named.optimizer.param_groups, strict=True)):
        of_names = [one for one in state["param_groups"] if not set(names).isdisjoint(one["params"])]
        if not names:  # it is known by its place alone
            of_names = [one for one in state["param_groups"][i : i + 1] if not one["params"]]
        options = of_names[0] if of_names else {}
        saved = {key: _on(group.get(key), one) for key, one in options.items() if key != "param_names"}
        groups.append({**group, **saved, "params": [numbers[name] for name in names]})
    states = {numbers.get(key, key): one for key, one in state["state"].items()}
    with_numbers = {**state, "state": states, "param_groups": groups}
    given = _load(named.optimizer, with_numbers)["state"]
    for name, parameter in named.parameters.items():
        number = numbers[name]
        if number in given and parameter in named.optimizer.state and saved_types.get(name) == parameter.dtype:
            named.optimizer.state[parameter] = _as_saved(given[number], named.optimizer.state[parameter])


def _load(optimizer: Any, state: State) -> State:
    """Load a state but keep the group objects: a program, or an optimizer inside this one, may hold them, and set the
    learning rate there.

    Returns:
        the state as hooks of the program, or the optimizer's class, have passed it on to torch.
    """
    groups = optimizer.param_groups
    before = list(groups)
    given = state

    def note(_: Any, passed: State) -> None:
        nonlocal given
        given = passed

    def put_back(one: Any) -> None:
        if one.param_groups is not groups and len(one.param_groups) == len(before):
            for old, new in zip(before, one.param_groups, strict=True):
                if old is not new:
                    old.clear()
                    old.update(new)
            groups[:] = before
            one.param_groups = groups

    if not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):  # a wrapper that is no torch optimizer
        optimizer.load_state_dict(state)
        return given
    last = optimizer.register_load_state_dict_pre_hook(note)
    # Before a subclass passes its groups on.
    first = optimizer.register_load_state_dict_post_hook(put_back, prepend=True)
    try:
        optimizer.load_state_dict(state)
    finally:
        last.remove()
        first.remove()
    return given


def _as_saved(saved: Any, loaded: Any) -> Any:
    """Undo what torch changed while loading: it casts tensors to the parameter's dtype, and replaces containers and
    other values.
    """
    wanted, form = tree_flatten(saved)
    found = tree_leaves(loaded)
    if _paths(saved) != _paths(loaded):
        return loaded  # the optimizer's format is its own, or a hook has changed it

    def chosen(want: Any, has: Any) -> Any:
        if not isinstance(want, torch.Tensor) or not isinstance(has, torch.Tensor):
            return want
        return has if has.dtype == want.dtype else want.to(has.device)

    return tree_unflatten([chosen(*both) for both in zip(wanted, found, strict=True)], form)


def _paths(state: Any) -> list[str]:
    return [keystr(path) for path, _ in tree_flatten_with_path(state)[0]]


def _other_groups(states: Mapping[str, State], named: Mapping[str, Named], kinds: Mapping[str, str]) -> str:
    """How an optimizer's groups or options differ from the saved ones; empty if they do not."""
    for name, state in states.items():
        one = named[name]
        for i, (names, today) in enumerate(zip(one.groups, one.optimizer.param_groups, strict=True)):
            groups = [group for group in state["param_groups"] if not set(names).isdisjoint(group["params"])]
            extra = [group for group in groups if set(group["params"]) & set(one.names) - set(names)]
            if extra or any(_options(group) != _options(groups[0]) for group in groups):
                return f"group {i} of '{name}' has other parameters than when it was saved"
            lacking = [option for option in today if groups and option not in groups[0]]
            if lacking and kinds.get(name) != kind_of(one.optimizer):
                return f"{kind_of(one.optimizer)}, with {listed(lacking, 4)}; it was {kinds.get(name)}"
    return ""


def _options(group: Mapping[str, Any]) -> str:
    return repr({key: one for key, one in group.items() if key not in ("params", "param_names")})


def _mapped(function: Callable[..., Any], state: State, parameters: Mapping[str, torch.Tensor]) -> State:
    """Map the leaves of a state with ``function(leaf, key, parameter or None)``. A tensor that is in several places
    remains one.
    """
    tensors: dict[int, Any] = {}

    def of_leaf(path: Sequence[Any], leaf: Any) -> Any:
        words = [str(getattr(word, "key", getattr(word, "idx", word))) for word in path]
        parameter = parameters.get(words[1]) if words[0] == "state" and len(words) > 1 else None
        if not isinstance(leaf, torch.Tensor) and not _is_slot(leaf):
            return function(leaf, ".".join(words), parameter)
        if id(leaf) not in tensors:
            tensors[id(leaf)] = function(leaf, ".".join(words), parameter)
        return tensors[id(leaf)]

    result: State = tree_map_with_path(of_leaf, state, is_leaf=_is_slot)
    return result


def _is_slot(one: Any) -> bool:
    return isinstance(one, dict) and SLOT in one


def _is_sharded(one: Any) -> bool:
    return hasattr(one, "device_mesh") and hasattr(one, "placements")


def _shards(one: Any, parameter: Any) -> Any:
    """How a tensor is sharded; None if neither it nor its parameter is."""
    if not _is_sharded(one):
        return WHOLE if _is_sharded(parameter) else None
    if _is_sharded(parameter) and one.placements == parameter.placements:
        return AS_PARAMETER
    return tuple(getattr(place, "dim", None) for place in one.placements)


def _places(shape: tuple[int, ...], shards: Any, parameter: Any) -> tuple[Any, list[Any]] | None:
    """The mesh and placements for a tensor of this parameter; None: not sharded."""
    if not _is_sharded(parameter) or shards == WHOLE or (shards is None and not shape):
        return None
    mesh = parameter.device_mesh
    own = isinstance(shards, tuple) and len(shards) == mesh.ndim
    dims = shards if own else [getattr(place, "dim", None) for place in parameter.placements]
    if shape == tuple(parameter.shape) and not own:
        return mesh, list(parameter.placements)
    from torch.distributed.tensor import Replicate, Shard

    # A reduction over a dimension is not sharded in it.
    alike = [
        own or (len(shape) == parameter.ndim and one == full) for one, full in zip(shape, parameter.shape, strict=False)
    ]
    fits = [dim is not None and dim < len(alike) and alike[dim] for dim in dims]
    return mesh, [Shard(dim) if is_one else Replicate() for dim, is_one in zip(dims, fits, strict=True)]


def _room(slot: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """An empty tensor to read a saved one into."""
    places = _places(slot["shape"], slot["shards"], parameter)
    if places is None:
        device = slot["device"] if slot["device"] == "cpu" else parameter.device
        return torch.empty(slot["shape"], dtype=slot["dtype"], device=device)
    mesh, placements = places
    if slot["shape"] == tuple(parameter.shape) and placements == list(parameter.placements):  # type: ignore[attr-defined]
        return torch.empty_like(parameter, dtype=slot["dtype"], requires_grad=False)
    return _distributed(torch.empty(slot["shape"], dtype=slot["dtype"]), mesh, placements).to(parameter.device)


def _distributed(one: torch.Tensor, mesh: Any, places: Sequence[Any]) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(one.to(mesh.device_type), mesh, places)


def _on(today: Any, saved: Any) -> Any:
    """An option of a group, moved to the device of today's."""
    is_tensor = isinstance(today, torch.Tensor) and isinstance(saved, torch.Tensor)
    return saved.to(today.device) if is_tensor else saved
