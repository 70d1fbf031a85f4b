"""The pieces that a template makes of a record: text and images in the order in which the model reads them.

    members of a record  --template.pieces-->  [Image("jpg"), Text("\\n"), Text("a cat", trained)]

A page longer than a document is split into several documents (`split_page`), between its parts, never within an image:

    t t I I I I t t t t I I I I t t E        of at most 9:   t t I I I I | t t t t | I I I I t t E

An image stays with the text after it while both fit into one document; a text longer than a document is cut where the
document is full. The documents in sequence have the tokens of the page; only the last has its end of document.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from megaresume.encoding.images.document import Record
from megaresume.stream.errors import CorpusError, listed

#: the last part of an image member's name.
IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp", "gif", "bmp", "tif", "tiff", "avif", "heic", "heif")
#: The keys under which a row names its images: for lists; LLaVA; folders of Hugging Face.
IMAGE_KEYS = ("images", "image", "file_name")
#: The extensions of files that are video or sound.
MEDIA_EXTENSIONS = (
    *("mp4", "m4v", "mov", "avi", "mkv", "webm", "mpg", "mpeg"),
    *("mp3", "m4a", "wav", "flac", "ogg", "opus", "aac"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text in the document."""

    text: str
    #: whether it is trained.
    trained: bool
    #: whether the text is the template's, not the record's: special tokens in it are special tokens.
    markup: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Image:
    """An image in the document."""

    #: name of the member: "jpg", "0.png".
    member: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Missing:
    """An image that a page names and the record does not have: no token, but counted."""

    #: the name of the image, as the page has it.
    name: str


Piece = Text | Image | Missing


class Template(Protocol):
    """A frozen dataclass of its options; picklable."""

    @property
    def split(self) -> int | None:
        """The number of tokens above which a record becomes several documents; None if it is always one."""

    @property
    def missing_images(self) -> bool:
        """Whether an image that the record names and does not have is left out; otherwise it is an error."""

    @property
    def damaged_images(self) -> bool:
        """Whether a damaged image is left out, or its place masked; otherwise the record is an error."""

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """The names of a JSON row's images, which are files beside it, in order. Raises ValueError if two lists name
        images."""

    def pieces(self, record: Record) -> list[Piece]:
        """The document. Raises CorpusError if the record is not what the template expects."""


def row_images(row: Mapping[str, Any]) -> list[Any]:
    """The value under `IMAGE_KEYS` in a row. Raises ValueError: two of them with different images."""
    given = {key: row[key] for key in IMAGE_KEYS if row.get(key) is not None}
    lists = {key: list(named) if isinstance(named, list) else [named] for key, named in given.items()}
    full = {key: names for key, names in lists.items() if given[key]}
    first = next(iter((full or lists).values()), [])
    if any(names != first for names in full.values()):
        raise ValueError(f"{full!r:.120}")
    return first


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
    """The value, if it is a text that UTF-8 can represent.

    Raises:
        CorpusError: it is not.
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
    """Names of the members that are images, "2.jpg" before "10.jpg"; of a row, in its order."""
    if record.images is not None:
        return [name for name in record.images if name in record.members]
    names = [name for name in record.members if name.rpartition(".")[2] in IMAGE_EXTENSIONS]
    return sorted(names, key=_natural)


def check_shown(record: Record, pieces: Collection[Piece], *, unused: bool) -> None:
    """Check that no image, video or sound of the record is left out silently.

    Args:
        record: the record.
        pieces: its document.
        unused: whether leaving them out is allowed.

    Raises:
        CorpusError: an image that the document does not show, video or sound, unless ``unused``.
    """
    if unused:
        return
    if media := [name for name in record.members if _extension(name) in MEDIA_EXTENSIONS]:
        raise no_media(record, ", ".join(media[:4]))
    shown = {piece.member for piece in pieces if isinstance(piece, Image)}
    if left := [name for name in image_members(record) if name not in shown]:
        raise CorpusError(
            f"record '{record.key}' has images that its document does not show",
            found=f"{listed(left, 4)}; {len(shown)} are shown",
            expected="every image of the record in the document",
            cause="a template of one image for records of several, or images that the JSON does not place",
            action="take the template that shows them, correct its options, or leave them out: "
            "template.unused_images: true",
        )


def find_image(record: Record, name: object) -> str | None:
    """Find an image as `named_image` does; None if there is no such member.

    Raises:
        CorpusError: the name is none, or that of a video.
    """
    text = checked_text(record, name, "the name of an image")
    if _extension(text) in MEDIA_EXTENSIONS:
        raise no_media(record, text)
    if record.images is not None:
        return text if text in record.members else None
    file = text.rpartition("/")[2]
    own = record.key.rpartition("/")[2]
    for candidate in (text.lower(), file.lower(), file.removeprefix(f"{own}.").lower()):
        if candidate in record.members:
            return candidate
    return None


def named_image(record: Record, name: object) -> str:
    """The member that JSON calls ``name``: by its extension ("0.jpg"), or by its file name ("000123.0.jpg").

    Raises:
        CorpusError: no such member.
    """
    member = find_image(record, name)
    if member is not None:
        return member
    file, own = str(name).rpartition("/")[2], record.key.rpartition("/")[2]
    raise CorpusError(
        f"record '{record.key}' has no image '{name}'",
        found=f"members {', '.join(sorted(record.members)) or 'none'}",
        expected=f"'{own}.{file}', or a name in the JSON that is the part after '{own}.'",
        cause="an image that was not downloaded, or a path of the data set before it was written to shards",
        action=f"correct the name, or write the record again; it is in {record.path}",
    )


def no_media(record: Record, found: str) -> CorpusError:
    """Video or sound, which no processor takes."""
    return CorpusError(
        f"record '{record.key}' has video or audio, which is not supported",
        found=found,
        expected="text and images",
        action="store frames of the video as images of the record (0.jpg, 1.jpg, ...); template.unused_images: true "
        "leaves out members that the document does not show",
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
    """The error for a record without text: there would be nothing to predict."""
    return CorpusError(
        f"record '{record.key}' has no text",
        found=f"nothing but white space in {where}",
        expected="text to be predicted",
        action=f"write the record again, or see on_fault; it is in {record.path}",
    )


def _extension(name: str) -> str:
    return name.rpartition(".")[2].lower()


def _natural(name: str) -> tuple[tuple[int, int, str], ...]:
    # (kind, number, word) a part, so that numbers and words compare.
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in name.split("."))


#: Tokens, and whether they are trained on.
Words = tuple[list[int], bool]
Part = Image | Words


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A text; or an image with the tokens around it, which is never cut."""

    parts: Sequence[Part]
    #: the tokens of all parts, those of the image too.
    tokens: int
    #: record and member, for errors; None: a text.
    image: str | None = None


def split_page(units: Sequence[Unit], limit: int) -> list[list[Part]]:
    """The documents of a page.

    Args:
        units: of the page, in order; at least one.
        limit: tokens of the longest document.

    Raises:
        CorpusError: an image of more than ``limit`` tokens.
    """
    documents: list[list[Part]] = [[]]
    used = 0
    for group in _groups(units):
        together = sum(unit.tokens for unit in group) <= limit
        for piece in [_joined(group)] if together else [piece for unit in group for piece in _pieces(unit, limit)]:
            if used + piece.tokens > limit:
                documents.append([])
                used = 0
            documents[-1] += piece.parts
            used += piece.tokens
    return documents


def _groups(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Images with the text after them."""
    group: list[Unit] = []
    for unit in units:
        group.append(unit)
        if unit.image is None:
            yield group
            group = []
    if group:
        yield group


def _joined(group: Sequence[Unit]) -> Unit:
    return Unit(parts=[part for unit in group for part in unit.parts], tokens=sum(unit.tokens for unit in group))


def _pieces(unit: Unit, limit: int) -> Iterator[Unit]:
    """The unit, if it is not too long; a text in pieces."""
    if unit.tokens <= limit:
        yield unit
        return
    if unit.image is not None:
        raise CorpusError(
            f"{unit.image} does not fit into a document",
            found=f"{unit.tokens} tokens, with those around it",
            expected=f"at most {limit}, by template.split",
            action="give the processor a smaller max_pixels or max_tiles, or raise template.split",
        )
    for part in unit.parts:
        assert isinstance(part, tuple)
        ids, is_trained = part
        for start in range(0, len(ids), limit):
            piece = ids[start : start + limit]
            yield Unit(parts=[(piece, is_trained)], tokens=len(piece))
