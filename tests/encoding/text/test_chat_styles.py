"""A built-in style is the same conversation to a template of images and to `prepare`: texts, and what is trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given

from megaresume.encoding.images.document import Record
from megaresume.encoding.images.pieces import Text
from megaresume.encoding.images.templates import template_from_options
from megaresume.encoding.text.chat_template import ChatTemplate, read_chat_template
from megaresume.encoding.text.conversations import STYLES, BadRow, Conversation, jinja_of
from megaresume.encoding.text.turns import Selection, TurnFinder
from tests.encoding.text.families import FAMILIES, Messages
from tests.encoding.text.kit import conversations, write_tokenizer


def by_images(style: str, messages: Messages) -> tuple[str, list[bool]]:
    """The text, and of each character whether it is trained."""
    template = template_from_options({"kind": "chat", "style": style, "mark": ""})
    data = json.dumps({"messages": messages}).encode()
    pieces = template.pieces(Record(key="0", path="a.tar", members={"json": data}))
    assert all(isinstance(piece, Text) for piece in pieces)
    return "".join(piece.text for piece in pieces), [piece.trained for piece in pieces for _ in piece.text]


def by_prepare(style: str, messages: Messages, selection: Selection | None = None) -> tuple[str, list[bool]]:
    finder = TurnFinder(ChatTemplate(jinja_of(STYLES[style]), {}), [], selection or Selection())
    text, runs = finder.find(Conversation(messages=messages))
    return text, [any(first <= at < stop for first, stop in runs) for at in range(len(text))]


@pytest.mark.parametrize("style", STYLES)
@given(messages=conversations())
def test_text_and_mask_are_those_of_images(style: str, messages: Messages) -> None:
    assert by_prepare(style, messages) == by_images(style, messages)


def test_parts_of_a_turn_and_a_selection() -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there"}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": parts}]
    messages += [{"role": "user", "content": "Bye"}, {"role": "assistant", "content": "So long"}]
    text, trained = by_prepare("chatml", messages, Selection(turns="last"))
    assert text == by_images("chatml", messages)[0]
    assert "".join(c for c, is_trained in zip(text, trained, strict=True) if is_trained) == "So long<|im_end|>"


def test_a_role_that_the_style_does_not_have() -> None:
    with pytest.raises(BadRow) as caught:
        by_prepare("vicuna", [{"role": "tool", "content": "4"}, {"role": "assistant", "content": "4"}])
    assert (
        "the roles of this style are system, user, assistant, not tool" in f"{caught.value.what} {caught.value.found}"
    )


def test_by_name_unless_a_file_is_called_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = write_tokenizer(tmp_path / "model", FAMILIES["chatml"], template="own")
    monkeypatch.chdir(tmp_path)
    assert read_chat_template(directory, "llama3")[0] == jinja_of(STYLES["llama3"])
    (tmp_path / "llama3").write_text("a file")
    assert read_chat_template(directory, "llama3")[0] == "a file"
