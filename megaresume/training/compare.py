"""The run against its uninterrupted twin, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaresume.training.records import RunRecords

__all__ = ["Comparison", "compare_all"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Whether the run trained on what the twin trained on."""

    steps: int
    #: steps that were done twice, since a kill came between them and the next checkpoint.
    redone: int
    #: numbers of the steps, in order, whose samples, or their content, are not the twin's; that the run lacks.
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


def compare_all(twin: RunRecords, run: RunRecords) -> Comparison:
    """Compare every step that the run did, also those that a kill made it do again."""
    done: dict[int, list[dict[str, Any]]] = {step: [record] for step, record in run.steps.items()}
    for record in run.lost:
        done.setdefault(record["step"], []).append(record)

    def differing(*fields: str) -> tuple[int, ...]:
        return tuple(
            step
            for step, expected in sorted(twin.steps.items())
            if any(record[field] != expected[field] for record in done.get(step, ()) for field in fields)
        )

    # Records that ranks wrote have no losses.
    both = [
        (run.steps[step], expected)
        for step, expected in twin.steps.items()
        if step in run.steps and "loss_hex" in run.steps[step] and "loss_hex" in expected
    ]
    return Comparison(
        steps=len(twin.steps),
        redone=len(run.lost),
        different_samples=differing("samples", "order", "digest"),
        different_content=differing("content"),
        missing=tuple(step for step in sorted(twin.steps) if step not in run.steps),
        equal_losses=sum(a["loss_hex"] == b["loss_hex"] for a, b in both),
        largest_difference=max((abs(a["loss"] - b["loss"]) for a, b in both), default=0.0),
    )
