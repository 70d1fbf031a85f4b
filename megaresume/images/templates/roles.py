"""What stands around the turns of a conversation.

before + content + end + after        of the assistant, content and end are trained on
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from pydantic import BeforeValidator

from megaresume.stream.schema import Options, near, refused

__all__ = ["CHATML", "STYLES", "Role", "Style"]


RoleName = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role(Options):
    """Texts around a turn; special tokens in them are special tokens."""

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
