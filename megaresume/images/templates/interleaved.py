"""Template ``interleaved``: texts and images in the order of a page; all text is trained on.

{"texts": ["A cat.", null, "It sleeps."], "images": [null, "0.jpg", null]}                          OBELICS
{"text_list": ["A cat.", "It sleeps."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 1}]}   MMC4

A cat. <image> It sleeps. <eod>        an image stands before the text of its index
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from megaresume.corpora.image_text import Record
from megaresume.images.templates.base import (
    Image,
    Piece,
    Text,
    bad_json,
    checked_text,
    image_members,
    json_member,
    named_image,
    no_text,
)
from megaresume.stream.errors import CorpusError
from megaresume.stream.schema import Options, Texts, Truth


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
    #: images of the record that the lists do not name are left out; otherwise they are errors.
    unused_images: Truth = False

    def pieces(self, record: Record) -> list[Piece]:
        """Raises CorpusError: no JSON, no lists, lists of two lengths, an unknown image, no text."""
        data = json_member(record, self.json)
        places = self._listed(record, data) if self.texts in data or "text_list" not in data else _matched(record, data)
        pieces: list[Piece] = []
        for images, text in places:
            pieces += [Image(member=named_image(record, name)) for name in images]
            if text is None or not text.strip():
                continue
            if pieces and isinstance(pieces[-1], Text):
                text = self.separator + text
            pieces.append(Text(text=text, trained=True))
        shown = {piece.member for piece in pieces if isinstance(piece, Image)}
        if not self.unused_images and (unused := [name for name in image_members(record) if name not in shown]):
            raise _unused(record, unused, len(shown))
        if not any(isinstance(piece, Text) for piece in pieces):
            raise no_text(record, "the texts")
        return pieces

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


def _unused(record: Record, names: list[str], shown: int) -> CorpusError:
    return CorpusError(
        f"record '{record.key}' has images that its page does not show",
        found=f"{', '.join(names[:4])}{' ...' if len(names) > 4 else ''}; {shown} are shown",
        expected="every image of the record in the page",
        cause="a list of images under a key other than template.images, or images that the page no longer places",
        action="correct template.images, or template.unused_images: true leaves them out",
    )


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
