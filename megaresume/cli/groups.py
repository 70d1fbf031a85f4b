"""The commands by task, for ``megaresume --help``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping

#: In the order of a newcomer's first day.
GROUPS = {
    "try it, and begin": ("demo", "new"),
    "data": ("prepare", "stream"),
    "start and resume": ("run", "patch", "latest", "plan", "convert"),
    "look and prove": ("inspect", "trace", "verify", "report"),
    "find what is wrong": ("doctor", "smoke"),
    "the shell": ("completion",),
}


def listed(commands: Mapping[str, str], width: int = 100) -> str:
    """Every command with its help, under the name of its group.

    Args:
        commands: name -> help. Those of no group come last.
        width: columns of text.
    """
    grouped = {name for group in GROUPS.values() for name in group}
    groups = {**GROUPS, "more": tuple(name for name in commands if name not in grouped)}
    lines: list[str] = []
    for title, names in groups.items():
        shown = [name for name in names if name in commands]
        if shown:
            lines += ["", f"{title}:"]
        for name in shown:
            first, *rest = textwrap.wrap(commands[name], width - 17)
            lines += [f"    {name:<12} {first}", *(" " * 17 + line for line in rest)]
    return "\n".join(lines[1:])
