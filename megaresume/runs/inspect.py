"""``megaresume inspect DIR``: a checkpoint's data state, the pointers, and whether every checkpoint is complete.

Answers in well under half a second: neither torch nor numpy is imported, and nothing is ever unpickled.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaresume.checkpoint.copies.stager import read_staging
from megaresume.checkpoint.lock.lock import Holder
from megaresume.checkpoint.records.candidates import Examined
from megaresume.checkpoint.records.envelope import DataState, OpaqueState
from megaresume.checkpoint.records.ledger import LedgerReading
from megaresume.checkpoint.records.manifest import Manifest
from megaresume.checkpoint.records.names import megatron_tag, split_root
from megaresume.checkpoint.records.rank_files import random_digest
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.command_line import at_least
from megaresume.render import spell_bytes, text_table
from megaresume.runs.answer import Answer, live, plain, told
from megaresume.runs.directory import Run
from megaresume.stream.errors import StateError, counted, listed
from megaresume.stream.progress import progress
from megaresume.stream.state import StreamState


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of the command."""
    parser.add_argument(
        "dir", metavar="DIR", type=Path, help="the directory where a run saves its checkpoints, or one checkpoint in it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--checksums", action="store_true", help="read every file and compare its checksum, not only its size"
    )
    parser.add_argument(
        "--last", type=at_least(1), default=10, metavar="N", help="checkpoints and ledger lines to show (default: 10)"
    )


def run(args: argparse.Namespace) -> int:
    """Inspect a directory. Returns 1 if a resume would not find weights and their data state, else 0."""
    root, tag = split_root(args.dir)
    with progress(f"reading {root}", None, "B") if args.checksums else nullcontext() as advance:
        found = look(Run(root, tag, checksums=args.checksums, progress=advance), args.last)
    return found.give(_text, as_json=args.json)


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection(Answer):
    """The findings about a run."""

    run: Run = live()
    #: the newest checkpoints, and the one that a resume takes.
    examined: Sequence[Examined] = live()
    #: the checkpoint that each of the pointers names.
    named: Sequence[Examined | None] = live()
    reading: LedgerReading = live()
    #: lines of the ledger to show.
    last: int = live()
    #: sentences, in addition to those of the choice.
    remarks: Sequence[str] = live()

    @property
    def status(self) -> int:
        """The exit status: 1 if a resume would not find weights and their data state."""
        return 0 if self.resumable else 1

    @property
    def unrecorded(self) -> str | None:
        """A checkpoint that Megatron finished saving, but that a kill kept us from committing."""
        tracked = self.named[1]
        if tracked is None or tracked.status != "incomplete" or tracked.candidate.iteration is None:
            return None
        tag, is_first = tracked.candidate.tag, tracked.candidate.unfinished
        return tag if is_first and tag == megatron_tag(tracked.candidate.iteration) else None

    @property
    def record(self) -> StepFile | None:
        """The state to show: the one that a resume loads, or else the newest readable one."""
        if self.run.choice is not None and self.run.choice.record is not None:
            return self.run.choice.record
        return next((e.record for e in self.examined if e.record is not None), None)

    @told
    def root(self) -> Path:
        """The directory of checkpoints."""
        return self.run.root

    @told
    def resumable(self) -> bool:
        """Whether a resume would find weights and their order."""
        return bool(self.run.resumable or self.unrecorded)

    @told
    def choice(self) -> dict[str, Any] | None:
        """The checkpoint that a resume would load."""
        choice = self.run.choice
        return None if choice is None else choice.to_dict() | {"rejected": choice.rejected}

    @told
    def error(self) -> Exception | None:
        """Why a resume would be refused."""
        return self.run.error

    @told
    def notes(self) -> list[str]:
        """Notes on what else is worth knowing, in sentences."""
        return [*([] if self.run.choice is None else self.run.choice.notes), *self.remarks]

    @told
    def state(self) -> dict[str, Any] | None:
        """The state shown, as recorded."""
        return None if self.record is None else self.record.to_fields()

    @told
    def order(self) -> DataState | None:
        """The order of Megatron's own datasets, if the run is guarded."""
        return None if self.record is None or self.record.state.kind != "order" else self.record.state

    @told
    def pointers(self) -> Sequence[dict[str, Any]]:
        """What ``latest`` and the tracker name."""
        return [plain(pointer) | {"problem": pointer.problem} for pointer in self.run.pointers]

    @told
    def checkpoints(self) -> list[dict[str, Any]]:
        """The newest checkpoints."""
        return [_checkpoint(examined) for examined in self.examined]

    @told
    def older_checkpoints(self) -> int:
        """How many older checkpoints are not listed."""
        return len(self.run.present) - len(self.examined)

    @told
    def pruned_checkpoints(self) -> int:
        """How many checkpoints were deleted while their records were kept."""
        return self.run.num_pruned

    @told
    def ledger(self) -> dict[str, Any]:
        """The last lines of the ledger."""
        ledger = self.reading
        entries = ledger.entries[-self.last :]
        return {"run": ledger.run, "lines": len(ledger.entries), "entries": entries, "problems": ledger.problems}

    @told
    def leftovers(self) -> Sequence[str]:
        """Temporary files that killed writers left behind."""
        return self.run.leftovers

    @told
    def holder(self) -> Holder | None:
        """Which job writes to the directory, or did last."""
        return self.run.holder()


def _checkpoint(examined: Examined) -> dict[str, Any]:
    record, manifest = examined.record, examined.manifest
    return {
        "tag": examined.candidate.tag,
        "iteration": examined.candidate.iteration,
        "status": examined.status,
        "durable": None if manifest is None else manifest.durable,
        "reasons": examined.reasons,
        "files": None if manifest is None else len(manifest.files),
        "bytes": None if manifest is None else manifest.size,
        "samples": None if record is None else record.state.samples,
        "digest": None if record is None else record.state.digest,
        "saved_at": None if record is None else record.saved_at,
        "topology": None if record is None else record.topology,
        "random": _random(manifest),
    }


def _random(manifest: Manifest | None) -> dict[str, Any] | None:
    """How many ranks have a random state in a checkpoint, and the digest of all these states."""
    found = None if manifest is None else random_digest(manifest)
    return None if found is None else {"ranks": found[0], "digest": found[1]}


def look(run: Run, last: int) -> Inspection:
    """Inspect a run.

    Args:
        run: the run.
        last: how many checkpoints and lines of the ledger to show.
    """
    remarks: list[str] = []
    try:
        ledger = run.ledger
    except StateError as error:
        ledger = LedgerReading()
        remarks.append(str(error))
    checkpoints = run.newest(last)
    unsummed = [e.candidate.tag for e in checkpoints if e.manifest is not None and not e.manifest.has_checksums]
    if run.checksums and unsummed:
        remarks.append(f"saved without checksums, so that only sizes could be compared: {listed(unsummed, 5)}")
    return Inspection(run=run, examined=checkpoints, named=run.named, reading=ledger, last=last, remarks=remarks)


def _text(found: Inspection) -> str:
    blocks = [_headline(found) + _held(found.run), _state_block(found), _order_block(found), _pointer_block(found)]
    blocks += [_checkpoint_block(found), _copy_block(found), _ledger_block(found), _note_block(found)]
    return "\n\n".join(block for block in blocks if block)


def _held(run: Run) -> str:
    """Which job writes to the directory; nothing if the last one ended properly."""
    holder = run.holder()
    if holder is None or holder.status == "released":
        return ""
    if holder.status == "gone":
        return f"\nleft behind by {holder}: {holder.reason}; the next start takes it over"
    return f"\nheld by {holder}"


def _copy_block(found: Inspection) -> str:
    """Where checkpoints are copied to, and which copies are complete."""
    staging = read_staging(found.run.root)
    if staging is None:
        return ""
    there = f"{len(staging.copied)} complete" + (f", the newest {staging.copied[0]}" if staging.copied else "")
    waiting = f"\n  not copied yet: {', '.join(staging.waiting[:10])}" if staging.waiting else ""
    return f"copies in {staging.to}\n  {there}{waiting}"


def _headline(found: Inspection) -> str:
    run, choice = found.run, found.run.choice
    if found.unrecorded is not None:
        return (
            f"{run.root}\nMegatron resumes from {found.unrecorded}: its tracker names it. The data state is inside it; "
            "the save was killed before the records beside it were written, and the next start writes them"
        )
    if choice is None:
        why = "there is no checkpoint" if run.error is None else run.error.headline
        return f"{run.root}\nNOT RESUMABLE: {why}"
    if choice.state is None:
        return f"{run.root}\nNOT RESUMABLE: {choice.tag} has no data state (written without megaresume)"
    more = ", under guard: it holds the order of Megatron's own datasets" if choice.state.kind == "order" else ""
    return f"{run.root}\nresumes from {choice.tag}, at sample {choice.state.samples:,}{more}"


def _state_block(found: Inspection) -> str:
    record = found.record
    if record is None:
        return ""
    rows = [
        ["iteration", f"{record.iteration:,}"],
        ["samples", f"{record.state.samples:,}"],
        ["digest", record.state.digest],
        ["saved", f"{record.saved_at}  on {record.topology}"],
        ["trained by", record.framework],
        ["run", record.run],
    ]
    manifest = next((e.manifest for e in found.examined if e.record == record), None)
    if (random := _random(manifest)) is not None:
        rows.append(["random state", f"of {counted(random['ranks'], 'rank')}, digest {random['digest']}"])
    if isinstance(record.state, OpaqueState):
        rows += _loader_rows(record.state) if record.state.kind == "loader" else []
        return f"data state of {record.tag}\n" + text_table(rows)
    if record.stream.reached != record.stream.samples:
        rows[1][1] += f" trained, {record.stream.reached:,} with those left out"
    return (
        f"data state of {record.tag}\n" + text_table(rows + _stream_rows(record.stream)) + source_table(record.stream)
    )


def _loader_rows(state: OpaqueState) -> list[list[str]]:
    from megaresume.hosts.loader_states import LoaderRecord

    record = LoaderRecord.from_state(state)
    facts = record.facts
    return [
        ["loader", f"{facts.library}, {facts.kind}: {record.batches:,} batches of each rank"],
        ["", f"dp {record.dp}  workers {facts.workers}  batch size {facts.batch_size}"],
        ["", f"{record.dp} states beside the checkpoint, {spell_bytes(sum(rank.size for rank in record.ranks))}"],
    ]


def _stream_rows(state: StreamState) -> list[list[str]]:
    config = state.config
    packing = dict(config.get("packing", {}))
    order = {name: config.get(name) for name in ("seed", "seq_length")}
    fillers = [name for name, source in config.get("sources", {}).items() if source.get("packing")]
    order |= {"packing": packing.pop("mode", None), **packing, "filled with": ", ".join(fillers) or None}
    order["blend by"] = config.get("blend", {}).get("unit")
    unit = state.config_now.unit
    rows = [
        *([] if unit == "items" else [["documents", f"{state.documents:,}"]]),
        [unit, f"{state.tokens:,}"],
        ["stream", _words(order)],
        ["stages", ", ".join(f"{stage.name} from {stage.first:,}" for stage in state.stages)],
        ["batches", ", ".join(f"{size:,} from {first:,}" for first, size in state.batches)],
        ["open bins", f"{len(state.bins)} with {sum(len(b.segments) for b in state.bins)} segments"],
    ]
    if state.pending:
        tokens = sum(segment.length for segment in state.pending)
        rows.append(["waiting", f"{tokens:,} tokens of {counted(len(state.pending), 'document')}, to be placed next"])
    if state.tails:
        tokens = sum(segment.length for segment in state.tails)
        rows.append(["kept back", f"{tokens:,} tokens of {counted(len(state.tails), 'document')}, for samples to come"])
    rows += [["skip", f"at sample {record.at:,}: {record}"] for record in state.skips.log]
    for skip in state.skips.documents:
        until = "" if skip.until is None else f" to {skip.until:,}"
        rows.append(["skip", f"{skip.documents}, from sample {skip.at:,}{until}"])
    if state.faults.total:
        last = state.faults.kept[-1]
        where = f"last {last.source}:{last.document} in sample {last.sample:,}: {last.reason}"
        rows.append(["faults", f"{state.faults.total:,} documents ({where})"])
    return [*rows, *(["accepted", override] for override in state.overrides)]


def _order_block(found: Inspection) -> str:
    record = found.record
    if record is None or record.state.kind != "order":
        return ""
    from megaresume.hosts.megatron.guard.compare import describe  # deferred: numpy

    try:
        return "\n".join(describe(record.state))
    except StateError as error:
        return str(error)


def source_table(state: StreamState) -> str:
    """How far each source is, by the weights of the state's current stage; "" for a stream without sources."""
    if not state.sources:
        return ""
    declared, now = (config.get("sources", {}) for config in (state.config, state.stages[-1].config))
    drawn = sum(cursor.tokens for cursor in state.sources.values()) or 1
    rows = [["source", "weight", "epoch", "position", "of", state.config_now.unit, "share", "skipped", ""]]
    for name, cursor in state.sources.items():
        documents = state.fingerprints[name].documents if name in state.fingerprints else 0
        size = cursor.size or documents
        names = declared.get(name, {}).get("names")
        rows.append(
            [
                f"{name} (now {names[-1]})" if names else name,
                str(now.get(name, {}).get("weight", "?")),
                str(cursor.epoch),
                f"{size - (cursor.left or size):,}",
                f"{size:,}",
                f"{cursor.tokens:,}",
                f"{cursor.tokens / drawn:.1%}",
                f"{cursor.skipped:,}",
                "exhausted" if cursor.exhausted else "",
            ]
        )
    return "\n\n" + text_table(rows)


def _words(values: dict[str, Any]) -> str:
    return "  ".join(f"{name} {value}" for name, value in values.items() if value is not None)


def _pointer_block(found: Inspection) -> str:
    rows = []
    for pointer, named in zip(found.run.pointers, found.named, strict=True):
        says = f"{named.candidate.tag}, {named.status}" if named is not None else pointer.problem or pointer.status
        rows.append([pointer.name, pointer.text or "-", says])
    return "pointers\n" + text_table(rows)


def _checkpoint_block(found: Inspection) -> str:
    if not found.examined:
        return f"checkpoints\n  none; {found.run.num_pruned} were pruned" if found.run.num_pruned else ""
    rows = [["", "tag", "status", "files", "size", "samples", "digest", "saved", "layout"]]
    reasons: dict[int, tuple[str, ...]] = {}
    for examined in found.examined:
        record, manifest = examined.record, examined.manifest
        chosen = found.run.choice is not None and found.run.choice.tag == examined.candidate.tag
        status, files, state = examined.status, ["-"] * 2, ["-"] * 4
        if status != "complete":
            reasons[len(rows)] = examined.reasons
        if manifest is not None:
            files = [f"{len(manifest.files):,}", spell_bytes(manifest.size)]
        if record is not None:
            state = [f"{record.state.samples:,}", record.state.digest, _time(record.saved_at), str(record.topology)]
        lasts = "" if status != "complete" or manifest is None or manifest.durable else ", not durable"
        rows.append([">" if chosen else "", examined.candidate.tag, status + lasts, *files, *state])
    lines = []
    for number, line in enumerate(text_table(rows).split("\n")):
        lines.append(line)
        shown = reasons.get(number, ())
        lines += [f"      {reason}" for reason in shown[:8]]
        if len(shown) > 8:
            lines.append(f"      and {len(shown) - 8} more")
    num_older = found.older_checkpoints
    if num_older:
        lines.append(f"  ... and {num_older} older (--last {len(found.run.present)} shows all)")
    if found.run.num_pruned:
        lines.append(f"  {found.run.num_pruned} more were pruned: their data states are kept")
    return "checkpoints\n" + "\n".join(lines)


def _time(text: str) -> str:
    """A time of day without fractions of a second and time zone."""
    return text[:19].replace("T", " ")


def _ledger_block(found: Inspection) -> str:
    entries, problems, last = found.reading.entries, found.reading.problems, found.last
    if not entries and not problems:
        return ""
    rows = [["time", "what", "iteration", "tag", "samples", "digest", "layout", "took"]]
    for entry in entries[-last:]:
        seconds = entry.details.get("save_seconds")
        rows.append(
            [
                _time(entry.time),
                entry.kind,
                f"{entry.iteration:,}",
                entry.tag or "-",
                f"{entry.samples:,}",
                entry.digest,
                str(entry.topology),
                f"{seconds:.1f} s" if isinstance(seconds, int | float) else "",
            ]
        )
    text = f"ledger, the last {len(rows) - 1} of {len(entries)} lines\n" + text_table(rows)
    shown = [f"  {problem}" for problem in problems[-last:]]
    if len(problems) > last:
        shown.insert(0, f"  {len(problems) - last} more lines cannot be read")
    return "\n".join([text, *shown])


def _note_block(found: Inspection) -> str:
    above = {str(problem) for problem in found.reading.problems}
    notes = [note for note in found.notes if note not in above]
    if found.run.leftovers:
        notes.append(f"temporary files of killed writers, harmless: {', '.join(found.run.leftovers[:5])}")
    if found.run.error is not None:
        notes.append(str(found.run.error))
    lines = ["  " + note.replace("\n", "\n  ") for note in dict.fromkeys(notes)]
    return "\n".join(["notes", *lines]) if lines else ""
