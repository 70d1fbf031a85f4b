"""A tokenizer's own chat template: finds it, renders a conversation, and locates each message in the text.

Renders as transformers does, with the same environment, filters, functions and variables; the tests compare every text
with transformers'. It does not call transformers, so that a corpus has the same bytes with and without it.

    {% generation %} ... {% endgeneration %}   the assistant's text, in templates that mark it; may get marks around it
    strftime_now(...)                          a date that the user sets, not today's: a corpus is the same tomorrow
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from megaresume.encoding.text.conversations import REASONING, STYLES, BadRow, Message, jinja_of
from megaresume.stream.errors import MegaresumeError, UsageError, require

if TYPE_CHECKING:
    import jinja2


#: variables of templates that are tokens.
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateRefuses(Exception):
    """The template raised: unknown roles, or an order of roles that it does not allow."""


class ChatTemplate:
    """Renders conversations.

    Args:
        text: of the template.
        tokens: its variables for special tokens (`TOKENS`) -> their texts.
        date: ISO, today's date for the template; None: a template that asks for it is refused.

    Raises:
        SetupError: the library `jinja2` is missing.
        UsageError: not a readable template.
    """

    def __init__(self, text: str, tokens: Mapping[str, str], date: str | None = None) -> None:
        self._tokens = dict(tokens)
        self._date = None if date is None else datetime.datetime.fromisoformat(date)
        require("jinja2", "it renders chat templates", "pip install 'megaresume[chat]'")
        self._environment = _environment(self._today)
        import jinja2

        try:
            self._template: jinja2.Template = self._environment.from_string(text)
        except jinja2.TemplateError as error:
            raise UsageError(
                "the chat template cannot be read",
                found=f"{error} (line {getattr(error, 'lineno', '?')})",
                expected="a jinja2 template as transformers takes it",
                action="correct it, or give another one: --chat-template FILE",
            ) from error
        #: whether it marks the assistant's text itself.
        self.marks_generation: bool = self._environment.marks_generation  # type: ignore[attr-defined]

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None = None,
        options: Mapping[str, Any] | None = None,
        prompt: bool = False,
        around: tuple[str, str] = ("", ""),
    ) -> str:
        """The text of a conversation.

        Args:
            messages, tools: of the conversation.
            options: further variables.
            prompt: add the text that asks the assistant to answer.
            around: texts to put around the content of {% generation %}.

        Raises:
            TemplateRefuses: the template raised.
            UsageError: it asks for a date, and none was given.
        """
        import jinja2

        self._environment.generation_marks = around  # type: ignore[attr-defined]
        variables = {**self._tokens, **(options or {})}
        known = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt}
        try:
            return self._template.render(**known | variables)
        except MegaresumeError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise TemplateRefuses(f"{error}" or type(error).__name__) from error

    def _today(self, form: str) -> str:
        if self._date is None:
            raise UsageError(
                "the chat template writes today's date",
                found="strftime_now in the template",
                expected="a date that is the same whenever the corpus is prepared",
                action="say which: --chat-date 2026-01-31",
            )
        return self._date.strftime(form)


def _environment(today: Any) -> jinja2.Environment:
    import jinja2
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012  as jinja2 has it

        def parse(self, parser: Any) -> nodes.Node:
            self.environment.marks_generation = True  # type: ignore[attr-defined]
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_around"), [], [], body).set_lineno(line)

        def _around(self, caller: Any) -> str:
            before, after = self.environment.generation_marks  # type: ignore[attr-defined]
            return f"{before}{caller()}{after}"

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.extend(generation_marks=("", ""), marks_generation=False)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = today
    return environment


def read_chat_template(tokenizer: str | Path | None, template: str | Path | None) -> tuple[str, dict[str, str]]:
    """The text of the template, and its variables for special tokens.

    Args:
        tokenizer: a tokenizer.json, or the directory of a model.
        template: a file, or a name in `STYLES`, to use instead of the tokenizer's own; None: its own.

    Raises:
        UsageError: there is no template.
    """
    if tokenizer is None:
        raise UsageError(
            "conversations need a tokenizer",
            found="no --tokenizer, so a token is a byte",
            expected="a tokenizer whose special tokens the chat template writes",
            action="--tokenizer DIR, a directory with tokenizer.json and tokenizer_config.json",
        )
    directory = Path(tokenizer) if Path(tokenizer).is_dir() else Path(tokenizer).parent
    config = _json_object(directory / "tokenizer_config.json")
    named = _json_object(directory / "special_tokens_map.json") | config
    tokens = {name: _token(named[name]) for name in TOKENS if named.get(name) is not None}
    if template is not None and str(template) in STYLES and not Path(template).exists():
        return jinja_of(STYLES[str(template)]), tokens
    if template is not None:
        return _text(Path(template), "--chat-template"), tokens
    beside = directory / "chat_template.jinja"
    own = _text(beside, "--tokenizer") if beside.is_file() else config.get("chat_template")
    if isinstance(own, list):  # several, by name
        own = next((one.get("template") for one in own if isinstance(one, dict) and one.get("name") == "default"), None)
    if not isinstance(own, str):
        raise UsageError(
            f"{directory} has no chat template",
            found="neither chat_template.jinja nor a chat_template in tokenizer_config.json",
            expected="a template that says how a conversation is written",
            cause="the tokenizer of a base model",
            action=f"give one: --chat-template FILE (jinja2, as transformers takes it), or {', '.join(STYLES)}",
        )
    return own, tokens


def _token(value: object) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value)


def _text(path: Path, flag: str) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError.unreadable(path, error, "a jinja2 template in UTF-8", action=f"check {flag}") from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError.unreadable(path, error, "a JSON object", action="check --tokenizer") from error
    return found if isinstance(found, dict) else {}


# Marks: characters that occur in no text, put around parts of messages, and found again in the rendered text.
#
# White space at the ends of a text stays outside its marks: templates strip it. Reasoning between <think> and </think>
# has its own marks: templates separate it, and omit it from earlier turns. Of a tool call, only the name is marked.


Part = Literal["text", "thinking", "tool-calls"]
PARTS = cast(tuple[Part, ...], get_args(Part))

#: private-use characters, used by icon fonts: the plane that does not occur in the conversation.
_PLANES = (0xF0000, 0x100000)
_PLANE_SIZE = 0xFFFE
_THINK = re.compile(r"(?:<think>|\A(?!\s*<think>))((?:(?!<think>).)*?)</think>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Core:
    """The content of a message in the text: characters first to stop."""

    message: int
    part: Part
    first: int
    stop: int


class Marks:
    """Characters that occur in no text.

    Args:
        text: the conversation rendered without them.
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
        """A mark for the beginning and one for the end."""
        number = 2 * len(self._labels)
        if number + 1 >= _PLANE_SIZE:
            raise BadRow("has too many messages", f"more than {len(self._labels)} parts", "a conversation")
        self._labels.append((message, part))
        return chr(self._plane + number), chr(self._plane + number + 1)

    def put(self, messages: Sequence[Message], which: set[int]) -> list[Message]:
        """The messages, with marks around the contents of those in ``which``."""
        return [self._message(message, i) if i in which else message for i, message in enumerate(messages)]

    @staticmethod
    def parts(message: Message) -> set[Part]:
        """The kinds of parts in a message."""
        marks = Marks("")
        marks.put([message], {0})
        return {part for _, part in marks._labels}

    def find(self, marked: str, text: str) -> list[Core]:
        """Locate the marked parts in the text without marks, in order.

        Args:
            marked, text: rendered with and without marks.

        Raises:
            BadRow: marks change the text that the template renders, or a part is cut or repeated.
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
                continue  # a tool's result is preceded by its name
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
            if len(self._labels) == before:  # a message of only </think> means it literally
                changed["content"] = self._contents(message["content"], i, thinks=False)
        return changed

    def _contents(self, content: Any, i: int, *, thinks: bool) -> Any:
        """The text of a message, or its list of texts."""
        if isinstance(content, list):
            return [{**part, "text": self._content(part["text"], i, thinks=thinks)} for part in content]
        return self._content(content, i, thinks=thinks) if isinstance(content, str) else content

    def _call(self, call: Any, i: int) -> Any:
        """The name and arguments of a tool call, in any of the usual formats."""
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
    """The messages without their reasoning, and the number of characters left out."""
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
