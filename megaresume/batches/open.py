"""`open_stream`: from a data.yaml, a mapping or a Megatron ``--data-path`` to a `Stream` whose samples can be read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.corpora.split import Part
from megaresume.sources import open_sources
from megaresume.sources.catalog import located
from megaresume.sources.data_config import Data, DataConfig
from megaresume.stream.config import OnChange, StreamConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream


def open_stream(
    data: Data,
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
        data: path of a data.yaml; the mapping in it; what follows ``--data-path``, as a list of words; or a
            `DataConfig`, which has read one of them.
        seq_length: tokens a sample, where the config does not say.
        seed: where the config does not say.
        split: Megatron's ``--split``, for sources without their own.
        part: train, valid or test.
        base_dir: directory that paths in a mapping or list are relative to; that of the file for a data.yaml.
        objects: sources that are Python objects, by name.
        state: where to go on; None: from sample 0.
        on_change: what a restore does where the config is not the one that the state was made with: ``refuse``, or
            ``stage``: begin a new stage there.

    Raises:
        ConfigError, CorpusError, SetupError, StateError: see `StreamConfig.from_dict`, `open_sources` and `Stream`.
    """
    named = DataConfig.of(data, base_dir)
    directory = named.directory
    config = named.stream_config(part, split=split, seq_length=seq_length, seed=seed)
    specs = {source.name: source.options for source in config.sources}
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
        if split is not None and options.get("kind") != "energon":  # which has a split of its own
            options.setdefault("split", split)
        mapping["sources"][source.name] |= options
    return mapping
