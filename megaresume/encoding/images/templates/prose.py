"""Templates ``caption`` and ``interleaved``: images, and text all of which is trained on.

caption
    <image> prompt text <eod>        the prompt is not trained on, text and end of document are

interleaved
    {"texts": ["A cat.", null, "It sleeps."], "images": [null, "0.jpg", null]}                          OBELICS
    {"text_list": ["A cat.", "It sleeps."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 1}]}   MMC4

    A cat. <image> It sleeps. <eod>        an image stands before the text of its index
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from megaresume.encoding.images.document import Record
from megaresume.encoding.images.templates.base import (
    IMAGE_EXTENSIONS,
    Image,
    Missing,
    Piece,
    Text,
    bad_json,
    check_shown,
    checked_text,
    find_image,
    image_members,
    json_member,
    missing,
    named_image,
    no_text,
    row_images,
    text_member,
)
from megaresume.stream.schema import Options, Texts, Truth, Within


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption(Options):
    """One image, one text."""

    kind: ClassVar[str] = "caption"
    split: ClassVar[int | None] = None
    damaged_images: ClassVar[bool] = False
    missing_images: ClassVar[bool] = False

    #: member of the image: the first of these that is there.
    image: Texts = IMAGE_EXTENSIONS
    #: member of the text: the first of these that is there.
    text: Texts = ("txt", "caption")
    #: read the text out of the JSON member, under this key, instead.
    json_key: str | None = None
    #: between image and text; not trained on.
    prompt: str = ""
    #: image before text.
    image_first: Truth = True
    #: records without an image are documents of text alone; otherwise they are errors.
    text_only: Truth = False
    #: take white space at the ends of the text away.
    strip: Truth = True
    #: other images of the record, video and audio are left out; otherwise they are errors.
    unused_images: Truth = False

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """Under ``images``, ``image`` or ``file_name``."""
        return row_images(row)

    def pieces(self, record: Record) -> list[Piece]:
        """Raises CorpusError: no image, several, no text, not UTF-8, not JSON."""
        names = self.image if record.images is None else record.images
        member = next((name for name in names if name in record.members), None)
        shown: list[Piece] = [] if member is None else [Image(member=member)]
        if member is not None or self.text_only or not image_members(record):
            check_shown(record, shown, unused=self.unused_images)
        if member is None and not self.text_only:
            raise missing(record, self.image)
        text = self._text(record)
        text = text.strip() if self.strip else text
        if not text.strip():
            raise no_text(record, "the caption")
        caption = Text(text=text, trained=True)
        if member is None:
            return [caption]
        prompt = [Text(text=self.prompt, trained=False, markup=True)] if self.prompt else []
        return [*shown, *prompt, caption] if self.image_first else [caption, *prompt, *shown]

    def _text(self, record: Record) -> str:
        if self.json_key is not None:
            data = json_member(record, ("json",))
            if self.json_key not in data:
                keys = ", ".join(sorted(data)[:10])
                raise bad_json(
                    record, f"no '{self.json_key}' in the JSON", f"keys {keys}", f"a text in '{self.json_key}'"
                )
            return checked_text(record, data[self.json_key], f"'{self.json_key}'")
        name = next((name for name in self.text if name in record.members), None)
        if name is None:
            raise missing(record, self.text)
        return text_member(record, name)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interleaved(Options):
    """Two lists in the JSON member, of the same length; or texts, and images with the index of theirs."""

    kind: ClassVar[str] = "interleaved"

    #: member of the lists: the first of these that is there.
    json: Texts = ("json",)
    #: key of the list of texts and nulls.
    texts: str = "texts"
    #: key of the list of names of images and nulls.
    images: str = "images"
    #: between two texts with no image between them.
    separator: str = "\n"
    #: images, video and audio of the record that the lists do not name are left out; otherwise they are errors.
    unused_images: Truth = False
    #: images that the lists name and the record does not have, or has as an empty file, are left out and counted;
    #: otherwise they are errors.
    missing_images: Truth = False
    #: images that cannot be read are left out; those that cannot be decoded to the end are not shown, and nothing is
    #: learned from their places; otherwise they are errors.
    damaged_images: Truth = False
    #: tokens of the longest document: a longer page becomes several, cut between its parts; None: one document a page.
    split: Annotated[int, Within(2, 2**31 - 1)] | None = None

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """In the list of images, or in ``image_info``."""
        matched = self.texts not in row and "text_list" in row
        named = row.get("image_info" if matched else self.images)
        items = named if isinstance(named, list) else ()
        if matched:
            return [info.get("image_name") for info in items if isinstance(info, dict)]
        return [item for item in items if item is not None]

    def pieces(self, record: Record) -> list[Piece]:
        """Raises CorpusError: no JSON, no lists, lists of two lengths, an unknown image, no text."""
        data = json_member(record, self.json)
        places = self._listed(record, data) if self.texts in data or "text_list" not in data else _matched(record, data)
        pieces: list[Piece] = []
        follows_text = False
        for names, text in places:
            images = [self._image(record, name) for name in names]
            pieces += images
            follows_text = follows_text and not any(isinstance(piece, Image) for piece in images)
            if text is None or not text.strip():
                continue
            pieces.append(Text(text=self.separator + text if follows_text else text, trained=True))
            follows_text = True
        # An empty file has nothing to show.
        empty = {name for name in image_members(record) if self.missing_images and not record.members[name]}
        check_shown(record, [*pieces, *(Image(member=name) for name in empty)], unused=self.unused_images)
        if not any(isinstance(piece, Text) for piece in pieces):
            raise no_text(record, "the texts")
        return pieces

    def _image(self, record: Record, name: object) -> Piece:
        if not self.missing_images:
            return Image(member=named_image(record, name))
        member = find_image(record, name)
        return Image(member=member) if member is not None and record.members[member] else Missing(name=str(name))

    def _listed(self, record: Record, data: dict[str, Any]) -> list[tuple[list[Any], str | None]]:
        texts, images = data.get(self.texts), data.get(self.images)
        if images is None and isinstance(texts, list) and not image_members(record):
            images = [None] * len(texts)
        if not isinstance(texts, list) or not isinstance(images, list) or len(texts) != len(images):
            lengths = [f"{len(value)}" if isinstance(value, list) else "no list" for value in (texts, images)]
            raise bad_json(
                record,
                f"'{self.texts}' and '{self.images}' are not two lists of one length",
                f"{lengths[0]} and {lengths[1]}; keys {', '.join(sorted(data)[:10]) or 'none'}",
                "an item in both for each place, null in one of them",
            )
        return [
            ([] if image is None else [image], None if text is None else checked_text(record, text, "a text"))
            for text, image in zip(texts, images, strict=True)
        ]


def _matched(record: Record, data: dict[str, Any]) -> list[tuple[list[Any], str | None]]:
    texts, infos = data["text_list"], data.get("image_info", [])
    if not isinstance(texts, list) or not isinstance(infos, list):
        raise bad_json(record, "'text_list' and 'image_info' are not lists", "another type", "two lists")
    images: list[list[Any]] = [[] for _ in texts]
    for info in infos:
        index = info.get("matched_text_index") if isinstance(info, dict) else None
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < len(texts):
            raise bad_json(record, "an image without the index of its text", f"{index!r}", f"0 to {len(texts) - 1}")
        images[index].append(info.get("image_name"))
    return [(names, checked_text(record, text, "a text")) for names, text in zip(images, texts, strict=True)]
