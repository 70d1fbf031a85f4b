"""What differs between the demo of text and that of images; run.py and report.py are for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaresume.training.demo.plan import Attempt

__all__ = ["Extra", "Say", "Scenario"]

#: Prints a line for people.
Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extra:
    """What a scenario tells beyond the comparison."""

    #: (what, result), for the terminal and the table of the report.
    rows: tuple[tuple[str, str], ...] = ()
    #: HTML of the report.
    parts: tuple[str, ...] = ()
    #: fields of the result.
    result: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Scenario:
    """One demo."""

    #: command, as the report's heading has it.
    title: str
    #: of the run, by default.
    steps: int
    #: samples.
    global_batch_size: int
    #: the run that nobody disturbs, and the starts of the one that is killed.
    twin: Attempt
    attempts: tuple[Attempt, ...]
    #: what the data is, in words, and what the model gets of it besides which samples.
    data: str
    content: str
    #: what packing did not do.
    packing: str
    #: (directory of the demo, say) -> data config.
    prepare: Callable[[Path, Say], Path]
    #: (directory of the demo, steps) -> flags of the training program that every start shares.
    flags: Callable[[Path, int], list[str]]
    #: directory of the demo, when all has been run -> what more there is to tell.
    extra: Callable[[Path], Extra] = lambda out: Extra()
