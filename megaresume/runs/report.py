"""What the records beside the checkpoints of a run tell, as plain JSON: the ledger and the states, no corpus.

    ledger.jsonl, step_*.json  ->  `collect`  ->  a dict  ->  --json, or a page (`megaresume.runs.report_page`)

Nothing is planned again: points are states that were saved, some hundred of them, spread over the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from megaresume.checkpoint.ledger import LedgerEntry
from megaresume.runs.history import History
from megaresume.runs.losses import Loss, LossLog
from megaresume.runs.run import Run
from megaresume.stream.changes import outlook
from megaresume.stream.config import StreamConfig
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
