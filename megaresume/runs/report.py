"""``megaresume report DIR``: the story of a run as one HTML page, from the records beside its checkpoints.

    ledger.jsonl, step_*.json  ->  `collect` (report_facts.py)  ->  `RunFacts`  ->  --json, or a page (`run_page`)

For a reinforcement learning run with a ledger of its prompts, the page of prompts.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megaresume.files import write_output
from megaresume.render import COLOURS, escape, html_table, page, svg
from megaresume.runs import prompts
from megaresume.runs.directory import Run
from megaresume.runs.history import Membership
from megaresume.runs.losses import read_losses
from megaresume.runs.report_facts import RunFacts, RunSource, RunStage, collect
from megaresume.runs.report_figures import parts_of_page
from megaresume.stream.errors import SetupError

#: Most changes of membership to show: the last ones.
MOST_MEMBERSHIPS = 50


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the directory where the run saves its checkpoints")
    parser.add_argument(
        "--log",
        metavar="FILE",
        type=Path,
        help="the run's losses: from --megaresume-log-samples, or printed by Megatron-LM or DeepSpeed",
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="where the page goes (default: report.html in DIR)")
    parser.add_argument("--json", action="store_true", help="print the facts as JSON, write no page")


def run(args: argparse.Namespace) -> int:
    """Write the page."""
    output = args.output or args.dir / "report.html"
    if prompts.has_prompts(args.dir):
        proof = prompts.prove(args.dir)
        if not args.json:
            _write(output, prompts.prompts_page(proof))
        return proof.give(lambda _: f"report: {output}", as_json=args.json)
    facts = collect(Run(args.dir), None if args.log is None else read_losses(args.log))
    if not args.json:
        _write(output, run_page(facts))
    return facts.give(lambda _: f"report: {output}", as_json=args.json)


def _write(output: Path, text: str) -> None:
    try:
        write_output(output, text.encode())
    except OSError as error:
        raise SetupError(
            f"cannot write {output}", found=error.strerror or str(error), action="--output ANOTHER"
        ) from error


def run_page(facts: RunFacts) -> str:
    """The HTML page."""
    fill = "" if facts.fill is None else f", {100 * facts.fill:.2f} % of all places hold a token"
    parts = [
        f"<h1>{escape(facts.dir)}</h1>",
        f"<p>run {escape(str(facts.run))}, at step {facts.step:,}: {facts.samples:,} samples, "
        f"{facts.tokens:,} tokens, {facts.documents:,} documents{fill}. "
        f"{len(facts.starts)} starts, {facts.checkpoints} checkpoints. Saved {escape(facts.saved)}"
        + ("" if facts.unsaved is None else f"; {facts.unsaved:,} steps done since, and not saved")
        + ".</p>",
        "<h2>Sources</h2>",
        html_table(
            ("source", "weight", "tokens", "documents", "epochs", "left of this epoch", "lasts until", "passed over"),
            [_source(row, facts) for row in facts.sources],
            numbers=True,
        ),
    ]
    if facts.intervals:
        parts += [
            "<p>Tokens drawn between two saved states by source; dotted: the declared weights.</p>",
            _shares(facts),
        ]
    parts += [
        "<h2>Stages</h2>",
        html_table(
            ("stage", "from sample", "sequence length", "packing", "weights"), [_stage_row(s) for s in facts.stages]
        ),
        "<h2>Starts</h2>",
        html_table(("", "time", "from step", "layout", "steps lost"), _start_rows(facts)),
        *_replicas(facts.memberships),
        "<h2>Batch sizes</h2>",
        _batches(facts),
    ]
    if facts.intervals:
        parts += ["<h2>Packing</h2>", _fill_picture(facts)]
    if facts.losses or facts.validations:
        parts += ["<h2>Loss</h2>", _losses(facts)]
    if facts.figures is not None:
        parts += parts_of_page(facts.figures, lambda axes: _mark(axes, facts))
    parts += ["<h2>Left out, masked, accepted</h2>", *_exceptions(facts)]
    return page(f"megaresume: {facts.dir}", parts)


def _source(row: RunSource, facts: RunFacts) -> tuple[str, ...]:
    until = "not drawn"
    if row.samples_left is not None:
        until = f"about sample {facts.samples + row.samples_left:,}"
    return (
        row.name + (" (ended)" if row.exhausted else ""),
        f"{row.weight:.4f}",
        f"{row.tokens:,}",
        f"{row.documents:,}",
        f"{row.epochs:.3f}",
        f"{row.remaining:,}",
        until,
        f"{row.passed_over:,}",
    )


def _stage_row(stage: RunStage) -> tuple[str, ...]:
    weights = ", ".join(f"{name} {weight:.4f}" for name, weight in stage.weights.items() if weight)
    return stage.name, f"{stage.first_sample:,}", f"{stage.seq_length:,}", stage.packing, weights


def _start_rows(facts: RunFacts) -> list[tuple[str, ...]]:
    return [
        (
            str(number),
            start.time,
            f"{start.step:,}" + (f" ({start.tag})" if start.tag else ""),
            str(start.topology),
            f"{start.lost:,}" if start.lost_is_exact else f"at least {start.lost:,}",
        )
        for number, start in enumerate(facts.starts, start=1)
    ]


def _replicas(members: Sequence[Membership]) -> list[str]:
    """The table of which replicas trained together, if replicas leave and join."""
    if not members:
        return []
    first = max(len(members) - MOST_MEMBERSHIPS, 0)
    rows = [(f"{one.step:,}", f"{one.replicas:,}", one.time) for one in members[first:]]
    left_out = [f"<p>{first:,} earlier changes are not shown.</p>"] if first else []
    return ["<h2>Replicas</h2>", html_table(("since step", "replicas", "time"), rows, numbers=True), *left_out]


def _mark(axes: Any, facts: RunFacts) -> None:
    """Mark stages and restarts on an axis of steps."""
    import numpy as np

    points = facts.points
    samples, steps = [p.samples for p in points], [p.step for p in points]
    for stage in facts.stages[1:]:
        axes.axvline(np.interp(stage.first_sample, samples, steps), color="#1c2330", lw=1)
    at = [start.step for start in facts.starts[1:]]
    axes.vlines(at, 0, 1, color="#a3acbd", lw=0.8, ls="--", transform=axes.get_xaxis_transform())
    axes.set_xlabel("step (dashed: a restart, solid: a stage)")


def _shares(facts: RunFacts) -> str:
    def draw(axes: Any) -> None:
        edges = [facts.intervals[0].steps[0], *(i.steps[1] for i in facts.intervals)]
        ends = [*(stage.first_sample for stage in facts.stages[1:]), facts.samples]
        for k, source in enumerate(facts.sources):
            name, colour = source.name, COLOURS[k % len(COLOURS)]
            axes.stairs([i.share.get(name, 0) for i in facts.intervals], edges, color=colour, lw=1.8, label=name)
            for stage, end in zip(facts.stages, ends, strict=True):
                if stage.unit == "tokens":
                    at = [_step_at(facts, sample) for sample in (stage.first_sample, end)]
                    axes.hlines(stage.weights.get(name, 0), *at, color=colour, lw=0.9, ls=":")
        axes.set_ylabel("share of tokens")
        axes.set_ylim(0, 1)
        _mark(axes, facts)
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=9)

    return svg(draw, height=3.4)


def _step_at(facts: RunFacts, sample: int) -> float:
    import numpy as np

    points = facts.points
    return float(np.interp(sample, [p.samples for p in points], [p.step for p in points]))


def _batches(facts: RunFacts) -> str:
    if not facts.batches:
        return "<p>No record tells.</p>"
    rows = [(f"{first:,}", f"{size:,}") for first, size in facts.batches]
    if len(rows) <= 3:
        return html_table(("from sample", "samples a step"), rows)

    def draw(axes: Any) -> None:
        firsts, sizes = zip(*facts.batches, strict=True)
        axes.stairs(sizes, [*firsts, max(facts.samples, firsts[-1] + 1)], color=COLOURS[0], lw=1.8, baseline=None)
        axes.set_xlabel("sample")
        axes.set_ylabel("samples a step")
        axes.set_ylim(0)

    listing = html_table(("from sample", "samples a step"), rows)
    return svg(draw, height=2.4) + f"<details><summary>All {len(rows)}</summary>{listing}</details>"


def _fill_picture(facts: RunFacts) -> str:
    def draw(axes: Any) -> None:
        edges = [facts.intervals[0].steps[0], *(i.steps[1] for i in facts.intervals)]
        values = [100 * (interval.fill or 0) for interval in facts.intervals]
        axes.stairs(values, edges, color=COLOURS[2], lw=1.8, baseline=None)
        axes.set_ylabel("places with a token, %")
        axes.set_ylim(min(90, *values), 100.5)
        _mark(axes, facts)

    return svg(draw, height=2.4)


def _losses(facts: RunFacts) -> str:
    def draw(axes: Any) -> None:
        if facts.losses:
            axes.plot(*zip(*facts.losses, strict=True), color=COLOURS[0], lw=1.2, label="training")
        for k, (name, points) in enumerate(facts.validations.items(), start=1):
            style = {"color": COLOURS[k % len(COLOURS)], "lw": 1.2, "marker": "o", "ms": 3.5}
            axes.plot(*zip(*points, strict=True), label=f"validation: {name}", **style)
        axes.set_ylabel("loss")
        _mark(axes, facts)
        axes.legend(frameon=False, fontsize=9)

    return svg(draw, height=3.6)


def _exceptions(facts: RunFacts) -> list[str]:
    """Everything that deviates from the data config."""
    left_out, faults = facts.left_out, facts.faults
    lines = [f"<p>{escape(line)}</p>" for line in (*left_out.asked, *facts.overrides)]
    lines += [f"<p>passed over: {escape(words)}</p>" for words in left_out.documents]
    if faults["total"]:
        shown = faults["kept"][-20:]
        rows = [(f"{s:,}", source, f"{doc:,}", str(epoch), did, why) for s, source, doc, epoch, did, why in shown]
        lines += [
            f"<p>{faults['total']:,} documents could not be trained as their index says; the last of them:</p>",
            html_table(("sample", "source", "document", "epoch", "was", "because"), rows),
        ]
    lines += [f"<p>{escape(note)}</p>" for note in facts.notes]
    return lines or ["<p>Nothing.</p>"]
