"""What differs between the demos, and how a demo starts its training program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of the training program."""

    processes: int
    workers: int
    #: samples.
    micro_batch_size: int
    start_method: str | None = None
    #: fraction of the run's steps after which everything is killed, in the middle of the next step; None: it ends.
    killed_after: float | None = None

    @property
    def layout(self) -> str:
        """In words."""
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        workers = f"{self.workers} worker" + ("s" if self.workers != 1 else "")
        how = f" ({self.start_method})" if self.start_method else ""
        return f"{processes}, micro-batch {self.micro_batch_size}, {workers}{how}"


def as_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line."""
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


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
    #: whether what it compared is the same.
    holds: bool = True


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
    #: what packing did not do; None: a sample is an item.
    packing: str | None = None
    #: what the weights count.
    unit: str = "tokens"
    #: the training program, a module.
    program: str = "megaresume.training"
    #: packages whose versions the report tells.
    packages: tuple[str, ...] = ("megaresume", "torch", "deepspeed", "megatron-core")
    #: (directory of the demo, say) -> what the training program is given as its data.
    prepare: Callable[[Path, Say], Path]
    #: (directory of the demo, steps) -> flags of the training program that every start shares.
    flags: Callable[[Path, int], list[str]]
    #: (directory of the demo, that) -> the data config, when all has been run.
    config: Callable[[Path, Path], Path] = lambda out, data: data
    #: directory of the demo, when all has been run -> what more there is to tell.
    extra: Callable[[Path], Extra] = lambda out: Extra()
