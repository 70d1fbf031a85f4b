"""The results of a smoke test: its attempts, stops, comparison and verdict.

As a table for the terminal, plain JSON, or an HTML page.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import megaresume
from megaresume.cluster.pages import loss_figure, steps_table
from megaresume.cluster.records import RunComparison, RunRecords
from megaresume.cluster.scenario import Found, StopResult
from megaresume.cluster.smoke.plan import SmokePlan
from megaresume.render import escape, html_table, page, text_table
from megaresume.stream.errors import SetupError, listed


@dataclass(kw_only=True, slots=True)
class Result(Found):
    """All results."""

    plan: SmokePlan
    #: where it ran: see `Launcher.description`.
    where: str
    reference: RunRecords | None = None
    run: RunRecords | None = None
    outcome: RunComparison | None = None
    #: the verdict of ``megaresume verify`` on the run; None if it could not run.
    verified: bool | None = None
    seconds: float = 0.0
    reference_seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the run trained exactly what the reference trained, through every stop."""
        return not self.problems and self.outcome is not None and self.outcome.holds and self.verified is not False

    @property
    def first_difference(self) -> str | None:
        """The difference to look at first."""
        if self.holds:
            return None
        if self.outcome is not None and self.outcome.first is not None:
            return self.outcome.first
        return self.problems[0] if self.problems else "megaresume verify does not hold"


_HEAD = ("stop", "before", "after", "at step", "resumed from", "steps lost", "first step after", "due to data")


def summary(result: Result) -> dict[str, Any]:
    """The result as plain JSON."""
    plan = result.plan
    return {
        "holds": result.holds,
        "first_difference": result.first_difference,
        "problems": result.problems,
        "notes": result.notes,
        "launcher": plan.options.launcher,
        "where": result.where,
        "script": None if plan.options.script is None else str(plan.options.script),
        "model": plan.options.model if plan.own else None,
        "steps": plan.steps,
        "save_interval": plan.save_interval,
        "global_batch_size": plan.global_batch_size,
        "stops": [
            {
                "kind": stop.kind,
                "before": asdict(stop.before),
                "after": asdict(stop.after),
                "step": stop.step,
                "resumed_from": stop.resumed_from,
                "lost": stop.lost,
                "seconds": _rounded(stop.seconds),
                "data_seconds": _rounded(stop.data_seconds),
            }
            for stop in result.stops
        ],
        "attempts": [
            {"number": a.number, "layout": asdict(a.layout), "resumed_from": a.first, "last_step": a.last}
            for a in result.attempts
        ],
        "comparison": None if result.outcome is None else result.outcome.to_dict(),
        "verified": result.verified,
        "seconds": round(result.seconds, 1),
        "reference_seconds": round(result.reference_seconds, 1),
        "report": str(plan.out / "report.html"),
    }


def table(result: Result) -> str:
    """The result as a table, for the terminal."""
    lines = ["", text_table([_HEAD, *map(_row, result.stops)]), ""]
    lines += [
        "  nodes x ranks on each, m: micro-batch, w: workers",
        "  steps lost were trained again; due to data: opening it, seeking, the wait for the first samples",
        "",
    ]
    lines += [f"  {what:<26} {found}" for what, found in _checks(result)]
    lines += ["", *(f"  note: {note}" for note in result.notes)]
    for problem in result.problems:
        lines.append("  " + problem.replace("\n", "\n  "))
    if result.holds:
        lines.append("  EXACT: nothing repeated, nothing skipped, through every stop")
    else:
        lines.append(f"  {_verdict(result)}")
    return "\n".join(lines)


def write_report(path: Path, result: Result) -> None:
    """Write the page; without matplotlib, it has no figure."""
    plan, kinds = result.plan, ", ".join(stop.kind for stop in result.stops) or "nothing"
    verdict = (
        f"The run was stopped by {kinds}, and resumed on other layouts. It trained on exactly what the undisturbed run "
        "trained on."
        if result.holds
        else _verdict(result)
    )
    model = f"our small {plan.options.model.upper()}" if plan.own else str(plan.options.script)
    parts = [
        "<h1>megaresume smoke</h1>",
        f"<p>{escape(result.where)}; {escape(model)}, {plan.steps} steps, a checkpoint every "
        f"{plan.save_interval}; megaresume {megaresume.__version__}; {result.seconds:.0f} seconds in all</p>",
        f"<p class='verdict {'holds' if result.holds else 'fails'}'>{escape(verdict)}</p>",
        *(f"<pre>{escape(problem)}</pre>" for problem in result.problems),
        *(f"<p>{escape(note)}</p>" for note in result.notes),
        "<h2>The stops</h2>",
        html_table(_HEAD, [_row(stop) for stop in result.stops], numbers=True),
        "<p>nodes x ranks on each, m: micro-batch, w: workers. Steps lost were trained again, with the same samples. "
        "Due to data: from opening the data to the restored position, and the wait of the first step.</p>",
        "<h2>What was checked</h2>",
        html_table(("", "result"), _checks(result)),
    ]
    if result.reference is not None and result.run is not None:
        parts += ["<h2>Loss, step by step</h2>", _figure(result, result.reference, result.run)]
        parts.append(steps_table(result.reference, result.run))
    path.write_text(page("megaresume smoke", parts), encoding="utf-8")


def _verdict(result: Result) -> str:
    """The verdict on a failed test: what differs, or why nothing is proved."""
    differs = result.outcome is not None and result.outcome.first is not None
    return f"NOT {'EXACT' if differs else 'PROVED'}: {(result.first_difference or '').splitlines()[0]}"


def _checks(result: Result) -> list[tuple[str, str]]:
    outcome = result.outcome
    if outcome is None:
        return [("steps compared", "none")]
    losses = outcome.losses
    rows = [
        (
            "steps",
            f"{outcome.compared} of {result.plan.steps} compared; {outcome.redone} were trained again after a stop",
        ),
        ("samples, order, digest", _all_but(outcome.different_samples, outcome.compared)),
        ("content", _all_but(outcome.different_content, outcome.compared)),
        ("steps missing", listed(outcome.missing, 12) or "none"),
    ]
    if outcome.hashed < outcome.compared:
        rows[1] = ("samples", _all_but(outcome.different_samples, outcome.compared))
        rows[2] = ("order, content", f"hashes of {outcome.hashed} steps compared; the others by megaresume verify")
    if losses.compared:
        exact = f"{losses.exact_equal} of {losses.exact} with an unchanged layout bit for bit; " if losses.exact else ""
        # A program that prints them may have been killed before it did.
        few = "" if losses.compared == outcome.compared else f"of {losses.compared} steps: "
        where = "" if losses.largest_step is None else f" (step {losses.largest_step})"
        rows.append(
            (
                "losses",
                f"{few}{exact}largest relative difference {losses.largest:.1e}{where}, allowed {losses.tolerance:.0e}",
            )
        )
    else:
        rows.append(("losses", "none are recorded"))
    proof = "not asked: no data state beside the checkpoints"
    if result.verified is not None:
        proof = "proved: the stream planned again gives what every rank was handed" if result.verified else "NOT PROVED"
    rows.append(("megaresume verify", proof))
    return rows


def _all_but(different: Sequence[int], steps: int) -> str:
    return f"identical in {steps - len(different)} of {steps} steps" + (
        f"; DIFFERENT in {listed(different, 12)}" if different else ""
    )


def _row(stop: StopResult) -> tuple[str, ...]:
    def of(value: object, unit: str = "") -> str:
        if value is None:
            return "-"
        return f"{value:.2f} {unit}" if isinstance(value, float) else str(value)

    return (
        stop.kind,
        stop.before.short,
        stop.after.short,
        of(stop.step),
        of(stop.resumed_from),
        of(stop.lost),
        of(stop.seconds, "s"),
        of(stop.data_seconds, "s"),
    )


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _figure(result: Result, reference: RunRecords, run: RunRecords) -> str:
    """The losses as a figure; none without matplotlib, which a cluster node may lack."""
    try:
        return loss_figure(
            reference,
            run,
            attempts=[str(attempt.layout) for attempt in result.attempts],
            stops=[(stop.step, stop.kind) for stop in result.stops],
        )
    except SetupError as error:
        return f"<p>No figure: {escape(str(error.action))}</p>"
