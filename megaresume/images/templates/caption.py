"""Template ``caption``: an image and the text that belongs to it.

<image> prompt text <eod>        the prompt is not trained on, text and end of document are
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megaresume.corpora.base import Record
from megaresume.images.templates.base import (
    IMAGE_EXTENSIONS,
    Image,
    Piece,
    Text,
    bad_json,
    check_shown,
    checked_text,
    image_members,
    json_member,
    missing,
    no_text,
    row_images,
    text_member,
)
from megaresume.stream.schema import Options, Texts, Truth


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
