"""The files of a checkpoint of a loop, and how they are written.

    dcp          torch.distributed.checkpoint: every rank writes its shards; loads on any number of ranks
    dcp_async    the same, while training continues
    torch        one file, torch.save, by rank 0: loads on any number of ranks

Modules and optimizers are saved by the names of their parameters, without what DDP, FSDP and torch.compile add to them.
Whatever else has a ``state_dict`` (a scheduler, a scaler) is the same on every rank: rank 0's is saved. So is a tensor
that torch does not know to be sharded: one rank's is saved. The first save compares them: `warn_of_differing`.

torch.distributed.checkpoint is imported at the first save or load: it takes 40 ms, and a fresh start does not need it.
"""

from __future__ import annotations

import contextlib
import inspect
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

from megaresume import importing
from megaresume.checkpoint.file_errors import writing
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.saver import Save
from megaresume.hosts.attach import kind_of, replaced
from megaresume.hosts.replicas import Hashes, hashes_of_states, hashes_of_tensors
from megaresume.stream.errors import MegaresumeError, StateError, UsageError, listed

Writer = Literal["dcp", "dcp_async", "torch"]

#: in place of a name of the user's: what is not a tensor.
KEY = "megaresume"
SINGLE, METADATA = "checkpoint.pt", ".metadata"

warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")


class Objects:
    """The objects that a loop saves: modules, optimizers, and others with a ``state_dict`` and a ``load_state_dict``.

    Args:
        objects: by name.

    Raises:
        UsageError: one without these methods; no module; or an optimizer of parameters of none of the modules.
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
        """Of the first parameter: that on which the models run."""
        parameters = (p for module in self.modules.values() for p in module.parameters())
        return next((p.device for p in parameters), torch.device("cpu"))

    def states(self, *, full: bool = False) -> dict[str, Any]:
        """Of modules and optimizers, by the names of the parameters; ``full``: all shards, on rank 0."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_model_state_dict,
            get_optimizer_state_dict,
        )

        options = StateDictOptions(full_state_dict=full, cpu_offload=full)
        states: dict[str, Any] = {n: get_model_state_dict(one, options=options) for n, one in self.modules.items()}
        for name, (optimizer, module) in self.optimizers.items():
            is_new = not optimizer.state
            with _steps_as_torch_calls_it(optimizer):
                states[name] = get_optimizer_state_dict(module, optimizer, options=options)
            if is_new:  # torch has made a step without gradients to create a state: training must not start from it
                optimizer.state.clear()
                states[name]["state"] = {}
        return states

    def blank(self) -> dict[str, Any]:
        """As `states`, to be read into: the optimizers forget their states, and every parameter gets an empty one."""
        from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

        for optimizer, _ in self.optimizers.values():
            optimizer.state.clear()
            optimizer.zero_grad()  # of a step that is given up
        states: dict[str, Any] = {n: get_model_state_dict(one) for n, one in self.modules.items()}
        for name, (optimizer, module) in self.optimizers.items():
            with _steps_as_torch_calls_it(optimizer):
                states[name] = get_optimizer_state_dict(module, optimizer)
        return states

    def put(self, states: Mapping[str, Any], *, full: bool = False) -> None:
        """Set those of modules and optimizers: what was read into `blank`, or ``full``."""
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            set_model_state_dict,
            set_optimizer_state_dict,
        )

        blank = self.blank() if full else states
        if full:
            _check_places({name: states[name]["state"] for name in self.optimizers}, blank)
        options = StateDictOptions(full_state_dict=full)
        for name, module in self.modules.items():
            # With full_state_dict torch leaves what is missing as it is, and says nothing.
            if missing := blank[name].keys() - states[name].keys():
                raise RuntimeError(f"Missing keys in the checkpoint: {', '.join(sorted(missing))}")
            set_model_state_dict(module, states[name], options=options)
        for name, (optimizer, module) in self.optimizers.items():
            # torch fails with full_state_dict if there is no tensor to be sharded, as in SGD without momentum.
            options = StateDictOptions(full_state_dict=full and _has_tensors(blank[name]["state"]), strict=False)
            with _steps_as_torch_calls_it(optimizer):
                set_optimizer_state_dict(module, optimizer, states[name], options=options)
            if full:
                _forget_unused(optimizer, blank[name]["param_groups"], states[name]["state"])

    def rest(self, held: Mapping[str, Any]) -> dict[str, Any]:
        """Everything in a checkpoint but the modules and optimizers."""
        return {"names": self.names, "others": {name: one.state_dict() for name, one in self.others.items()}, **held}

    def hashes(self) -> Hashes:
        """Of the states of this rank: see `warn_of_differing`."""
        tensors = {name: hashes_of_tensors(self._tensors(name)) for name in (*self.modules, *self.optimizers)}
        return {**hashes_of_states(self.others), **tensors}

    def _tensors(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of a module, or the state of an optimizer: tensors that torch does not know to be sharded."""
        if name in self.modules:
            named: Iterable[tuple[str, Any]] = self.modules[name].named_parameters()
        else:
            optimizer, module = self.optimizers[name]
            names: dict[Any, str] = {parameter: key for key, parameter in module.named_parameters()}
            states = ((names.get(parameter), state) for parameter, state in optimizer.state.items())
            named = ((f"{key}.{field}", one) for key, state in states for field, one in state.items())
        return ((key, one) for key, one in named if type(one) in (torch.Tensor, torch.nn.Parameter))

    def put_rest(self, rest: Mapping[str, Any]) -> None:
        """Put back everything but the modules and optimizers."""
        for name, one in self.others.items():
            one.load_state_dict(rest["others"][name])

    def check_names(self, rest: Mapping[str, Any]) -> None:
        """Raise a StateError if a checkpoint holds other objects."""
        if rest["names"] != self.names:
            raise StateError(
                "the checkpoint holds other objects than the loop",
                found=", ".join(rest["names"]),
                expected=", ".join(self.names),
                cause="megaresume.attach was given others, or under other names, when the checkpoint was saved",
                action="give megaresume.attach the same names as then",
            )


def write(objects: Objects, directory: Path, held: Mapping[str, Any], writer: Writer, group: Any) -> Future[Any] | None:
    """Write a checkpoint. On every rank.

    Args:
        objects: what is saved.
        directory: the tag directory.
        held: what else it holds: see `TrainerHost.carried`.
        writer: see above.
        group: a process group on the CPU, of the writer alone; None if there is one rank.

    Returns:
        of ``dcp_async``: done when this rank's part is written; on rank 0, when those of all ranks are.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import async_save, save

    states = objects.states(full=writer == "torch")
    rest = on_all_ranks(lambda: objects.rest(held))
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
            # Without a writer torch imports fsspec, in case that the directory is in a store, and ends with this one.
            save(states, storage_writer=FileSystemWriter(directory), process_group=group)
            return None
        future: Future[Any] = async_save(  # type: ignore[assignment]
            states, checkpoint_id=directory, process_group=group
        )
    return future


def wait(future: Future[Any]) -> None:
    """Until an asynchronous write has ended. Raises what it raised."""
    with dcp_errors():
        future.result()


def read(objects: Objects, directory: Path, group: Any) -> dict[str, Any]:
    """Read a checkpoint that any of the writers wrote, on any number of ranks; what else it holds. On every rank."""
    with importing():
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

    if (directory / SINGLE).exists():
        states = torch.load(directory / SINGLE, map_location="cpu", mmap=True, weights_only=False)
        rest = _checked(objects, states.pop(KEY))
        objects.put(states, full=True)
    else:
        first: dict[str, Any] = {KEY: b""}
        reader = FileSystemReader(directory)
        with dcp_errors():
            load(first, storage_reader=reader, process_group=group)
            rest = _checked(objects, torch.load(io.BytesIO(first[KEY]), map_location="cpu", weights_only=False))
            states, saved = objects.blank(), _saved_fields(objects, reader.read_metadata())
            kept = {name: _only_saved(name, states[name], fields) for name, fields in saved.items()}
            _check_places(saved, states)
            for name, state in kept.items():
                states[name]["state"] = state
            load(states, storage_reader=reader, process_group=group)
        objects.put(states)
    on_all_ranks(lambda: objects.put_rest(rest))
    return rest


def _checked(objects: Objects, rest: dict[str, Any]) -> dict[str, Any]:
    on_all_ranks(lambda: objects.check_names(rest))
    return rest


def _check_optimizer(name: str, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that cannot step without arguments, as LBFGS (see `_steps_as_torch_calls_it`), or whose state
    cannot be had at any time."""
    if any(cls.__name__ == "ZeroRedundancyOptimizer" for cls in type(optimizer).__mro__):  # it may not be importable
        raise UsageError(
            f"'{name}' cannot be saved",
            found=f"{kind_of(optimizer)}, which gives its state only after a collective of its own, on one rank",
            expected="an optimizer with its state on every rank, whole or in DTensors",
            action="leave ZeroRedundancyOptimizer out; FSDP2 (fully_shard) divides an optimizer's state over the ranks",
        )
    # Of the class: a scheduler puts a function of its own in the place of the instance's.
    _self, *parameters = inspect.signature(type(optimizer).step).parameters.values()
    if needed := [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]:
        raise UsageError(
            f"the state of '{name}' could be saved, and not loaded",
            found=f"{kind_of(optimizer)}, whose step needs {', '.join(needed)}",
            expected="a step without arguments, by which torch creates the state that a checkpoint is read into",
            action=f"save it as an object of another kind: '{name}': types.SimpleNamespace("
            "state_dict=optimizer.state_dict, load_state_dict=optimizer.load_state_dict)",
        )


@contextmanager
def _steps_as_torch_calls_it(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """To create a state torch calls ``step(closure=None)``, with gradients of zero. Not every optimizer takes that:
    Muon often has no such argument, and SAM asserts that it is given."""
    step: Callable[..., Any] = optimizer.step

    def step_anyhow(closure: None = None) -> Any:
        try:
            return step()
        except Exception:
            if "closure" not in inspect.signature(type(optimizer).step).parameters:
                raise
            return step(closure=lambda: torch.zeros(()))

    with replaced(optimizer, step=step_anyhow):
        yield


def _has_tensors(state: Mapping[str, Mapping[str, Any]]) -> bool:
    values = chain.from_iterable(one.values() for one in state.values())
    return any(isinstance(value, torch.Tensor) and value.dim() for value in values)


def _forget_unused(
    optimizer: torch.optim.Optimizer, groups: Iterable[Mapping[str, Any]], saved: Mapping[str, Any]
) -> None:
    """A parameter that no step has used has no state; with full_state_dict torch gives it one.

    Args:
        optimizer: after torch has set its state.
        groups: its groups, with the names of their parameters.
        saved: the state that was saved, by these names.
    """
    names = chain.from_iterable(group["params"] for group in groups)
    parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for name, parameter in zip(names, parameters, strict=True):
        if name not in saved:
            optimizer.state.pop(parameter, None)


def _check_places(saved: Mapping[str, Iterable[str]], blank: Mapping[str, Any]) -> None:
    """Refuse to leave out the state of a parameter, as torch does that of one that is frozen today, or that today's
    optimizer does not train. Collective.

    Args:
        saved: of each optimizer, the parameters that had a state.
        blank: see `Objects.blank`.

    Raises, on every rank:
        StateError: naming them.
    """
    held = {f"{name}.{one}" for name in saved for one in blank[name]["state"]}
    here = {f"{name}.{one}" for name in saved for group in blank[name]["param_groups"] for one in group["params"]}
    wanted = {f"{name}.{one}" for name, parameters in saved.items() for one in parameters}
    # Of models whose parts differ by rank, each rank has its own.
    of_ranks = gather((wanted & here - held, wanted - held))
    lost = set().union(*(frozen for frozen, _ in of_ranks)) | set.intersection(*(lacking for _, lacking in of_ranks))
    if lost:
        raise StateError(
            "an optimizer's state in the checkpoint would be left out",
            found=f"{listed(sorted(lost), 4)}: frozen, or not in the optimizer",
            expected="each parameter that was trained, trainable and in the optimizer when the checkpoint is loaded",
            cause="parameters are frozen before loop.load() and trained later, or added by add_param_group",
            action="call loop.load() first, and requires_grad_(False) after it; give the optimizer all its parameters "
            "when it is made: those without gradients are not stepped",
        )


def _saved_fields(objects: Objects, metadata: Any) -> dict[str, dict[str, set[str]]]:
    """Of each optimizer, the parameters that had a state when it was saved, and its fields. By torch's own paths: the
    keys of a checkpoint join them by points, which names of parameters have as well."""
    saved: dict[str, dict[str, set[str]]] = {name: {} for name in objects.optimizers}
    for name, *path in metadata.planner_data.values():
        if name in saved and len(path) > 2 and path[0] == "state":
            saved[name].setdefault(path[1], set()).add(path[2])
    return saved


def _only_saved(name: str, blank: Mapping[str, Any], saved: Mapping[str, set[str]]) -> dict[str, Any]:
    """The state of those parameters that had one when it was saved.

    Args:
        name: of the optimizer.
        blank: its state, with that of every parameter, and its groups.
        saved: see `_saved_fields`.

    Raises:
        RuntimeError: there are fields that today's optimizer does not have: with them its options would be loaded.
    """
    state = blank["state"]
    parameters = set(chain.from_iterable(group["params"] for group in blank["param_groups"]))
    fields: set[str] = set().union(*(saved[one] for one in parameters & saved.keys()))
    if lost := fields.difference(*state.values()):
        raise RuntimeError(f"The optimizer '{name}' had a state that today's does not have: {', '.join(sorted(lost))}")
    return {parameter: one for parameter, one in state.items() if parameter in saved}


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
        cause="the optimizer was made before the model was wrapped (fully_shard replaces parameters), or it trains "
        "several models",
        action="make the optimizer after wrapping; put several models into one torch.nn.ModuleDict, and pass that",
    )


@contextmanager
def dcp_errors() -> Iterator[None]:
    """torch's CheckpointException, which no ``except Exception`` sees, as an error with the cause of its first rank."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as failed:
        number, (cause, _) = min(failed.failures.items())
        raise RuntimeError(f"rank {number}: {type(cause).__name__}: {cause}") from cause


def own_group() -> Any:
    """A process group on the CPU, for the writer alone: it writes in the background while others train. Collective."""
    return dist.new_group(backend="gloo") if dist.is_available() and dist.is_initialized() else None


class Background:
    """A save that torch.distributed.checkpoint writes while training continues: at most one. It counts once it is
    whole.

    Args:
        commit: makes it count: `Session.commit`.
    """

    def __init__(self, commit: Callable[[Save], object]) -> None:
        self._commit = commit
        #: what is in flight, and whether it counts already: known on rank 0.
        self._flight: tuple[Future[Any], Save] | None = None
        self._is_committed = False

    def begin(self, future: Future[Any], save: Save) -> None:
        """A save is in flight: the future of this rank's part; on rank 0, of those of all ranks."""
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
        """Commit it, if it is written: rank 0 ends after all others. No collective."""
        if self._flight is None or self._is_committed or not is_rank_0():
            return
        future, save = self._flight
        if save.part is not None:
            return  # of every node one rank commits: when all of them `settle`
        if future.done() and future.exception() is None:
            with contextlib.suppress(MegaresumeError):  # `settle` tries again, and says it on every rank
                self._is_committed = save.commit()

    def look_at_exit(self) -> None:
        """The same at the end of a program that did not wait."""
        if self._flight is None or not is_rank_0():
            return
        future, save = self._flight
        try:
            _written(future, save)
            self.look()
        except MegaresumeError as error:
            print(f"megaresume: error: {error}", file=sys.stderr, flush=True)


def _written(future: Future[Any], save: Save) -> None:
    with writing(save.save_dir / save.tag):
        wait(future)
