"""The steps that a training recorded; and a comparison of a run with an undisturbed one, step by step. Without torch.

    records                    one line per step, for all ranks (`megaresume.cluster.training.logging`)
    records/rank_00000.jsonl   one file per rank (`megaresume.checkpoint.records.rank_log`)

Both become a `RunRecords`. A step that was trained, lost to a kill and trained again has a line for each attempt; the
last one counts. A directory of rank files lacks hashes over all ranks and losses: these are None there. Its losses are
read from the training's log.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from megaresume.runs.losses import read_losses
from megaresume.runs.rank_steps import lines_of
from megaresume.stream.errors import UsageError, listed


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecords:
    """The records of one run, over all of its attempts."""

    #: every start, in order of time.
    starts: tuple[dict[str, Any], ...]
    #: the last line of each step.
    steps: dict[int, dict[str, Any]]
    #: lines of steps that were trained again later: the work lost to kills.
    lost: tuple[dict[str, Any], ...]
    #: the last validation, by name of the set, then by step.
    validations: dict[str, dict[int, dict[str, Any]]]
    #: the last measurement of the held-out accuracy, by step.
    held_out: dict[int, dict[str, Any]]


def read_records(path: str | Path) -> RunRecords:
    """Read a JSON lines file, leaving out a last line that a kill truncated.

    Raises:
        UsageError: no such file, or a line that is not a record.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError.unreadable(
            path, error, "a file of --megaresume-log-samples", action="check the path"
        ) from error
    records: list[dict[str, Any]] = []
    for number, line in enumerate(lines[:-1], start=1):
        try:
            record = json.loads(line)
            record["event"], record["step"]
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"line {number} of {path} is not a record",
                found=line[:100].decode("utf-8", "replace"),
                action="name a file that --megaresume-log-samples wrote",
            ) from error
        records.append(record)
    return assemble(records)


def assemble(records: Iterable[dict[str, Any]]) -> RunRecords:
    """Build the records of a run from its lines, in order of time; lines after where a start resumed are lost."""
    starts: list[dict[str, Any]] = []
    steps: dict[int, dict[str, Any]] = {}
    lost: list[dict[str, Any]] = []
    validations: dict[str, dict[int, dict[str, Any]]] = {}
    held_out: dict[int, dict[str, Any]] = {}
    for record in records:
        event, step = record["event"], record["step"]
        if event == "start":
            starts.append(record)
            lost += [steps.pop(later) for later in sorted(s for s in steps if s > step)]
        elif event == "step":
            steps[step] = record
        elif event == "validation":
            validations.setdefault(record.get("set", "valid"), {})[step] = record
        elif event == "held_out":
            held_out[step] = record
    return RunRecords(starts=tuple(starts), steps=steps, lost=tuple(lost), validations=validations, held_out=held_out)


def read_any(path: Path) -> RunRecords | None:
    """The records of a run; None if there are none yet.

    Raises:
        UsageError: the file is something else.
    """
    if path.is_dir():
        return _read_directory(path)
    return read_records(path) if path.exists() else None


def with_losses(records: RunRecords, log: Path) -> RunRecords:
    """Add the losses in a printed log to steps that have none."""
    if all(record.get("loss") is not None for record in records.steps.values()):
        return records
    try:
        losses = read_losses(log).steps
    except UsageError:
        return records  # it prints none in a known format
    for step, record in records.steps.items():
        if record.get("loss") is None and step in losses:
            record["loss"] = losses[step].value
    return records


def _read_directory(path: Path) -> RunRecords | None:
    launches: dict[tuple[int, int], dict[str, Any]] = {}
    for file in sorted(path.glob("rank_*.jsonl")):
        # Skips a line that a kill truncated: its step is missing then.
        for key, start, fields in lines_of(file, []):
            layout = {name: int(start[name]) for name in ("dp", "micro_batch_size")}
            common = {name: start[name] for name in ("event", "step", "samples", "digest", "time")}
            launch = launches.setdefault(key, {"start": common | {"topology": layout}, "steps": {}})
            if fields is not None:
                line = {**fields, **layout, "dp_rank": int(start["dp_rank"])}
                launch["steps"].setdefault(int(fields["step"]), []).append(line)
    events: list[dict[str, Any]] = []
    for number, (_, launch) in enumerate(sorted(launches.items()), start=1):
        events.append(launch["start"] | {"attempt": number})
        for step, lines in sorted(launch["steps"].items()):
            ranks = {line["dp_rank"]: line for line in lines}
            if len(ranks) == launch["start"]["topology"]["dp"]:  # otherwise a kill came first
                events.append(_step(step, ranks) | {"attempt": number})
    return assemble(events) if events else None


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


#: The names of fields, in words, for the first difference.
_FIELDS = {
    "samples": "samples",
    "order": "identities of the samples",
    "ranks": "what a rank was handed",
    "content": "what the model got of the samples",
    "digest": "digest of all samples so far",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Losses:
    """The losses of the steps for which both runs have one."""

    compared: int
    #: steps that must be equal bit for bit, as neither they nor earlier steps had another layout; and those that are.
    exact: int
    exact_equal: int
    #: the number of losses that are equal bit for bit.
    equal: int
    #: largest difference relative to the reference, and its step; the limit.
    largest: float
    largest_step: int | None
    tolerance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunComparison:
    """Whether a run trained what the reference trained, in every step, including repeated ones."""

    #: the number of steps of the reference.
    steps: int
    #: steps that were done twice because a kill came before the next checkpoint.
    redone: int
    #: steps, in order, whose samples or their content differ from the reference's; steps that the run lacks.
    different_samples: tuple[int, ...]
    different_content: tuple[int, ...]
    missing: tuple[int, ...]
    #: steps in both runs; steps whose hashes can be compared directly.
    compared: int
    hashed: int
    losses: Losses
    #: the first difference, in words; None if there is none.
    first: str | None

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return self.first is None and self.steps > 0

    def to_dict(self) -> dict[str, Any]:
        """As plain JSON."""
        return {
            "holds": self.holds,
            "first_difference": self.first,
            "steps": self.steps,
            "compared": self.compared,
            "hashed": self.hashed,
            "trained_again": self.redone,
            "different_samples": list(self.different_samples),
            "different_content": list(self.different_content),
            "missing": list(self.missing),
            "losses": asdict(self.losses),
        }


def compare_runs(
    reference: RunRecords,
    run: RunRecords,
    *,
    steps: int,
    done: int | None = None,
    tolerance: float = math.inf,
    exact: bool = False,
    nodes: Sequence[int] = (),
) -> RunComparison:
    """Compare every step of the run, including repeated ones.

    Args:
        reference, run: their records.
        steps: of the reference.
        done: steps that the run must have; fewer if the test was given up. None: all.
        tolerance: relative difference of losses allowed for another order of summation; infinity: no limit.
        exact: losses must be equal bit for bit while the layout is that of the reference.
        nodes: by start of the run; the first is also the reference's.
    """
    trained: dict[int, list[dict[str, Any]]] = {step: [record] for step, record in run.steps.items()}
    for record in run.lost:
        trained.setdefault(record["step"], []).append(record)

    def differing(*fields: str) -> tuple[int, ...]:
        return tuple(
            step
            for step, expected in sorted(reference.steps.items())
            if any(record[field] != expected[field] for record in trained.get(step, ()) for field in fields)
        )

    losses, wrong = _losses(reference, run, tolerance, exact, nodes)
    found = [
        *_incomplete("the reference", reference, steps),
        *_incomplete("the run", run, steps if done is None else done),
        *_starts(reference, run),
        *_differences(reference, run),
        *wrong,
    ]
    both = reference.steps.keys() & run.steps.keys()
    return RunComparison(
        steps=len(reference.steps),
        redone=len(run.lost),
        different_samples=differing("samples", "order", "digest"),
        different_content=differing("content"),
        missing=tuple(sorted(reference.steps.keys() - run.steps.keys())),
        compared=len(both),
        hashed=sum(_comparable(run.steps[step], reference.steps[step]) for step in both),
        losses=losses,
        first=min(found, key=lambda difference: difference[0])[1] if found else None,
    )


def _incomplete(who: str, records: RunRecords, steps: int) -> Iterator[tuple[int, str]]:
    missing = [step for step in range(1, steps + 1) if step not in records.steps]
    if missing:
        yield missing[0], f"step {listed(missing, 1)} is missing in the records of {who}"
    if records.steps and max(records.steps) > steps:
        yield steps + 1, f"{who} continued to step {max(records.steps)}, beyond the end at step {steps}"
    for (step, one), (after, other) in pairwise(sorted(records.steps.items())):
        if after == step + 1 and one["samples"][-1] != other["samples"][0]:
            yield (
                after,
                f"step {after} of {who} trained samples {spelled(other['samples'])} after {spelled(one['samples'])} of "
                f"step {step}: samples were {_what(one['samples'], other['samples'])}",
            )


def _what(one: Sequence[Any], other: Sequence[Any]) -> str:
    last, first = (value if isinstance(value, int) else -1 for value in (one[-1], other[0]))
    return "repeated" if first < last else "skipped"


def _starts(reference: RunRecords, run: RunRecords) -> Iterator[tuple[int, str]]:
    """Differences between starts of the run and the reference at the same step."""
    for start in run.starts:
        step = start["step"]
        if (before := reference.steps.get(step)) is None:
            continue
        resumed = f"the start from step {step} resumed"
        samples, digests = before["samples"][-1], (before["digest"], start["digest"])
        if start["samples"] != samples:
            yield step + 1, f"{resumed} at sample {start['samples']}, and not at {samples}"
        elif None not in digests and digests[0] != digests[1]:
            yield step + 1, f"{resumed} with digest {digests[1]}, and not {digests[0]}"


def _differences(reference: RunRecords, run: RunRecords) -> Iterator[tuple[int, str]]:
    done = [*run.steps.items(), *((record["step"], record) for record in run.lost)]
    for step, record in done:
        expected = reference.steps.get(step)
        if expected is None:
            continue
        again = "" if run.steps.get(step) is record else ", when it was trained for the first time"
        for field, words in _FIELDS.items():
            if field == "ranks" and not (_same_layout(record, expected) and record.get("ranks")):
                continue
            if record.get(field) != expected.get(field):
                one, other = (spelled(r[field]) if field == "samples" else _short(r[field]) for r in (expected, record))
                yield step, f"step {step}{again}: {words}: reference {one}, run {other}"
                break


def _losses(
    reference: RunRecords, run: RunRecords, tolerance: float, exact: bool, nodes: Sequence[int]
) -> tuple[Losses, list[tuple[int, str]]]:
    # step, loss of the reference, of the run, whether they must be equal
    rows: list[tuple[int, float, float, bool]] = []
    unchanged = exact
    for step, expected in sorted(reference.steps.items()):
        record = run.steps.get(step)
        if record is None or record.get("loss") is None or expected.get("loss") is None:
            continue
        # The attempt with this step: the last one that began before it.
        attempt = max((k for k, start in enumerate(run.starts) if start["step"] < step), default=0)
        same_nodes = not nodes or nodes[min(attempt, len(nodes) - 1)] == nodes[0]
        unchanged = unchanged and _same_layout(record, expected) and same_nodes
        rows.append((step, expected["loss"], record["loss"], unchanged))
    apart = {step: abs(other - one) / max(abs(one), 1e-30) for step, one, other, _ in rows}
    wrong = []
    for step, one, other, must_be_equal in rows:
        words = f"step {step}: loss: reference {one!r}, run {other!r}"
        if must_be_equal and one != other:
            wrong.append((step, words))
        if not apart[step] <= tolerance:  # also for NaN
            wrong.append((step, f"{words}: {apart[step]:.1e} apart, allowed {tolerance:.0e}"))
    worst = max(apart, key=lambda step: (math.isnan(apart[step]), apart[step]), default=None)
    largest = 0.0 if worst is None else apart[worst]
    losses = Losses(
        compared=len(rows),
        exact=sum(must_be_equal for *_, must_be_equal in rows),
        exact_equal=sum(must_be_equal and one == other for _, one, other, must_be_equal in rows),
        equal=sum(one == other for _, one, other, _ in rows),
        largest=largest,
        largest_step=None if largest == 0 else worst,
        tolerance=tolerance,
    )
    return losses, wrong


def _same_layout(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return all(one.get(name) == other.get(name) for name in ("dp", "tp", "micro_batch_size"))


def _comparable(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.get("order") is not None or _same_layout(one, other)


def spelled(samples: Sequence[Any]) -> str:
    """The samples of a step: ``0 to 7``; of ranks that leave a gap, each range."""
    if samples and isinstance(samples[0], int):
        return f"{samples[0]} to {samples[1] - 1}"
    return " and ".join(spelled(part) for part in samples)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 120 else text[:117] + "..."
