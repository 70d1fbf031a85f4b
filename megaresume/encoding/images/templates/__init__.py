"""Templates by kind: how the members of a record become one document.

prose.py  caption      an image, a text                            trained on: the text
          interleaved  images, lists of texts and images in JSON   every text
chat.py   chat         images, a conversation in JSON              the assistant's turns

base.py says what a template makes of a record.
"""

from __future__ import annotations

from typing import Any

from megaresume.encoding.images.templates.base import Image, Missing, Piece, Template, Text
from megaresume.encoding.images.templates.chat import Chat
from megaresume.encoding.images.templates.prose import Caption, Interleaved
from megaresume.stream.schema import read_kind

__all__ = ["KINDS", "Image", "Missing", "Piece", "Template", "Text", "template_from_options"]

KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in (Caption, Chat, Interleaved)}


def template_from_options(options: object, where: str = "template") -> Template:
    """The template that the options describe: ``{kind: caption, prompt: "\\n"}``, or only ``caption``.

    Raises:
        ConfigError: an unknown kind or option, or a bad value.
    """
    template: Template = read_kind(options, KINDS, where, default="caption")
    return template
