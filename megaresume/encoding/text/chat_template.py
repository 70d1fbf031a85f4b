"""A tokenizer's own chat template: where it is, and its text for a conversation, by jinja2.

Rendered as transformers renders it: the same environment, filters, functions and variables; the tests hold every text
against transformers'. It is not transformers that is called, so that a corpus has the same bytes with and without it.

    {% generation %} ... {% endgeneration %}   what the assistant says, in templates that tell; marks may go around it
    strftime_now(...)                          the date that was asked for, not today's: a corpus is the same tomorrow
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.encoding.text.chat_styles import STYLES, jinja_of
from megaresume.encoding.text.conversations import Message
from megaresume.stream.errors import MegaresumeError, UsageError, require

if TYPE_CHECKING:
    import jinja2

#: variables of templates that are tokens.
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateRefuses(Exception):
    """The template raised: roles it does not know, or in an order that it does not allow."""


class ChatTemplate:
    """Renders conversations.

    Args:
        text: of the template.
        tokens: its variables for special tokens (`TOKENS`) -> their texts.
        date: ISO, what the template takes for today; None: one that asks is refused.

    Raises:
        SetupError: the library `jinja2` is missing.
        UsageError: no template that it can read.
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
        #: whether it says itself what the assistant says.
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
            messages, tools: of it.
            options: further variables.
            prompt: with what asks the assistant to continue at the end.
            around: texts to put around what is said in {% generation %}.

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
        template: a file, or a name in `STYLES`, in place of the tokenizer's own; None: its own.

    Raises:
        UsageError: there is none.
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
        raise UsageError(
            f"{path} cannot be read",
            found=str(error),
            expected="a jinja2 template in UTF-8",
            action=f"check {flag}",
        ) from error


def _json_object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read", found=str(error), expected="a JSON object", action="check --tokenizer"
        ) from error
    return found if isinstance(found, dict) else {}
