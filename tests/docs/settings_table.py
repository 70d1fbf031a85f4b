"""The table of settings in docs/settings.md: ``python -m tests.docs.settings_table`` writes it anew."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from megaresume.checkpoint.flags import flag_of
from megaresume.checkpoint.settings import GROUPS

DOCUMENT = Path(__file__).parents[2] / "docs/settings.md"
BEGIN, END = "<!-- settings: begin -->\n", "<!-- settings: end -->\n"
_TITLES = {
    "launch": "What to train on, and what to log",
    "data_options": "Order of the data",
    "loader_options": "Reading ahead",
    "checkpoints": "Checkpoints",
    "stop": "When to save and exit",
}
_HEAD = ["| name | flag | taken by | default | what |", "| --- | --- | --- | --- | --- |"]


def tables() -> str:
    """One for each group, as Markdown."""
    lines = []
    for name, cls in GROUPS.items():
        python = "" if name == "launch" else f": `attach({name}={cls.__name__}(…))`"
        lines += [f"## {_TITLES[name]}{python}", "", *_HEAD]
        for field in dataclasses.fields(cls):
            hosts = field.metadata["hosts"]
            flag = f"`{flag_of(field)}`" if hosts else ""
            default = "" if field.default in (None, ()) else f"`{field.default}`".replace("'", "")
            what = field.metadata["help"].replace("|", "\\|")
            lines.append(f"| `{field.name}` | {flag} | {', '.join(hosts)} | {default} | {what} |")
        lines.append("")
    return "\n".join(lines) + "\n"


def renewed(text: str) -> str:
    """The document with the tables of today."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: BEGIN + "\n" + tables() + END, text, flags=re.DOTALL)


if __name__ == "__main__":
    DOCUMENT.write_text(renewed(DOCUMENT.read_text()))
