"""Reads the JSON lines that ``--megaresume-log-samples`` wrote, and compares two runs step by step.

A step that was trained, lost to a kill and trained again has a line of each attempt; the last one counts.
What `megaresume.cluster.training.validation` measured is read as well. All of it without torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.stream.errors import UsageError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """One run, over all of its attempts."""

    #: every start, in order of time.
    starts: tuple[dict[str, Any], ...]
    #: by step: the last line of it.
    steps: dict[int, dict[str, Any]]
    #: lines of steps that were trained again later: the work that kills cost.
    lost: tuple[dict[str, Any], ...]
    #: by name of the validation set, by step: the last validation.
    validations: dict[str, dict[int, dict[str, Any]]]
    #: by step: the last measurement of the held-out accuracy.
    held_out: dict[int, dict[str, Any]]


def read_records(path: str | Path) -> RunRecords:
    """Read a file of JSON lines. A last line that a kill cut short is left out.

    Raises:
        UsageError: no such file, or a line that is no record.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(
            f"cannot read {path}", found=str(error), expected="a file of --megaresume-log-samples"
        ) from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            record["event"], record["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"line {number} of {path} is no record", found=line[:100].decode("utf-8", "replace")
            ) from error
        records.append(record)
    return assemble(records)


def assemble(records: Iterable[dict[str, Any]]) -> RunRecords:
    """A run from its lines, in order of time: what lies after the place that a start went back to is lost."""
    starts: list[dict[str, Any]] = []
    steps: dict[int, dict[str, Any]] = {}
    lost: list[dict[str, Any]] = []
    validations: dict[str, dict[int, dict[str, Any]]] = {}
    held_out: dict[int, dict[str, Any]] = {}
    for record in records:
        event, step = record["event"], record["step"]
        if event == "start":
            starts.append(record)
            lost += [steps.pop(later) for later in sorted(s for s in steps if s > step)]
        elif event == "step":
            steps[step] = record
        elif event == "validation":
            validations.setdefault(record.get("set", "valid"), {})[step] = record
        elif event == "held_out":
            held_out[step] = record
    return RunRecords(starts=tuple(starts), steps=steps, lost=tuple(lost), validations=validations, held_out=held_out)


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
