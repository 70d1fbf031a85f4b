"""What the reports of `megaresume demo` and `megaresume smoke` show alike: a run step by step, beside the undisturbed
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from megaresume.cluster.records import RunRecords, spelled
from megaresume.render import COLOURS, html_table, svg


def all_records(run: RunRecords) -> list[dict[str, Any]]:
    """Every step that a run made, in order, also those that were lost."""
    return sorted([*run.steps.values(), *run.lost], key=lambda record: (record["attempt"], record["step"]))


def done_again(run: RunRecords) -> set[tuple[int, int]]:
    """(attempt, step) of every step that an earlier attempt had made already."""
    seen, again = set[int](), set[tuple[int, int]]()
    for record in all_records(run):
        if record["step"] in seen:
            again.add((record["attempt"], record["step"]))
        seen.add(record["step"])
    return again


def loss_figure(
    undisturbed: RunRecords, run: RunRecords, *, attempts: Sequence[str], stops: Iterable[tuple[int, str]]
) -> str:
    """The losses of both runs, and where the second was stopped, as a figure.

    Args:
        undisturbed, run: their records.
        attempts: the names of the run's attempts, in order.
        stops: last step before each stop, and its kind; one for each attempt that was stopped.

    Raises:
        SetupError: matplotlib is not installed.
    """

    def colour(number: int) -> str:
        return COLOURS[(number - 1) % len(COLOURS)]

    def draw(axes: Any) -> None:
        twin = _losses(record for _, record in sorted(undisturbed.steps.items()))
        axes.plot(list(twin), list(twin.values()), color="#c9d0dc", lw=7, label="undisturbed")
        for number, name in enumerate(attempts, 1):
            losses = _losses(record for record in all_records(run) if record["attempt"] == number)
            label = f"start {number}: {name}"
            axes.plot(list(losses), list(losses.values()), color=colour(number), lw=1.8, label=label)
        for number, (step, kind) in enumerate(stops, 1):
            place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -10), "textcoords": "offset points"}
            axes.axvline(step + 0.5, color=colour(number), lw=1, ls="--")
            axes.annotate(kind, (step + 0.5, 1), color=colour(number), fontsize=9, **place)
        axes.set_xlabel("step (dashed: a stop)")
        axes.set_ylabel("loss")
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

    return svg(draw, height=4.2)


def _losses(records: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    return {record["step"]: record["loss"] for record in records if record.get("loss") is not None}


def steps_table(undisturbed: RunRecords, run: RunRecords) -> str:
    """Every step that a run made, folded away."""
    again, lost = done_again(run), {(record["attempt"], record["step"]) for record in run.lost}

    def row(record: Mapping[str, Any]) -> tuple[str, ...]:
        place, twin = (record["attempt"], record["step"]), undisturbed.steps.get(record["step"], {})
        return (
            str(record["step"]),
            str(record["attempt"]),
            ", ".join(["done again"] * (place in again) + ["lost to the stop"] * (place in lost)),
            spelled(record["samples"]),
            str(record.get("digest") or "-"),
            *(f"{loss:.6f}" if (loss := one.get("loss")) is not None else "-" for one in (record, twin)),
        )

    head = ("step", "start", "", "samples", "digest", "loss", "undisturbed")
    table = html_table(head, [row(record) for record in all_records(run)])
    return f"<details><summary>Every step</summary><div class=scroll>{table}</div></details>"
