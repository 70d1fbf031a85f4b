"""The options for conversations, and what follows from them, the tokenizer and the first row."""

from __future__ import annotations

import datetime
import json
import logging
import re
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megaresume.data.documents import TextOptions
from megaresume.data.inputs import InputFile
from megaresume.data.streams import MAX_DOCUMENT_BYTES, InputStream
from megaresume.encoding.text.chat_template import ChatTemplate, TemplateRefuses, read_chat_template
from megaresume.encoding.text.conversation_encoder import TOO_LONG, ConversationOptions, TooLong
from megaresume.encoding.text.conversations import KEYS, ROLES, BadRow, RowShape, conversation_of, shapes_of
from megaresume.encoding.text.turns import Selection
from megaresume.stream.errors import CorpusError, UsageError, near

log = logging.getLogger(__name__)

#: rows of a file to search for the first one that is a JSON object.
LOOKED_AT = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """The options that a user gives."""

    #: a file, or a name in `megaresume.encoding.text.conversations.STYLES`; None: the tokenizer's own.
    template: str | Path | None = None
    #: today's date for the template: YYYY-MM-DD.
    date: str | None = None
    #: the shape of the rows; None: that of the first row.
    shape: RowShape | None = None
    selection: Selection = field(default_factory=Selection)
    #: roles may come in any order that the template accepts.
    any_order: bool = False
    #: limit on the tokens of a document; None: no limit.
    max_tokens: int | None = None
    too_long: TooLong = "error"


def with_conversations(
    text: TextOptions, chat: ChatOptions, tokenizer: str | Path | None, files: Sequence[InputFile]
) -> TextOptions:
    """The text options of a corpus of conversations.

    Args:
        text: options of rows.
        chat: the user's options.
        tokenizer: a tokenizer.json, or a directory with one.
        files: the input.

    Raises:
        UsageError: bad options, no readable template, files without rows.
        CorpusError: no row shows its shape, or the first one has two shapes.
        SetupError: the library `jinja2` is missing.
    """
    _check(chat)
    texts = [file.path for file in files if file.format == "text"]
    if texts:
        raise UsageError(
            f"{texts[0]} has no rows",
            found="a text file, and --chat",
            expected="rows: JSON lines, an array of JSON, CSV, Parquet or Arrow",
            action="name the files with conversations, or --format jsonl",
        )
    shape = chat.shape or ("messages" if text.json_key is not None else _first_shape(files))
    if shape == "preference" and chat.too_long in ("turn", "cut"):
        raise UsageError(
            f"--too-long {chat.too_long} is not for preference pairs",
            found="rows with chosen and rejected",
            expected="pairs whose halves are both whole",
            action="leave those out that are too long: --too-long skip",
        )
    template, tokens = read_chat_template(tokenizer, chat.template)
    rendered = ChatTemplate(template, tokens, chat.date)  # before starting anything that a failure would waste
    if "tool_calls" in template:
        _hint_at_arguments(rendered, shape, text.json_key, files)
    roles = tuple(dict.fromkeys(ROLES.get(role, role) for role in chat.selection.roles))
    _check_trained(roles, template, shape, text.json_key, files)
    options = ConversationOptions(
        template=template,
        tokens=tokens,
        date=chat.date,
        shape=shape,
        key=text.json_key,
        selection=replace(chat.selection, roles=roles),
        any_order=chat.any_order,
        max_tokens=chat.max_tokens,
        too_long=chat.too_long,
    )
    return replace(text, conversations=options)


def _check(chat: ChatOptions) -> None:
    try:
        datetime.date.fromisoformat(chat.date or "2026-01-31")
    except ValueError as error:
        raise UsageError(
            "bad --chat-date",
            found=f"{chat.date}: {error}",
            expected="YYYY-MM-DD",
            action="--chat-date 2026-01-31, for example",
        ) from error
    if chat.max_tokens is not None and chat.max_tokens < 1:
        raise UsageError(
            "bad --max-tokens",
            found=chat.max_tokens,
            expected="1 or more",
            action="leave --max-tokens out for no limit",
        )
    if chat.too_long != "error" and chat.max_tokens is None:
        raise UsageError(
            f"--too-long {chat.too_long} goes with --max-tokens",
            found="no --max-tokens",
            expected="the longest length of a conversation",
            action="add --max-tokens N, for example the seq_length of the training",
        )
    if chat.too_long not in TOO_LONG:
        raise UsageError.unknown(
            "value of --too-long",
            chat.too_long,
            TOO_LONG,
            action="--too-long turn ends a conversation after an answer that fits; error is the default",
        )


def _check_trained(
    roles: Sequence[str], template: str, shape: RowShape, key: str | None, files: Sequence[InputFile]
) -> None:
    """Refuse an unknown role: neither a usual one, nor in the template or the first rows."""
    known = dict.fromkeys([*ROLES.values(), "developer"])
    unknown = [role for role in roles if role not in known]
    unknown = [role for role in unknown if not re.search(f"""["']{re.escape(role)}["']""", template)]
    if not unknown:
        return
    for row in _first_rows(files):
        with suppress(BadRow):
            known |= dict.fromkeys(m["role"] for m in conversation_of(row, shape, "", key=key).messages)
    for role in unknown:
        if role not in known:
            raise UsageError(
                f"--train names a role that no message has: {role}",
                found=f"--train {','.join(roles)}",
                expected=f"some of {', '.join(known)}, which the chat template or the first rows have",
                cause=near(role, known),
                action="correct --train",
            )


def _hint_at_arguments(template: ChatTemplate, shape: RowShape, key: str | None, files: Sequence[InputFile]) -> None:
    """Warn if the template writes the arguments of tool calls as JSON inside a JSON string: it expects objects."""
    for row in _first_rows(files[:1]):
        with suppress(BadRow, TemplateRefuses):
            said = conversation_of(row, shape, "", key=key)
            several = [message.get("tool_calls") for message in said.messages]
            calls = [call for one in several if isinstance(one, list) for call in one]
            functions = [call.get("function", call) for call in calls if isinstance(call, dict)]
            arguments = [function.get("arguments") for function in functions if isinstance(function, dict)]
            text = next((one for one in arguments if isinstance(one, str) and '"' in one), None)
            if text is None:
                continue
            if json.dumps(text, ensure_ascii=False) in template.render(
                said.messages, tools=said.tools, options=said.options
            ):
                log.warning(
                    "megaresume: the arguments of tool calls are texts, as OpenAI has them, and the chat template "
                    "escapes them: %s is trained. If the model is to write plain JSON, write them as objects: "
                    "jq -c '(.. | .arguments? | strings) |= fromjson' rows.jsonl",
                    json.dumps(text, ensure_ascii=False)[:60],
                )
            return


def _first_rows(files: Sequence[InputFile]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the first rows of each file."""
    for file in files:
        with closing(InputStream(file)) as stream:
            for _ in range(LOOKED_AT):
                line = stream.readline(MAX_DOCUMENT_BYTES)
                if not line:
                    break
                with suppress(ValueError, RecursionError):
                    row = json.loads(line)
                    if isinstance(row, dict):
                        yield row


def _first_shape(files: Sequence[InputFile]) -> RowShape:
    """The shape of the first row that has one; all others must have it, too."""
    keys: list[str] = []
    for row in _first_rows(files):
        shapes = shapes_of(row)
        if len(shapes) > 1:
            raise CorpusError(
                "the first row can be read in two ways",
                found=f"keys {', '.join(list(row)[:10])}: {' or '.join(shapes)}",
                expected="which of them to train",
                action=" or ".join(f"--chat-rows {shape}" for shape in shapes),
            )
        if shapes:
            return shapes[0]
        keys = keys or list(row)
    known = "; ".join(f"{shape}: {', '.join(names)}" for shape, names in KEYS.items())
    raise CorpusError(
        "the first rows are not conversations",
        found=f"keys {', '.join(keys[:10]) or 'none'}",
        expected=f"the keys of one of the shapes ({known})",
        action="say which key holds the messages: --json-key KEY",
    )
