"""What stands around the turns of a conversation.

before + content + end + after        of the assistant, content and end are trained on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaresume.images.options import choice, mapping, option, read_options, string

__all__ = ["CHATML", "STYLES", "Role", "style"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Role:
    """Texts around a turn; special tokens in them are special tokens."""

    #: system, user, assistant or tool.
    role: str = option("user", choice("system", "user", "assistant", "tool"))
    before: str = option("", string)
    #: ends the turn: of an answer the model learns it too.
    end: str = option("", string)
    after: str = option("", string)


def _all(names: str, before: str, end: str, after: str = "") -> tuple[Role, ...]:
    return tuple(Role(role=name, before=before.format(role=name), end=end, after=after) for name in names.split())


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


def style(value: Any, where: str) -> tuple[Role, ...]:
    """Reader of ``style``: a name in `STYLES`; {user: {before: ...}, ...}; or the list that a spec holds."""
    if isinstance(value, str):
        return STYLES[choice(*STYLES)(value, where)]
    if isinstance(value, list):
        return tuple(read_options(Role, item, f"{where}[{number}]") for number, item in enumerate(value))
    roles = mapping(value, where)
    return tuple(
        read_options(Role, {"role": name, **mapping(texts, f"{where}.{name}")}, where) for name, texts in roles.items()
    )
