"""Validation sets that stay put: the same samples of the same documents, whatever becomes of the training.

    validation:                                              # in data.yaml; without it: one set, the valid part of all
      held_out: {part: valid}                                # that part of the training's own sources
      wiki:     {sources: {wiki: {path: wiki}}}              # corpora of its own
      code:     {sources: {code: {path: code, split: "969,30,1"}}}    # the valid part of a corpus that is trained on

What a set does not say itself (seq_length, packing, blend, seed) is as the run began with, and so are the weights of
`part:` sets: the first stage in the run's state says it, and a later data config does not move it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from megaresume.corpora.base import Source
from megaresume.corpora.split import PARTS, Part
from megaresume.sources import open_sources, sources_from_data_path
from megaresume.sources.catalog import read_data_config, read_validation
from megaresume.sources.metadataset import expand_metadatasets
from megaresume.sources.overlap import check_no_overlap, check_not_seen
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import ConfigError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

__all__ = ["DEFAULT_SET", "as_begun", "check_held_out", "open_part", "open_validation"]

#: the set where no sets are declared.
DEFAULT_SET = "valid"
_INHERITED = ("seed", "seq_length", "packing", "blend")
_KEYS = ("sources", "part", "overlap", *_INHERITED)


def open_validation(
    data: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str],
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
        training: the training stream: what no set may hold.
        seq_length, seed, split, base_dir, objects: as for `open_stream`.
        state: of the run that goes on; default: what ``training`` was restored from.

    Returns:
        streams from sample 0, by name of the set.

    Raises:
        ConfigError: a set that is not one; a set that holds documents which are trained on, naming both ranges.
        CorpusError, SetupError: see `open_stream`.
    """
    directory, declared = Path(base_dir), None
    if isinstance(data, str | os.PathLike):
        directory, declared = Path(data).parent, read_validation(Path(data))
    elif isinstance(data, Mapping):
        declared = data.get("validation")
    sets = {DEFAULT_SET: {"part": "valid"}} if declared is None else _checked(declared)
    common: dict[str, Any] = {"seq_length": seq_length, "seed": seed, "state": state or training.base_state}
    opened = {}
    for name, entry in sets.items():
        own = {key: value for key, value in entry.items() if key in _INHERITED}
        if "sources" in entry:
            stream = _open_set(data, entry, own, directory, **common)
        else:
            stream = open_part(
                data,
                part=cast(Part, entry["part"]),
                own=own,
                split=split,
                base_dir=directory,
                objects=objects,
                **common,
            )
        if entry.get("overlap", "refuse") == "refuse":
            check_held_out(training, stream, name, common["state"])
        opened[name] = stream
    return opened


def check_held_out(training: Stream, held_out: Stream, name: str, state: StreamState | None) -> None:
    """Refuse a validation stream that holds documents of the training stream's sources, or of those that it once had.

    Args:
        training, held_out: the streams.
        name: of the validation set.
        state: of the run that goes on; None: it begins.

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
    data: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str],
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
        state: of the run; None: it begins.
        own: seed, seq_length, packing and blend where they are not those of the training.
        left_out: sources of the training that have no such part.
    """
    directory = Path(base_dir)
    if isinstance(data, str | os.PathLike):
        mapping, directory = read_data_config(Path(data), part=part)
    elif isinstance(data, Mapping):
        mapping = expand_metadatasets(data, directory, part)
    else:
        of_part, of_training = (
            sources_from_data_path(data, base_dir=directory, split=split, part=p) for p in (part, "train")
        )
        mapping = {"sources": of_part}
        if [s["weight"] for s in of_part.values()] != [s["weight"] for s in of_training.values()]:
            state = None  # corpora without weights are weighed by their documents, which no flag moves
    if seed is not None:
        mapping.setdefault("seed", seed)
    config = StreamConfig.from_dict(_without_plans(mapping), seq_length=seq_length)
    if state is not None:
        config = as_begun(config, state, left_out)
    if own:
        said = StreamConfig.from_dict(config.to_dict() | dict(own))
        config = replace(config, seed=said.seed, seq_length=said.seq_length, packing=said.packing, blend=said.blend)
    # Validation has no end: epochs are counted for the training.
    config = replace(config, sources=tuple(replace(s, max_epochs=None, on_exhausted="drop") for s in config.sources))
    specs = {source.name: source.options for source in config.sources}
    opened = open_sources(specs, base_dir=directory, split=split, part=part, objects=objects)
    return Stream(config, list(opened.values()))


def _open_set(
    data: Any,
    entry: Mapping[str, Any],
    own: Mapping[str, Any],
    directory: Path,
    *,
    seq_length: int | None,
    seed: int | None,
    state: StreamState | None,
) -> Stream:
    """A set with sources of its own."""
    if state is not None:
        above = {key: state.stages[0].config[key] for key in _INHERITED}
    else:
        said = read_data_config(Path(data))[0] if isinstance(data, str | os.PathLike) else dict(data)
        above = {key: said[key] for key in _INHERITED if said.get(key) is not None}
        above |= {} if seq_length is None else {"seq_length": seq_length}
        above |= {} if seed is None else {"seed": above.get("seed", seed)}
    config = StreamConfig.from_dict(above | dict(own) | {"sources": entry["sources"]})
    sources: list[Source] = []
    for source in config.sources:
        parted = "split" in source.options or source.options.get("kind") == "energon"
        part: Part = entry.get("part", "valid" if parted else "train")
        sources += open_sources({source.name: source.options}, base_dir=directory, part=part).values()
    return Stream(config, sources)


def _without_plans(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Without what is to come in the training: stages and skips."""
    return {key: value for key, value in mapping.items() if key not in ("stages", "skip", "validation")}


def _checked(declared: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(declared, Mapping) or not declared:
        raise ConfigError(
            "validation is not a mapping of sets",
            found=f"{declared!r:.60}",
            expected="validation: {NAME: {sources: {...}}, ...}",
            action="correct validation, or remove it: then the valid part of every source is one set",
        )
    for name, entry in declared.items():
        if not isinstance(name, str) or not name.strip() or not name.isprintable() or "|" in name:
            raise ConfigError(
                "bad name of a validation set",
                found=repr(name),
                expected="a text without |",
                action="rename it (quote it if YAML reads it as a number)",
            )
        unknown = [key for key in entry if key not in _KEYS] if isinstance(entry, Mapping) else []
        says_what = isinstance(entry, Mapping) and ("sources" in entry or "part" in entry)
        if not says_what or unknown or entry.get("overlap", "refuse") not in ("allow", "refuse"):
            raise ConfigError(
                f"validation set '{name}' is not one",
                found=f"unknown key '{unknown[0]}'" if unknown else f"{entry!r:.80}",
                expected=f"sources: {{...}} or part: valid, and of {', '.join(_KEYS[2:])} what is not as in the "
                "training; overlap: allow or refuse",
                action=f"correct '{name}'",
            )
        if "part" in entry and (entry["part"] not in PARTS or (entry["part"] == "train" and "sources" not in entry)):
            raise ConfigError(
                f"validation set '{name}' has no such part",
                found=f"part: {entry['part']}",
                expected="valid or test",
                action=f"correct '{name}'",
            )
    return {name: dict(entry) for name, entry in declared.items()}


def as_begun(config: StreamConfig, state: StreamState, left_out: Sequence[str] = ()) -> StreamConfig:
    """The blend and the packing that a run began with, over the places that its data config names today.

    Args:
        config: of today.
        state: of the run.
        left_out: sources that have no part to be measured.

    Raises:
        ConfigError: a source that validation measures is gone.
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
