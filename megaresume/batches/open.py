"""From a data.yaml, a mapping or a Megatron ``--data-path`` to a `Stream` whose samples can be read.

`open_validation` opens fixed sets: the same samples of the same documents, however the training changes.
How sets are declared: `megaresume.data.data_config`. Settings that a set leaves out (seq_length, packing, blend, seed),
and the weights of `part:` sets, are those that the run began with: they come from the first stage in the run's state,
and a later data config does not change them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megaresume.data.catalog import located, open_sources
from megaresume.data.data_config import INHERITED, DataConfig, DataConfigLike, ValidationSet
from megaresume.data.held_out import check_no_overlap, check_not_seen
from megaresume.data.source import Source
from megaresume.data.split import Part
from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

#: the name of the only set if none are declared.
DEFAULT_SET = "valid"


def open_stream(
    data: DataConfigLike,
    *,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    part: Part = "train",
    base_dir: str | os.PathLike[str] = ".",
    objects: Mapping[str, object] | None = None,
    state: StreamState | None = None,
    on_change: OnChange = "refuse",
) -> Stream:
    """Open the sources of a data config and build their stream.

    Args:
        data: path of a data.yaml; the mapping in it; the words after ``--data-path``, as a list; or a `DataConfig` made
            from one of them.
        seq_length: tokens per sample, if the config does not say.
        seed: if the config does not say.
        split: Megatron's ``--split``, for sources without their own.
        part: train, valid or test.
        base_dir: directory that paths in a mapping or list are relative to; that of the file for a data.yaml.
        objects: sources that are Python objects, by current name.
        state: where to continue; None: from sample 0.
        on_change: what a restore does if the config differs from the state's: ``refuse``, or begin a new ``stage``.

    Raises:
        ConfigError, CorpusError, SetupError, StateError: see `StreamConfig.from_dict`, `open_sources` and `Stream`.
    """
    named = DataConfig.of(data, base_dir)
    directory = named.directory
    config = named.stream_config(part, split=split, seq_length=seq_length, seed=seed)
    specs = {source.label: source.options for source in config.sources}
    opened = open_sources(specs, base_dir=directory, split=split, part=part, objects=objects)
    origin = None if objects or part != "train" else _origin(config, directory, split)
    return Stream(config, list(opened.values()), state=state, origin=origin, on_change=on_change)


def _origin(config: StreamConfig, directory: Path, split: str | None) -> dict[str, Any]:
    """A data config that opens the same train part again, from any directory."""
    mapping = config.to_dict()
    if config.skip:
        mapping["skip"] = config.skip.to_dict(files=True)
    for source in config.sources:
        options = located(source.options, directory)
        if split is not None and options.get("kind") != "energon":  # energon has its own split
            options.setdefault("split", split)
        mapping["sources"][source.name] |= options
    return mapping


def open_validation(
    data: DataConfigLike,
    training: Stream,
    *,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    base_dir: str | os.PathLike[str] = ".",
    objects: Mapping[str, object] | None = None,
    state: StreamState | None = None,
) -> dict[str, Stream]:
    """Open the validation sets of a data config.

    Args:
        data: as for `open_stream`; its key ``validation`` names the sets.
        training: the training stream, whose documents no set may hold.
        seq_length, seed, split, base_dir, objects: as for `open_stream`.
        state: of the run that continues; default: what ``training`` was restored from.

    Returns:
        streams from sample 0, by name of the set.

    Raises:
        ConfigError: an invalid set; or a set with documents that are trained on, naming both ranges.
        CorpusError, SetupError: see `open_stream`.
    """
    named = DataConfig.of(data, base_dir)
    sets = {DEFAULT_SET: ValidationSet(part="valid")} if named.validation is None else named.validation
    common: dict[str, Any] = {"seq_length": seq_length, "seed": seed, "state": state or training.base_state}
    opened = {}
    for name, one in sets.items():
        if one.sources is not None:
            stream = _open_set(named, one, **common)
        else:
            part: Part = one.part or "valid"
            stream = open_part(named, part=part, own=one.settings, split=split, objects=objects, **common)
        if one.overlap == "refuse":
            check_held_out(training, stream, name, common["state"])
        opened[name] = stream
    return opened


def check_held_out(training: Stream, held_out: Stream, name: str, state: StreamState | None) -> None:
    """Refuse a validation stream that holds documents of the training stream's past or present sources.

    Args:
        training, held_out: the streams.
        name: of the validation set.
        state: of the run that continues; None if it begins.

    Raises:
        ConfigError: naming both ranges.
    """
    trained, held = (
        dict(zip((s.name for s in stream.config.sources), stream.sources, strict=True))
        for stream in (training, held_out)
    )
    check_no_overlap(trained, held, name)
    seen = {}
    if state is not None:
        seen = {source: state.fingerprints[source] for source, cursor in state.sources.items() if cursor.documents}
    check_not_seen(seen | training.fingerprints, held, name)


def open_part(
    data: DataConfigLike,
    *,
    part: Part,
    state: StreamState | None,
    own: Mapping[str, Any] | None = None,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    base_dir: str | os.PathLike[str] = ".",
    objects: Mapping[str, object] | None = None,
    left_out: Sequence[str] = (),
) -> Stream:
    """The valid or test part of the training's own sources, blended and packed as the run began.

    Args:
        data, seq_length, seed, split, base_dir, objects: as for `open_stream`.
        part: valid or test.
        state: of the run; None if it begins.
        own: seed, seq_length, packing and blend, if they differ from those of the training.
        left_out: sources of the training that have no such part.
    """
    named = DataConfig.of(data, base_dir)
    if named.words:
        of_part, of_training = (named.mapping_for(p, split)["sources"] for p in (part, "train"))
        if [s["weight"] for s in of_part.values()] != [s["weight"] for s in of_training.values()]:
            state = None  # corpora without weights are weighted by size, which no flag changes
    config = named.stream_config(part, split=split, seq_length=seq_length, seed=seed)
    if state is not None:
        config = as_begun(config, state, left_out)
    if own:
        said = StreamConfig.from_dict(config.to_dict() | dict(own))
        config = replace(config, seed=said.seed, seq_length=said.seq_length, packing=said.packing, blend=said.blend)
    # Validation has no end: epoch limits are for the training.
    config = replace(config, sources=tuple(replace(s, max_epochs=None, on_exhausted="drop") for s in config.sources))
    specs = {source.label: source.options for source in config.sources}
    opened = open_sources(specs, base_dir=named.directory, split=split, part=part, objects=objects)
    return Stream(config, list(opened.values()))


def _open_set(
    named: DataConfig, one: ValidationSet, *, seq_length: int | None, seed: int | None, state: StreamState | None
) -> Stream:
    """A set with sources of its own."""
    if state is not None:
        above = {key: state.stages[0].config[key] for key in INHERITED}
    else:
        above = {key: value for key in INHERITED if (value := named.mapping.get(key)) is not None}
        above |= {} if seq_length is None else {"seq_length": seq_length}
        above |= {} if seed is None else {"seed": above.get("seed", seed)}
    own = DataConfig(mapping=above | one.settings | {"sources": one.sources}, directory=named.directory)
    config = own.stream_config()
    sources: list[Source] = []
    for source in config.sources:
        parted = "split" in source.options or source.options.get("kind") == "energon"
        part = one.part or ("valid" if parted else "train")
        sources += open_sources({source.label: source.options}, base_dir=named.directory, part=part).values()
    return Stream(config, sources)


def as_begun(config: StreamConfig, state: StreamState, left_out: Sequence[str] = ()) -> StreamConfig:
    """The blend and packing that a run began with, over the current locations of its sources.

    Args:
        config: the current one.
        state: of the run.
        left_out: sources without such a part.

    Raises:
        ConfigError: a source that validation measures was removed.
    """
    begun = StreamConfig.from_dict(state.stages[0].config)
    now = {source.name: source for source in config.sources}
    measured = [source for source in begun.sources if source.weight and source.name not in left_out]
    gone = [source.name for source in measured if source.name not in now]
    if gone:
        raise ConfigError(
            "the data config lacks sources that validation measures",
            found=", ".join(now),
            expected=f"{', '.join(gone)} as well: validation stays what it was when the run began",
            cause="the sources were removed from the training",
            action=f"keep {gone[0]} with weight 0; or declare sets: validation: {{NAME: {{sources: ...}}}}",
        )
    sources = tuple(replace(source, options=now[source.name].options) for source in measured)
    return replace(
        config,
        seed=begun.seed,
        seq_length=begun.seq_length,
        packing=begun.packing,
        blend=begun.blend,
        sources=sources,
        stages=(),
    )
