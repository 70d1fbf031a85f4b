"""`Check`: one thing that was looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ok. note: worth knowing. warning: it may go wrong. problem: it will, or has.
Status = Literal["ok", "note", "warning", "problem"]
Area = Literal["environment", "filesystem", "checkpoints", "log"]


@dataclass(frozen=True, slots=True)
class Check:
    """What was looked at, what was found, what to do."""

    area: Area
    name: str
    status: Status
    found: str
    #: what it means, where that is not plain.
    cause: str | None = None
    #: what to do next.
    action: str | None = None
