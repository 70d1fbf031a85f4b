"""``megaresume verify DIR``: plans the stream of a run again, on a CPU, and compares it with everything recorded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.stream.errors import CheckpointError, ConfigError, CorpusError, MegaresumeError, UsageError

if TYPE_CHECKING:
    from megaresume.checkpoint.ledger import LedgerProblem
    from megaresume.checkpoint.state_file import StepFile
    from megaresume.sources.base import Source
    from megaresume.stream.replay import Checked, Recorded
    from megaresume.stream.state import StreamState
    from megaresume.stream.stream import Stream

__all__ = ["HELP", "add_arguments", "run"]

HELP = "recompute the stream of a run on a CPU and compare digests: proof, or the first difference"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="the run's --save directory")
    parser.add_argument("--data", metavar="DATA.yaml", help="where the corpora are now (default: as recorded in DIR)")
    parser.add_argument("--split", help="that of the run, where neither DATA.yaml nor DIR says it: 969,30,1")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")


def run(args: argparse.Namespace) -> int:
    """Verify a run."""
    from megaresume.stream.progress import progress
    from megaresume.stream.replay import replay

    steps, recorded, unreadable = _records(args.dir)
    present = [step for step, point in zip(steps, recorded, strict=False) if not point.given_up] or steps
    state = max((step.state for step in present), key=lambda state: state.samples)
    sources = _sources(args, state)
    problems = _corpus_problems(sources, state)
    stream = _stream(state, sources)
    checked: list[Checked] = []
    if stream is not None:
        with progress("planning the stream again", state.samples, "samples") as bar:
            checked = list(replay(stream, recorded, progress=bar.update))
    # What was given up and is the same proves as much as the rest; what is not is no part of the run any more.
    given_up = [c for c in checked if c.recorded.given_up and not c.holds]
    checked = [c for c in checked if c not in given_up]
    report = _report(args.dir, problems, unreadable, checked) | {"given_up": [c.recorded.origin for c in given_up]}
    print(json.dumps(report) if args.json else _text(report))
    return 0 if report["holds"] else 1


def _records(root: Path) -> tuple[list[StepFile], list[Recorded], list[LedgerProblem]]:
    """Every data state; every point with a digest: those states, then ledger lines; lines that say nothing."""
    from megaresume.checkpoint.layout import ledger_path, parse_record_name, records_dir
    from megaresume.checkpoint.ledger import abandoned_checkpoints, read_ledger
    from megaresume.checkpoint.state_file import read_step_file
    from megaresume.stream.cursor import comparable
    from megaresume.stream.replay import Recorded

    if not root.is_dir():
        raise UsageError(
            "no such directory", found=str(root), expected="the --save directory of a run", action="check the path"
        )
    ledger = read_ledger(ledger_path(root))
    abandoned = abandoned_checkpoints(ledger.entries)
    checkpoints = [entry for entry in ledger.entries if entry.kind == "checkpoint" and entry.tag is not None]
    gone = {(e.samples, e.digest) for e in checkpoints if (e.iteration, e.tag) in abandoned}
    gone -= {(e.samples, e.digest) for e in checkpoints if (e.iteration, e.tag) not in abandoned}
    steps: list[StepFile] = []
    recorded: list[Recorded] = []
    for path in sorted(records_dir(root).glob("step_*.json")):
        name = parse_record_name(path.name)
        if name is None or name.kind != "state":
            continue
        step = read_step_file(path)
        steps.append(step)
        position = comparable({f: getattr(step.state, f) for f in step.state.__dataclass_fields__})
        recorded.append(
            Recorded(
                origin=f"state of step {step.iteration}",
                sample=step.state.samples,
                digest=step.state.digest,
                position=position,
                given_up=(step.iteration, step.tag) in abandoned,
            )
        )
    for entry in ledger.entries:
        origin = f"ledger: {entry.kind} at step {entry.iteration}"
        is_gone = (entry.samples, entry.digest) in gone
        recorded.append(Recorded(origin=origin, sample=entry.samples, digest=entry.digest, given_up=is_gone))
    if not steps and (records_dir(root) / "order.json").is_file():
        raise CheckpointError(
            "the run is under guard: its order is verified where it is rebuilt, at every start",
            found=f"{records_dir(root) / 'order.json'}, the order of Megatron's own datasets",
            expected="data states of a megaresume stream, which can be planned again without Megatron",
            action=f"start the run, which says whether it is as recorded; megaresume inspect {root} shows the record",
        )
    if not steps:
        raise CheckpointError(
            "there is nothing to verify",
            found=f"no data state in {records_dir(root)}",
            expected="step_0000010.json or the like, written with a checkpoint",
            cause="not a --save directory, or the run has saved no checkpoint with megaresume",
            action=f"megaresume inspect {root}",
        )
    return steps, recorded, list(ledger.problems)


def _sources(args: argparse.Namespace, state: StreamState) -> dict[str, Source]:
    """The corpora, opened; by the name of their source."""
    from megaresume.cli.corpora import locate
    from megaresume.sources import open_sources

    path, config, directory = locate(args.data, args.dir, state)
    opened = open_sources({s.name: s.options for s in config.sources}, base_dir=directory, split=args.split)
    missing = [name for name in state.fingerprints if name not in opened]
    if missing:
        raise ConfigError(
            "the data config lacks sources of the run",
            found=", ".join(opened),
            expected=", ".join(state.fingerprints),
            action=f"add {', '.join(missing)} to {path}",
        )
    return {name: opened[name] for name in state.fingerprints}


def _corpus_problems(sources: dict[str, Source], state: StreamState) -> list[str]:
    """What differs between the corpora as they are, read from end to end, and as the state knows them."""
    from megaresume.stream.fingerprints import check_fingerprint

    problems = []
    for name, source in sources.items():
        try:
            check_fingerprint(name, state.fingerprints[name], source.fingerprint(recompute=True))
        except MegaresumeError as error:
            gap = _first_gap(source)
            problems.append(str(error) + ("" if gap is None else f"\n  {'where:':<14}{gap}"))
    return problems


def _first_gap(source: Source) -> str | None:
    """The first document that does not end where the next one starts: a damaged length, in words."""
    import numpy as np

    from megaresume.sources.base import TokenSource

    if not isinstance(source, TokenSource):
        return None
    chunk = 1 << 20
    for first in range(0, len(source), chunk):
        ids = np.arange(first, min(first + chunk + 1, len(source)))
        try:
            lengths = source.lengths(ids)
            ids, lengths = ids[lengths > 0], lengths[lengths > 0]
            starts = source.token_starts(ids)
        except CorpusError:
            return None  # the error already names the document
        gaps = np.flatnonzero(starts[:-1] + lengths[:-1] != starts[1:])
        if len(gaps):
            k = int(gaps[0])
            between = int(starts[k + 1] - starts[k])
            return f"document {ids[k]} has {lengths[k]} tokens, but {between} lie between its start and the next one's"
    return None


def _stream(state: StreamState, sources: dict[str, Source]) -> Stream | None:
    """The stream of the recorded config over the corpora as they are."""
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.stream import Stream

    try:
        return Stream(StreamConfig.from_dict(state.config), list(sources.values()), recorded=state.stages)
    except CorpusError:
        return None  # already among the problems of the corpora


def _report(root: Path, problems: list[str], unreadable: list[LedgerProblem], checked: list[Checked]) -> dict[str, Any]:
    difference = next((c for c in checked if not c.holds), None)
    agreeing = [c.recorded.sample for c in checked if c.holds]
    report: dict[str, Any] = {
        "dir": str(root),
        # A line that a kill cut short was never a record; one that was damaged later may have said something else.
        "holds": not problems
        and difference is None
        and bool(checked)
        and not any(problem.kind == "damaged" for problem in unreadable),
        "corpora": problems,
        "unreadable": [str(problem) for problem in unreadable],
        "points": [
            {"origin": c.recorded.origin, "samples": c.recorded.sample, "digest": c.recorded.digest, "holds": c.holds}
            for c in checked
        ],
        "first_difference": None,
    }
    if difference is not None:
        before = max((s for s in agreeing if s <= difference.recorded.sample), default=0)
        report["first_difference"] = {
            "origin": difference.recorded.origin,
            "samples": [before, difference.recorded.sample],
            "recorded": difference.recorded.digest,
            "recomputed": difference.digest,
            "fields": list(difference.fields),
            "error": str(difference.error) if difference.error else None,
        }
    return report


def _text(report: dict[str, Any]) -> str:
    lines = [f"verify {report['dir']}"]
    for problem in report["corpora"]:
        lines += ["", *(f"  {line}" for line in problem.splitlines())]
    if report["corpora"]:
        lines.append("")
    for point in report["points"]:
        mark = "same     " if point["holds"] else "DIFFERENT"
        lines.append(f"  {mark}  sample {point['samples']:>10}  digest {point['digest']}  {point['origin']}")
    lines += [f"  NOT READ   {problem}" for problem in report["unreadable"]]
    lines += [f"  given up   {origin}: another branch of the run" for origin in report["given_up"]]
    difference = report["first_difference"]
    if difference:
        first, stop = difference["samples"]
        lines += ["", f"first difference: in samples {first} to {stop - 1} ({difference['origin']})"]
        lines.append(f"  recorded digest   {difference['recorded']}")
        lines.append(f"  recomputed        {difference['recomputed'] or 'not possible'}")
        if difference["fields"]:
            lines.append(f"  fields that differ: {', '.join(difference['fields'])}")
        if difference["error"]:
            lines += [f"  {line}" for line in difference["error"].splitlines()]
    if report["holds"]:
        last = max(point["samples"] for point in report["points"])
        lines.append(f"proved: all {len(report['points'])} recorded points are those of one stream of {last} samples")
    else:
        lines += ["", "not proved: the corpora or the records are not those of the run"]
    return "\n".join(lines)
