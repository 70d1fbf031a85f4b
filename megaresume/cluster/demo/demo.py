"""What differs between the demos, and what their small models have in common with those of `megaresume smoke`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megaresume.cluster.scenario import Say

#: tokens of a sample; samples of a step.
SEQ_LENGTH, GLOBAL_BATCH_SIZE = 256, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoStart:
    """One start of the training program."""

    processes: int
    workers: int
    #: samples.
    micro_batch_size: int
    start_method: str | None = None
    #: fraction of the run's steps after which everything is killed, in the middle of the next step; None if it ends.
    killed_after: float | None = None

    nodes = 1

    @property
    def ranks_per_node(self) -> int:
        """As `megaresume.cluster.scenario` asks for it."""
        return self.processes

    ranks = ranks_per_node

    def __str__(self) -> str:
        processes = f"{self.processes} process" + ("es" if self.processes > 1 else "")
        workers = f"{self.workers} worker" + ("s" if self.workers != 1 else "")
        how = f" ({self.start_method})" if self.start_method else ""
        return f"{processes}, micro-batch {self.micro_batch_size}, {workers}{how}"


def write_config(path: Path, sources: Mapping[str, Any], *, seq_length: int = SEQ_LENGTH, **more: Any) -> Path:
    """Write a data config; the path."""
    packing = {"mode": "best_fit", "open_bins": 16}
    config = {"seed": 1234, "seq_length": seq_length, "packing": packing, **more, "sources": sources}
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path


#: flags of a small vision encoder.
VISION = {"vision-num-layers": 1, "vision-hidden-size": 64, "vision-num-attention-heads": 4}


def small_gpt(steps: int) -> dict[str, object]:
    """Flags of a GPT that trains anywhere."""
    return {
        "num-layers": 2,
        "hidden-size": 64,
        "num-attention-heads": 4,
        "train-iters": steps,
        "lr": "3e-3",
        "min-lr": "3e-4",
        "lr-decay-style": "cosine",
        "lr-warmup-iters": max(steps // 20, 1),
        "seed": 1234,
    }


def as_words(flags: Mapping[str, object]) -> list[str]:
    """Flags as words of a command line."""
    return [word for flag, value in flags.items() for word in (f"--{flag}", str(value))]


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
class Demo:
    """One demo."""

    #: command, as the report's heading has it.
    title: str
    #: of the run, by default.
    steps: int
    #: the run that nobody disturbs, and the starts of the one that is killed.
    twin: DemoStart = DemoStart(processes=2, workers=0, micro_batch_size=4)
    attempts: tuple[DemoStart, ...] = (
        DemoStart(processes=2, workers=0, micro_batch_size=4, killed_after=0.29),
        DemoStart(processes=1, workers=2, micro_batch_size=8, start_method="fork", killed_after=0.63),
        DemoStart(processes=2, workers=1, micro_batch_size=2, start_method="spawn"),
    )
    #: what the data is, in words, and what the model gets of it besides which samples.
    data: str
    content: str
    #: what packing did not do; None if a sample is an item.
    packing: str | None = None
    #: what the weights count.
    unit: str = "tokens"
    #: the training program, a module.
    program: str = "megaresume.cluster.training"
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
