"""Reads the losses of a run from a log of megaresume, Megatron-LM or DeepSpeed, and compares two runs step by step.

    {"event": "step", "step": 11, "loss": 5.25, "loss_hex": "0x1.5p+2", ...}          --megaresume-log-samples FILE
     iteration       11/     100 | ... | lm loss: 5.250000E+00 | ...                  printed by Megatron-LM
    steps: 11 loss: 5.2500 iter time (s): 0.511 samples/sec: 31.3                     printed by a DeepSpeed pipeline

A killed run that resumed repeats steps in its log: the last line of each step counts.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megaresume.runs.answer import Answer, live, told
from megaresume.stream.errors import UsageError

_NUMBER = r"[-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|nan|inf)"
#: Megatron's line for a step. What comes before (rank, time) and in the middle (learning rate, ...) depends on its
#: version.
_MEGATRON = re.compile(rf"(?<!loss at )\biteration\s+(\d+)/\s*(?:\d+|-)\s*\|.*?\blm loss:\s*({_NUMBER})", re.IGNORECASE)
_DEEPSPEED = re.compile(rf"\bsteps:\s*(\d+)\s+loss:\s*({_NUMBER})", re.IGNORECASE)
_VALIDATION = re.compile(
    rf"\bvalidation loss at iteration\s+(\d+)(?: on ([^|]+?))?\s*\|\s*lm loss value:\s*({_NUMBER})", re.IGNORECASE
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """The loss of one step, with the precision of its log."""

    value: float
    #: the loss as printed; None if the value is exact.
    text: str | None = None

    def rounded_as(self, text: str) -> float:
        """The value, rounded to the precision of ``text``."""
        if not math.isfinite(self.value):
            return self.value
        mantissa, exponent, _ = text.lower().partition("e")
        digits = len(mantissa.partition(".")[2])
        return float(f"{self.value:.{digits}{'e' if exponent else 'f'}}")


@dataclass(frozen=True, kw_only=True, slots=True)
class LossLog:
    """The losses of one run."""

    path: Path
    #: the last line of each step, by step number from 1.
    steps: dict[int, Loss]
    #: (step that the run resumed from, steps beyond it that had been done).
    restarts: tuple[tuple[int, int], ...] = ()
    #: the validation losses, by name of the set and by step.
    validations: dict[str, dict[int, Loss]] = field(default_factory=dict)

    @property
    def exact(self) -> bool:
        """Whether the log has the losses to the last bit."""
        return all(loss.text is None for loss in self.steps.values())


@dataclass(frozen=True, slots=True)
class LossDifference:
    """One step with two losses."""

    step: int
    first: float
    second: float

    @property
    def size(self) -> float:
        """The absolute difference of the two losses; NaN if only one of them is a number."""
        return abs(self.first - self.second)


@dataclass(frozen=True, kw_only=True, slots=True)
class LossComparison(Answer):
    """A comparison of two runs, over the steps in both logs."""

    logs: tuple[LossLog, LossLog] = live()
    steps: int
    #: steps with the same loss, bit for bit (as far as the logs print it).
    equal: int
    #: whether both logs are exact.
    exact: bool
    first_difference: LossDifference | None
    largest_difference: LossDifference | None
    #: steps that only the first log has, and only the second.
    only_first: int
    only_second: int
    #: the largest allowed difference.
    tolerance: float

    @told
    def holds(self) -> bool:
        """Whether there are steps to compare, and none differs by more than ``tolerance``."""
        largest = self.largest_difference
        return self.steps > 0 and (largest is None or largest.size <= self.tolerance)


def read_losses(path: str | Path) -> LossLog:
    """Read a log in any of the formats.

    Raises:
        UsageError: no such file, or no loss in it.
    """
    path = Path(path)
    steps: dict[int, Loss] = {}
    validations: dict[str, dict[int, Loss]] = {}
    restarts: list[tuple[int, int]] = []
    last = 0
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for kind, step, name, loss in _events(file):
                if kind == "validation" and loss is not None:
                    validations.setdefault(name, {})[step] = loss
                    continue
                # After a start line; or, in a log without them, from the first repeated step.
                at = step if kind == "start" else step - 1
                if (kind == "start" and last) or at < last:
                    restarts.append((at, max(last - at, 0)))
                    while steps and next(reversed(steps)) > at:  # ascending: a step is added after all others
                        steps.popitem()
                last = at
                if loss is not None:
                    steps[step], last = loss, step
    except OSError as error:
        raise UsageError.unreadable(
            path,
            error,
            "a file: of --megaresume-log-samples, or what Megatron-LM or DeepSpeed printed",
            action="check the path",
        ) from error
    if not steps:
        raise UsageError(
            f"{path} holds no losses",
            found="neither JSON lines with a loss_hex, nor lines 'iteration N/ M | ... lm loss: "
            "x', nor 'steps: N loss: x'",
            expected="the log of a run",
            cause="the log of a rank that prints nothing, or of a run that ended before its first step",
            action="give the output of the rank that prints the losses (the last one, under Megatron-LM)",
        )
    return LossLog(path=path, steps=steps, restarts=tuple(restarts), validations=validations)


def _events(lines: Any) -> Iterator[tuple[str, int, str, Loss | None]]:
    """The events of a log: (``start``, ``step`` or ``validation``, step, name of the validation set, loss)."""
    for line in lines:
        if line.startswith("{"):
            event = _record(line)
            if event is not None:
                yield event
            continue
        if "loss" not in line:
            continue
        if found := _VALIDATION.search(line):
            name = found[2] or "valid"
            yield "validation", int(found[1]), "valid" if name == "validation set" else name, _printed(found[3])
        elif found := _MEGATRON.search(line) or _DEEPSPEED.search(line):
            yield "step", int(found[1]), "", _printed(found[2])


def _record(line: str) -> tuple[str, int, str, Loss | None] | None:
    try:
        record = json.loads(line)
        kind, step = record["event"], int(record["step"])
        if kind == "start":
            return kind, step, "", None
        exact = float.fromhex(record["loss_hex"])
    except (ValueError, KeyError, TypeError):
        return None  # a line truncated by a kill, or another program's
    return kind, step, str(record.get("set", "valid")), Loss(value=exact)


def _printed(text: str) -> Loss:
    return Loss(value=float(text), text=text)


def compare_losses(first: LossLog, second: LossLog, *, tolerance: float) -> LossComparison:
    """Compare two runs step by step. If one log has rounded losses, the other's are rounded in the same way."""
    both = sorted(first.steps.keys() & second.steps.keys())
    pairs = [(step, *_comparable(first.steps[step], second.steps[step])) for step in both]
    found = [LossDifference(*p) for p in pairs if p[1] != p[2] and not (math.isnan(p[1]) and math.isnan(p[2]))]
    return LossComparison(
        logs=(first, second),
        tolerance=tolerance,
        steps=len(both),
        equal=len(both) - len(found),
        exact=first.exact and second.exact,
        first_difference=found[0] if found else None,
        # NaN against a number counts as the largest difference.
        largest_difference=max(found, key=lambda d: (math.isnan(d.size), d.size), default=None),
        only_first=len(first.steps.keys() - second.steps.keys()),
        only_second=len(second.steps.keys() - first.steps.keys()),
    )


def _comparable(one: Loss, other: Loss) -> tuple[float, float]:
    if one.text is None and other.text is not None:
        return one.rounded_as(other.text), other.value
    if other.text is None and one.text is not None:
        return one.value, other.rounded_as(one.text)
    return one.value, other.value
