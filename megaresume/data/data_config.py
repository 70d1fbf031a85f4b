"""`DataConfig`: what names the data of a run, read once; in any of the forms in which people say it.

    data.yaml, the mapping in it, or the words after --data-path  --DataConfig.of-->  DataConfig
        .stream_config(part)   -->  StreamConfig    the order: metadatasets expanded, augmentation written out, typed
        .validation            -->  ValidationSet   by name

    validation:                                              # in data.yaml; without it: one set, the valid part of all
      held_out: {part: valid}                                # that part of the training's own sources
      wiki:     {sources: {wiki: {path: wiki}}}              # corpora of its own
      code:     {sources: {code: {path: code, split: "969,30,1"}}}    # the valid part of a corpus that is trained on

The classic ``--data-path``, weights and paths in one list, is read as Megatron reads it. Source of the rules:
``get_blend_from_list`` and ``BlendedMegatronDatasetBuilder`` of megatron-core.

A source of kind ``energon`` that names one of Energon's metadatasets becomes several sources of the blend:

    meta.yaml    splits: {train: {blend: [{weight: 2, path: coco}, {weight: 1, path: coyo}]}}
    data.yaml    sources: {pairs: {kind: energon, path: meta.yaml, weight: 0.3}}
      becomes    sources: {pairs/coco: {kind: energon, path: coco, weight: 1/5},
                           pairs/coyo: {kind: energon, path: coyo, weight: 1/10}}

    blend             the weights, times the weight of the source; what they count must be said (Energon: documents)
    blend_epochized   weights such that each data set is seen as often as its ``repetitions`` say
    val, test         the data sets one after the other in Energon: weights by their sizes

Weights of stages are shared out in the same way. What cannot be said in a data.yaml (join, aux, subset, other
shuffles) is refused by name. ``subflavors`` are tags for a task encoder: they do not change what is read. Source:
``metadataset/metadataset{,_v2}.py`` of megatron-energon 7.4.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from megaresume.data.catalog import expanded, open_sources
from megaresume.data.energon import OUR_PARTS
from megaresume.data.inputs import is_energon, join
from megaresume.data.layout import prefix_of
from megaresume.data.record_index import SUFFIX
from megaresume.data.split import Part, open_corpus, split_part
from megaresume.encoding.images.rgb import augmentation_from_options, augmentation_options
from megaresume.stream.config import StreamConfig
from megaresume.stream.data_yaml import IMAGE_KINDS, SOURCE_KEYS, parse_weight
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Before, Options, read, refused
from megaresume.stream.yaml_text import read_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSet(Options):
    """Samples that stay the same: of ``sources`` of their own, or a part of the training's."""

    sources: dict[Any, Any] | None = None
    #: the part of each source; None: the valid part of those that are split, the others whole.
    part: Part | None = None
    #: ``allow``: it may hold documents that are trained on.
    overlap: Literal["allow", "refuse"] = "refuse"
    #: the seed, as in a data.yaml; None: that of the training's beginning.
    seed: Any = None
    seq_length: Any = None
    packing: Any = None
    blend: Any = None

    def __post_init__(self) -> None:
        if self.sources is None and self.part is None:
            raise refused("{place} does not say what it holds", expected="sources: {...} or part: valid")
        if self.sources is None and self.part == "train":
            raise refused("{place} has no such part", found="part: train", expected="valid or test")

    @property
    def settings(self) -> dict[str, Any]:
        """The set's own seed, seq_length, packing and blend."""
        values = {name: getattr(self, name) for name in INHERITED}
        return {name: value for name, value in values.items() if value is not None}


#: The fields that a set takes from the beginning of the run, unless it says them itself.
INHERITED = tuple(f.name for f in fields(ValidationSet))[3:]


def _set_name(name: Any) -> Any:
    if not isinstance(name, str) or not name.strip() or not name.isprintable() or "|" in name:
        raise refused(
            "bad name of a validation set",
            expected="a text without |",
            action="rename it (quote it if YAML reads it as a number)",
        )
    return name


def _any_set(sets: Any) -> Any:
    if not isinstance(sets, Mapping) or not sets:
        raise refused(
            "{place} is not a mapping of sets",
            expected="validation: {NAME: {sources: {...}}, ...}",
            action="correct validation, or remove it: then the valid part of every source is one set",
        )
    return sets


_Sets = Annotated[dict[Annotated[str, Before(_set_name)], ValidationSet], Before(_any_set)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The data of a run, as it was named."""

    #: the mapping of a data.yaml, without ``validation``; empty if ``words`` name the sources.
    mapping: Mapping[str, Any]
    #: the sources as words, as after ``--data-path``.
    words: tuple[str, ...] = ()
    #: relative paths start there.
    directory: Path
    #: the declared validation sets by name; None if none are declared.
    validation: Mapping[str, ValidationSet] | None = None

    @classmethod
    def of(cls, data: DataConfigLike, base_dir: str | os.PathLike[str] = ".") -> DataConfig:
        """Read a data config.

        Args:
            data: path of a data.yaml; the mapping in it; the words after ``--data-path``; or what was read already.
            base_dir: directory that paths in a mapping or in words are relative to; that of the file for a data.yaml.

        Raises:
            ConfigError: something else; a file that is missing, unreadable, not YAML, or no mapping; bad validation
                sets.
        """
        if isinstance(data, DataConfig):
            return data
        directory = Path(base_dir)
        if isinstance(data, str | os.PathLike):
            directory = Path(data).parent
            data = read_mapping(Path(data), "a data config", "a mapping with seed, seq_length, sources and so on")
        elif not isinstance(data, Mapping):
            if not isinstance(data, Sequence):
                raise ConfigError(
                    "this is not a data config",
                    found=f"{type(data).__module__}.{type(data).__qualname__}",
                    expected="the path of a data.yaml, the mapping in it, or the words after --data-path",
                    action="megaresume.attach also takes a Stream; so does a loader that saves its own state",
                )
            return cls(mapping={}, words=tuple(data), directory=directory)
        sets = data.get("validation")
        return cls(
            mapping={key: value for key, value in data.items() if key != "validation"},
            directory=directory,
            validation=None if sets is None else read(_Sets, sets, "validation"),
        )

    def mapping_for(self, part: Part, split: str | None = None) -> dict[str, Any]:
        """The mapping for a part: what its metadatasets stand for, paths and steps of augmentation written out.

        Args:
            part: train, valid or test. What is to come in the training (stages, skips) is that of train alone.
            split: ``--split``, by which sources without weights are weighed.

        Raises:
            ConfigError: a metadataset that says what cannot be said here, or unknown augmentation.
        """
        if self.words:
            return {"sources": sources_from_data_path(self.words, base_dir=self.directory, split=split, part=part)}
        mapping = with_skip_files(expand_metadatasets(self.mapping, self.directory, part), self.directory)
        if part != "train":
            mapping["stages"] = mapping["skip"] = None  # validation stays put, whatever training changes
        if isinstance(sources := mapping.get("sources"), Mapping):
            mapping["sources"] = {name: _augmented(name, entry) for name, entry in sources.items()}
        return mapping

    def stream_config(
        self, part: Part = "train", *, split: str | None = None, seq_length: int | None = None, seed: int | None = None
    ) -> StreamConfig:
        """The definition of the order of a part.

        Args:
            part, split: as for `mapping_for`.
            seq_length: tokens a sample, if the mapping does not say.
            seed: if the mapping does not say.

        Raises:
            ConfigError: as `mapping_for` and `StreamConfig.from_dict`.
        """
        mapping = self.mapping_for(part, split)
        if seed is not None:
            mapping.setdefault("seed", seed)
        return StreamConfig.from_dict(mapping, seq_length=seq_length)


def with_skip_files(mapping: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """The mapping of a data.yaml with the files of ``skip`` under paths that hold from anywhere."""
    skip = mapping.get("skip")
    documents = skip.get("documents") if isinstance(skip, Mapping) else None
    if not isinstance(skip, Mapping) or not isinstance(documents, Mapping):
        return dict(mapping)

    def absolute_path(entry: Any) -> Any:
        if isinstance(entry, list | tuple):
            return [absolute_path(item) for item in entry]
        if not isinstance(entry, Mapping) or not isinstance(entry.get("file"), str):
            return entry
        return {**entry, "file": str((directory / entry["file"]).resolve())}

    return {**mapping, "skip": {**skip, "documents": {name: absolute_path(e) for name, e in documents.items()}}}


#: The forms of a data config that `DataConfig.of` takes.
DataConfigLike = str | os.PathLike[str] | Mapping[str, Any] | Sequence[str] | DataConfig


def _augmented(name: object, entry: Any) -> Any:
    """A source whose steps of augmentation are written out, so that a state has them with every default."""
    if not isinstance(entry, Mapping) or entry.get("augment") is None:
        return entry
    if entry.get("kind", IMAGE_KINDS[0]) not in IMAGE_KINDS:
        return entry  # which may mean something else by the word
    steps = augmentation_from_options(entry["augment"], f"sources.{name}.augment")
    return {**entry, "augment": augmentation_options(steps)}


def sources_from_data_path(
    values: Sequence[str], *, base_dir: str | Path = ".", split: str | None = None, part: Part = "train"
) -> dict[str, dict[str, Any]]:
    """The ``sources`` mapping of a data.yaml for ``--data-path VALUES``.

    Accepts one path; weights and paths in turn (``0.6 web 0.4 code``); or several paths without weights, which
    are then weighted by their tokens (of the part, if there is a split).

    Args:
        values: the words after the flag.
        base_dir: what relative paths are relative to.
        split: ``--split``, if it applies.
        part: of the split.

    Returns:
        name -> ``{"path": ..., "weight": ...}`` and ``"split"`` if there is one, in the order given.

    Raises:
        ConfigError: nothing given, or weights that do not pair up with paths.
        CorpusError: a corpus whose size is needed is missing or damaged.
    """
    words = [str(value).strip() for value in values]
    weighted = _is_weighted(words)
    paths = words[1::2] if weighted else words
    prefixes = [str(prefix_of(path)) for path in paths]
    weights: Sequence[str | int]
    if weighted:
        weights = words[0::2]
    elif len(paths) == 1:
        weights = [1]
    else:
        weights = [_tokens(Path(base_dir, prefix), split, part) for prefix in prefixes]
    entries = zip(source_names(prefixes), prefixes, weights, strict=True)
    common = {} if split is None else {"split": split}
    return {name: {"path": prefix, "weight": weight, **common} for name, prefix, weight in entries}


def source_names(prefixes: Sequence[str]) -> list[str]:
    """A name for each corpus: its file name; as many directories before it as tell it from the others; a number if
    it is given twice.

    A name depends on the set of paths alone, not on their order: it keys the permutation of the source.
    """
    unique = sorted(set(prefixes))
    names: dict[str, str] = {}
    for prefix in unique:
        parts = PurePath(prefix).parts
        for depth in range(1, len(parts) + 1):
            tail = parts[-depth:]
            if sum(PurePath(other).parts[-depth:] == tail for other in unique) == 1:
                break
        names[prefix] = "/".join(tail).replace("//", "/")
    seen: dict[str, int] = {}
    result = []
    for prefix in prefixes:
        count = seen[prefix] = seen.get(prefix, 0) + 1
        result.append(names[prefix] if count == 1 else f"{names[prefix]}#{count}")
    return result


def _is_weighted(words: Sequence[str]) -> bool:
    numbers = [_is_number(word) for word in words]
    if not words:
        problem = "nothing"
    elif not any(numbers):
        return False
    elif len(words) % 2 == 0 and all(numbers[0::2]) and not any(numbers[1::2]):
        return True
    else:
        problem = " ".join(words)
    raise ConfigError(
        "--data-path cannot be read",
        found=problem,
        expected="one path; weights and paths in turn (0.6 web_text_document 0.4 code_text_document); or paths only",
        cause="a weight without a path or a path without a weight" if words else None,
        action="correct --data-path",
    )


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _tokens(prefix: Path, split: str | None, part: Part) -> int:
    source = open_corpus(prefix)
    if split is None:
        return source.num_tokens
    return split_part(source, split, part).fingerprint().tokens


#: keys of a reference that change nothing in what is read.
_TAGS = ("subflavors", "subflavor")
_REFERENCE = ("path", "split_part", "split_config", "dataset_config", *_TAGS)
_BLENDS = {"blend": "weight", "datasets": "weight", "blend_epochized": "repetitions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Leaf:
    """One data set of a metadataset."""

    #: directory, relative to what the metadataset is relative to.
    path: str
    #: Energon's name of the part of it.
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
    """A data config without metadatasets: each is replaced by its data sets, in place; the rest is as it was.

    Args:
        data: the mapping of a data.yaml, not checked yet.
        base_dir: what its paths are relative to.
        part: train, valid or test: which split of the metadatasets.

    Raises:
        ConfigError: a metadataset that is missing, or says something that cannot be said here.
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
    """Every data set that a metadataset reaches -> its index in a directory, as ``index:`` of the source names it."""
    path = os.fspath(path)
    splits = _splits(path)
    leaves = [leaf for split in splits for leaf in _leaves(path, split, "metadataset")[1]]
    paths = list(dict.fromkeys(leaf.path for leaf in leaves))
    names = (name.replace("/", "_") for name in _names(paths, path))
    return {found: directory / (name + SUFFIX) for found, name in zip(paths, names, strict=True)}


def _entries(
    name: str, entry: Mapping[str, Any], base_dir: str, part: str, unit: str | None
) -> dict[str, tuple[Fraction, dict[str, Any]]]:
    """Name -> (share of the weight of the source, options)."""
    path = os.path.expanduser(os.path.expandvars(os.fspath(entry["path"])))
    full = join(base_dir, path)
    kind, leaves = _leaves(full, OUR_PARTS[part], name)
    files = None
    if entry.get("index") is not None:
        files = index_files(full, expanded(str(entry["index"])))
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
    """The mix of the data sets of a split (``blend`` or ``blend_epochized``), and the data sets."""
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
    """(how an inner metadataset mixes, data set) for what one entry names."""
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
    """The unit of the blend; None if the config does not say it."""
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
    """Names of data sets that do not depend on where the metadataset lies: they key the order of each."""
    return source_names([os.path.relpath(path, os.path.dirname(metadataset) or ".") for path in paths])


def _refused(path: str, found: str, expected: str, name: str) -> ConfigError:
    return ConfigError(
        f"{path}, of source '{name}', cannot be read as a blend of sources",
        found=found,
        expected=expected,
        action="name the data sets as separate sources: {kind: energon, path: DIR, weight: ...}",
    )
