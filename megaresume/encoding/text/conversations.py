"""Turns a row of a data set into a `Conversation`, from any of the usual formats.

    messages            {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    sharegpt            {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    alpaca              {"instruction": "Translate", "input": "Hallo", "output": "Hello"}, and system, history
    prompt-completion   {"prompt": "Hi", "completion": "Hello"}, both texts or both lists of messages
    preference          {"prompt": "Hi", "chosen": "Hello", "rejected": "What?"}, texts or lists as above; without a
                        prompt, both are whole conversations, and their common first messages are the prompt

A row may also have ``tools`` (a list of JSON schemas, or its JSON as a string) and ``chat_template_kwargs``. A message
with ``"weight": 0`` is not trained, and neither are those of a prompt; other data sets use ``"loss": false`` or
``"train": false``. A token is trained or not: a weight in between is refused.

The texts around the turns, for widely used models, are a style: `STYLES` has them by name.

    before   content   end        after          for the assistant, content and end are trained

Image templates use a style directly; `megaresume prepare --chat-template NAME` uses it as a jinja template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, cast, get_args

from megaresume.stream.errors import near
from megaresume.stream.schema import Before, Options, refused

RowShape = Literal["messages", "sharegpt", "alpaca", "prompt-completion", "preference"]
SHAPES = cast(tuple[RowShape, ...], get_args(RowShape))
#: the keys that identify a shape.
KEYS: dict[RowShape, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
}
#: The names of roles: in data sets -> in templates.
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
}
#: names for a message's reasoning; templates read the first, and some the second.
REASONING = ("reasoning_content", "thinking", "reasoning")

#: keys of a message for whether it is trained: OpenAI's, ms-swift's, Axolotl's.
TRAINED = ("weight", "loss", "loss_scale", "train", "training")

Message = dict[str, Any]


class BadRow(Exception):
    """A row that is not a conversation.

    Args:
        what: the problem, to follow the name of the row.
        found, expected: as in `megaresume.stream.errors.MegaresumeError`.
    """

    def __init__(self, what: str, found: object, expected: str) -> None:
        super().__init__(what)
        self.what, self.found, self.expected = what, str(found), expected


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A conversation as the variables of a template."""

    #: role, content and anything else that the template reads; no value is None.
    messages: list[Message]
    tools: list[Any] | None = None
    #: further variables of the template.
    options: dict[str, Any] = field(default_factory=dict)
    #: numbers of the messages that are not trained, whatever their role.
    untrained: frozenset[int] = frozenset()
    #: file and row, for errors.
    where: str = ""
    #: the rejected conversation of a preference pair, if this is the chosen one.
    rejected: Conversation | None = None


def shapes_of(row: Mapping[str, Any]) -> list[RowShape]:
    """The shapes that a row's keys fit; some data sets fit two, such as messages next to a preference."""
    return [shape for shape in SHAPES if all(key in row for key in KEYS[shape])]


#: In place of a missing value.
MISSING = object()


def under(row: Mapping[str, Any], key: str) -> Any:
    """The value of a row under a key, or a path of keys joined by dots (``meta.text``); `MISSING` if there is none."""
    if key in row:
        return row[key]
    first, dot, rest = key.partition(".")
    inner = row.get(first) if dot else None
    return under(inner, rest) if isinstance(inner, Mapping) else MISSING


def conversation_of(row: Mapping[str, Any], shape: RowShape, where: str, *, key: str | None = None) -> Conversation:
    """The conversation in a row.

    Args:
        row: JSON.
        shape: of all rows of the corpus.
        where: file and row, for errors.
        key: of the list of messages, if it has an unusual name.

    Raises:
        BadRow: the row has another shape; a message has no role or text.
    """
    keys = (key,) if key is not None and shape in ("messages", "sharegpt") else KEYS[shape]
    missing = [name for name in keys if under(row, name) in (None, MISSING)]
    if missing:
        found = [f"{name}: null" if name in row else name for name in row]
        raise BadRow(f"has no '{missing[0]}'", f"keys {', '.join(found[:10]) or 'none'}", f"a row of shape {shape}")
    if shape == "preference":
        return _pair(row, where)
    untrained: set[int] = set()
    if shape == "alpaca":
        messages = _alpaca(row)
    elif shape == "prompt-completion":
        prompt, completion = (
            _either(row[name], role) for name, role in (("prompt", "user"), ("completion", "assistant"))
        )
        messages = prompt + completion
        untrained = set(range(len(prompt)))
    else:
        messages = _messages(under(row, keys[0]), strict=shape == "sharegpt")
        if isinstance(row.get("system"), str) and row["system"] and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": row["system"]}, *messages]
    return _conversation(row, messages, untrained, where)


def _conversation(row: Mapping[str, Any], messages: list[Message], untrained: set[int], where: str) -> Conversation:
    if row.get("weight", 1) not in (1, None):
        expected = "1 or none; for another share: a corpus of such rows, and its weight in data.yaml"
        raise BadRow("has a weight of the whole row", f"{row['weight']!r:.40}", expected)
    untrained |= {i for i, message in enumerate(messages) if not _is_trained(message, i)}
    options = row.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise BadRow("has bad chat_template_kwargs", type(options).__name__, "an object")
    return Conversation(
        messages=messages, tools=_tools(row.get("tools")), options=options, untrained=frozenset(untrained), where=where
    )


def _is_trained(message: Message, i: int) -> bool:
    said = [(key, message[key]) for key in TRAINED if key in message]
    for key, value in said:
        if value not in (0, 1):
            expected = "0 or 1: a token is trained or not; for another share: a corpus with a weight in data.yaml"
            raise BadRow(f"message {i} has a weight that is neither 0 nor 1", f"'{key}': {value!r:.40}", expected)
    return all(value for _, value in said)


def _pair(row: Mapping[str, Any], where: str) -> Conversation:
    """The chosen conversation, with the rejected one in it."""
    prompt = [] if row.get("prompt") is None else _either(row["prompt"], "user")
    if not prompt and not (isinstance(row["chosen"], list) and isinstance(row["rejected"], list)):
        raise BadRow("has no 'prompt'", "answers that are texts", "a prompt, or two conversations as lists of messages")
    chosen, rejected = (_either(row[name], "assistant") for name in ("chosen", "rejected"))
    if chosen == rejected:
        raise BadRow("has no preference", "chosen and rejected are the same", "two answers")
    said = len(prompt)
    if prompt == chosen[:said] == rejected[:said]:  # repeated in both, as in some data sets
        prompt = []
    if not prompt:
        while chosen and rejected and chosen[0] == rejected[0]:
            prompt.append(chosen.pop(0))
            rejected.pop(0)
    known = set(range(len(prompt)))
    pair = _conversation(row, prompt + chosen, set(known), where)
    return replace(pair, rejected=_conversation(row, prompt + rejected, set(known), where))


def check_roles(messages: Sequence[Message]) -> None:
    """Refuse roles out of order: a system message after the first, a role twice in a row, a tool result without a call.

    Raises:
        BadRow: names the message.
    """
    before = None
    for i, message in enumerate(messages):
        role = message["role"]
        order = " ".join(m["role"] for m in messages[: i + 1][-4:])
        if role in ("system", "developer") and i and before not in ("system", "developer"):
            raise BadRow("has roles out of order", f"message {i} is of the {role}: {order}", f"the {role} first")
        if role == before and role in ("user", "assistant"):
            raise BadRow("has roles out of order", f"message {i}: {order}", "turns that take turns")
        if role == "tool" and before not in ("assistant", "tool"):
            raise BadRow("has roles out of order", f"message {i}: {order}", "what a tool says after its caller")
        before = role


def _messages(turns: object, *, strict: bool) -> list[Message]:
    if not isinstance(turns, list) or not turns:
        found = "an empty list" if turns == [] else type(turns).__name__
        raise BadRow("has no list of messages", found, "a list of messages")
    return [_message(turn, i, strict=strict) for i, turn in enumerate(turns)]


def _message(turn: object, i: int, *, strict: bool) -> Message:
    """A message with role and content, in OpenAI's or ShareGPT's format; drops null values, as transformers does."""
    if not isinstance(turn, dict):
        raise BadRow(f"message {i} is not an object", type(turn).__name__, "an object with role and content")
    role = turn.get("role", turn.get("from"))
    if not isinstance(role, str) or (strict and role not in ROLES):
        known = f"one of {', '.join(ROLES)}" if strict else "a role"
        raise BadRow(f"message {i} has an unknown role", f"{role!r:.40}", known)
    message = {key: value for key, value in turn.items() if value is not None and key not in ("role", "from", "value")}
    content = turn.get("content", turn.get("value"))
    if content is None and not message.get("tool_calls"):
        raise BadRow(f"message {i} has no text", "null", "content, or tool_calls")
    message = {"role": ROLES.get(role, role)} | ({} if content is None else {"content": content}) | message
    _check_content(content, i)
    reasoning = next((message[key] for key in REASONING if key in message), None)
    if reasoning is not None:
        if not isinstance(reasoning, str):
            raise BadRow(f"message {i} has reasoning that is not text", type(reasoning).__name__, "a text")
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _check_content(content: object, i: int) -> None:
    if content is None or isinstance(content, str):
        return
    if not isinstance(content, list):
        raise BadRow(f"message {i} has no text", type(content).__name__, "a text, or a list of parts")
    for part in content:
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            found = f"a part of type {part.get('type')!r}" if isinstance(part, dict) else type(part).__name__
            raise BadRow(f"message {i} has a part without text", found, '{"type": "text", "text": ...}')


def _alpaca(row: Mapping[str, Any]) -> list[Message]:
    words = {name: row.get(name) for name in ("instruction", "input", "output", "system")}
    for name, value in words.items():
        if value is not None and not isinstance(value, str):
            raise BadRow(f"has no text under '{name}'", type(value).__name__, "a text")
    messages = [{"role": "system", "content": words["system"]}] if words["system"] else []
    history = row.get("history") or []
    for pair in history:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise BadRow("has a bad 'history'", f"{pair!r:.60}", "pairs of a question and its answer")
        messages += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    question = f"{words['instruction']}\n{words['input']}" if words["input"] else words["instruction"]
    return [*messages, {"role": "user", "content": question}, {"role": "assistant", "content": words["output"]}]


def _either(value: object, role: str) -> list[Message]:
    return [{"role": role, "content": value}] if isinstance(value, str) else _messages(value, strict=False)


def _tools(value: object) -> list[Any] | None:
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRow("has tools that are not JSON", f"{value:.40}", "a list of JSON schemas") from error
    if value in (None, "", []):
        return None
    if not isinstance(value, list):
        raise BadRow("has bad tools", type(value).__name__, "a list of JSON schemas")
    return value


RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role(Options):
    """The texts around a turn; special tokens in them count as special tokens.

    A style cannot express: a token before the whole conversation, trimmed texts, a role that is written as part of
    another role's turn. A model that needs these has its own jinja template.
    """

    #: system, user, assistant or tool.
    role: RoleName = "user"
    before: str = ""
    #: ends the turn; the model also learns it if it ends an answer.
    end: str = ""
    after: str = ""


def _all(names: str, before: str, end: str, after: str = "") -> tuple[Role, ...]:
    return tuple(
        Role(role=cast(RoleName, name), before=before.format(role=name), end=end, after=after) for name in names.split()
    )


#: Qwen, InternVL 2 and later.
CHATML = _all("system user assistant tool", "<|im_start|>{role}\n", "<|im_end|>", "\n")

STYLES: dict[str, tuple[Role, ...]] = {
    "chatml": CHATML,
    "llama3": _all("system user assistant tool", "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>"),
    #: The style of LLaVA-1.5.
    "vicuna": (
        Role(role="system", after=" "),
        Role(role="user", before="USER: ", after=" "),
        Role(role="assistant", before="ASSISTANT: ", end="</s>"),
    ),
    #: A style for tokenizers without marks of their own.
    "plain": _all("system user assistant tool", "{role}: ", "\n"),
}


def _style(value: Any) -> Any:
    if isinstance(value, str):
        if value not in STYLES:
            raise refused(expected=f"one of {', '.join(STYLES)}, or the roles", cause=near(value, STYLES))
        return STYLES[value]
    if isinstance(value, Mapping):
        return [{"role": name, **texts} if isinstance(texts, Mapping) else texts for name, texts in value.items()]
    return value


#: ``style``: a name in `STYLES`; {user: {before: ...}, ...}; or the list in a spec.
Style = Annotated[tuple[Role, ...], Before(_style)]

_CONTENT = (
    "{% set said = message['content'] %}"
    "{% if said is string %}{{ said }}{% else %}{% for part in said %}{{ part['text'] }}{% endfor %}{% endif %}"
)


def jinja_of(style: Sequence[Role]) -> str:
    """The style as a chat template that marks the assistant's text with ``{% generation %}``."""
    turns, prompt = "", ""
    for number, role in enumerate(style):
        said = _CONTENT + _written(role.end)
        if role.role == "assistant":
            said, prompt = f"{{% generation %}}{said}{{% endgeneration %}}", _written(role.before)
        test = f"{{% {'elif' if number else 'if'} message['role'] == '{role.role}' %}}"
        turns += f"{test}{_written(role.before)}{said}{_written(role.after)}"
    known = ", ".join(role.role for role in style)
    refusal = f"{{{{ raise_exception('the roles of this style are {known}, not ' + message['role']) }}}}"
    return (
        f"{{% for message in messages %}}{turns}{{% else %}}{refusal}{{% endif %}}{{% endfor %}}"
        f"{{% if add_generation_prompt %}}{prompt}{{% endif %}}"
    )


def _written(text: str) -> str:
    return f"{{{{ {json.dumps(text)} }}}}" if text else ""
