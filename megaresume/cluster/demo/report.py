"""The demo's report: one HTML page with everything inside, no script, no link outside."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.cluster.demo.demo import Demo, Extra
from megaresume.cluster.records import RecordComparison, RunRecords
from megaresume.render import COLOURS, html_table, page, svg

if TYPE_CHECKING:
    from megaresume.stream.stream import Stream


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedStart:
    """One start of the run, for the report."""

    layout: str
    #: the first and the last step that it did.
    steps: tuple[int, int]
    killed: bool
    #: what ended it, in words.
    end: str
    #: the line that it printed when it resumed.
    resumed: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What the report tells."""

    demo: Demo
    extra: Extra
    holds: bool
    comparison: RecordComparison
    twin: RunRecords
    run: RunRecords
    starts: Sequence[ReportedStart]
    #: of ``megaresume verify``.
    verified: dict[str, Any]
    #: sources and fill of the run's samples: what ``megaresume stream --summary --json`` prints.
    summary: dict[str, Any]
    seconds: float
    versions: str


def write_report(path: Path, facts: Facts, stream: Stream) -> None:
    """Write the page."""
    path.write_text(_page(facts, stream), encoding="utf-8")


def _page(facts: Facts, stream: Stream) -> str:
    verdict = (
        "The run was killed twice and resumed on other processes, workers and micro-batches. It trained on exactly "
        "what the uninterrupted run trained on."
        if facts.holds
        else "The run did not train on what the uninterrupted run trained on."
    )
    parts = [
        f"<h1>{facts.demo.title}</h1><p>{html.escape(facts.versions)}; {facts.seconds:.0f} seconds in all</p>",
        f"<p class='verdict {'holds' if facts.holds else 'fails'}'>{verdict}</p>",
        "<h2>What was checked</h2>",
        html_table(("", "result"), checks(facts)),
        "<p>With other processes or micro-batches the sums of a loss are taken in another order. megaresume verify: "
        f"{len(facts.verified['points'])} recorded points, planned again on a CPU.</p>",
        "<h2>Loss, step by step</h2>",
        _losses(facts),
        *facts.extra.parts,
        "<h2>The starts of the run</h2>",
        html_table(("", "layout", "steps", "end"), _starts(facts)),
        "<pre>" + html.escape("\n".join(s.resumed for s in facts.starts if s.resumed)) + "</pre>",
        "<h2>What each source contributed</h2>",
        html_table(
            ("source", "weight", f"share of {facts.demo.unit}", facts.demo.unit, "segments"),
            _sources(facts),
            numbers=True,
        ),
        _shares(facts, stream),
        *(_packing(facts, stream) if facts.demo.packing else ()),
        "<details><summary>Every step</summary><div class=scroll>",
        html_table(("step", "start", "", "samples", "digest", "loss", "loss of the twin"), _steps(facts)),
        "</div></details>",
    ]
    return page(facts.demo.title, parts)


def _packing(facts: Facts, stream: Stream) -> tuple[str, ...]:
    return (
        "<h2>Packing</h2>",
        f"<p>{100 * facts.summary['fill']:.2f} % of all positions hold a token "
        f"({html.escape(facts.summary['packing'])}, samples of {facts.summary['seq_length']} tokens). "
        f"{facts.demo.packing}</p>",
        _fill(facts, stream),
    )


def checks(facts: Facts) -> list[tuple[str, str]]:
    """What was checked, and what came of it."""
    c = facts.comparison

    def identical(different: Sequence[int]) -> str:
        found = f"{c.steps - len(different)} of {c.steps} identical"
        return found + (f": DIFFERENT in steps {', '.join(map(str, different))}" if different else "")

    return [
        ("steps compared", f"{c.steps}"),
        ("steps lost to a kill, and done again", _ranges([record["step"] for record in facts.run.lost])),
        ("samples of every step", identical(c.different_samples)),
        (facts.demo.content, identical(c.different_content)),
        ("steps missing", ", ".join(map(str, c.missing)) or "none"),
        ("losses, bit for bit", f"{c.equal_losses} of {c.steps}, the others within {c.largest_difference:.1e}"),
        ("megaresume verify", "proved" if facts.verified["holds"] else "NOT PROVED"),
        *facts.extra.rows,
    ]


def _starts(facts: Facts) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("twin", "never disturbed", f"1 to {facts.comparison.steps}", "finished")]
    for number, start in enumerate(facts.starts, 1):
        again = [step for attempt, step in _done_again(facts) if attempt == number]
        steps = f"{start.steps[0]} to {start.steps[1]}" + (f" ({_ranges(again)} again)" if again else "")
        rows.append((f"start {number}", start.layout, steps, start.end))
    return rows


def _ranges(steps: Sequence[int]) -> str:
    """Numbers in words: ``3: 7 to 9``."""
    runs: list[list[int]] = []
    for step in sorted(steps):
        if runs and runs[-1][1] + 1 == step:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return f"{len(steps)}: " + ", ".join(f"{a} to {b}" if a != b else f"{a}" for a, b in runs) if runs else "none"


def _done_again(facts: Facts) -> set[tuple[int, int]]:
    """(start, step) of every step that an earlier start had done, too."""
    seen, again = set[int](), set[tuple[int, int]]()
    for record in _all_records(facts):
        if record["step"] in seen:
            again.add((record["attempt"], record["step"]))
        seen.add(record["step"])
    return again


def _sources(facts: Facts) -> list[tuple[str, ...]]:
    return [
        (name, f"{s['weight']:.3f}", f"{s['share']:.3f}", f"{s['tokens']:,}", f"{s['segments']:,}")
        for name, s in facts.summary["sources"].items()
    ]


def _all_records(facts: Facts) -> list[dict[str, Any]]:
    """Every step that the run did, in the order in which it did them."""
    return sorted([*facts.run.steps.values(), *facts.run.lost], key=lambda r: (r["attempt"], r["step"]))


def _steps(facts: Facts) -> list[tuple[str, ...]]:
    again, lost = _done_again(facts), {(record["attempt"], record["step"]) for record in facts.run.lost}

    def words(record: dict[str, Any]) -> str:
        place = record["attempt"], record["step"]
        return ", ".join(["done again"] * (place in again) + ["lost to the kill"] * (place in lost))

    return [
        (
            str(r["step"]),
            str(r["attempt"]),
            words(r),
            f"{r['samples'][0]} to {r['samples'][1] - 1}",
            r["digest"],
            f"{r['loss']:.6f}",
            f"{facts.twin.steps[r['step']]['loss']:.6f}" if r["step"] in facts.twin.steps else "",
        )
        for r in _all_records(facts)
    ]


def _losses(facts: Facts) -> str:
    def draw(axes: Any) -> None:
        twin = [facts.twin.steps[step] for step in sorted(facts.twin.steps)]
        axes.plot([r["step"] for r in twin], [r["loss"] for r in twin], color="#c9d0dc", lw=7, label="uninterrupted")
        for number, start in enumerate(facts.starts, 1):
            records = [r for r in _all_records(facts) if r["attempt"] == number]
            colour = COLOURS[(number - 1) % len(COLOURS)]
            label = f"start {number}: {start.layout}"
            axes.plot([r["step"] for r in records], [r["loss"] for r in records], color=colour, lw=1.8, label=label)
            if start.killed:
                at = start.steps[1] + 0.5
                axes.axvline(at, color=colour, lw=1, ls="--")
                place = {"xycoords": ("data", "axes fraction"), "xytext": (4, -10), "textcoords": "offset points"}
                axes.annotate("SIGKILL", (at, 1), color=colour, fontsize=9, **place)
        axes.set_xlabel("step")
        axes.set_ylabel("loss")
        axes.figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)

    return svg(draw, height=4.2)


def _shares(facts: Facts, stream: Stream) -> str:
    """Tokens of each source so far over all tokens so far, against the weights."""
    import numpy as np

    plan = stream.plan(facts.summary["first"], facts.summary["stop"])
    sample = np.repeat(np.arange(plan.first, plan.stop), np.diff(plan.starts))
    total = np.cumsum(plan.table[:, 4])

    def draw(axes: Any) -> None:
        for i, (name, s) in enumerate(facts.summary["sources"].items()):
            colour = COLOURS[i % len(COLOURS)]
            mine = np.cumsum(np.where(plan.table[:, 0] == i, plan.table[:, 4], 0))
            axes.plot(sample, mine / total, color=colour, lw=1.6, label=name)
            axes.axhline(s["weight"], color=colour, lw=0.8, ls=":")
        axes.set_xlabel("sample")
        axes.set_ylabel(f"share of {facts.demo.unit} so far")
        axes.legend(frameon=False, fontsize=9, loc="upper right")

    return svg(draw, height=3)


def _fill(facts: Facts, stream: Stream) -> str:
    plan = stream.plan(facts.summary["first"], facts.summary["stop"])
    padding = facts.summary["seq_length"] - plan.tokens()

    def draw(axes: Any) -> None:
        axes.bar(range(plan.first, plan.stop), padding, width=1.0, color="#c2571a")
        axes.set_xlabel("sample")
        axes.set_ylabel("padding, tokens")

    return svg(draw, height=2.2)
