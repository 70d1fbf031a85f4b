"""What the records beside the checkpoints of a run tell, as plain JSON: the ledger and the states, no corpus.

    ledger.jsonl, step_*.json  ->  `collect`  ->  a dict  ->  --json, or a page (`run_page`)

Nothing is planned again: points are states that were saved, some hundred of them, spread over the run.

``megaresume report DIR``: what became of a run, as one HTML page, from the records beside its checkpoints.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from megaresume.checkpoint.ledger import LedgerEntry
from megaresume.render import COLOURS, escape, html_table, page, svg
from megaresume.runs.history import History
from megaresume.runs.losses import Loss, LossLog, read_losses
from megaresume.runs.run import Run
from megaresume.stream.changes import outlook
from megaresume.stream.config import StreamConfig
from megaresume.stream.errors import SetupError
from megaresume.stream.state import StreamState

#: States that are read, spread evenly; the newest is always among them.
MOST_POINTS = 300
#: Losses that are drawn; of a longer log every n-th.
MOST_LOSSES = 4000


def collect(run: Run, log: LossLog | None = None) -> dict[str, Any]:
    """The facts of a run.

    Args:
        run: the run.
        log: its losses, if there is a log of them.

    Raises:
        CheckpointError, StateError: see `Run.history`.
    """
    history, ledger = run.history, run.ledger
    state = history.state
    points = _points(history)
    return {
        "dir": str(run.root),
        "run": ledger.run,
        "step": history.newest.iteration,
        "samples": state.samples,
        "tokens": state.tokens,
        "documents": state.documents,
        "saved": history.newest.saved_at,
        "fill": _fill(state, 0, state.samples, state.tokens),
        "stages": [_stage(record.first, record.name, record.config) for record in state.stages],
        "batches": [list(batch) for batch in state.batches],
        "sources": _sources(state),
        "points": points,
        "intervals": [_interval(state, a, b) for a, b in pairwise(points)],
        "starts": _starts(ledger.entries, log),
        "checkpoints": sum(entry.kind == "checkpoint" for entry in ledger.entries),
        "left_out": _left_out(state),
        "faults": state.faults.to_plain(),
        "overrides": list(state.overrides),
        "losses": None if log is None else _thinned(log.steps),
        "validations": {} if log is None else {name: _thinned(by) for name, by in log.validations.items()},
        "notes": [*history.notes, *(str(p) for p in ledger.problems if p.kind == "damaged")],
    }


def _points(history: History) -> list[dict[str, Any]]:
    """Where the run stood, from its beginning to its newest state."""
    records = list(history.saved)
    stride = -(-len(records) // MOST_POINTS) or 1
    chosen = records[::-1][::stride][::-1]  # counted from the newest
    nothing: dict[str, Any] = {"step": 0, "samples": 0, "tokens": 0, "sources": {}}
    points = [nothing]
    for record in chosen:
        state = history.state if record.samples == history.state.samples else history.read(record)
        if state is None or state.samples <= points[-1]["samples"]:
            continue
        drawn = {name: source.tokens for name, source in state.sources.items()}
        points.append({"step": record.iteration, "samples": state.samples, "tokens": state.tokens, "sources": drawn})
    return points


def _interval(state: StreamState, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What was drawn and how full the samples were between two points."""
    drawn = {name: tokens - before["sources"].get(name, 0) for name, tokens in after["sources"].items()}
    total = sum(drawn.values())
    return {
        "steps": [before["step"], after["step"]],
        "share": {name: tokens / total if total else 0.0 for name, tokens in drawn.items()},
        "fill": _fill(state, before["samples"], after["samples"], after["tokens"] - before["tokens"]),
    }


def _fill(state: StreamState, first: int, stop: int, tokens: int) -> float | None:
    """Tokens of documents by places in samples ``first .. stop``; None: no sample."""
    ends = [*(record.first for record in state.stages[1:]), max(stop, state.stages[-1].first)]
    places = sum(
        max(min(end, stop) - max(record.first, first), 0) * int(record.config["seq_length"])
        for record, end in zip(state.stages, ends, strict=True)
    )
    return tokens / places if places else None


def _stage(first: int, name: str, config: Any) -> dict[str, Any]:
    weights = {source: entry["weight"] for source, entry in config["sources"].items()}
    total = sum(weights.values())
    return {
        "name": name,
        "first_sample": first,
        "seq_length": config["seq_length"],
        "packing": StreamConfig.recorded(config).packed_by,
        "unit": config["blend"]["unit"],
        "weights": {source: weight / total for source, weight in weights.items()},
    }


def _sources(state: StreamState) -> list[dict[str, Any]]:
    ahead = outlook(state, StreamConfig.from_dict(state.stages[-1].config))
    rows = []
    for source in ahead:
        cursor = state.sources[source.name]
        rows.append(
            {
                "name": source.name,
                "weight": source.share,
                "documents": source.documents,
                "tokens": source.tokens,
                "epoch": source.epoch,
                "epochs": cursor.epochs,
                "remaining": source.remaining,
                "samples_left": source.samples_left,
                "passed_over": cursor.skipped,
                "left_out_documents": cursor.left_out_documents,
                "exhausted": cursor.exhausted,
            }
        )
    return rows


def _starts(entries: Sequence[LedgerEntry], log: LossLog | None) -> list[dict[str, Any]]:
    """Every start of the run, and what it lost: steps that had been done and were not saved."""
    #: by step: what each of its restarts lost, the last one first
    restarts: dict[int, list[int]] = {}
    for step, lost in reversed(log.restarts if log is not None else ()):
        restarts.setdefault(step, []).append(lost)
    starts: list[dict[str, Any]] = []
    saved = 0
    for entry in entries:
        if entry.kind == "checkpoint":
            saved = entry.iteration
        if entry.kind != "start":
            continue
        known = restarts.get(entry.iteration)
        exact = known.pop() if known and starts else None
        starts.append(
            {
                "time": entry.time,
                "step": entry.iteration,
                "samples": entry.samples,
                "from": entry.tag,
                "layout": str(entry.topology),
                "topology": entry.topology.to_dict(),
                # Without a log, only what was saved and then given up is known.
                "lost": exact if exact is not None else max(saved - entry.iteration, 0),
                "lost_is_exact": exact is not None or not starts,
            }
        )
        saved = entry.iteration
    return starts


def _left_out(state: StreamState) -> dict[str, Any]:
    skips = state.skips
    return {
        "samples": sum(stop - first for first, stop in skips.ranges),
        "ranges": [list(r) for r in skips.ranges],
        "asked": [str(record) for record in skips.log],
        "documents": [str(skip.documents) for skip in skips.documents if skip.until is None],
    }


def _thinned(losses: Mapping[int, Loss]) -> list[list[float]]:
    """(step, loss), ascending."""
    steps = sorted(losses)
    stride = -(-len(steps) // MOST_LOSSES)
    return [[step, losses[step].value] for step in steps[::stride]]


def run_page(facts: dict[str, Any]) -> str:
    """The page."""
    fill = "" if facts["fill"] is None else f", {100 * facts['fill']:.2f} % of all places hold a token"
    parts = [
        f"<h1>{escape(facts['dir'])}</h1>",
        f"<p>run {escape(str(facts['run']))}, at step {facts['step']:,}: {facts['samples']:,} samples, "
        f"{facts['tokens']:,} tokens, {facts['documents']:,} documents{fill}. "
        f"{len(facts['starts'])} starts, {facts['checkpoints']} checkpoints. Saved {escape(facts['saved'])}.</p>",
        "<h2>Sources</h2>",
        html_table(
            ("source", "weight", "tokens", "documents", "epochs", "left of this epoch", "lasts until", "passed over"),
            [_source(row, facts) for row in facts["sources"]],
            numbers=True,
        ),
    ]
    if facts["intervals"]:
        parts += [
            "<p>Tokens drawn between two saved states by source; dotted: the declared weights.</p>",
            _shares(facts),
        ]
    parts += [
        "<h2>Stages</h2>",
        html_table(
            ("stage", "from sample", "sequence length", "packing", "weights"), [_stage_row(s) for s in facts["stages"]]
        ),
        "<h2>Starts</h2>",
        html_table(("", "time", "from step", "layout", "steps lost"), _start_rows(facts)),
        "<h2>Batch sizes</h2>",
        _batches(facts),
    ]
    if facts["intervals"]:
        parts += ["<h2>Packing</h2>", _fill_picture(facts)]
    if facts["losses"] or facts["validations"]:
        parts += ["<h2>Loss</h2>", _losses(facts)]
    parts += ["<h2>Left out, masked, accepted</h2>", *_exceptions(facts)]
    return page(f"megaresume: {facts['dir']}", parts)


def _source(row: dict[str, Any], facts: dict[str, Any]) -> tuple[str, ...]:
    until = "not drawn"
    if row["samples_left"] is not None:
        until = f"about sample {facts['samples'] + row['samples_left']:,}"
    return (
        row["name"] + (" (ended)" if row["exhausted"] else ""),
        f"{row['weight']:.4f}",
        f"{row['tokens']:,}",
        f"{row['documents']:,}",
        f"{row['epochs']:.3f}",
        f"{row['remaining']:,}",
        until,
        f"{row['passed_over']:,}",
    )


def _stage_row(stage: dict[str, Any]) -> tuple[str, ...]:
    weights = ", ".join(f"{name} {weight:.4f}" for name, weight in stage["weights"].items() if weight)
    return stage["name"], f"{stage['first_sample']:,}", f"{stage['seq_length']:,}", stage["packing"], weights


def _start_rows(facts: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(number),
            start["time"],
            f"{start['step']:,}" + (f" ({start['from']})" if start["from"] else ""),
            start["layout"],
            f"{start['lost']:,}" if start["lost_is_exact"] else f"at least {start['lost']:,}",
        )
        for number, start in enumerate(facts["starts"], start=1)
    ]


def _mark(axes: Any, facts: dict[str, Any]) -> None:
    """Stages and restarts, on an axis of steps."""
    import numpy as np

    points = facts["points"]
    samples, steps = [p["samples"] for p in points], [p["step"] for p in points]
    for stage in facts["stages"][1:]:
        axes.axvline(np.interp(stage["first_sample"], samples, steps), color="#1c2330", lw=1)
    at = [start["step"] for start in facts["starts"][1:]]
    axes.vlines(at, 0, 1, color="#a3acbd", lw=0.8, ls="--", transform=axes.get_xaxis_transform())
    axes.set_xlabel("step (dashed: a restart, solid: a stage)")


def _shares(facts: dict[str, Any]) -> str:
    def draw(axes: Any) -> None:
        edges = [facts["intervals"][0]["steps"][0], *(i["steps"][1] for i in facts["intervals"])]
        ends = [*(stage["first_sample"] for stage in facts["stages"][1:]), facts["samples"]]
        for k, source in enumerate(facts["sources"]):
            name, colour = source["name"], COLOURS[k % len(COLOURS)]
            axes.stairs([i["share"].get(name, 0) for i in facts["intervals"]], edges, color=colour, lw=1.8, label=name)
            for stage, end in zip(facts["stages"], ends, strict=True):
                if stage["unit"] == "tokens":
                    at = [_step_at(facts, sample) for sample in (stage["first_sample"], end)]
                    axes.hlines(stage["weights"].get(name, 0), *at, color=colour, lw=0.9, ls=":")
        axes.set_ylabel("share of tokens")
        axes.set_ylim(0, 1)
        _mark(axes, facts)
        axes.figure.legend(loc="outside right upper", frameon=False, fontsize=9)

    return svg(draw, height=3.4)


def _step_at(facts: dict[str, Any], sample: int) -> float:
    import numpy as np

    points = facts["points"]
    return float(np.interp(sample, [p["samples"] for p in points], [p["step"] for p in points]))


def _batches(facts: dict[str, Any]) -> str:
    if not facts["batches"]:
        return "<p>No record tells.</p>"
    rows = [(f"{first:,}", f"{size:,}") for first, size in facts["batches"]]
    if len(rows) <= 3:
        return html_table(("from sample", "samples a step"), rows)

    def draw(axes: Any) -> None:
        firsts, sizes = zip(*facts["batches"], strict=True)
        axes.stairs(sizes, [*firsts, max(facts["samples"], firsts[-1] + 1)], color=COLOURS[0], lw=1.8, baseline=None)
        axes.set_xlabel("sample")
        axes.set_ylabel("samples a step")
        axes.set_ylim(0)

    listing = html_table(("from sample", "samples a step"), rows)
    return svg(draw, height=2.4) + f"<details><summary>All {len(rows)}</summary>{listing}</details>"


def _fill_picture(facts: dict[str, Any]) -> str:
    def draw(axes: Any) -> None:
        edges = [facts["intervals"][0]["steps"][0], *(i["steps"][1] for i in facts["intervals"])]
        values = [100 * (interval["fill"] or 0) for interval in facts["intervals"]]
        axes.stairs(values, edges, color=COLOURS[2], lw=1.8, baseline=None)
        axes.set_ylabel("places with a token, %")
        axes.set_ylim(min(90, *values), 100.5)
        _mark(axes, facts)

    return svg(draw, height=2.4)


def _losses(facts: dict[str, Any]) -> str:
    def draw(axes: Any) -> None:
        if facts["losses"]:
            axes.plot(*zip(*facts["losses"], strict=True), color=COLOURS[0], lw=1.2, label="training")
        for k, (name, points) in enumerate(facts["validations"].items(), start=1):
            style = {"color": COLOURS[k % len(COLOURS)], "lw": 1.2, "marker": "o", "ms": 3.5}
            axes.plot(*zip(*points, strict=True), label=f"validation: {name}", **style)
        axes.set_ylabel("loss")
        _mark(axes, facts)
        axes.legend(frameon=False, fontsize=9)

    return svg(draw, height=3.6)


def _exceptions(facts: dict[str, Any]) -> list[str]:
    """Everything that is not as the data config alone would have it."""
    left_out, faults = facts["left_out"], facts["faults"]
    lines = [f"<p>{escape(line)}</p>" for line in (*left_out["asked"], *facts["overrides"])]
    lines += [f"<p>passed over: {escape(words)}</p>" for words in left_out["documents"]]
    if faults["total"]:
        shown = faults["kept"][-20:]
        rows = [(f"{s:,}", source, f"{doc:,}", str(epoch), did, why) for s, source, doc, epoch, did, why in shown]
        lines += [
            f"<p>{faults['total']:,} documents could not be trained as their index says; the last of them:</p>",
            html_table(("sample", "source", "document", "epoch", "was", "because"), rows),
        ]
    lines += [f"<p>{escape(note)}</p>" for note in facts["notes"]]
    return lines or ["<p>Nothing.</p>"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the run's --save directory")
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
    facts = collect(Run(args.dir), None if args.log is None else read_losses(args.log))
    if args.json:
        print(json.dumps(facts))
        return 0
    output = args.output or args.dir / "report.html"
    try:
        output.write_text(run_page(facts), encoding="utf-8")
    except OSError as error:
        raise SetupError(
            f"cannot write {output}", found=error.strerror or str(error), action="--output ANOTHER"
        ) from error
    print(f"report: {output}")
    return 0
