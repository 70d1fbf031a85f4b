"""What a template makes of a record: text and images in the order in which the model reads them.

members of a record  --template.pieces-->  [Image("jpg"), Text("\\n"), Text("a cat", trained)]
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol

from megaresume.corpora.image_text import Record
from megaresume.stream.errors import CorpusError

#: the last part of the names of members that are images.
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp")


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text that stands in the document."""

    text: str
    #: is it to be predicted.
    trained: bool
    #: it comes from the template, not from the record: special tokens in it are special tokens.
    markup: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image that stands in the document."""

    #: name of the member: "jpg", "0.png".
    member: str


Piece = Text | Image


class Template(Protocol):
    """A frozen dataclass of its options; picklable."""

    def pieces(self, record: Record) -> list[Piece]:
        """The document. Raises CorpusError when the record is not what the template expects."""
        ...


def json_member(record: Record, names: Collection[str]) -> dict[str, Any]:
    """The object in the JSON member: the first of the names that is there.

    Raises:
        CorpusError: no such member, not UTF-8, not JSON, or not an object.
    """
    name = next((name for name in names if name in record.members), None)
    if name is None:
        raise missing(record, names)
    try:
        value = json.loads(record.members[name])
    except (ValueError, RecursionError) as error:
        raise CorpusError(
            f"record '{record.key}': {name} is not JSON",
            found=f"{len(record.members[name])} bytes",
            expected="one JSON object in UTF-8",
            cause=f"{type(error).__name__}: {error}",
            action=f"write the record again; it is in {record.path}",
        ) from error
    if not isinstance(value, dict):
        raise bad_json(record, f"{name} is not a JSON object", type(value).__name__, "an object: {...}")
    return value


def text_member(record: Record, name: str) -> str:
    """The text in a member.

    Raises:
        CorpusError: not UTF-8.
    """
    try:
        return record.members[name].decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"record '{record.key}': {name} is not UTF-8",
            found=f"byte 0x{record.members[name][error.start]:02x} at {error.start}",
            expected="text in UTF-8",
            action=f"write the record again; it is in {record.path}",
        ) from error


def checked_text(record: Record, value: object, where: str) -> str:
    """The value, if it is a text that UTF-8 can hold.

    Raises:
        CorpusError: it is none.
    """
    if not isinstance(value, str):
        raise bad_json(record, f"{where} is not a text", type(value).__name__, "a JSON string")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise bad_json(record, f"{where} is not UTF-8", "half of a surrogate pair", "text in UTF-8") from error
    return value


def image_members(record: Record) -> list[str]:
    """Names of the members that are images, "2.jpg" before "10.jpg"."""
    names = [name for name in record.members if name.rpartition(".")[2] in IMAGE_EXTENSIONS]
    return sorted(names, key=_natural)


def named_image(record: Record, name: object) -> str:
    """The member that JSON calls ``name``: by its extension ("0.jpg"), or by its file name ("000123.0.jpg").

    Raises:
        CorpusError: no such member.
    """
    text = checked_text(record, name, "the name of an image")
    file = text.rpartition("/")[2]
    own = record.key.rpartition("/")[2]
    for candidate in (text.lower(), file.lower(), file.removeprefix(f"{own}.").lower()):
        if candidate in record.members:
            return candidate
    raise CorpusError(
        f"record '{record.key}' has no image '{text}'",
        found=f"members {', '.join(sorted(record.members)) or 'none'}",
        expected=f"'{own}.{file}', or a name in the JSON that is the part after '{own}.'",
        cause="an image that was not downloaded, or a path of the data set before it was written to shards",
        action=f"correct the name, or write the record again; it is in {record.path}",
    )


def missing(record: Record, names: Collection[str]) -> CorpusError:
    """A record without any of these members."""
    return CorpusError(
        f"record '{record.key}' has no member {' or '.join(names)}",
        found=f"members {', '.join(sorted(record.members)) or 'none'}",
        expected=f"one of {', '.join(names)}",
        cause="a shard of another layout, or a record that was cut",
        action=f"correct the template, or write the record again; it is in {record.path}",
    )


def bad_json(record: Record, headline: str, found: str, expected: str) -> CorpusError:
    """JSON of a shape that the template does not know."""
    return CorpusError(
        f"record '{record.key}': {headline}",
        found=found,
        expected=expected,
        action=f"correct the template, or write the record again; it is in {record.path}",
    )


def no_text(record: Record, where: str) -> CorpusError:
    """Nothing to predict."""
    return CorpusError(
        f"record '{record.key}' has no text",
        found=f"nothing but white space in {where}",
        expected="text to be predicted",
        action=f"write the record again, or see on_fault; it is in {record.path}",
    )


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    # (kind, number, word) a part, so that numbers and words compare.
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("."))
