"""Templates by kind: how the members of a record form one document.

caption      an image, a text                            trained on: the text
interleaved  images, lists of texts and images in JSON   every text
chat         images, a conversation in JSON              the assistant's turns
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from megaresume.encoding.images.document import Record
from megaresume.encoding.images.pieces import (
    IMAGE_EXTENSIONS,
    Image,
    Missing,
    Piece,
    Template,
    Text,
    bad_json,
    check_shown,
    checked_text,
    find_image,
    image_members,
    json_member,
    missing,
    named_image,
    no_media,
    no_text,
    row_images,
    text_member,
)
from megaresume.encoding.text.conversations import CHATML, ROLES, Style
from megaresume.stream.errors import CorpusError
from megaresume.stream.schema import Options, Texts, Truth, Within, read_kind

#: keys next to the turns, and types of their parts, that are neither text nor image.
_MEDIA_KEYS = ("video", "videos", "audio", "audios")
_IMAGE_PARTS = ("image", "image_url")
_MEDIA_PARTS = ("video", "video_url", "audio", "audio_url", "input_audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chat(Options):
    """A conversation about images, in the JSON member; only the assistant's answers are trained on.

        {"conversations": [{"from": "human", "value": "<image>\\nWhat is it?"}, {"from": "gpt", "value": "A cat."}]}
        {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}, ...]}

        <|im_start|>user\\n <image> \\nWhat is it? <|im_end|> \\n <|im_start|>assistant\\n A cat. <|im_end|> \\n
                                                                                     xxxxxx xxxxxxxxxx   trained on

    A mark without a name takes the next image: from the list ``images`` in the JSON if there is one, otherwise from the
    members of the record in order of their names ("2.jpg" before "10.jpg"). Every image must be used.

    For the text around a turn, see `megaresume.encoding.text.conversations.STYLES`. Each text is tokenized by itself,
    as there are images in between, and special tokens in the user's texts are treated as plain text.
    """

    kind: ClassVar[str] = "chat"
    split: ClassVar[int | None] = None
    damaged_images: ClassVar[bool] = False
    missing_images: ClassVar[bool] = False

    #: member with the conversation: the first of these that exists.
    json: Texts = ("json",)
    #: key of the list of turns: the first of these that exists.
    turns: Texts = ("conversations", "messages")
    #: the texts around the turns: a name in `conversations.STYLES`, or a mapping by role.
    style: Style = CHATML
    #: system text of conversations that have none.
    system: str | None = None
    #: marks an image in a turn that is one string.
    mark: str = "<image>"
    #: ignore images, video and audio of the record that no turn shows; otherwise they are errors.
    unused_images: Truth = False

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """The images named under ``images``, ``image`` or ``file_name``, or in parts of turns."""
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
        """Raises CorpusError: no JSON, no turns, an unknown role, no answer, images and marks that do not match."""
        data = json_member(record, self.json)
        if media := [key for key in _MEDIA_KEYS if data.get(key)]:
            raise no_media(record, f"{' and '.join(media)} in the JSON")
        key = next((key for key in self.turns if key in data), None)
        turns = None if key is None else data[key]
        if not isinstance(turns, list) or not turns:
            expected = f"a list of turns under {' or '.join(self.turns)}"
            raise bad_json(record, "no conversation", f"keys {', '.join(sorted(data)[:10]) or 'none'}", expected)
        named = data.get("images")
        # A row may list them under another key.
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
    """Gives out the images of a record, in order or by name."""

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
    """Role and content of one turn, in LLaVA's or OpenAI's format."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption(Options):
    """A template of one image and one text.

    <image> prompt text <eod>        the prompt is not trained on, text and end of document are
    """

    kind: ClassVar[str] = "caption"
    split: ClassVar[int | None] = None
    damaged_images: ClassVar[bool] = False
    missing_images: ClassVar[bool] = False

    #: member with the image: the first of these that exists.
    image: Texts = IMAGE_EXTENSIONS
    #: member with the text: the first of these that exists.
    text: Texts = ("txt", "caption")
    #: read the text from the JSON member instead, under this key.
    json_key: str | None = None
    #: the text between image and text; not trained on.
    prompt: str = ""
    #: whether the image comes before the text.
    image_first: Truth = True
    #: accept records without an image as documents of text only; otherwise they are errors.
    text_only: Truth = False
    #: strip white space from both ends of the text.
    strip: Truth = True
    #: ignore other images of the record, video and audio; otherwise they are errors.
    unused_images: Truth = False

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """The images named under ``images``, ``image`` or ``file_name``."""
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
    """Two lists of the same length in the JSON member; or texts, and images with the index of their text.

    {"texts": ["A cat.", null, "It sleeps."], "images": [null, "0.jpg", null]}                              OBELICS
    {"text_list": ["A cat.", "It sleeps."], "image_info": [{"image_name": "0.jpg", "matched_text_index": 1}]}  MMC4

    A cat. <image> It sleeps. <eod>        an image comes before the text of its index; all text is trained on
    """

    kind: ClassVar[str] = "interleaved"

    #: member with the lists: the first of these that exists.
    json: Texts = ("json",)
    #: key of the list of texts and nulls.
    texts: str = "texts"
    #: key of the list of image names and nulls.
    images: str = "images"
    #: the text between two texts with no image between them.
    separator: str = "\n"
    #: ignore images, video and audio of the record that the lists do not name; otherwise they are errors.
    unused_images: Truth = False
    #: leave out, and count, images in the lists that the record lacks, or that are empty files; otherwise they are
    #: errors.
    missing_images: Truth = False
    #: leave out images that cannot be read, and mask those that cannot be decoded completely: their tokens stay,
    #: without training on them; otherwise they are errors.
    damaged_images: Truth = False
    #: limit on the tokens of a document: longer pages become several documents, cut between parts; None: one for each
    #: page.
    split: Annotated[int, Within(2, 2**31 - 1)] | None = None

    def image_names(self, row: Mapping[str, Any]) -> list[Any]:
        """The images named in the list of images, or in ``image_info``."""
        matched = self.texts not in row and "text_list" in row
        named = row.get("image_info" if matched else self.images)
        items = named if isinstance(named, list) else ()
        if matched:
            return [info.get("image_name") for info in items if isinstance(info, dict)]
        return [item for item in items if item is not None]

    def pieces(self, record: Record) -> list[Piece]:
        """Raises CorpusError: no JSON, no lists, lists of different lengths, an unknown image, no text."""
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
        # An empty file has no image to show.
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


KINDS: dict[str, type[Any]] = {cls.kind: cls for cls in (Caption, Chat, Interleaved)}


def template_from_options(options: object) -> Template:
    """The template that the options describe: ``{kind: caption, prompt: "\\n"}``, or only ``caption``.

    Raises:
        ConfigError: an unknown kind or option, or a bad value.
    """
    template: Template = read_kind(options, KINDS, "template", default="caption")
    return template
