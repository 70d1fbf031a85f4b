"""What stands around the turns of a conversation, of models that many people train: chatml, llama3, vicuna, plain.

    before   content   end        after          of the assistant, content and end are trained

Templates of images take a style as it is; `megaresume prepare --chat-template NAME` as the jinja template that it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from megaresume.stream.schema import Options, near, refused

RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role(Options):
    """Texts around a turn; special tokens in them are special tokens.

    What a style cannot say: a token before the whole conversation, texts that are trimmed, a role that is written as
    part of another's turn. A model that needs these has a jinja template of its own.
    """

    #: system, user, assistant or tool.
    role: RoleName = "user"
    before: str = ""
    #: ends the turn: of an answer the model learns it too.
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
    #: LLaVA-1.5.
    "vicuna": (
        Role(role="system", after=" "),
        Role(role="user", before="USER: ", after=" "),
        Role(role="assistant", before="ASSISTANT: ", end="</s>"),
    ),
    #: for tokenizers without marks of their own.
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


#: ``style``: a name in `STYLES`; {user: {before: ...}, ...}; or the list that a spec holds.
Style = Annotated[tuple[Role, ...], BeforeValidator(_style)]

_CONTENT = (
    "{% set said = message['content'] %}"
    "{% if said is string %}{{ said }}{% else %}{% for part in said %}{{ part['text'] }}{% endfor %}{% endif %}"
)


def jinja_of(style: Sequence[Role]) -> str:
    """The style as a chat template that says itself what the assistant says."""
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
