"""What may be wrong: with this machine, with a directory of checkpoints, with a launch that failed.

    machine.py    versions, CUDA, apex, shared memory; the kind of filesystem, locks, space; nothing is imported
    directory.py  pointers, completeness, ranks                    checkpoint.foreign, ledger; nothing is unpickled
    log.py        ``known.yaml``: what users' logs say, what it means, what to do

Each gives `Check`s; ``megaresume doctor`` (command.py) prints them.
"""

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
