"""Template ``chat``: a conversation about images; only the answers are trained on.

    {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}
    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, ...]}

    <|im_start|>user\\n <image> \\nWhat is it? <|im_end|> \\n <|im_start|>assistant\\n A cat. <|im_end|> \\n
                                                                                     xxxxxx xxxxxxxxxx   trained on

A mark without a name takes the next image: of the list ``images`` in the JSON when there is one, otherwise of the
members of the record in the order of their names ("2.jpg" before "10.jpg"). Every image must be used.

What stands around a turn: `megaresume.encoding.text.chat_styles`. Each text is tokenized by itself, as images stand
between them, and special tokens that people wrote are plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from megaresume.encoding.images.document import Record
from megaresume.encoding.images.templates.base import (
    Image,
    Piece,
    Text,
    bad_json,
    check_shown,
    checked_text,
    image_members,
    json_member,
    named_image,
    no_media,
    no_text,
    row_images,
)
from megaresume.encoding.text.chat_styles import CHATML, Style
from megaresume.encoding.text.conversations import ROLES
from megaresume.stream.errors import CorpusError
from megaresume.stream.schema import Options, Texts, Truth

#: keys beside the turns, and types of their parts, that are neither text nor image.
_MEDIA_KEYS = ("video", "videos", "audio", "audios")
_IMAGE_PARTS = ("image", "image_url")
_MEDIA_PARTS = ("video", "video_url", "audio", "audio_url", "input_audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(Options):
    """A conversation in the JSON member."""

    kind: ClassVar[str] = "chat"
    split: ClassVar[int | None] = None
    damaged_images: ClassVar[bool] = False
    missing_images: ClassVar[bool] = False

    #: member of the conversation: the first of these that is there.
    json: Texts = ("json",)
    #: key of the list of turns: the first of these that is there.
    turns: Texts = ("conversations", "messages")
    #: what stands around the turns: chatml, llama3, vicuna, plain, or a mapping of roles.
    style: Style = CHATML
    #: system text of conversations that have none.
    system: str | None = None
    #: marks an image in a turn that is one text.
    mark: str = "<image>"
    #: images, video and audio of the record that no turn shows are left out; otherwise they are errors.
    unused_images: Truth = False

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """Under ``images``, ``image`` or ``file_name``; and those that only a part of a turn names."""
        names = row_images(row)
        turns = next((row[key] for key in self.turns if key in row), None)
        for turn in turns if isinstance(turns, list) else ():
            content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") in _IMAGE_PARTS:
                    name = _name_in(part)
                    names += [name] if name is not None and name not in names else []
        return names

    def pieces(self, record: Record) -> list[Piece]:
        """Raises CorpusError: no JSON, no turns, an unknown role, no answer, images and marks that do not agree."""
        data = json_member(record, self.json)
        if media := [key for key in _MEDIA_KEYS if data.get(key)]:
            raise no_media(record, f"{' and '.join(media)} in the JSON")
        key = next((key for key in self.turns if key in data), None)
        turns = None if key is None else data[key]
        if not isinstance(turns, list) or not turns:
            expected = f"a list of turns under {' or '.join(self.turns)}"
            raise bad_json(record, "no conversation", f"keys {', '.join(sorted(data)[:10]) or 'none'}", expected)
        named = data.get("images")
        # A row may have another key for them.
        images = _Images(record, None if record.images is not None and not named else named)
        pieces: list[Piece] = []
        for number, turn in enumerate(turns):
            name, content = _turn(record, turn, f"{key}[{number}]")
            if number == 0 and name != "system" and self.system is not None:
                pieces += self._around(record, "system", [Text(text=self.system, trained=False)])
            is_trained = name == "assistant"
            pieces += self._around(record, name, list(self._content(record, content, is_trained, images)))
        if not any(isinstance(piece, Text) and piece.trained and piece.text.strip() for piece in pieces):
            raise no_text(record, "the turns of the assistant")
        if not self.unused_images:
            images.check_all_used()
        check_shown(record, pieces, unused=self.unused_images)
        return pieces

    def _around(self, record: Record, name: str, content: list[Piece]) -> list[Piece]:
        role = next((role for role in self.style if role.role == name), None)
        if role is None:
            known = ", ".join(role.role for role in self.style)
            raise bad_json(record, f"a turn of the role '{name}'", repr(name), f"one of {known}, by template.style")
        trained = name == "assistant"
        parts: list[Piece] = [Text(text=role.before, trained=False, markup=True), *content]
        parts += [Text(text=role.end, trained=trained, markup=True), Text(text=role.after, trained=False, markup=True)]
        return [part for part in parts if not isinstance(part, Text) or part.text]

    def _content(self, record: Record, content: Any, is_trained: bool, images: _Images) -> Iterator[Piece]:
        if isinstance(content, str):
            first, *others = checked_text(record, content, "a turn").split(self.mark) if self.mark else [content]
            yield Text(text=first, trained=is_trained)
            for text in others:
                yield Image(member=images.take(None))
                yield Text(text=text, trained=is_trained)
            return
        if not isinstance(content, list):
            raise bad_json(record, "a turn without text", type(content).__name__, "a text, or a list of parts")
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "text":
                yield Text(text=checked_text(record, part.get("text"), "a part of a turn"), trained=is_trained)
            elif kind in _IMAGE_PARTS:
                yield Image(member=images.take(_name_in(part)))
            elif kind in _MEDIA_PARTS:
                raise no_media(record, f"type {kind!r} in a turn")
            else:
                found = f"type {kind!r}" if isinstance(part, dict) else type(part).__name__
                raise bad_json(record, "an unknown part of a turn", found, "type: text, image or image_url")


class _Images:
    """Hands the images of a record out, in order or by name."""

    def __init__(self, record: Record, names: object) -> None:
        self._record = record
        if names is not None and not isinstance(names, list):
            raise bad_json(record, "'images' is not a list", type(names).__name__, "names of members")
        self._all = image_members(record) if names is None else [named_image(record, name) for name in names]
        self._left = list(self._all)
        self._marks = 0

    def take(self, name: object) -> str:
        self._marks += 1
        if name is not None:
            member = named_image(self._record, name)
            if member in self._left:
                self._left.remove(member)
            return member
        if not self._left:
            raise self._disagree()
        return self._left.pop(0)

    def check_all_used(self) -> None:
        if self._left:
            raise self._disagree()

    def _disagree(self) -> CorpusError:
        return CorpusError(
            f"record '{self._record.key}': images and their marks do not agree",
            found=f"images {', '.join(self._all) or 'none'}; {self._marks} marks used them up to there",
            expected="a mark for each image, and an image for each mark",
            cause="a mark in the text that is not meant as one, or an image that the conversation does not show",
            action="correct the record, template.mark, or template.unused_images: true",
        )


def _turn(record: Record, turn: Any, where: str) -> tuple[str, Any]:
    """Role and content of one turn, in LLaVA's words or OpenAI's."""
    if not isinstance(turn, dict):
        raise bad_json(record, f"{where} is not a turn", type(turn).__name__, "an object with role and content")
    name = turn.get("role", turn.get("from"))
    content = turn.get("content", turn.get("value"))
    if not isinstance(name, str) or name not in ROLES:
        raise bad_json(record, f"{where} has an unknown role", f"{name!r:.40}", f"one of {', '.join(ROLES)}")
    if content is None:
        raise bad_json(record, f"{where} has no content", f"keys {', '.join(turn)}", "content or value")
    return ROLES[name], content


def _name_in(part: dict[str, Any]) -> object:
    """The name in {"type": "image", "image": NAME} or {"type": "image_url", "image_url": {"url": NAME}}, or None."""
    value = part.get("image", part.get("image_url"))
    return value.get("url") if isinstance(value, dict) else value
