"""`DataConfig`: names the data of a run, in any of the forms that users write; read once.

    data.yaml, the mapping in it, or the words after --data-path  --DataConfig.of-->  DataConfig
        .stream_config(part)   -->  StreamConfig    the order: metadatasets expanded, augmentation written out, typed
        .validation            -->  ValidationSet   by name

    validation:                                              # in data.yaml; without it: one set, the valid part of all
      held_out: {part: valid}                                # that part of the training's own sources
      wiki:     {sources: {wiki: {path: wiki}}}              # corpora of its own
      code:     {sources: {code: {path: code, split: "969,30,1"}}}    # the valid part of a corpus that is trained on

`megaresume.data.data_path` parses the words, `megaresume.data.metadatasets` Energon's metadatasets.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

from megaresume.data.data_path import sources_from_data_path
from megaresume.data.metadatasets import expand_metadatasets
from megaresume.data.split import Part
from megaresume.encoding.images.rgb import augmentation_from_options, augmentation_options
from megaresume.stream.config import StreamConfig
from megaresume.stream.data_yaml import IMAGE_KINDS
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Before, Options, read, refused
from megaresume.stream.yaml_text import read_mapping


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationSet(Options):
    """A fixed set of samples: from ``sources`` of its own, or from a part of the training's."""

    sources: dict[Any, Any] | None = None
    #: the part of each source; None: the valid part of sources with a split, and all of the others.
    part: Part | None = None
    #: ``allow``: it may contain documents that are trained on.
    overlap: Literal["allow", "refuse"] = "refuse"
    #: the seed, as in a data.yaml; None: the seed that the training began with.
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


#: The fields that a set takes from the beginning of the run, unless it has its own.
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
    """The data of a run, as named by the user."""

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
            data: path of a data.yaml; its mapping; the words after ``--data-path``; or a `DataConfig`.
            base_dir: directory that paths in a mapping or in words are relative to; that of the file for a data.yaml.

        Raises:
            ConfigError: of another type; a file that is missing, unreadable, not YAML, or not a mapping; bad validation
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
        """The mapping for a part, with metadatasets expanded, and paths and augmentation steps written out.

        Args:
            part: train, valid or test. Future changes (stages, skips) only apply to train.
            split: ``--split``, by which sources without weights are weighted.

        Raises:
            ConfigError: a metadataset with settings that have no equivalent here, or unknown augmentation.
        """
        if self.words:
            return {"sources": sources_from_data_path(self.words, base_dir=self.directory, split=split, part=part)}
        mapping = with_skip_files(expand_metadatasets(self.mapping, self.directory, part), self.directory)
        if part != "train":
            mapping["stages"] = mapping["skip"] = None  # validation is fixed, whatever changes in training
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
    """The mapping of a data.yaml with absolute paths to the files of ``skip``."""
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
    """A source with its augmentation steps written out, so that a state has them with every default."""
    if not isinstance(entry, Mapping) or entry.get("augment") is None:
        return entry
    if entry.get("kind", IMAGE_KINDS[0]) not in IMAGE_KINDS:
        return entry  # the word may mean something else to another kind
    steps = augmentation_from_options(entry["augment"], f"sources.{name}.augment")
    return {**entry, "augment": augmentation_options(steps)}
