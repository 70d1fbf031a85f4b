"""Marks: characters that no text has, put around what messages say, and found again in the rendered text.

White space at the ends of a text stays outside its marks: templates strip it. Reasoning between <think> and </think>
has marks of its own: templates take it apart, and leave it out of earlier turns. Of a tool call the name is marked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from megaresume.encoding.text.conversations import REASONING, BadRow, Message

Part = Literal["text", "thinking", "tool-calls"]
PARTS = cast(tuple[Part, ...], get_args(Part))

#: private-use characters, which fonts of icons use: the plane that the conversation has none of.
_PLANES = (0xF0000, 0x100000)
_PLANE_SIZE = 0xFFFE
_THINK = re.compile(r"(?:<think>|\A(?!\s*<think>))((?:(?!<think>).)*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Core:
    """What a message says, where it stands in the text: characters first to stop."""

    message: int
    part: Part
    first: int
    stop: int


class Marks:
    """Characters that no text has.

    Args:
        text: the conversation as it is rendered without them.
    """

    def __init__(self, text: str) -> None:
        for plane in _PLANES:
            self._any = re.compile(f"[{chr(plane)}-{chr(plane + _PLANE_SIZE - 1)}]")
            if self._any.search(text) is None:
                self._plane = plane
                break
        else:
            raise BadRow("has characters of both private-use planes", "U+F0000 and U+100000 or above", "one of them")
        self._labels: list[tuple[int, Part]] = []

    def pair(self, message: int, part: Part) -> tuple[str, str]:
        """A mark to stand before, and one after."""
        number = 2 * len(self._labels)
        if number + 1 >= _PLANE_SIZE:
            raise BadRow("has too many messages", f"more than {len(self._labels)} parts", "a conversation")
        self._labels.append((message, part))
        return chr(self._plane + number), chr(self._plane + number + 1)

    def put(self, messages: Sequence[Message], which: set[int]) -> list[Message]:
        """The messages, with marks around what these say."""
        return [self._message(message, i) if i in which else message for i, message in enumerate(messages)]

    @staticmethod
    def parts(message: Message) -> set[Part]:
        """Of what kinds are the words of a message."""
        marks = Marks("")
        marks.put([message], {0})
        return {part for _, part in marks._labels}

    def find(self, marked: str, text: str) -> list[Core]:
        """Where what was marked stands in the text without marks, in order.

        Args:
            marked, text: rendered with and without marks.

        Raises:
            BadRow: with marks the template writes another text, or a part of it is cut or comes twice.
        """
        if self._any.sub("", marked) != text:
            raise BadRow(
                "is written by the chat template in a way that cannot be followed",
                "another text as soon as its words are marked",
                "a template that writes what the messages say, or one with {% generation %}: --chat-template FILE",
            )
        cores, begun, done = [], dict[int, int](), set[int]()
        for count, found in enumerate(self._any.finditer(marked)):
            number, place = ord(found[0]) - self._plane, found.start() - count
            if number % 2 == 0:
                begun[number] = place
                continue
            first = begun.pop(number - 1, None)
            message, part = self._labels[number // 2]
            if first is None or (number in done and message >= 0 and part != "tool-calls"):
                raise _cut(message, part)
            if number in done and part == "tool-calls":
                continue  # what the tool says is headed by its name
            done.add(number)
            if place > first:
                cores.append(Core(message, part, first, place))
        if begun:
            raise _cut(*self._labels[min(begun) // 2])
        return cores

    def _message(self, message: Message, i: int) -> Message:
        changed, before = dict(message), len(self._labels)
        for key in REASONING:
            if isinstance(message.get(key), str):
                changed[key] = self._wrap(message[key], i, "thinking")
        if isinstance(message.get("tool_calls"), list):
            changed["tool_calls"] = [self._call(call, i) for call in message["tool_calls"]]
        if "content" in message:
            changed["content"] = self._contents(message["content"], i, thinks=message["role"] == "assistant")
            if len(self._labels) == before:  # a message of nothing but </think> says </think>
                changed["content"] = self._contents(message["content"], i, thinks=False)
        return changed

    def _contents(self, content: Any, i: int, *, thinks: bool) -> Any:
        """The text of a message, or its texts."""
        if isinstance(content, list):
            return [{**part, "text": self._content(part["text"], i, thinks=thinks)} for part in content]
        return self._content(content, i, thinks=thinks) if isinstance(content, str) else content

    def _call(self, call: Any, i: int) -> Any:
        """Its name, in any of the usual shapes; arguments follow it."""
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return {**call, "function": self._call(call["function"], i)}
        name = call.get("name")
        return {**call, "name": self._wrap(name, i, "tool-calls")} if isinstance(name, str) else call

    def _content(self, text: str, i: int, *, thinks: bool) -> str:
        done, at = "", 0
        for found in _THINK.finditer(text) if thinks and "</think>" in text else ():
            first, stop = found.span(1)
            tag = found.start()
            done += self._wrap(text[at:tag], i, "text") + text[tag:first]
            done += self._wrap(text[first:stop], i, "thinking") + text[stop : found.end()]
            at = found.end()
        return done + self._wrap(text[at:], i, "text")

    def _wrap(self, text: str, i: int, part: Part) -> str:
        core = text.strip()
        if not core:
            return text
        at = text.index(core)
        before, after = self.pair(i, part)
        return f"{text[:at]}{before}{core}{after}{text[at + len(core) :]}"


def without_reasoning(messages: Sequence[Message]) -> tuple[list[Message], int]:
    """The messages without what they think, and how many characters that is."""
    stripped, thought = [], 0
    for message in messages:
        kept = {key: value for key, value in message.items() if key not in REASONING}
        thought += max((len(message[key].strip()) for key in REASONING if key in message), default=0)
        content = message.get("content")
        if message["role"] == "assistant" and isinstance(content, str) and "</think>" in content:
            thought += sum(len(found[1].strip()) for found in _THINK.finditer(content))
            kept["content"] = _THINK.sub("", content).lstrip()
        stripped.append(kept)
    return stripped, thought


def _cut(message: int, part: Part) -> BadRow:
    what = f"has {part.replace('-', ' ')} that the chat template cuts, or writes twice"
    return BadRow(what, f"message {message}", "a template that writes what messages say: --chat-template FILE")
