"""Energon's field map: which member, or which value in a JSON member, is the image, the caption, the question.

    dataset.yaml   sample_type: CaptioningSample, field_map: {image: jpg, caption: "json[text]"}
    record         jpg, json {"text": "a cat"}     ->     jpg, txt "a cat"        what the caption template reads
    VQASample      context, answers                ->     json {"conversations": [...]}    what the chat template reads

Source: ``flavors/webdataset/field_access.py`` of megatron-energon 7.4. A data set with a ``sample_loader`` or a class
of its own is code, not data: it is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaresume.corpora.image_text import Record
from megaresume.shards.tar import RecordError
from megaresume.stream.errors import CorpusError

__all__ = ["Fields", "fields_of"]

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
    """How records of a data set become records that a template knows. Plain JSON in its fields."""

    #: ``caption``, ``vqa`` or ``text``.
    kind: str
    #: field of the sample -> alternatives, each a member and the keys into its JSON.
    places: Mapping[str, Sequence[Sequence[str]]]

    def options(self) -> dict[str, Any]:
        """Plain JSON: ``Fields(**fields.options()) == fields`` up to tuples."""
        return {"kind": self.kind, "places": {name: [list(p) for p in ps] for name, ps in self.places.items()}}

    def apply(self, record: Record) -> Record:
        """The record with image and text where a template looks for them.

        Raises:
            RecordError: a field is not there, or JSON that is not.
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
                value = value[0]  # of several answers the first
            if isinstance(value, str):
                return _utf8(record, value, field)
        raise _no_field(record, field, self.places[field])


def fields_of(dataset: Mapping[str, Any], where: str) -> Fields | None:
    """The field map in a dataset.yaml; None where members are taken as they are.

    Raises:
        CorpusError: it needs code, or is a kind of sample that has no place in a document of text and images.
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
    """The value; None where it is not."""
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
