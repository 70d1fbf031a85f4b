"""Expands Energon's metadatasets, which describe a blend of data sets, into sources of a data config.

A source of kind ``energon`` that names one of Energon's metadatasets becomes several sources of the blend:

    meta.yaml    splits: {train: {blend: [{weight: 2, path: coco}, {weight: 1, path: coyo}]}}
    data.yaml    sources: {pairs: {kind: energon, path: meta.yaml, weight: 0.3}}
      becomes    sources: {pairs/coco: {kind: energon, path: coco, weight: 1/5},
                           pairs/coyo: {kind: energon, path: coyo, weight: 1/10}}

    blend             the weights, times the weight of the source; their unit must be set (Energon: documents)
    blend_epochized   weights such that each data set is seen as often as its ``repetitions`` say
    val, test         Energon reads the data sets one after the other: weights by their sizes

Weights of stages are distributed in the same way. Anything that a data.yaml cannot express (join, aux, subset, other
shuffles) is refused by name. ``subflavors`` are tags for a task encoder and do not change what is read. Source:
``metadataset/metadataset{,_v2}.py`` of megatron-energon 7.4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaresume.data.catalog import open_sources
from megaresume.data.data_path import source_names
from megaresume.data.energon import OUR_PARTS
from megaresume.data.inputs import expanded, is_energon, join
from megaresume.data.record_index import SUFFIX
from megaresume.stream.data_yaml import SOURCE_KEYS, parse_weight
from megaresume.stream.errors import ConfigError
from megaresume.stream.yaml_text import read_mapping

#: keys of a reference that do not change what is read.
_TAGS = ("subflavors", "subflavor")
_REFERENCE = ("path", "split_part", "split_config", "dataset_config", *_TAGS)
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leaf:
    """One data set of a metadataset."""

    #: directory, relative to the base of the metadataset.
    path: str
    #: Energon's name of the split part.
    part: str
    #: parts of the blend; under ``blend_epochized``, repetitions.
    weight: Fraction
    split_config: str | None
    dataset_config: str | None


def is_metadataset(path: object) -> bool:
    """Whether a path names a metadataset rather than a directory."""
    return isinstance(path, str | os.PathLike) and os.fspath(path).endswith((".yaml", ".yml"))


def expand_metadatasets(
    data: Mapping[str, Any], base_dir: str | os.PathLike[str], part: str = "train"
) -> dict[str, Any]:
    """A data config with each metadataset replaced by its data sets, in place.

    Args:
        data: the mapping of a data.yaml, not checked yet.
        base_dir: the base of its paths.
        part: train, valid or test: which split of the metadatasets.

    Raises:
        ConfigError: a metadataset that is missing, or has settings with no equivalent here.
        CorpusError: sizes are needed, and the index of a data set is missing.
    """
    sources = data.get("sources")
    if not isinstance(sources, Mapping):
        return dict(data)
    shares: dict[str, dict[str, Fraction]] = {}
    replaced: dict[Any, Any] = {}
    for name, entry in sources.items():
        if isinstance(entry, Mapping) and entry.get("kind") == "energon" and is_metadataset(entry.get("path")):
            entries = _entries(str(name), entry, str(base_dir), part, _unit(data))
            shares[name] = {leaf: weight for leaf, (weight, _) in entries.items()}
            whole = parse_weight(entry.get("weight", 1), str(name))
            replaced |= {leaf: {**options, "weight": str(whole * share)} for leaf, (share, options) in entries.items()}
        else:
            replaced[name] = entry
    if not shares:
        return dict(data)
    result = {**data, "sources": replaced}
    if isinstance(data.get("stages"), list | tuple):
        result["stages"] = [_stage(stage, shares) for stage in data["stages"]]
    return result


def index_files(path: str | os.PathLike[str], directory: Path) -> dict[str, Path]:
    """Every data set that a metadataset reaches -> its index in a directory, as in ``index:`` of the source."""
    path = os.fspath(path)
    splits = _splits(path)
    leaves = [leaf for split in splits for leaf in _leaves(path, split, "metadataset")[1]]
    paths = list(dict.fromkeys(leaf.path for leaf in leaves))
    names = (name.replace("/", "_") for name in _names(paths, path))
    return {found: directory / (name + SUFFIX) for found, name in zip(paths, names, strict=True)}


def _entries(
    name: str, entry: Mapping[str, Any], base_dir: str, part: str, unit: str | None
) -> dict[str, tuple[Fraction, dict[str, Any]]]:
    """Name -> (share of the source's weight, options)."""
    path = expanded(entry["path"])
    full = join(base_dir, path)
    kind, leaves = _leaves(full, OUR_PARTS[part], name)
    files = None
    if entry.get("index") is not None:
        files = index_files(full, Path(expanded(str(entry["index"]))))
    sized = kind == "blend_epochized" or part != "train"
    if unit is None and not sized and len(leaves) > 1:
        raise ConfigError(
            f"{full}, of source '{name}': it does not say what its weights count",
            found="a blend of data sets, and no blend.unit in the data config",
            expected="blend: {unit: documents}, as Energon counts, or blend: {unit: tokens}",
            cause="weights count tokens by default: data sets of long documents would be seen less often than "
            "under Energon",
            action="add blend: {unit: documents} to the data config; it applies to all sources, text too",
        )
    repetitions = {leaf: leaf.weight if kind == "blend_epochized" else Fraction(1) for leaf in leaves}
    names = _names([leaf.path for leaf in leaves], full)
    found: dict[str, tuple[Fraction, dict[str, Any]]] = {}
    for leaf, short in zip(leaves, names, strict=True):
        options = {key: value for key, value in entry.items() if key not in ("path", "index", "weight")}
        options["path"] = leaf.path if os.path.isabs(path) else os.path.relpath(leaf.path, base_dir)
        if files is not None:
            options["index"] = str(files[leaf.path])
        if leaf.part != OUR_PARTS[part]:
            options["split_part"] = leaf.part
        options |= {
            key: value for key in ("split_config", "dataset_config") if (value := getattr(leaf, key)) is not None
        }
        weight = leaf.weight
        if sized:
            weight = repetitions[leaf] * _size(options, name, base_dir, part, unit or "tokens")
        if kind == "blend_epochized" and options.get("max_epochs") is not None:
            options["max_epochs"] = _epochs(options["max_epochs"], leaf, name)
        short += "" if leaf.part == OUR_PARTS[part] else f":{leaf.part}"
        if isinstance(was := options.get("was"), str | list | tuple):
            options["was"] = [f"{one}/{short}" for one in ([was] if isinstance(was, str) else was)]
        found[f"{name}/{short}"] = (weight, options)
    total = sum(weight for weight, _ in found.values())
    if not total:
        raise _refused(full, "weights that are all 0", "at least one data set with a weight", name)
    return {label: (weight / total, options) for label, (weight, options) in found.items()}


def _leaves(path: str, split: str, name: str, within: tuple[str, ...] = ()) -> tuple[str, list[_Leaf]]:
    """How a split mixes its data sets (``blend`` or ``blend_epochized``), and the data sets."""
    if path in within:
        raise _refused(path, "itself, by way of " + " and ".join(within), "no circle", name)
    node = _splits(path).get(split)
    if not isinstance(node, Mapping):
        raise _refused(path, f"no split '{split}'", f"splits: {{{split}: ...}}", name)
    kind = next((key for key in _BLENDS if key in node), None)
    if kind is None:
        _check_keys(node, _REFERENCE, path, name)
        leaves = list(_reference(node, path, split, Fraction(1), None, name, within))
        return (leaves[0][0] or "blend") if leaves else "blend", [leaf for _, leaf in leaves]
    _check_keys(node, (kind,), path, name)
    word = "blend_epochized" if kind == "blend_epochized" else "blend"
    entries = node[kind]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise _refused(path, f"{kind}: {entries!r:.60}", "a list of data sets", name)
    weights = []
    for entry in entries:
        if not isinstance(entry, Mapping):
            raise _refused(path, f"{entry!r:.60} in {kind}", "path, and weight or repetitions", name)
        _check_keys(entry, (*_REFERENCE, _BLENDS[kind], "shuffle_over_epochs_multiplier"), path, name)
        weights.append(parse_weight(entry.get(_BLENDS[kind], 1), f"{name}, {entry.get('path')}"))
    total = sum(weights) if word == "blend" else Fraction(1)
    found = []
    for entry, weight in zip(entries, weights, strict=True):
        share = weight / total if total else weight
        for inner, leaf in _reference(entry, path, split, share, word, name, within):
            if inner not in (None, word):
                raise _refused(path, f"{word} of a metadataset with {inner}", "one way of mixing", name)
            found.append(leaf)
    return word, found


def _reference(
    entry: Mapping[str, Any],
    path: str,
    split: str,
    weight: Fraction,
    word: str | None,
    name: str,
    within: tuple[str, ...],
) -> Iterator[tuple[str | None, _Leaf]]:
    """(how an inner metadataset mixes, data set) for each data set of an entry."""
    target = entry.get("path")
    if not isinstance(target, str) or not target:
        raise _refused(path, f"{dict(entry)!r:.80}", "path: of a data set or a metadataset", name)
    if entry.get("shuffle_over_epochs_multiplier", 1) != 1:
        raise _refused(
            path,
            f"shuffle_over_epochs_multiplier: {entry['shuffle_over_epochs_multiplier']}",
            "1: each record once in an epoch",
            name,
        )
    full = os.path.normpath(os.path.join(os.path.dirname(path), target))
    part = str(entry.get("split_part") or split)
    if is_metadataset(full):
        inner, leaves = _leaves(full, part, name, (*within, path))
        for leaf in leaves:
            yield inner if len(leaves) > 1 else None, replace(leaf, weight=leaf.weight * weight)
        return
    if not is_energon(full):
        raise _refused(
            path, f"path: {target}, which is not a directory with .nv-meta", "data sets that Energon prepared", name
        )
    yield (
        None,
        _Leaf(
            path=full,
            part=part,
            weight=weight,
            split_config=entry.get("split_config"),
            dataset_config=entry.get("dataset_config"),
        ),
    )


def _splits(path: str) -> Mapping[str, Any]:
    known = ("Metadataset", "MetadatasetV2")
    holds = f"__class__: {' or '.join(known)}, with splits"
    data = read_mapping(Path(path), "a metadataset of Energon", holds)
    splits = data.get("splits")
    if data.get("__class__", "Metadataset") not in known or not isinstance(splits, Mapping):
        raise ConfigError(
            f"{path} is not a metadataset of Energon",
            found=f"{data.get('__class__', list(data))}",
            expected=holds,
            action="check the path: pass a data.yaml to the command itself",
        )
    return splits


def _check_keys(node: Mapping[str, Any], known: Sequence[str], path: str, name: str) -> None:
    for key, value in node.items():
        if key not in known and value is not None and key != "shuffle_over_epochs_multiplier":
            raise _refused(path, f"{key}: {value!r:.60}", f"{', '.join(known)}", name)


def _size(options: Mapping[str, Any], name: str, base_dir: str, part: str, unit: str) -> int:
    """Documents or tokens of a data set, from its index."""
    specs = {name: {key: value for key, value in options.items() if key not in SOURCE_KEYS}}
    source = open_sources(specs, base_dir=base_dir, part=part)[name]  # type: ignore[arg-type]
    fingerprint = source.fingerprint()
    return fingerprint.tokens if unit == "tokens" else fingerprint.documents


def _epochs(max_epochs: Any, leaf: _Leaf, name: str) -> int:
    epochs = Fraction(max_epochs) * leaf.weight if isinstance(max_epochs, int) else Fraction(1, 2)
    if epochs.denominator != 1 or epochs < 1:
        raise _refused(
            leaf.path,
            f"max_epochs {max_epochs} of '{name}', repetitions {float(leaf.weight)}",
            "a whole number of epochs of each data set",
            name,
        )
    return int(epochs)


def _unit(data: Mapping[str, Any]) -> str | None:
    """The unit of the blend; None if not set."""
    blend = data.get("blend")
    return str(blend["unit"]) if isinstance(blend, Mapping) and "unit" in blend else None


def _stage(stage: Any, shares: Mapping[str, Mapping[str, Fraction]]) -> Any:
    """A stage whose weights name the data sets instead of the metadatasets."""
    if not isinstance(stage, Mapping) or not isinstance(stage.get("weights"), Mapping):
        return stage
    weights: dict[Any, Any] = {}
    for name, weight in stage["weights"].items():
        if name in shares:
            whole = parse_weight(weight, str(name))
            weights |= {leaf: str(whole * share) for leaf, share in shares[name].items()}
        else:
            weights[name] = weight
    return {**stage, "weights": weights}


def _names(paths: Sequence[str], metadataset: str) -> list[str]:
    """Names of data sets that do not depend on the metadataset's location: they key the order of each."""
    return source_names([os.path.relpath(path, os.path.dirname(metadataset) or ".") for path in paths])


def _refused(path: str, found: str, expected: str, name: str) -> ConfigError:
    return ConfigError(
        f"{path}, of source '{name}', cannot be read as a blend of sources",
        found=found,
        expected=expected,
        action="name the data sets as separate sources: {kind: energon, path: DIR, weight: ...}",
    )
