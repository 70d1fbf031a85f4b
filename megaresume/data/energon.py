"""Reads a directory prepared by Energon, unchanged: the shards, split and field map of its ``.nv-meta``.

    DIR/.nv-meta/.info.json (or .info.yaml)   shard -> records
    DIR/.nv-meta/split.yaml                   train, val, test: shards of each; excluded shards and records
    DIR/.nv-meta/dataset.yaml                 sample type and field map

Source: ``flavors/webdataset/{metadata,structs,default_generic_webdataset}.py`` of megatron-energon 7.4.

Energon's field map: which member, or which value in a JSON member, is the image, the caption, the question.

    dataset.yaml   sample_type: CaptioningSample, field_map: {image: jpg, caption: "json[text]"}
    record         jpg, json {"text": "a cat"}     ->     jpg, txt "a cat"        what the caption template reads
    VQASample      context, answers                ->     json {"conversations": [...]}    what the chat template reads

Source: ``flavors/webdataset/field_access.py`` of megatron-energon 7.4. A data set with a ``sample_loader`` or its own
class is code, not data, and is refused by name.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash
import yaml

from megaresume.data.inputs import META, braces, join
from megaresume.data.remote import RemoteStore, is_url
from megaresume.data.shard_files import RecordError
from megaresume.encoding.images.document import Record
from megaresume.stream.errors import CorpusError, parse_json
from megaresume.stream.yaml_text import parse_yaml

_ACCESS = re.compile(r"(?P<name>[^[\]]+)(?P<path>(?:\[[^[\]]+])*)")
#: class in dataset.yaml -> kind of record; None: members as they are.
_KINDS: Mapping[str, str | None] = {
    "CaptioningSample": "caption",
    "CaptioningWebdataset": "caption",
    "VQASample": "vqa",
    "VQAWebdataset": "vqa",
    "TextSample": "text",
    "TextWebdataset": "text",
    "CrudeSample": None,
    "CrudeWebdataset": None,
}
_NEEDED = {"caption": ("image", "caption"), "vqa": ("image", "context"), "text": ("text",)}
_CODE = ("sample_loader", "part_filter")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fields:
    """Maps records of a data set to records that a template knows. Its fields are plain JSON."""

    #: ``caption``, ``vqa`` or ``text``.
    kind: str
    #: field of the sample -> alternatives, each a member and the keys into its JSON.
    places: Mapping[str, Sequence[Sequence[str]]]

    def options(self) -> dict[str, Any]:
        """Plain JSON: ``Fields(**fields.options()) == fields`` up to tuples."""
        return {"kind": self.kind, "places": {name: [list(p) for p in ps] for name, ps in self.places.items()}}

    def apply(self, record: Record) -> Record:
        """The record with image and text where templates look for them.

        Raises:
            RecordError: a field is missing, or is invalid JSON.
        """
        members: dict[str, bytes] = {}
        if self.kind != "text":
            name = next((p[0] for p in self.places["image"] if p[0] in record.members), None)
            if name is None:
                raise _no_field(record, "image", self.places["image"])
            members[name] = record.members[name]
        if self.kind == "vqa":
            turns = [{"from": "human", "value": f"<image>\n{self._text(record, 'context')}"}]
            if "answers" in self.places:
                turns.append({"from": "gpt", "value": self._text(record, "answers")})
            members["json"] = json.dumps({"conversations": turns}, ensure_ascii=False).encode()
        else:
            members["txt"] = self._text(record, "text" if self.kind == "text" else "caption").encode()
        return Record(key=record.key, path=record.path, members=members)

    def _text(self, record: Record, field: str) -> str:
        for place in self.places[field]:
            value = _find(record, place)
            if isinstance(value, list) and value and isinstance(value[0], str):
                value = value[0]  # the first of several answers
            if isinstance(value, str):
                return _utf8(record, value, field)
        raise _no_field(record, field, self.places[field])


def fields_of(dataset: Mapping[str, Any], where: str) -> Fields | None:
    """The field map in a dataset.yaml; None if members are taken as they are.

    Raises:
        CorpusError: it needs code, or its kind of sample cannot be a document of text and images.
    """
    sample = dataset.get("sample_type", dataset)
    name = sample.get("__class__") if isinstance(sample, Mapping) else None
    module = sample.get("__module__") if isinstance(sample, Mapping) else None
    code = next((key for key in _CODE if key in dataset), None)
    if code is None and module != "megatron.energon":
        code = f"{module}.{name}"
    if code is not None:
        raise _not_ours(where, f"{code}: {dataset[code]!r}" if code in dataset else code, "it is read by user code")
    if not isinstance(name, str) or name not in _KINDS:
        raise _not_ours(where, str(name), "no template makes a document of it")
    kind = _KINDS[name]
    if kind is None:
        return None
    field_map = dataset.get("field_map")
    if not isinstance(field_map, Mapping) or any(field not in field_map for field in _NEEDED[kind]):
        raise _not_ours(where, f"field_map: {field_map!r:.80}", f"a field map with {', '.join(_NEEDED[kind])}")
    places = {str(field): _places(str(text)) for field, text in field_map.items()}
    return Fields(kind=kind, places=places)


def _places(text: str) -> list[list[str]]:
    places = []
    for option in text.split(","):
        found = _ACCESS.fullmatch(option)
        keys = re.findall(r"\[([^[\]]+)]", found["path"]) if found else []
        places.append([(found["name"] if found else option).strip().lower(), *keys])
    return places


def _find(record: Record, place: Sequence[str]) -> Any:
    """The value; None if it is missing."""
    content = record.members.get(place[0])
    if content is None:
        return None
    try:
        value: Any = content.decode("utf-8")
        if len(place) > 1 or place[0].rpartition(".")[2] == "json":
            value = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise RecordError(
            f"record '{record.key}': {place[0]} cannot be read",
            found=f"{len(content)} bytes that are not {'JSON' if len(place) > 1 else 'UTF-8'}",
            expected="text in UTF-8, or JSON if the field map reads into it",
            cause=str(error),
            action=f"write the record again; it is in {record.path}",
        ) from error
    for key in place[1:]:
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and key.isdecimal() and int(key) < len(value):
            value = value[int(key)]
        else:
            return None
    return value


def _utf8(record: Record, text: str, field: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RecordError(
            f"record '{record.key}': its {field} is not UTF-8",
            found="half of a surrogate pair",
            expected="text in UTF-8",
            action=f"write the record again; it is in {record.path}",
        ) from error
    return text


def _no_field(record: Record, field: str, places: Sequence[Sequence[str]]) -> RecordError:
    wanted = " or ".join(place[0] + "".join(f"[{key}]" for key in place[1:]) for place in places)
    return RecordError(
        f"record '{record.key}' has no {field}",
        found=f"members {', '.join(sorted(record.members))}",
        expected=wanted,
        cause="a record that was cut, or a field map of another layout",
        action=f"correct field_map in .nv-meta/dataset.yaml, or write the record again; it is in {record.path}",
    )


def _not_ours(where: str, found: str, why: str) -> CorpusError:
    return CorpusError(
        f"{where} describes samples that cannot be read without Energon",
        found=found,
        expected=f"{', '.join(sorted(set(_KINDS)))} of megatron.energon, with a field_map",
        cause=why,
        action="give the shards themselves (kind: webdataset, path: 'DIR/*.tar') and a template for their members",
    )


#: The names of the parts: ours -> Energon's.
OUR_PARTS = {"train": "train", "valid": "val", "test": "test"}


@dataclass(frozen=True, kw_only=True, slots=True)
class EnergonDataset:
    """The content of ``.nv-meta``."""

    #: the directory or URL.
    path: str
    #: part -> names of its shards, relative to the directory, in its order, without excluded shards.
    parts: Mapping[str, tuple[str, ...]]
    #: the number of records of each shard.
    counts: Mapping[str, int]
    #: shard -> keys of records to leave out.
    excluded: Mapping[str, frozenset[str]]
    #: the fields of a sample; None if the members are taken as they are (crude data sets).
    fields: Fields | None
    #: xxh3_128 of what was read, which changes with the split or the field map.
    hash: str

    def options(self) -> dict[str, str]:
        """The options of the data set in the header of an index."""
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
    """Energon's documentation says record numbers, but its code compares SHARD/KEY (``ITarReader``)."""
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
