"""A row of the result, and the rows as a Markdown table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One comparison."""

    what: str
    ours: float
    #: of ``ours`` and ``baseline``.
    unit: str
    #: None: there is nothing to compare with.
    baseline: float | None = None
    #: what the baseline is.
    against: str = ""
    #: how many times better than the baseline; None: there is none, or it is no question of better.
    ratio: float | None = None
    #: what must hold; empty: for information.
    must: str = ""
    #: None: nothing must.
    holds: bool | None = None


def quantity(value: float, unit: str) -> str:
    """Three significant digits; per cent with two decimals."""
    if unit == "%":
        return f"{value:.2f} %"
    digits = max(0, 2 - math.floor(math.log10(value))) if value > 0 else 0
    return f"{value:,.{digits}f} {unit}"


def markdown(rows: Sequence[Row], *, judge: bool = True) -> str:
    """The table.

    Args:
        rows: in the order of printing.
        judge: say whether requirements hold; not on sizes so small that a time means nothing.
    """
    head = ("what", "ours", "baseline", "ratio", "must hold", "holds")
    body = [
        (
            row.what,
            quantity(row.ours, row.unit),
            "-" if row.baseline is None else f"{quantity(row.baseline, row.unit)} ({row.against})",
            "-" if row.ratio is None else quantity(row.ratio, "x"),
            row.must or "-",
            "-" if row.holds is None or not judge else "yes" if row.holds else "NO",
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    lines = [head, tuple("-" * width for width in widths), *body]
    return "\n".join(
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    )
