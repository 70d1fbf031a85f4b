"""Carries a run from Energon's loader over to a stream: our stream begins with what is left of Energon's pass.

    states of the ranks  --position_of-->  records handed out in the pass that is going on
    data.yaml, source    --compare keys--> the same records have the same numbers here
                         --write-->        OUTPUT.npy, and OUTPUT: the data config with
                                           skip: {documents: {SOURCE: {file: OUTPUT.npy, epochs: "0:1"}}}

The stream's epoch 0 then holds exactly the records that Energon had not handed out, in the stream's own order.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from megaresume.checkpoint.files import write_atomic
from megaresume.hosts.loaders.energon_position import EnergonPosition, Factory, position_of
from megaresume.stream.errors import ConfigError, StateError, UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """What was carried over."""

    position: EnergonPosition
    #: records that the pass has left, and has handed out.
    left: int
    handed: int
    #: the data config that was written, and the list beside it; None: nothing is left out.
    config: Path
    documents: Path | None

    @property
    def exact(self) -> bool:
        """Whether the stream goes on exactly where Energon stood."""
        return not self.position.inexact


def factory_of(name: str) -> Factory:
    """The function that makes the run's loader, from ``module:function``; the current directory is searched too.

    Raises:
        UsageError: there is no such function.
    """
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            "the function that makes the loader cannot be imported",
            found=f"{name}: {error}",
            expected="module:function, with (rank, world_size, num_workers) -> get_savable_loader(...)",
            action="call this from the directory of the training script, or set PYTHONPATH",
        ) from error
    finally:
        sys.path.pop(0)
    made: Factory = found
    return made


def read_states(paths: Sequence[Path]) -> list[Any]:
    """The states of all data-parallel ranks, in order. Unpickles: only for files of one's own runs.

    Args:
        paths: Energon's or Megatron's files, one a rank in the order of the ranks, or one with all; or the ``--save``
            directory of a run with `megaresume.attach`.

    Raises:
        StateError, CheckpointError: a file holds no state of Energon.
        UsageError: a file is missing.
    """
    if missing := [path for path in paths if not path.exists()]:
        raise UsageError(
            f"{missing[0]} does not exist",
            found="no such file",
            expected="the saved states of the loader, or the directory of a run",
            action="check the path",
        )
    if len(paths) == 1 and paths[0].is_dir():
        return _from_checkpoint(paths[0])
    import torch

    found: list[Any] = []
    for path in paths:
        try:
            state = torch.load(path, weights_only=False, map_location="cpu")
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AttributeError, ImportError) as error:
            raise _no_state(path, f"{type(error).__name__}: {error}".splitlines()[0]) from error
        if isinstance(state, Mapping) and "dataloader_state_dict" in state:
            state = state["dataloader_state_dict"]
        found += state if isinstance(state, list) else [state]
    for state in found:
        if not hasattr(state, "worker_states"):
            raise _no_state(paths[0], f"a {type(state).__name__}")
    if len({len(state.worker_states) for state in found}) != 1:
        raise StateError(
            "the ranks' states are of different numbers of workers",
            found=", ".join(str(len(state.worker_states)) for state in found),
            expected="the same number: all files of one save, each once, in the order of the ranks",
        )
    return found


def _no_state(path: Path, found: str) -> StateError:
    return StateError(
        "this is no state of an Energon loader",
        found=f"{path}: {found}",
        expected="what save_state_rank or save_state_global returned, as torch.save or Megatron's "
        "--dataloader-save wrote it",
        action="give the files of all data-parallel ranks in order: train_dataloader_dprank*.pt",
    )


def _from_checkpoint(root: Path) -> list[Any]:
    from megaresume.checkpoint.choosing.choose import choose
    from megaresume.checkpoint.saving import rank_files
    from megaresume.hosts.loaders.states import LoaderRecord

    choice = choose(root)
    if choice is None or choice.state is None or choice.iteration is None:
        raise _no_state(root, "no checkpoint with the state of a loader")
    record = LoaderRecord.from_state(choice.state)
    if record.facts.kind != "energon":
        raise _no_state(root, f"states of {record.facts.library}")
    states = []
    for rank, entry in zip(record.ranks, record.entries(choice.iteration, choice.tag), strict=True):
        state = pickle.loads(rank_files.read(root, entry))["state"]
        if state is None:
            raise _no_state(root, "a loader at its beginning: nothing to carry over")
        for step in range(rank.skip):  # handed out by the workers in turn
            state.worker_states[(state.next_worker_id + step) % len(state.worker_states)].offset += 1
        states.append(state)
    return states


def import_energon(states: Sequence[Any], factory: Factory, *, data: Path, source: str, output: Path) -> Imported:
    """Write the data config that goes on where Energon stood.

    Args:
        states: of all data-parallel ranks, in order.
        factory: makes the run's loader.
        data: a data config in which ``source`` is the same data set (``kind: energon``).
        source: its name there.
        output: where the new config goes; the list of documents goes beside it.

    Raises:
        ConfigError: the config has no such source, or the source is another data set.
        StateError, UsageError: see `position_of`.
    """
    from megaresume.sources.catalog import open_sources
    from megaresume.sources.data_config import DataConfig

    named = DataConfig.of(data)
    mapping, directory = named.of_part("train"), named.directory
    options = (mapping.get("sources") or {}).get(source)
    if options is None:
        raise ConfigError(
            f"{data} has no source '{source}'",
            found=", ".join(mapping.get("sources") or {}),
            expected="the name of the source that is Energon's data set",
            action="--source NAME",
        )
    position = position_of(states, factory)
    _check_same(open_sources({source: options}, base_dir=directory)[source], position, source)
    handed = position.handed()
    config = _absolute(mapping, directory)
    documents = None
    if len(handed):
        documents = output.with_suffix(".npy").absolute()
        np.save(documents, handed)
        lists = config.setdefault("skip", {}).setdefault("documents", {})
        if source in lists:
            raise ConfigError(
                f"{data} leaves out documents of '{source}' already",
                found=str(lists[source])[:80],
                expected="a source of which nothing is left out",
                action=f"take {source} out of skip.documents; a run that goes on has no use for an old list",
            )
        lists[source] = {"file": str(documents), "epochs": "0:1"}
    text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    write_atomic(output.absolute(), text.encode())
    return Imported(
        position=position, left=position.records - len(handed), handed=len(handed), config=output, documents=documents
    )


def _absolute(mapping: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    from megaresume.sources.catalog import located

    config = dict(mapping)
    config["sources"] = {
        name: located({"path": options} if isinstance(options, str) else options, directory)
        for name, options in mapping["sources"].items()
    }
    if "skip" in config:
        config["skip"] = {key: dict(v) if isinstance(v, Mapping) else v for key, v in config["skip"].items()}
    return config


def _check_same(ours: Any, position: EnergonPosition, name: str) -> None:
    """Numbers mean the same record on both sides: the same count, and the same keys at a few places."""
    wrong = None
    if len(ours) != position.records:
        wrong = f"{len(ours)} documents in '{name}', {position.records} records in the loader"
    for record, key in position.keys.items():
        if wrong is None and _key(ours, record) != key:
            wrong = f"document {record} of '{name}' is {_key(ours, record)}, the loader's is {key}"
    if wrong is not None:
        raise ConfigError(
            f"source '{name}' is not the data set that the loader reads",
            found=wrong,
            expected="the same records in the same order",
            cause="another directory, another split_part, or records that only one side leaves out",
            action=f"in data.yaml: {name}: {{kind: energon, path: the directory that the loader is given}}",
        )


def _key(source: Any, document: int) -> str:
    if hasattr(source, "record"):
        return str(source.record(document).key)
    return str(source.describe(document).get("key"))
