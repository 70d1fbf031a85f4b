"""``megaresume inspect DIR``: a checkpoint's data state, the pointers, and whether every checkpoint is complete.

Answers in well under half a second: neither torch nor numpy is imported, and nothing is ever unpickled.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaresume.stream.errors import StateError, UsageError

if TYPE_CHECKING:
    from megaresume.checkpoint.candidates import Examined
    from megaresume.checkpoint.ledger import LedgerEntry
    from megaresume.checkpoint.manifest import Manifest
    from megaresume.checkpoint.state_file import StepFile
    from megaresume.runs.survey import Survey

__all__ = ["HELP", "add_arguments", "run"]

HELP = "a checkpoint's data state, pointers and completeness, readable"

_UNDER_GUARD = "under guard no list of its files is kept: whether it is complete cannot be known"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument("dir", metavar="DIR", type=Path, help="a --save directory, or one tag directory in it")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.add_argument(
        "--checksums", action="store_true", help="read every file and compare its checksum, not only its size"
    )
    parser.add_argument(
        "--last", type=int, default=10, metavar="N", help="checkpoints and ledger lines to show (default: 10)"
    )


def run(args: argparse.Namespace) -> int:
    """Inspect a directory; 1 if a resume from it would not find weights and their data state."""
    from megaresume.checkpoint.layout import split_root
    from megaresume.runs.survey import survey

    if not args.dir.is_dir():
        raise UsageError(
            "no such directory",
            found=f"{args.dir} is a file" if args.dir.exists() else str(args.dir),
            expected="the --save directory of a run, or one tag directory in it",
        )
    if args.last < 1:
        raise UsageError("--last must be at least 1", found=args.last)
    root, tag = split_root(args.dir)
    with _progress(root, show=args.checksums and sys.stderr.isatty()) as progress:
        found = survey(root, tag=tag, limit=args.last, checksums=args.checksums, progress=progress)
    print(json.dumps(_report(found, args.last)) if args.json else _text(found, args.last))
    return 0 if found.resumable or _is_guarded(found) or _unrecorded(found) else 1


def _said(found: Survey, words: str) -> str:
    """The same words, where a run under guard is meant: the guard keeps its record inside the checkpoint."""
    from megaresume.checkpoint.candidates import UNMANAGED

    return words.replace(UNMANAGED, _UNDER_GUARD) if UNMANAGED in words and _is_guarded(found) else words


def _is_guarded(found: Survey) -> bool:
    """Whether Megatron's own datasets are trained here under guard: their record is inside the checkpoints."""
    order = _order(found)
    is_there = found.choice is not None and found.choice.state is None
    return is_there and order is not None and "error" not in order


@contextmanager
def _progress(root: Path, *, show: bool) -> Iterator[Callable[[int], object] | None]:
    if not show:
        yield None
        return
    from tqdm import tqdm

    with tqdm(desc=f"reading {root}", unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update


def _newest_state(found: Survey) -> StepFile | None:
    """The state to show: what a resume loads, or else the newest that can be read."""
    if found.choice is not None and found.choice.step is not None:
        return found.choice.step
    return next((e.step for e in found.checkpoints if e.step is not None), None)


# -- JSON


def _report(found: Survey, last: int) -> dict[str, Any]:
    choice, step = found.choice, _newest_state(found)
    return {
        "root": str(found.root),
        "resumable": bool(found.resumable or _is_guarded(found) or _unrecorded(found)),
        "choice": None
        if choice is None
        else choice.to_broadcast()
        | {"rejected": [{"tag": r.tag, "iteration": r.iteration, "reason": r.reason} for r in choice.rejected]},
        "error": None if found.error is None else str(found.error),
        "notes": [*(_said(found, note) for note in (choice.notes if choice else ())), *found.notes],
        "state": None if step is None else step.to_fields(),
        "order": _order(found),
        "pointers": [
            {"name": p.name, "status": p.status, "text": p.text, "tag": p.tag, "problem": p.problem}
            for p in found.pointers
        ],
        "checkpoints": [_checkpoint(found, e) for e in found.checkpoints],
        "older_checkpoints": found.num_older,
        "pruned_checkpoints": found.num_pruned,
        "ledger": {
            "run": found.ledger.run,
            "lines": len(found.ledger.entries),
            "entries": [_entry(e) for e in found.ledger.entries[-last:]],
            "problems": [{"line": p.line, "kind": p.kind, "reason": p.reason} for p in found.ledger.problems],
        },
        "leftovers": list(found.leftovers),
        "holder": _holder(found),
    }


def _order(found: Survey) -> dict[str, Any] | None:
    """What the guard recorded of Megatron's own datasets."""
    from megaresume.integrations.megatron.guard import read_record

    try:
        return read_record(found.root)
    except StateError as error:
        return {"error": str(error)}


def _checkpoint(found: Survey, examined: Examined) -> dict[str, Any]:
    step, manifest = examined.step, examined.manifest
    return {
        "tag": examined.candidate.tag,
        "iteration": examined.candidate.iteration,
        "status": examined.status,
        "reasons": [_said(found, reason) for reason in examined.reasons],
        "files": None if manifest is None else len(manifest.files),
        "bytes": None if manifest is None else manifest.size,
        "samples": None if step is None else step.state.samples,
        "digest": None if step is None else step.state.digest,
        "saved_at": None if step is None else step.saved_at,
        "topology": None if step is None else step.topology.to_dict(),
        "random": _random(manifest),
    }


def _random(manifest: Manifest | None) -> dict[str, Any] | None:
    """Of how many ranks there is a random state, and the digest of all."""
    from megaresume.checkpoint.beside import random_digest

    found = None if manifest is None else random_digest(manifest)
    return None if found is None else {"ranks": found[0], "digest": found[1]}


def _entry(entry: LedgerEntry) -> dict[str, Any]:
    return {
        "kind": entry.kind,
        "time": entry.time,
        "iteration": entry.iteration,
        "tag": entry.tag,
        "samples": entry.samples,
        "digest": entry.digest,
        "run": entry.run,
        "topology": entry.topology.to_dict(),
        "details": dict(entry.details),
    }


# -- text


def _text(found: Survey, last: int) -> str:
    blocks = [_headline(found) + _held(found), _state_block(found), _order_block(found), _pointer_block(found)]
    blocks += [_checkpoint_block(found), _copy_block(found), _ledger_block(found, last), _note_block(found)]
    return "\n\n".join(block for block in blocks if block)


def _holder(found: Survey) -> dict[str, Any] | None:
    holder = found.holder
    if holder is None:
        return None
    owner = None if holder.owner is None else asdict(holder.owner)
    return {"status": holder.status, "reason": holder.reason, "owner": owner}


def _held(found: Survey) -> str:
    """Who writes there; nothing, where the last one has ended by itself."""
    holder = found.holder
    if holder is None or holder.status == "released":
        return ""
    if holder.status == "gone":
        return f"\nleft behind by {holder}: {holder.reason}; the next start takes it over"
    return f"\nheld by {holder}"


def _copy_block(found: Survey) -> str:
    """Where the checkpoints are copied to, and which are there."""
    from megaresume.checkpoint.staging import read_staging

    staging = read_staging(found.root)
    if staging is None:
        return ""
    there = f"{len(staging.copied)} complete" + (f", the newest {staging.copied[0]}" if staging.copied else "")
    waiting = f"\n  not copied yet: {', '.join(staging.waiting[:10])}" if staging.waiting else ""
    return f"copies in {staging.to}\n  {there}{waiting}"


def _headline(found: Survey) -> str:
    choice = found.choice
    unrecorded = _unrecorded(found)
    if unrecorded is not None:
        return (
            f"{found.root}\nMegatron goes on from {unrecorded}: its tracker names it. The data state is inside it; the "
            "save was killed before the records beside it were written, and the next start writes them"
        )
    if choice is None:
        why = "there is no checkpoint" if found.error is None else found.error.headline
        return f"{found.root}\nNOT RESUMABLE: {why}"
    if choice.state is None and _is_guarded(found):
        return f"{found.root}\nresumes from {choice.tag}, under guard: it holds the order of Megatron's own datasets"
    if choice.state is None:
        return f"{found.root}\nNOT RESUMABLE: {choice.tag} has no data state (written without megaresume)"
    return f"{found.root}\nresumes from {choice.tag}, at sample {choice.state.samples:,}"


def _unrecorded(found: Survey) -> str | None:
    """A checkpoint of Megatron's whose save was over when a kill came, but not our commit of it."""
    from megaresume.checkpoint.layout import megatron_tag

    tracked = found.named[1]
    if tracked is None or tracked.status != "incomplete" or tracked.candidate.iteration is None:
        return None
    tag, is_first = tracked.candidate.tag, tracked.candidate.unfinished
    return tag if is_first and tag == megatron_tag(tracked.candidate.iteration) else None


def _state_block(found: Survey) -> str:
    step = _newest_state(found)
    if step is None:
        return ""
    state, config = step.state, step.state.config
    packing = dict(config.get("packing", {}))
    order = {name: config.get(name) for name in ("seed", "seq_length")}
    order |= {"packing": packing.pop("mode", None), **packing, "blend by": config.get("blend", {}).get("unit")}
    rows = [
        ["iteration", f"{step.iteration:,}"],
        ["samples", f"{state.samples:,}"],
        ["documents", f"{state.documents:,}"],
        ["tokens", f"{state.tokens:,}"],
        ["digest", state.digest],
        ["saved", f"{step.saved_at}  on {step.topology}"],
        ["run", step.run],
        ["stream", _words(order)],
        ["stages", ", ".join(f"{stage.name} from {stage.first:,}" for stage in state.stages)],
        ["batches", ", ".join(f"{size:,} from {first:,}" for first, size in state.batches)],
        ["open bins", f"{len(state.bins)} with {sum(len(b.segments) for b in state.bins)} segments"],
    ]
    if (loader := config.get("loader")) is not None:  # somebody else's: integrations/loaders/record.py
        size = sum(row[0] for row in loader["ranks"])
        rows.append(["loader", f"{loader['library']}, {loader['kind']}: {loader['batches']:,} batches of each rank"])
        rows.append(["", f"dp {loader['dp']}  workers {loader['workers']}  batch size {loader['batch_size']}"])
        rows.append(["", f"{len(loader['ranks'])} states beside the checkpoint, {_size(size)}"])
    manifest = next((e.manifest for e in found.checkpoints if e.step == step), None)
    if (random := _random(manifest)) is not None:
        rows.append(["random state", f"of {random['ranks']} ranks, digest {random['digest']}"])
    if state.pending:
        tokens = sum(segment.length for segment in state.pending)
        rows.append(["waiting", f"{tokens:,} tokens of {len(state.pending)} documents, to be placed next"])
    if state.tails:
        tokens = sum(segment.length for segment in state.tails)
        rows.append(["kept back", f"{tokens:,} tokens of {len(state.tails)} documents, for samples to come"])
    if state.reached != state.samples:
        rows[1][1] += f" trained, {state.reached:,} with those left out"
    rows += [["skip", f"at sample {record.at:,}: {record}"] for record in state.skips.log]
    for skip in state.skips.documents:
        until = "" if skip.until is None else f" to {skip.until:,}"
        rows.append(["skip", f"{skip.documents}, from sample {skip.at:,}{until}"])
    if state.faults.total:
        last = state.faults.kept[-1]
        where = f"last {last.source}:{last.document} in sample {last.sample:,}: {last.reason}"
        rows.append(["faults", f"{state.faults.total:,} documents ({where})"])
    rows += [["accepted", override] for override in state.overrides]
    return f"data state of {step.tag}\n" + _table(rows) + _source_table(step)


def _order_block(found: Survey) -> str:
    from megaresume.integrations.megatron.guard import describe, read_record

    try:
        record = read_record(found.root)
        return "" if record is None else "\n".join(describe(record))
    except StateError as error:
        return str(error)


def _source_table(step: StepFile) -> str:
    state = step.state
    if not state.sources:
        return ""
    weights = state.config.get("sources", {})
    drawn = sum(cursor.tokens for cursor in state.sources.values()) or 1
    rows = [["source", "weight", "epoch", "position", "of", "tokens", "share", "skipped", ""]]
    for name, cursor in state.sources.items():
        documents = state.fingerprints[name].documents if name in state.fingerprints else 0
        size = cursor.size or documents
        names = weights.get(name, {}).get("names")
        rows.append(
            [
                f"{name} (now {names[-1]})" if names else name,
                str(weights.get(name, {}).get("weight", "?")),
                str(cursor.epoch),
                f"{size - (cursor.left or size):,}",
                f"{size:,}",
                f"{cursor.tokens:,}",
                f"{cursor.tokens / drawn:.1%}",
                f"{cursor.skipped:,}",
                "exhausted" if cursor.exhausted else "",
            ]
        )
    return "\n\n" + _table(rows)


def _words(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _pointer_block(found: Survey) -> str:
    rows = []
    for pointer, named in zip(found.pointers, found.named, strict=True):
        says = f"{named.candidate.tag}, {named.status}" if named is not None else pointer.problem or pointer.status
        rows.append([pointer.name, pointer.text or "-", says])
    return "pointers\n" + _table(rows)


def _checkpoint_block(found: Survey) -> str:
    if not found.checkpoints:
        return f"checkpoints\n  none; {found.num_pruned} were pruned" if found.num_pruned else ""
    rows = [["", "tag", "status", "files", "size", "samples", "digest", "saved", "layout"]]
    reasons: dict[int, tuple[str, ...]] = {}
    for examined in found.checkpoints:
        step, manifest = examined.step, examined.manifest
        chosen = found.choice is not None and found.choice.tag == examined.candidate.tag
        if examined.status != "complete":
            reasons[len(rows)] = tuple(_said(found, reason) for reason in examined.reasons)
        rows.append(
            [
                ">" if chosen else "",
                examined.candidate.tag,
                examined.status,
                "-" if manifest is None else f"{len(manifest.files):,}",
                "-" if manifest is None else _size(manifest.size),
                "-" if step is None else f"{step.state.samples:,}",
                "-" if step is None else step.state.digest,
                "-" if step is None else step.saved_at[:19].replace("T", " "),
                "-" if step is None else str(step.topology),
            ]
        )
    lines = []
    for number, line in enumerate(_table(rows).split("\n")):
        lines.append(line)
        shown = reasons.get(number, ())
        lines += [f"      {reason}" for reason in shown[:8]]
        if len(shown) > 8:
            lines.append(f"      and {len(shown) - 8} more")
    if found.num_older:
        lines.append(f"  ... and {found.num_older} older (--last {found.num_older + len(found.checkpoints)} shows all)")
    if found.num_pruned:
        lines.append(f"  {found.num_pruned} more were pruned: their data states are kept")
    return "checkpoints\n" + "\n".join(lines)


def _ledger_block(found: Survey, last: int) -> str:
    entries, problems = found.ledger.entries, found.ledger.problems
    if not entries and not problems:
        return ""
    rows = [["time", "what", "iteration", "tag", "samples", "digest", "layout", "took"]]
    for entry in entries[-last:]:
        seconds = entry.details.get("save_seconds")
        rows.append(
            [
                entry.time[:19].replace("T", " "),
                entry.kind,
                f"{entry.iteration:,}",
                entry.tag or "-",
                f"{entry.samples:,}",
                entry.digest,
                str(entry.topology),
                f"{seconds:.1f} s" if isinstance(seconds, int | float) else "",
            ]
        )
    text = f"ledger, the last {len(rows) - 1} of {len(entries)} lines\n" + _table(rows)
    shown = [f"  {problem}" for problem in problems[-last:]]
    if len(problems) > last:
        shown.insert(0, f"  {len(problems) - last} more lines cannot be read")
    return "\n".join([text, *shown])


def _note_block(found: Survey) -> str:
    above = {str(problem) for problem in found.ledger.problems}
    of_choice = [_said(found, note) for note in (found.choice.notes if found.choice else ())]
    notes = [note for note in (*of_choice, *found.notes) if note not in above]
    if found.leftovers:
        notes.append(f"temporary files of killed writers, harmless: {', '.join(found.leftovers[:5])}")
    if found.error is not None:
        notes.append(str(found.error))
    return "notes\n" + "\n".join("  " + note.replace("\n", "\n  ") for note in notes) if notes else ""


def _size(size: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def _table(rows: list[list[str]]) -> str:
    """Columns aligned: numbers to the right, the rest to the left."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    right = [
        all(not row[i] or row[i][0].isdigit() or row[i] in "-?" for row in rows[1:])
        and all(len(row[i]) < 16 for row in rows)
        for i in range(len(widths))
    ]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)
