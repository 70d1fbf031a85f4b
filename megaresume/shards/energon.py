"""A directory that Energon has prepared, read as it is: shards, split and field map of its ``.nv-meta``.

    DIR/.nv-meta/.info.json (or .info.yaml)   shard -> records
    DIR/.nv-meta/split.yaml                   train, val, test: shards of each; excluded shards and records
    DIR/.nv-meta/dataset.yaml                 sample type and field map

Source: ``flavors/webdataset/{metadata,structs,default_generic_webdataset}.py`` of megatron-energon 7.4.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml

from megaresume.corpora.yaml_text import parse_yaml
from megaresume.shards.fields import Fields, fields_of
from megaresume.shards.paths import META, braces, join
from megaresume.shards.remote import RemoteStore, is_url
from megaresume.stream.errors import CorpusError
from megaresume.stream.json_text import parse_json

__all__ = ["OUR_PARTS", "EnergonDataset", "read_energon"]

#: ours -> Energon's.
OUR_PARTS = {"train": "train", "valid": "val", "test": "test"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergonDataset:
    """What ``.nv-meta`` says."""

    #: directory or URL.
    path: str
    #: part -> names of its shards, relative to the directory, in its order; excluded shards are gone.
    parts: Mapping[str, tuple[str, ...]]
    #: shard -> records.
    counts: Mapping[str, int]
    #: shard -> keys of records to leave out.
    excluded: Mapping[str, frozenset[str]]
    #: None: the members are taken as they are (crude data sets).
    fields: Fields | None
    #: xxh3_128 of what was read: changes when the split or the field map does.
    hash: str

    def options(self) -> dict[str, str]:
        """What the header of an index remembers of it."""
        return {"hash": self.hash}


def read_energon(
    path: str | os.PathLike[str], *, split_config: str = "split.yaml", dataset_config: str = "dataset.yaml"
) -> EnergonDataset:
    """Read the metadata of a prepared data set.

    Args:
        path: directory or URL.
        split_config: name of the split file in ``.nv-meta``.
        dataset_config: name of the file with the field map in ``.nv-meta``.

    Raises:
        CorpusError: a file is missing or not as Energon writes it; an unknown shard; a data set that needs user code.
    """
    path = os.fspath(path)
    info_name, info = _first(path, (".info.json", ".info.yaml"))
    splits = (split_config, "split.json") if split_config == "split.yaml" else (split_config,)
    split_name, split = _first(path, splits)
    _, dataset = _first(path, (dataset_config,))
    counts = _checked(info.get("shard_counts"), info_name, path, dict, "shard_counts: shard -> records")
    raw_parts = _checked(split.get("split_parts"), split_name, path, dict, "split_parts: part -> shards")
    excluded = set(_braces(split.get("exclude") or []))
    parts = {
        str(name): tuple(shard for shard in _braces(shards or []) if shard not in excluded)
        for name, shards in raw_parts.items()
    }
    unknown = sorted({shard for shards in parts.values() for shard in shards} - set(counts))
    if unknown:
        raise CorpusError(
            f"{path} has shards in its split that it does not know",
            found=f"{', '.join(unknown[:3])} in {split_name}",
            expected=f"shards of {info_name}",
            cause="shards were renamed or added after energon prepare",
            action=f"run it again: energon prepare {path}",
        )
    state = json.dumps([counts, split, dataset], sort_keys=True, default=str)
    return EnergonDataset(
        path=path,
        parts=parts,
        counts=counts,
        excluded=_excluded_records(excluded, counts),
        fields=fields_of(dataset, f"{path}/{META}/{dataset_config}"),
        hash=xxhash.xxh3_128_hexdigest(state.encode()),
    )


def _excluded_records(excluded: set[str], shards: Mapping[str, Any]) -> dict[str, frozenset[str]]:
    """Energon's documentation speaks of numbers of records; what it compares is SHARD/KEY (``ITarReader``)."""
    records: dict[str, set[str]] = {}
    for entry in excluded:
        parts = entry.split("/")
        for k in range(1, len(parts)):  # shards may lie in directories, and keys have slashes
            if (shard := "/".join(parts[:k])) in shards:
                records.setdefault(shard, set()).add("/".join(parts[k:]))
    return {shard: frozenset(keys) for shard, keys in records.items()}


def _braces(patterns: list[str]) -> list[str]:
    return [name for pattern in patterns for name in braces(str(pattern))]


def _first(path: str, names: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    for name in names:
        file = f"{META}/{name}"
        content = _content(join(path, file))
        if content is None:
            continue
        try:
            data = parse_json(content) if name.endswith(".json") else parse_yaml(content.decode())
        except (ValueError, yaml.YAMLError) as error:
            raise _bad(path, file, str(error), "JSON" if name.endswith(".json") else "YAML") from error
        return file, _checked(data, file, path, dict, "a mapping")
    raise CorpusError(
        f"{path} is not a data set that Energon has prepared",
        found=f"no {META}/{' or '.join(names)}",
        expected=f"{META} with .info.json, split.yaml and dataset.yaml",
        cause="a wrong path, or energon prepare was not run, or not finished",
        action=f"run: energon prepare {path}; or give the shards themselves: '{path}/*.tar'",
    )


def _content(path: str) -> bytes | None:
    if is_url(path):
        try:
            return RemoteStore(path.partition("://")[0]).read_all(path)
        except CorpusError:
            return None
    try:
        return Path(path).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None


def _checked(value: Any, file: str, path: str, kind: type, expected: str) -> Any:
    if isinstance(value, kind):
        return value
    raise _bad(path, file, f"{value!r:.80}", expected)


def _bad(path: str, file: str, found: str, expected: str) -> CorpusError:
    return CorpusError(
        f"{file} of {path} is not as Energon writes it",
        found=found,
        expected=expected,
        cause="edited by hand, or damaged",
        action=f"correct it, or run energon prepare {path} again",
    )
