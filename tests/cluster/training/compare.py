"""Two runs, step by step: the first difference."""

from __future__ import annotations

from dataclasses import dataclass

from megaresume.cluster.records import RunRecords


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first step at which two runs differ."""

    step: int
    #: ``step`` if only one of the runs has it.
    field: str
    first: object
    second: object

    def __str__(self) -> str:
        return f"step {self.step}: {self.field} {self.first} and {self.second}"


def compare(
    first: RunRecords, second: RunRecords, *, fields: tuple[str, ...] = ("samples", "order", "content", "digest")
) -> Difference | None:
    """The first difference in the steps that either run has; None: they are the same, in every field."""
    for step in sorted(first.steps.keys() | second.steps.keys()):
        one, other = first.steps.get(step), second.steps.get(step)
        if one is None or other is None:
            return Difference(step=step, field="step", first=one and one["step"], second=other and other["step"])
        for field in fields:
            if one[field] != other[field]:
                return Difference(step=step, field=field, first=one[field], second=other[field])
    return None
