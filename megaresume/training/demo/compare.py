"""The run against its uninterrupted twin, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Comparison", "Step", "compare", "read_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """What the training program logged about one step."""

    step: int
    #: [first, stop) in samples.
    samples: tuple[int, int]
    #: of the identities of the step's samples.
    digest: str
    #: of their tokens, labels, masks and positions.
    content: str
    loss: float
    #: loss, bit for bit.
    loss_bits: str
    #: 0-based start of the run that did the step.
    attempt: int


def read_steps(path: Path, *, attempt: int = 0) -> list[Step]:
    """Steps of a log, in the order in which they were done. A line cut short by a kill ends it."""
    steps = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record: dict[str, Any] = json.loads(line)
        except ValueError:
            break
        if "loss" in record and "step" in record:
            steps.append(_step(record, attempt))
    return steps


def _step(record: dict[str, Any], attempt: int) -> Step:
    return Step(
        step=record["step"],
        samples=(record["samples"][0], record["samples"][1]),
        digest=record["digest"],
        content=record["content"],
        loss=record["loss"],
        loss_bits=record["loss_hex"],
        attempt=attempt,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Whether the run trained on what the twin trained on."""

    steps: int
    #: steps that were done twice, since a kill came between them and the next checkpoint.
    redone: int
    #: numbers of the steps, in order, whose samples are not the twin's; that the run lacks.
    different_samples: tuple[int, ...]
    different_content: tuple[int, ...]
    missing: tuple[int, ...]
    #: steps whose loss is bit for bit the twin's, and the largest difference of the others.
    equal_losses: int
    largest_difference: float

    @property
    def holds(self) -> bool:
        """The same samples with the same content in the same steps, none missing."""
        return not (self.different_samples or self.different_content or self.missing) and self.steps > 0


def compare(twin: Sequence[Step], run: Iterable[Step]) -> Comparison:
    """Compare every step that the run did, also those that it did again after a kill."""
    done: dict[int, list[Step]] = {}
    for step in run:
        done.setdefault(step.step, []).append(step)
    differences = [abs(other.loss - t.loss) for t in twin for other in done.get(t.step, ())[-1:]]
    return Comparison(
        steps=len(twin),
        redone=sum(len(same) - 1 for same in done.values()),
        different_samples=tuple(
            t.step for t in twin if any((s.samples, s.digest) != (t.samples, t.digest) for s in done.get(t.step, ()))
        ),
        different_content=tuple(t.step for t in twin if any(s.content != t.content for s in done.get(t.step, ()))),
        missing=tuple(t.step for t in twin if t.step not in done),
        equal_losses=sum(done[t.step][-1].loss_bits == t.loss_bits for t in twin if t.step in done),
        largest_difference=max(differences, default=0.0),
    )
