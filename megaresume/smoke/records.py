"""What a training recorded of its steps: the file of the reference program, or the directory in which ranks write.

    records                       one line a step, of all ranks (`megaresume.training.logging`)
    records/rank_00000.jsonl ...  a file a rank (`megaresume.runs.rank_log`): Megatron-LM, megaresume.attach

Both become a `RunRecords`. What a directory does not have is None there: hashes over all ranks, losses. Its losses
are those that the training printed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megaresume.checkpoint.sealed import SealError, unseal
from megaresume.runs.losses import read_losses
from megaresume.stream.errors import UsageError
from megaresume.training.records import RunRecords, assemble, read_records

__all__ = ["read_any", "with_losses"]


def read_any(path: Path) -> RunRecords | None:
    """The records of a run; None: there are none yet.

    Raises:
        UsageError: a file of something else.
    """
    if path.is_dir():
        return _read_directory(path)
    return read_records(path) if path.exists() else None


def with_losses(records: RunRecords, log: Path) -> RunRecords:
    """Add the losses of a printed log to steps that have none."""
    if all(record.get("loss") is not None for record in records.steps.values()):
        return records
    try:
        losses = read_losses(log).steps
    except UsageError:
        return records  # it prints none that is known
    for step, record in records.steps.items():
        if record.get("loss") is None and step in losses:
            record["loss"] = losses[step].value
    return records


def _read_directory(path: Path) -> RunRecords | None:
    launches: dict[tuple[int, int], dict[str, Any]] = {}
    for file in sorted(path.glob("rank_*.jsonl")):
        _read_rank(file, launches)
    events: list[dict[str, Any]] = []
    for number, (_, launch) in enumerate(sorted(launches.items()), start=1):
        events.append(launch["start"] | {"attempt": number})
        for step, lines in sorted(launch["steps"].items()):
            ranks = {line["dp_rank"]: line for line in lines}
            if len(ranks) == launch["start"]["topology"]["dp"]:  # otherwise a kill came first
                events.append(_step(step, ranks) | {"attempt": number})
    return assemble(events) if events else None


def _read_rank(path: Path, launches: dict[tuple[int, int], dict[str, Any]]) -> None:
    start: dict[str, Any] | None = None
    again = 0
    key = 0, 0
    for line in path.read_bytes().split(b"\n"):
        try:
            fields = unseal(line)
        except SealError:
            continue  # empty, or cut short by a kill: its step is missing then
        if fields["event"] == "start":
            # A process that loads again, without being started anew, begins once more.
            again = again + 1 if start is not None and start["launch"] == fields["launch"] else 0
            start = fields
            key = int(fields["launch"]), again
            common = {name: fields[name] for name in ("event", "step", "samples", "digest", "time")}
            topology = {name: int(fields[name]) for name in ("dp", "micro_batch_size")}
            launches.setdefault(key, {"start": common | {"topology": topology}, "steps": {}})
        elif start is not None:
            line_of_rank = fields | {name: int(start[name]) for name in ("dp_rank", "dp", "micro_batch_size")}
            launches[key]["steps"].setdefault(int(fields["step"]), []).append(line_of_rank)


def _step(step: int, ranks: dict[int, dict[str, Any]]) -> dict[str, Any]:
    lines = [ranks[rank] for rank in sorted(ranks)]
    ranges: list[list[int]] = []
    for first, stop in sorted((int(a), int(b)) for line in lines for a, b in line["samples"]):
        if ranges and ranges[-1][1] == first:
            ranges[-1][1] = stop
        else:
            ranges.append([first, stop])
    return {
        "event": "step",
        "step": step,
        "samples": ranges[0] if len(ranges) == 1 else ranges,  # with a gap or an overlap: not one range
        "order": None,
        "content": None,
        "digest": None,
        "ranks": [[line["order"], line["content"]] for line in lines],
        "dp": lines[0]["dp"],
        "micro_batch_size": lines[0]["micro_batch_size"],
        "time": max(str(line["time"]) for line in lines),
    }
