"""When a document of a run was or will be seen: ``megaresume trace RUN --find``.

The permutation is invertible, so the positions of a document's pieces in any epoch are known at once. Only planning
shows which samples they are in: from the last state before a position was drawn, found by bisection, or ahead from
the newest state.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, groupby
from typing import Literal

import numpy as np

from megaresume.runs.answer import Answer
from megaresume.runs.history import Point
from megaresume.runs.trace.trace import Trace, places
from megaresume.stream.changes import outlook
from megaresume.stream.errors import StreamExhausted, UsageError
from megaresume.stream.kernel import DOCUMENT, LENGTH
from megaresume.stream.left_out import DocumentSkip
from megaresume.stream.order import SourceOrder
from megaresume.stream.progress import Progress
from megaresume.stream.state import StreamState

Status = Literal["trained", "partly trained", "waiting", "left out", "to come", "not planned", "never"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """When a segment of the document was or will be trained; None if no record tells."""

    step: int | None
    sample: int
    rank: int | None
    micro_batch: int | None
    #: its position in the sample, its position in the document, and its length, in tokens.
    place: int
    offset: int
    length: int


@dataclass(kw_only=True, slots=True)
class Occurrence:
    """A document in one epoch."""

    epoch: int
    #: the known positions of its pieces in the source, counting epochs.
    positions: list[int]
    #: trained: all of it, when the newest state was saved. partly trained: some of it. waiting: drawn then, in an open
    #: bin. to come: planned ahead. left out: in skipped samples, or skipped by its number. not planned: further ahead
    #: than requested. never: the stream ends before it.
    status: Status
    parts: list[Seen] = field(default_factory=list)
    #: pieces of the source before it, and roughly the sample in which it comes (not planned).
    pieces_ahead: int | None = None
    about_sample: int | None = None
    #: the number of its tokens in samples that were left out.
    left_out: int = 0
    #: the step of `about_sample`; None if no record tells.
    about_step: int | None = None


@dataclass(kw_only=True, slots=True)
class Sought(Answer):
    """A document that was searched for, and when it was or will be seen."""

    source: str
    document: int
    #: the number of its tokens; 0: an empty document, which is skipped.
    tokens: int
    occurrences: list[Occurrence] = field(default_factory=list)


@dataclass(kw_only=True, slots=True)
class _Target:
    """A target of the search: a piece that was drawn, or the rest of a document that is still to come in an epoch."""

    found: Sought
    occurrence: Occurrence
    #: number of the source.
    source: int
    #: the position; None: anything still to come.
    position: int | None
    #: the number of its tokens not found yet.
    tokens: int


def parse_documents(text: str, flag: str = "--find") -> list[tuple[str, int]]:
    """``web:17,code:5`` as (source, document) pairs; a number without a source belongs to the previous one.

    Args:
        text: the value of the flag.
        flag: for errors.

    Raises:
        UsageError: another format.
    """
    documents: list[tuple[str, int]] = []
    for word in text.split(","):
        name, colon, number = word.strip().rpartition(":")
        name = name if colon else (documents[-1][0] if documents else "")
        if not name or not number.isdecimal():
            raise UsageError(
                f"bad {flag}",
                found=repr(text),
                expected="SOURCE:DOC[,SOURCE:DOC...]",
                action=f"for example {flag} web:17,code:5",
            )
        documents.append((name, int(number)))
    return documents


def find(
    trace: Trace,
    documents: Iterable[tuple[str, int]],
    *,
    epochs: int | None = None,
    until_sample: int | None = None,
    progress: Progress = lambda samples: None,
) -> list[Sought]:
    """Search for documents.

    Args:
        trace: the run.
        documents: (source, document).
        epochs: plan ahead until each was found in so many epochs.
        epochs: plan ahead until each was found in this many epochs.
        until_sample: plan ahead up to this sample. Without either, plan ahead only for what is drawn already.
    Raises:
        UsageError: an unknown source or document; or ``epochs`` of a source that is no longer drawn.
    """
    state = trace.history.state
    result: list[Sought] = []
    past: list[tuple[Point | None, _Target]] = []
    listed: list[tuple[Point | None, _Target]] = []
    ahead: list[_Target] = []
    orders = trace.replan.orders
    for name, document in documents:
        source = _checked(trace, name, document)
        order = orders[source]
        length = int(trace.replan.sources[source].lengths(np.array([document], np.int64))[0])
        found = Sought(source=name, document=document, tokens=length)
        result.append(found)
        if not length:
            continue
        drawn = state.sources[name].position if name in state.sources else 0
        for epoch, positions in _positions(trace, order, source, document, drawn, epochs):
            status: Status = "waiting" if min(positions) < drawn else "not planned"
            occurrence = Occurrence(epoch=epoch, positions=positions, status=status)
            found.occurrences.append(occurrence)
            skipped = _skipped(trace, name, document, epoch)
            pieces = _pieces(order, found, occurrence, source)
            for target in pieces:
                if target.position is not None and target.position < drawn:
                    (listed if skipped else past).append((trace.history.before_drawing(name, target.position), target))
            coming = [t for t in pieces if t.position is not None and t.position >= drawn]
            if not coming:
                continue
            if any(skip.until is None for skip in skipped):
                occurrence.status = "left out"
            elif epochs is not None or until_sample is not None:
                tokens = sum(t.tokens for t in coming)
                ahead.append(_Target(found=found, occurrence=occurrence, source=source, position=None, tokens=tokens))
            else:
                _estimate(trace, occurrence, name, min(t.position or 0 for t in coming) - drawn)
    _look_back(trace, past, progress)
    # Passed over or taken out of a bin, it is found nowhere: then the search ends with the past.
    _look_back(trace, listed, progress, stop=state.samples)
    for _, target in listed:
        if not target.occurrence.parts:
            target.occurrence.status = "left out"
    if ahead:
        if epochs is not None and until_sample is None:
            _check_ends(trace, ahead)
        _look_ahead(trace, ahead, until_sample, progress)
    for found in result:
        for occurrence in found.occurrences:
            _set_status(occurrence, found.tokens, state)
    return result


def _checked(trace: Trace, name: str, document: int) -> int:
    if name not in trace.names:
        raise UsageError.unknown(
            f"source '{name}'", name, trace.names, found=f"--find {name}:{document}", action="name one of these"
        )
    source = trace.names.index(name)
    num = len(trace.replan.sources[source])
    if document >= num:
        raise UsageError(
            f"source '{name}' has no document {document}",
            found=f"--find {name}:{document}",
            expected=f"a document from 0 to {num - 1}" if num else "it has no documents",
            action="correct the number after the colon; documents count from 0",
        )
    return source


def _positions(
    trace: Trace, order: SourceOrder, source: int, document: int, drawn: int, epochs: int | None
) -> Iterator[tuple[int, list[int]]]:
    """(epoch, positions) of a document: all that were drawn, and as many of those to come as are wanted."""
    entry = trace.replan.last_config.sources[source]
    last = entry.max_epochs if entry.max_epochs is not None and entry.on_exhausted != "repeat" else None
    for epoch in count():
        positions = order.positions_of(document, epoch)
        if not positions:
            continue  # it came to the corpus later
        to_come = max(positions) >= drawn
        if to_come and ((last is not None and epoch >= last) or (epochs is not None and epoch >= epochs)):
            return
        yield epoch, positions
        if to_come and epochs is None:
            return  # the next one; how many more lie before a sample only planning tells


def _pieces(order: SourceOrder, found: Sought, occurrence: Occurrence, source: int) -> list[_Target]:
    """The pieces of a document in one epoch."""
    pieces, left = [], found.tokens
    for position in occurrence.positions:
        tokens = min(order.piece_length(position) or left, left)
        left -= tokens
        pieces.append(_Target(found=found, occurrence=occurrence, source=source, position=position, tokens=tokens))
    return pieces


def _skipped(trace: Trace, name: str, document: int, epoch: int) -> list[DocumentSkip]:
    """The present and former lists of documents to skip that name this document."""
    return [
        skip
        for skip in trace.replan.skips.documents
        if skip.documents.source == name and skip.documents.holds_in(epoch) and document in skip.documents.numbers()
    ]


def _look_back(
    trace: Trace,
    past: list[tuple[Point | None, _Target]],
    progress: Progress,
    stop: int | None = None,
) -> None:
    """Occurrences that were drawn: each bracket of two states is planned once for all of them."""

    def samples(item: tuple[Point | None, _Target]) -> int:
        return item[0].samples if item[0] is not None else 0

    for first, group in groupby(sorted(past, key=samples), key=samples):
        _scan(trace, [target for _, target in group], first, stop, None, progress)


def _look_ahead(trace: Trace, targets: list[_Target], until_sample: int | None, progress: Progress) -> None:
    state = trace.history.state
    if until_sample is None or until_sample > state.samples:
        _scan(trace, targets, state.samples, until_sample, state, progress, later=until_sample is not None)


def _scan(
    trace: Trace,
    targets: list[_Target],
    first: int,
    stop: int | None,
    start: StreamState | None,
    progress: Progress,
    *,
    later: bool = False,
) -> None:
    """Plan until every target is found as a whole.

    Args:
        trace: the run.
        targets: what to look for: pieces by their positions, or what is to come of documents.
        first, stop, start, progress: see `Replan.plans`.
        later: continue to ``stop``, and look for the same documents in later epochs too.
    """
    drawn = {name: source.position for name, source in trace.history.state.sources.items()}
    pieces = {(t.source, t.position): t for t in targets if t.position is not None}
    coming = {(t.source, t.found.document, t.occurrence.epoch): t for t in targets if t.position is None}
    founds = {(t.source, t.found.document): t.found for t in targets}
    documents = np.array(sorted({document for _, document in founds}), np.int64)
    try:
        for planned in trace.replan.plans(first, stop, start=start, progress=progress, left_out=True):
            plan = planned.plan
            rows = np.flatnonzero(np.isin(plan.table[:, DOCUMENT], documents))
            at = places(plan.table[:, LENGTH], plan.starts, planned.config.packing.align) if len(rows) else rows
            for k in rows.tolist():
                source, position, document, offset, length = plan.table[k].tolist()
                target = pieces.get((source, position))
                found = founds.get((source, document))
                if target is None and found is not None and position >= drawn.get(found.source, 0):
                    key = source, document, plan.orders[source].epoch_of(position)
                    if later and key not in coming:
                        coming[key] = _again(found, source, key[2], position)
                    target = coming.get(key)
                if target is None or target.tokens <= 0:
                    continue
                target.tokens -= length
                if planned.left_out:
                    target.occurrence.left_out += length
                    if not target.occurrence.parts:
                        target.occurrence.status = "left out"
                    continue
                sample = plan.first + int(np.searchsorted(plan.starts, k, side="right")) - 1
                target.occurrence.parts.append(_seen(trace, sample, int(at[k]), offset, length))
            if not later and all(target.tokens <= 0 for target in targets):
                return
    except StreamExhausted:
        for target in targets:
            if target.tokens > 0 and not target.occurrence.parts:
                target.occurrence.status = "never"


def _again(found: Sought, source: int, epoch: int, position: int) -> _Target:
    """Look for the same document in a later epoch."""
    occurrence = Occurrence(epoch=epoch, positions=[position], status="not planned")
    found.occurrences.append(occurrence)
    found.occurrences.sort(key=lambda o: o.epoch)
    return _Target(found=found, occurrence=occurrence, source=source, position=None, tokens=found.tokens)


def _seen(trace: Trace, sample: int, place: int, offset: int, length: int) -> Seen:
    step, rank, micro = trace.place(sample)
    return Seen(step=step, sample=sample, rank=rank, micro_batch=micro, place=place, offset=offset, length=length)


def _check_ends(trace: Trace, targets: list[_Target]) -> None:
    """Refuse to plan ahead for a source that the last stage never draws: the search would not end."""
    state, config = trace.history.state, trace.replan.last_config
    for target in targets:
        name = target.found.source
        exhausted = name in state.sources and state.sources[name].exhausted
        if config.sources[target.source].weight == 0 or exhausted:
            raise UsageError(
                f"source '{name}' is no longer drawn",
                found=f"weight 0 in the stage '{trace.replan.last_stage}'" if not exhausted else "all its epochs seen",
                expected="a source that continues, to plan ahead until its documents come",
                action="bound the search: --until-step N",
            )


def _estimate(trace: Trace, occurrence: Occurrence, name: str, pieces_ahead: int) -> None:
    """Estimate without planning when an occurrence, or the rest of it, comes."""
    state = trace.history.state
    occurrence.pieces_ahead = pieces_ahead
    for row in outlook(state, trace.replan.config_now):
        if row.name == name and row.samples_left is not None and row.remaining:
            ahead = pieces_ahead * row.samples_left / row.remaining
            occurrence.about_sample = state.samples + round(ahead)
            occurrence.about_step = trace.steps.step_of(occurrence.about_sample)


def _set_status(occurrence: Occurrence, tokens: int, state: StreamState) -> None:
    if not occurrence.parts:
        return
    occurrence.parts.sort(key=lambda part: (part.sample, part.place))
    trained = sum(part.length for part in occurrence.parts if part.sample < state.samples)
    if trained:
        occurrence.status = "trained" if trained + occurrence.left_out >= tokens else "partly trained"
    elif occurrence.status != "waiting":
        occurrence.status = "to come"
