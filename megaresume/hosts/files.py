"""The files of a loop's checkpoint, and how they are written.

    dcp          torch.distributed.checkpoint: every rank writes its shards; loads on any number of ranks
    dcp_async    the same, while training continues
    torch        one file, torch.save, by rank 0: loads on any number of ranks

Modules and optimizers (`optimizer_states`) are saved by parameter name, without what DDP, FSDP and torch.compile add to
the names. Anything else with a ``state_dict`` (a scheduler, a scaler) must be the same on every rank, and rank 0's is
saved. Likewise, of a tensor that torch does not know to be sharded, one rank's is saved. The first save compares these:
`warn_of_differing`.

torch.distributed.checkpoint is imported at the first save or load: it takes 40 ms, and a fresh start does not need it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only

from megaresume import importing
from megaresume.checkpoint.ending import is_end_of_all
from megaresume.checkpoint.file_errors import writing
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.saver import Save
from megaresume.hosts.attach import kind_of
from megaresume.hosts.frozen import entries, unsaved, weights_of
from megaresume.hosts.optimizer_states import (
    Named,
    State,
    apart,
    check,
    differing,
    joined,
    load,
    rooms,
    shards_of,
    spread,
    whole,
)
from megaresume.hosts.replicas import Hashes, hashes_of_states, hashes_of_tensors
from megaresume.stream.errors import MegaresumeError, StateError, UsageError, listed

Writer = Literal["dcp", "dcp_async", "torch"]

#: In place of a user's object name: everything that is not a tensor.
KEY = "megaresume"
SINGLE, METADATA = "checkpoint.pt", ".metadata"

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Objects:
    """The objects that a loop saves: modules, optimizers, and others with ``state_dict`` and ``load_state_dict``.

    Args:
        objects: by name.

    Raises:
        UsageError: an object lacks these methods; there is no module; or no module has all parameters of an optimizer.
    """

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self.names = sorted(objects)
        for name, one in objects.items():
            if name == KEY or not all(callable(getattr(one, m, None)) for m in ("state_dict", "load_state_dict")):
                raise UsageError(
                    f"'{name}' cannot be saved",
                    found=kind_of(one),
                    expected="an object with state_dict and load_state_dict"
                    + (f", under another name than {KEY}" if name == KEY else ""),
                    action=f"each under a name of its own: {{'{name} 0': {name}[0], '{name} 1': {name}[1], ...}}"
                    if isinstance(one, (list, tuple))
                    else "the objects: megaresume.attach({'model': model, 'optimizer': optimizer}, loader)",
                )
        self.modules = {n: one for n, one in objects.items() if isinstance(one, torch.nn.Module)}
        for name, module in self.modules.items():
            _check_module(name, module)
        optimizers = {n: one for n, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        for name, one in optimizers.items():
            _check_optimizer(name, one)
        self.optimizers = {n: (one, _owner(n, one, self.modules)) for n, one in optimizers.items()}
        self.others = {n: one for n, one in objects.items() if n not in self.modules and n not in self.optimizers}
        if not self.modules:
            raise UsageError(
                "there is no model to save",
                found=", ".join(self.names) or "nothing",
                expected="at least one torch.nn.Module",
                action="megaresume.attach({'model': model, 'optimizer': optimizer, ...}, loader)",
            )

    @property
    def device(self) -> torch.device:
        """The device of the first parameter, on which the models run."""
        parameters = (p for module in self.modules.values() for p in module.parameters())
        return next((p.device for p in parameters), torch.device("cpu"))

    def states(
        self, models: Mapping[str, Any], optimizers: Mapping[str, tuple[Named, State]], *, full: bool
    ) -> dict[str, Any]:
        """States of modules and optimizers by parameter name. Collective.

        Args:
            models: see `model_states`.
            optimizers: see `optimizer_states`.
            full: unsharded, on rank 0.

        Raises:
            UsageError: an optimizer's state contains something that cannot be saved.
        """
        states: dict[str, Any] = dict(models)
        parts = {name: apart(state, named) for name, (named, state) in optimizers.items()}
        blobs = on_all_ranks(lambda: {name: _packed(name, rest) for name, (_, rest) in parts.items()})
        if full:
            return {**states, **{n: whole(state, keep=is_rank_0()) for n, (_, state) in optimizers.items()}}
        digests = {name: hashlib.sha256(blob).digest() for name, blob in blobs.items()}
        of_ranks = gather(digests)
        for name, (tensors, _) in parts.items():
            first = next(rank for rank, one in enumerate(of_ranks) if one.get(name) == digests[name])
            states[name] = {**tensors, f"{KEY}.{first}": blobs[name]}
        return states

    def named(self) -> dict[str, Named]:
        """The optimizers with their parameter names.

        Raises:
            UsageError: a parameter of an optimizer is no longer in its model.
        """
        return {n: Named(one, _owner(n, one, self.modules)) for n, (one, _) in self.optimizers.items()}

    def optimizer_states(self) -> dict[str, tuple[Named, State]]:
        """The states of the optimizers, except of those whose state is not in torch's format.

        Raises:
            UsageError: see `named` and `Named.state`.
        """
        return {n: (one, state) for n, one in self.named().items() if (state := one.state()) is not None}

    def forget(self) -> None:
        """Before a load, drop the states of optimizers and the gradients of an abandoned step."""
        for optimizer, _ in self.optimizers.values():
            optimizer.state.clear()
            optimizer.zero_grad()

    def put_modules(self, states: Mapping[str, Any], *, full: bool = False) -> None:
        """Set the states of modules, either read into their own tensors, or ``full``."""
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        for name, module in self.modules.items():
            # A wrapper such as DDP does not ask a module within it whether it misses what its state_dict leaves out.
            there = entries({name: states[name]})
            is_whole = not unsaved(weights_of({name: module}), there)
            options = StateDictOptions(full_state_dict=full, strict=is_whole)
            found = set_model_state_dict(module, states[name], options=options)
            if not is_whole and found is not None and (unknown := list(found.unexpected_keys)):
                raise RuntimeError(f"Unexpected keys: {listed(unknown, 4)}")

    def model_states(self, *, full: bool = False) -> dict[str, Any]:
        """The states of the modules, with this rank's shards. Collective.

        Args:
            full: unsharded, copied, on rank 0. Otherwise they may also be read into.
        """
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        return {name: get_model_state_dict(one, options=options) for name, one in self.modules.items()}

    def put_optimizers(
        self, states: Mapping[str, State], named: Mapping[str, Named], types: Mapping[str, Mapping[str, torch.dtype]]
    ) -> None:
        """Put the states of optimizers back into them.

        Args:
            states: with tensors sharded as today.
            named: the optimizers.
            types: dtypes of each module's parameters when they were saved.
        """
        names = {id(module): name for name, module in self.modules.items()}
        for name, state in states.items():
            load(state, named[name], types[names[id(self.optimizers[name][1])]])

    def rest(self, held: Mapping[str, Any], optimizers: Mapping[str, tuple[Named, State]]) -> dict[str, Any]:
        """Everything in a checkpoint except modules and these optimizers: see `optimizer_states`."""
        others = {**self.others, **{n: one for n, (one, _) in self.optimizers.items() if n not in optimizers}}
        shards = {name: shards_of(state, named) for name, (named, state) in optimizers.items()}
        kinds = {name: kind_of(optimizer) for name, (optimizer, _) in self.optimizers.items()}
        return {
            "names": self.names,
            "others": {n: one.state_dict() for n, one in others.items()},
            "kinds": kinds,
            "shards": shards,
            "modes": {name: mode for name, one in self._all().items() if (mode := _mode_of(one)) is not None},
            **held,
        }

    def hashes(self) -> Hashes:
        """Hashes of this rank's states, for `warn_of_differing`."""
        tensors = {name: hashes_of_tensors(self._tensors(name)) for name in (*self.modules, *self.optimizers)}
        return {**hashes_of_states(self.others), **tensors}

    def _tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Those tensors of a module's parameters or an optimizer's state that torch does not know to be sharded."""
        if name in self.modules:
            named: Iterable[tuple[str, Any]] = self.modules[name].named_parameters()
        else:
            optimizer, module = self.optimizers[name]
            names: dict[Any, str] = {parameter: key for key, parameter in module.named_parameters()}
            states = ((names.get(key, key), state) for key, state in optimizer.state.items())
            named = ((f"{key}.{i}", one) for key, state in states for i, one in enumerate(tree_leaves(state)))
        return ((key, one) for key, one in named if type(one) in (torch.Tensor, torch.nn.Parameter))

    def put_rest(self, rest: Mapping[str, Any]) -> None:
        """Restore everything except modules and optimizers."""
        objects = self._all()
        for name, state in rest["others"].items():
            objects[name].load_state_dict(state)
        for name, mode in rest.get("modes", {}).items():
            if _mode_of(objects[name]) is not None:
                objects[name].train_mode = mode

    def _all(self) -> dict[str, Any]:
        """All objects except modules."""
        return {**self.others, **{name: optimizer for name, (optimizer, _) in self.optimizers.items()}}

    def check_names(self, rest: Mapping[str, Any]) -> None:
        """Raise a StateError if a checkpoint has other objects."""
        if rest["names"] != self.names:
            raise StateError(
                "the checkpoint holds other objects than the loop",
                found=", ".join(rest["names"]),
                expected=", ".join(self.names),
                cause="megaresume.attach was given others, or under other names, when the checkpoint was saved",
                action="give megaresume.attach the same names as then",
            )


def write(
    objects: Objects, models: Mapping[str, Any], directory: Path, held: Mapping[str, Any], writer: Writer, group: Any
) -> Future[Any] | None:
    """Write a checkpoint. On every rank.

    Args:
        objects: what to save.
        models: the states of its modules, ``full`` for ``torch``: see `Objects.model_states`.
        directory: the tag directory.
        held: what else goes in: see `TrainerHost.carried`.
        writer: see the module.
        group: a CPU process group for the writer alone; None with a single rank.

    Returns:
        for ``dcp_async``, a future: done when this rank's part is written, or on rank 0, those of all ranks.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    optimizers = on_all_ranks(objects.optimizer_states)
    states = objects.states(models, optimizers, full=writer == "torch")
    rest = on_all_ranks(lambda: objects.rest(held, optimizers))
    if writer == "torch":
        if is_rank_0():
            directory.mkdir(exist_ok=True)
            torch.save({**states, KEY: rest}, directory / SINGLE)
        return None
    blob = io.BytesIO()
    torch.save(rest, blob)
    states[KEY] = blob.getvalue()
    with dcp_errors():
        if writer == "dcp":
            # Without a writer, torch imports fsspec in case the directory is in a store, and ends up with this writer.
            save(states, storage_writer=FileSystemWriter(directory), process_group=group)
            return None
        # Copied before training continues: torch itself may copy only from other devices.
        states = tree_map_only(torch.Tensor, lambda one: one.clone() if one.device.type == "cpu" else one, states)
        future: Future[Any] = async_save(  # type: ignore[assignment]
            states, checkpoint_id=directory, process_group=group
        )
    return future


def wait(future: Future[Any]) -> None:
    """Wait for an asynchronous write to end. Raises what it raised."""
    with dcp_errors():
        future.result()


def read(objects: Objects, directory: Path, group: Any) -> dict[str, Any]:
    """Read a checkpoint by any of the writers, on any number of ranks; returns what else it holds. On every rank."""
    with importing():
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load as read_into

    if (directory / SINGLE).exists():
        states = torch.load(directory / SINGLE, map_location="cpu", mmap=True, weights_only=False)
        rest = _checked(objects, states.pop(KEY))
        named = {name: one for name, one in objects.named().items() if name in states}
        kept = {name: states[name] for name in named}
        types = {name: _types(states[name]) for name in objects.modules}
        today = objects.model_states()
        _check_models({name: set(states[name]) for name in objects.modules}, today)
        _check_types(types, today)
        check(kept, named, rest["kinds"])
        objects.forget()
        objects.put_modules(states, full=True)
        kept = {name: spread(one.own(kept[name]), one, rest["shards"][name]) for name, one in named.items()}
    else:
        first: dict[str, Any] = {KEY: b""}
        reader = FileSystemReader(directory)
        with dcp_errors():
            read_into(first, storage_reader=reader, process_group=group)
            rest = _checked(objects, _unpacked(first[KEY]))
            metadata = reader.read_metadata()
            keys = _keys(objects, metadata)
            blobs = {
                name: dict.fromkeys(sorted((k for k in keys[name] if k.startswith(f"{KEY}.")), key=_rank), b"")
                for name in objects.optimizers
                if name not in rest["others"]
            }
            read_into(blobs, storage_reader=reader, process_group=group)
            named = {name: one for name, one in objects.named().items() if name in blobs}
            saved = {name: joined(map(_unpacked, blobs[name].values())) for name in named}
            states = objects.model_states()
            _check_models({name: keys[name] for name in objects.modules}, states)
            types = _saved_types(objects.modules, metadata)
            _check_types(types, states)
            check(saved, named, rest["kinds"])
            objects.forget()
            kept = {}
            for name, one in named.items():
                kept[name], states[name] = rooms(one.own(saved[name]), one)
            read_into(states, storage_reader=reader, process_group=group)
        objects.put_modules(states)
    on_all_ranks(lambda: objects.put_optimizers(kept, named, types))
    on_all_ranks(lambda: objects.put_rest(rest))
    return rest


def _checked(objects: Objects, rest: dict[str, Any]) -> dict[str, Any]:
    on_all_ranks(lambda: objects.check_names(rest))
    return rest


def _mode_of(one: Any) -> bool | None:
    """Which of its two weights the model now has, if this is an optimizer like schedulefree's ``ScheduleFreeWrapper``,
    which keeps that in an attribute only.
    """
    mode = getattr(one, "train_mode", None)
    return mode if isinstance(mode, bool) else None


def _check_module(name: str, module: torch.nn.Module) -> None:
    """Refuse parameters that have no shape yet: a start could save them later, and the next one not load them."""
    named = chain(module.named_parameters(), module.named_buffers())
    if lazy := [key for key, one in named if torch.nn.parameter.is_lazy(one)]:
        raise UsageError(
            f"'{name}' cannot be saved and loaded",
            found=f"{listed(lazy, 4)}, which the first forward pass initializes",
            expected="parameters and buffers with shapes",
            action="call the model once with an example, collate_fn([dataset[0]]), before the optimizer is made",
        )


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose state is not available at all times."""
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):  # may not be importable
        raise UsageError(
            f"'{name}' cannot be saved",
            found=f"{kind_of(optimizer)}, which gives its state only after a collective of its own, on one rank",
            expected="an optimizer with its state on every rank, whole or in DTensors",
            action="leave ZeroRedundancyOptimizer out; FSDP2 (fully_shard) divides an optimizer's state over the ranks",
        )


def _packed(name: str, state: State) -> bytes:
    """The non-tensor part of an optimizer's state, as bytes."""
    blob = io.BytesIO()
    try:
        torch.save(state, blob)
    except Exception as error:
        raise UsageError(
            f"'{name}' cannot be saved",
            found=f"{type(error).__name__}: {error}",
            expected="a state_dict() that torch.save can write",
            cause="a group of the optimizer, or its state, holds a lambda, a generator or an open file",
            action="put it into an attribute of the optimizer; or a function of a module in place of a lambda",
        ) from error
    return blob.getvalue()


def _unpacked(blob: bytes) -> Any:
    return torch.load(io.BytesIO(blob), map_location="cpu", weights_only=False)


def _check_models(saved: Mapping[str, set[str]], today: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a module that would not receive all that was saved of it, or would not find all that it has. Collective.

    Args:
        saved: for each module, the keys in the checkpoint.
        today: for each module, its state.

    Raises, on every rank:
        StateError: names the keys.
    """
    wanted = {f"{name}.{key}" for name, keys in saved.items() for key in keys}
    here = {f"{name}.{key}" for name in saved for key in today[name]}
    tensors = {f"{n}.{key}" for n in saved for key, one in today[n].items() if isinstance(one, torch.Tensor)}
    if words := differing(wanted, here, tensors):
        raise StateError(
            "a model is not the one that was saved",
            found=words,
            expected="the parameters and buffers of the model that was saved",
            cause="the model, or its config, was changed; or its steps register parameters or buffers that it does not "
            "have yet",
            action="before megaresume.attach, make the model as it was when the checkpoint was saved, with all its "
            "parameters and buffers: register them in __init__",
        )


def _check_types(saved: Mapping[str, Mapping[str, torch.dtype]], today: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse to read tensors into a dtype that cannot hold such values, and warn of any other one. Collective.

    Args:
        saved: for each module, the dtypes in the checkpoint.
        today: for each module, its state.

    Raises, on every rank:
        StateError: names one of them.
    """
    others = {
        f"{name}.{key}": (dtype, one.dtype)
        for name, types in saved.items()
        for key, dtype in types.items()
        if isinstance(one := today[name].get(key), torch.Tensor) and one.dtype != dtype
    }
    worst = sorted(others, key=lambda key: torch.can_cast(*others[key]))[:1]
    words = "".join(f"{key} is {others[key][1]}, and was {others[key][0]}" for key in worst)
    words += f"; {len(others) - 1} more" if len(others) > 1 else ""

    def refuse() -> None:
        if worst and not torch.can_cast(*others[worst[0]]):
            raise StateError(
                "a model has other dtypes than the one that was saved",
                found=words,
                expected="dtypes that hold what was saved",
                cause="the model, or its config, was changed",
                action="make the model as it was when the checkpoint was saved",
            )

    on_all_ranks(refuse)
    if words and is_rank_0():
        print(
            f"megaresume: WARNING: a model has other dtypes than when it was saved: {words}. What is read is rounded "
            "to them, and the run continues with other numbers than if nobody had stopped it",
            flush=True,
        )


def _keys(objects: Objects, metadata: Any) -> dict[str, set[str]]:
    """The keys that a checkpoint has for each module and optimizer. Uses torch's own paths, as the checkpoint's keys
    join them with dots, which parameter names contain as well.
    """
    keys: dict[str, set[str]] = {name: set() for name in (*objects.modules, *objects.optimizers)}
    for name, *path in metadata.planner_data.values():
        if name in keys and path:
            keys[name].add(path[0])
    return keys


def _types(states: Mapping[str, Any]) -> dict[str, torch.dtype]:
    return {key: one.dtype for key, one in states.items() if isinstance(one, torch.Tensor)}


def _saved_types(names: Iterable[str], metadata: Any) -> dict[str, dict[str, torch.dtype]]:
    """The dtypes of each module's tensors in a checkpoint."""
    types: dict[str, dict[str, torch.dtype]] = {name: {} for name in names}
    for key, (name, *path) in metadata.planner_data.items():
        properties = getattr(metadata.state_dict_metadata.get(key), "properties", None)
        if name in types and len(path) == 1 and properties is not None:
            types[name][path[0]] = properties.dtype
    return types


def _rank(key: str) -> int:
    return int(key.removeprefix(f"{KEY}."))


def _owner(name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    """The module whose parameters an optimizer trains."""
    wanted = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for module in modules.values():
        if wanted <= {id(p) for p in module.parameters()}:
            return module
    raise UsageError(
        f"no single module of the loop has all parameters of the optimizer '{name}'",
        found=f"{len(wanted)} parameters; modules {', '.join(modules) or 'none'}",
        expected="all of them in one of the modules",
        cause="the optimizer was made before the model was wrapped (fully_shard replaces parameters) or got a new "
        "layer, or it trains several models",
        action="make the optimizer after these changes; put several models into one torch.nn.ModuleDict, and pass that",
    )


@contextmanager
def dcp_errors() -> Iterator[None]:
    """Turn torch's CheckpointException, which ``except Exception`` misses, into its first rank's error."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as failed:
        number, (cause, _) = min(failed.failures.items())
        raise RuntimeError(f"rank {number}: {type(cause).__name__}: {cause}") from cause


def own_group() -> Any:
    """A CPU process group for the writer alone, as it writes in the background while others train. Collective."""
    return dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None


class Background:
    """At most one save that torch.distributed.checkpoint writes while training continues; counts once complete.

    Args:
        commit: makes it count: `Session.commit`.
    """

    def __init__(self, commit: Callable[[Save], object]) -> None:
        self._commit = commit
        #: The save in flight, and whether it already counts (known on rank 0).
        self._flight: tuple[Future[Any], Save] | None = None
        self._is_committed = False

    def begin(self, future: Future[Any], save: Save) -> None:
        """Note a save in flight, with the future of this rank's part; on rank 0, of all ranks' parts."""
        self._flight, self._is_committed = (future, save), False
        save.defer()

    def settle(self) -> None:
        """See `Host.settle`."""
        flight = self._flight
        if flight is None:
            return
        future, save = flight
        self._flight = None
        on_all_ranks(lambda: _written(future, save))
        if not on_rank_0(lambda: self._is_committed):
            self._commit(save)

    def is_saving(self) -> bool:
        """See `Host.is_saving`."""
        return self._flight is not None and not self._is_committed

    def look(self) -> None:
        """Commit the save once it is written; rank 0 finishes after all others. Not collective."""
        if self._flight is None or self._is_committed or not is_rank_0():
            return
        future, save = self._flight
        if save.part is not None:
            return  # one rank per node commits, when all of them `settle`
        if future.done() and future.exception() is None:
            with contextlib.suppress(MegaresumeError):  # `settle` tries again, and reports it on every rank
                self._is_committed = save.commit()

    def look_at_exit(self) -> None:
        """The same at the end of a program that did not wait."""
        if self._flight is None:
            return
        future, save = self._flight
        try:
            if save.part is not None and is_end_of_all():
                self.settle()
            elif is_rank_0():
                _written(future, save)
                self.look()
        except MegaresumeError as error:
            print(f"megaresume: error: {error}", file=sys.stderr, flush=True)


def _written(future: Future[Any], save: Save) -> None:
    with writing(save.save_dir / save.tag):
        wait(future)
