"""Compares what the ranks recorded with the stream planned again, and with the contents of the corpora.

Hashes the contents of samples and documents as read from the corpora, not as their indexes describe them.

A sample is hashed as it is trained: its tokens in place, padding, the pixels of its images, and its loss mask if
requested. A document is hashed as it is stored: its tokens, and which are trained if the corpus knows; or the record,
for a source that has records (`record(i)`: the bytes of the members of an image-text record), when its first segment
comes.

For a step that a rank recorded, these are compared:

samples    those that this rank gets in this step, by the batch size and the layout
order      their identities: source, document, offset and length of every segment
content    the tokens and pixels that were handed out, if the corpora are read too
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.checkpoint.records.ledger import LedgerEntry
from megaresume.checkpoint.records.rank_log import hash_rows, hash_samples, ranges_of
from megaresume.data.source import Source
from megaresume.data.spans import spans_of
from megaresume.runs.history import StepMap
from megaresume.runs.rank_steps import RankStep, RankSteps
from megaresume.runs.trace.documents import of_stage
from megaresume.runs.trace.replan import Past, Planned
from megaresume.runs.trace.trace import Trace
from megaresume.stream.dealing import deal
from megaresume.stream.errors import CorpusError, MegaresumeError, StateError, UsageError
from megaresume.stream.kernel import DOCUMENT, LENGTH, OFFSET, SOURCE
from megaresume.stream.planner import Plan, concatenate
from megaresume.stream.progress import Progress

if TYPE_CHECKING:
    from megaresume.batches.assemble import Assembler

#: Samples read at a time, as a step of a large run may not fit into memory.
CHUNK = 256


@dataclass
class DocumentDigest:
    """The digest of the contents of one source, as far as read."""

    #: the number of documents whose first segment was read.
    documents: int = 0
    #: xxh3_128 over the hashes of the segments, in stream order.
    _hasher: xxhash.xxh3_128 = field(default_factory=xxhash.xxh3_128)

    def add(self, value: int, *, begins: bool) -> None:
        """Add a segment; ``begins``: it is the first one of its document."""
        self.documents += begins
        self._hasher.update(value.to_bytes(8, "little"))

    @property
    def digest(self) -> str:
        """32 hex digits, the same on any machine for the same segments in the same order."""
        return self._hasher.hexdigest()


class Contents:
    """Reads the corpora of a run.

    Args:
        names: of the sources, in the order of the stream.
        sources: the open ones; segments of a missing source must not be requested.
    """

    def __init__(self, names: Sequence[str], sources: Sequence[Any]) -> None:
        self._names = list(names)
        self._sources: list[Source] = list(sources)
        self._assemblers: dict[str, Assembler] = {}
        #: the digests of what `documents` has read, by source.
        self.digests: dict[str, DocumentDigest] = {}

    def samples(self, parts: Sequence[Planned], pad_id: int, *, masks: bool = False) -> npt.NDArray[np.uint64]:
        """The hashes of the contents of every sample: uint64[n], as from `hash_rows`.

        Args:
            parts: consecutive samples.
            pad_id: token at positions without a document.
            masks: also hash which labels are trained.

        Raises:
            CorpusError: a document is damaged, or its length differs from the index.
        """
        from megaresume.batches.batch import BatchArrays
        from megaresume.batches.images import BatchImages

        hashes = []
        for part in parts:
            for first in range(part.plan.first, part.plan.stop, CHUNK):
                plan = part.plan.slice(first, min(first + CHUNK, part.plan.stop))
                assembler = self._assembler(part, pad_id)
                arrays, images = BatchArrays.empty(len(plan), assembler.seq_length), BatchImages()
                assembler.fill(plan, arrays, images, [])
                rows = [position[0] for position in images.positions]
                pixels = zip(rows, images.pixels, strict=True)
                hashes.append(hash_rows(arrays.tokens, pixels, arrays.loss_mask if masks else None))
        return np.concatenate(hashes) if hashes else np.zeros(0, np.uint64)

    def _assembler(self, part: Planned, pad_id: int) -> Assembler:
        from megaresume.batches.assemble import Assembler  # needs torch, which proving a directory does not

        config = part.config
        augment = {source.name: list(source.augment) for source in config.sources}
        key = repr((config.seq_length, config.packing.align, pad_id, augment))
        if key not in self._assemblers:
            self._assemblers[key] = Assembler(
                [of_stage(s, name, config) for s, name in zip(self._sources, self._names, strict=True)],
                seq_length=config.seq_length,
                align=config.packing.align,
                pad_id=pad_id,
                seed=config.seed,
                names=self._names,
            )
        return self._assemblers[key]

    def documents(self, parts: Sequence[Planned]) -> None:
        """Hash every segment of these samples; for shards, every record.

        Raises:
            CorpusError: one cannot be read, or its length differs from the index.
        """
        for part in parts:
            table = part.plan.table
            for row in table:
                name, source = self._names[int(row[SOURCE])], self._sources[int(row[SOURCE])]
                value = _hash(source, name, int(row[DOCUMENT]), int(row[OFFSET]), int(row[LENGTH]))
                self.digests.setdefault(name, DocumentDigest()).add(value, begins=bool(row[OFFSET] == 0))


def _hash(source: Source, name: str, document: int, offset: int, length: int) -> int:
    record = getattr(source, "record", None)
    if record is not None:
        hasher = xxhash.xxh3_64()
        for member, content in sorted(record(document).members.items()):
            # With explicit lengths, no two records have the same encoding.
            hasher.update(f"{len(member.encode())} {member} {len(content)} ".encode() + content)
        return int(hasher.intdigest())
    tokens = source.read(document, offset, length)
    if len(tokens) != length:
        raise CorpusError(
            f"document {document} of source '{name}' is not as long as the index says",
            found=f"{len(tokens)} tokens from token {offset} on",
            expected=f"{length} tokens",
            cause="the file of tokens was cut short or exchanged",
            action="copy the corpus again",
        )
    hasher = xxhash.xxh3_64(np.ascontiguousarray(tokens, dtype="<i8").data)
    spans = spans_of(source, np.array([document]))
    if spans is not None:
        hasher.update(spans.mask(0, offset, length).data)
    return hasher.intdigest()


@dataclass(frozen=True, kw_only=True, slots=True)
class RankDifference:
    """A record of a rank that differs from the plan."""

    step: int
    #: the rank, in words.
    rank: str
    field: Literal["samples", "order", "content"]
    recorded: str
    planned: str


@dataclass(kw_only=True, slots=True)
class RankCheck:
    """The result of checking the ranks' records."""

    #: steps and lines that agree with the plan; lines whose content was read and compared.
    steps: int = 0
    lines: int = 0
    contents: int = 0
    #: lines among them for what the model was given, not only what was handed out.
    seen: int = 0
    #: the differences by step, then rank.
    differences: list[RankDifference] = field(default_factory=list)
    #: lines of lost steps that were repeated: those that agree, and those of another branch of the run.
    lost: int = 0
    given_up: int = 0
    #: (step, data-parallel ranks without a line); no ranks if all are missing.
    missing: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    #: [first, stop) steps of launches without a record of any rank.
    unlogged: list[tuple[int, int]] = field(default_factory=list)
    #: the first matching line without what the model was given: step, rank in words; None if there is none.
    unseen: tuple[int, str] | None = None
    #: why checking stopped early.
    error: MegaresumeError | None = None

    @property
    def holds(self) -> bool:
        """Whether everything recorded agrees with the plan, and nothing is missing."""
        return self.steps > 0 and not self.differences and not self.missing and self.error is None


@dataclass(frozen=True, slots=True)
class _Group:
    """The recorded lines of one step."""

    step: int
    lines: tuple[RankStep, ...]
    #: [first, stop) samples of the step, as planned; if no record tells, as in the lines.
    samples: tuple[int, int]
    lost: bool


def check_ranks(
    trace: Trace,
    records: RankSteps,
    *,
    first: int,
    stop: int,
    content: bool = False,
    progress: Progress = lambda steps: None,
) -> RankCheck:
    """Check every line of the steps ``first .. stop``.

    Args:
        trace: the run, without comparing.
        records: the ranks' records.
        first, stop: numbers of steps, from 1.
        content: read the corpora too; otherwise only the identities are compared.
        progress: called with the steps checked since the last call.
    """
    check = RankCheck()
    contents = Contents(trace.names, trace.replan.sources) if content else None
    groups = sorted(_groups(trace.steps, records, first, stop), key=lambda g: (g.samples[0], g.step))
    past = Past(trace.replan)
    kept = _kept(trace.run.ledger.entries)
    saved = {step for launch in kept for step in launch}
    for group in groups:
        try:
            parts = past.blocks(*group.samples)
            differences = _check(group, parts, contents, check)
        except MegaresumeError as error:
            check.error = error
            break
        if group.lost:
            check.lost += len(group.lines) if not differences else 0
            check.given_up += len(group.lines) if differences else 0
            continue
        check.differences += differences
        check.steps += not differences
        if not differences:
            check.lines += len(group.lines)
            check.seen += sum(line.seen for line in group.lines)
            unseen = [(line.step, line.who) for line in group.lines if not line.seen]
            check.unseen = min([*unseen, *([check.unseen] if check.unseen else [])], default=None)
        lacking = _lacking(group.lines)
        if lacking and (group.step in saved or group.step not in records.last_steps):
            check.missing.append((group.step, lacking))
        progress(1)
    check.differences.sort(key=lambda d: d.step)
    gaps = set(records.gaps)
    for launch in kept:
        if written := [step for step in launch if step in records.steps]:
            gaps.update(set(launch) - set(written))
        elif inside := range(max(launch.start, first), min(launch.stop, stop)):
            check.unlogged.append((inside.start, inside.stop))
    check.missing += [(step, ()) for step in gaps if first <= step < stop]
    check.missing.sort()
    return check


def _kept(entries: Sequence[LedgerEntry]) -> list[range]:
    """The steps of each launch that a later checkpoint includes, so that their lines must exist."""
    kept: list[range] = []
    for entry in entries:
        after = entry.iteration + 1
        if entry.kind == "start":
            kept = [*(range(launch.start, min(launch.stop, after)) for launch in kept), range(after, after)]
        elif kept:
            kept[-1] = range(kept[-1].start, max(kept[-1].stop, after))
    return [launch for launch in kept if launch]


def _groups(steps: StepMap, records: RankSteps, first: int, stop: int) -> list[_Group]:
    groups = []
    for step, lines in records.steps.items():
        if first <= step < stop:
            samples = _samples_of(steps, step) or _span(lines)
            groups.append(_Group(step, lines, samples, lost=False))
    by_step: dict[tuple[int, tuple[int, int]], list[RankStep]] = {}
    for line, _ in records.lost:
        if first <= line.step < stop:
            by_step.setdefault((line.step, _span([line])), []).append(line)
    for (step, span), some in by_step.items():
        # Lost steps may have had another batch size: use the samples that they recorded.
        groups.append(_Group(step, tuple(some), span, lost=True))
    return groups


def _samples_of(steps: StepMap, step: int) -> tuple[int, int] | None:
    try:
        return steps.samples(step, step + 1)
    except (StateError, UsageError):
        return None  # no record tells; the identities in the lines are checked anyway


def _span(lines: Sequence[RankStep]) -> tuple[int, int]:
    ranges = [r for line in lines for r in line.samples]
    return min(a for a, _ in ranges), max(b for _, b in ranges)


def _check(group: _Group, parts: list[Planned], contents: Contents | None, check: RankCheck) -> list[RankDifference]:
    low, high = group.samples
    plan = concatenate([part.plan for part in parts])
    read: dict[tuple[int, bool], npt.NDArray[np.uint64]] = {}
    differences = []

    def differ(line: RankStep, name: Literal["samples", "order", "content"], recorded: str, planned: str) -> None:
        differences.append(
            RankDifference(step=line.step, rank=line.who, field=name, recorded=recorded, planned=planned)
        )

    for line in sorted(group.lines, key=lambda n: (-1 if n.dp_rank is None else n.dp_rank, n.rank or 0)):
        expected = _expected(line, plan) if line.part or not group.lost else line.samples
        samples = expected if line.part else line.samples
        inside = all(low <= a < b <= high for a, b in samples)
        if samples != expected or not samples or not inside:
            differ(line, "samples", _words(line.samples), _words(expected))
            continue
        rows = np.concatenate([np.arange(a - low, b - low) for a, b in samples])
        order = hash_samples(plan.hashes[rows])
        if order != line.order:
            differ(line, "order", line.order, order)
            continue
        if contents is None or line.content is None:
            continue
        how = line.pad_id, line.masks
        if how not in read:
            read[how] = contents.samples(parts, line.pad_id, masks=line.masks)
        check.contents += not group.lost
        content = hash_samples(read[how][rows])
        if content != line.content:
            differ(line, "content", line.content, content)
    return differences


def _expected(line: RankStep, plan: Plan) -> tuple[tuple[int, int], ...]:
    """The samples of a rank in a step."""
    if line.dp_rank is None or line.dp is None or line.micro_batch_size is None:
        return ((plan.first, plan.stop),)
    if not line.evenly and len(plan) % (line.dp * line.micro_batch_size):
        return ()
    place = {"micro_batch_size": line.micro_batch_size, "dp_rank": line.dp_rank, "dp_size": line.dp}
    mine = deal(plan, line.balance, evenly=line.evenly, **place)
    return tuple((a, b) for a, b in ranges_of(np.concatenate(mine)))


def _words(ranges: Sequence[tuple[int, int]]) -> str:
    if not ranges:
        return "no whole micro-batches: the batch size is not a multiple of them"
    shown = ", ".join(f"{a} to {b - 1}" for a, b in ranges[:4])
    return shown + (f" and {len(ranges) - 4} more ranges" if len(ranges) > 4 else "")


def _lacking(lines: Sequence[RankStep]) -> tuple[int, ...]:
    sizes = [line.dp for line in lines if line.dp is not None]
    present = {line.dp_rank for line in lines}
    return tuple(rank for rank in range(max(sizes, default=0)) if rank not in present)
