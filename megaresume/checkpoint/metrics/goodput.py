"""Goodput: the share of a run's time that produced steps which were kept; and how the rest was spent.

    born ... start ........... save ........... last        born ... start ...
      start-up       data, saving, steps   steps that are lost   waiting   start-up

Every second since the first process was started is of one kind:

    startup    from the start of a process to its first step: imports, the load, compilation before it
    data       waiting for a micro-batch      } in steps
    saving     standing still for a save      } that were kept
    lost       everything after the checkpoint that the next start resumed from
    waiting    from the end of one process to the start of the next: the queue, a node, a launcher
    goodput    the rest

If a run was measured (`megaresume.checkpoint.metrics`), the seconds are those of rank 0. Otherwise the ledger only has
starts and saves: it does not show waiting for data, nor when a process died, unless its position was recorded
(`position`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

from megaresume.checkpoint.metrics.record import Mark
from megaresume.checkpoint.records.ledger import LedgerEntry
from megaresume.checkpoint.records.position import Position, reached_of
from megaresume.checkpoint.starts import NOTHING_TO_TRAIN
from megaresume.checkpoint.system import seconds_of

CAUSES = ("startup", "data", "saving", "lost", "waiting")


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """How the time of a run was spent."""

    #: since its first process started.
    seconds: float
    #: seconds by cause: see above.
    badput: dict[str, float]
    starts: int
    #: samples trained again.
    repeated: int

    @property
    def goodput(self) -> float:
        """The share of goodput, from 0 to 1."""
        return max(1 - sum(self.badput.values()) / self.seconds, 0.0) if self.seconds > 0 else 0.0


@dataclass(slots=True)
class _Span:
    """The time of one process between two marks."""

    seconds: float
    data: float
    saving: float
    first: int
    last: int
    #: whether the process died at the end of it.
    is_last: bool
    is_lost: bool = False


def goodput_of(marks: Sequence[Mark]) -> Goodput:
    """How the time up to the last mark was spent.

    Args:
        marks: of a run, in order.
    """
    spent = dict.fromkeys(CAUSES, 0.0)
    spans: list[_Span] = []
    before: Mark | None = None
    starts = repeated = attempt = 0
    for mark in marks:
        if mark.event == "start":
            # A load in the middle of a process begins again, but is not another start of the run.
            starts += not mark.attempt or mark.attempt != attempt
            attempt = mark.attempt
            born = mark.born or mark.time
            spent["startup"] += max(mark.time - born, 0.0)
            if before is not None:
                spent["waiting"] += max(born - before.time, 0.0)
                repeated += max(before.samples - mark.samples, 0)
            spans = _given_up(spans, mark.step)
        elif before is not None:
            spans.append(
                _Span(
                    seconds=max(mark.time - before.time, 0.0),
                    data=max(mark.waited - before.waited, 0.0),
                    saving=max(mark.saving - before.saving, 0.0),
                    first=before.step,
                    last=mark.step,
                    is_last=mark.event == "last",
                )
            )
        before = mark
    for span in spans:
        if span.is_lost:
            spent["lost"] += span.seconds
        else:
            spent["data"] += span.data
            spent["saving"] += span.saving
    seconds = (marks[-1].time - (marks[0].born or marks[0].time)) if marks else 0.0
    return Goodput(seconds=seconds, badput=spent, starts=starts, repeated=repeated)


def _given_up(spans: list[_Span], step: int) -> list[_Span]:
    """The spans, with those after the step that a start went back to marked as lost."""
    found: list[_Span] = []
    for span in spans:
        if span.is_lost or span.last < step or (span.last == step and not (span.is_last and span.first == step)):
            found.append(span)
            continue
        steps = span.last - span.first
        part = min(max((step - span.first) / steps, 0.0), 1.0) if steps else 0.0
        if part:  # its save left no mark: a kill came first
            kept = (span.seconds * part, span.data * part, span.saving * part)
            found.append(_Span(*kept, first=span.first, last=step, is_last=False))
        lost = (span.seconds * (1 - part), span.data * (1 - part), span.saving * (1 - part))
        found.append(_Span(*lost, first=step, last=span.last, is_last=span.is_last, is_lost=True))
    return found


def marks_of_ledger(entries: Sequence[LedgerEntry]) -> list[Mark]:
    """The marks of a run that was not measured."""
    marks: list[Mark] = []
    saving, attempt = 0.0, 0
    for entry in entries:
        attempt += entry.kind == "start"
        try:
            time = seconds_of(entry.time)
        except ValueError:
            continue
        seconds = _number(entry.details.get("save_seconds"))
        place = {"step": entry.iteration, "samples": entry.samples}
        if entry.kind == "start":
            if marks and (before := reached_of(entry.details)) is not None:
                step, samples, when, _ = before
                with contextlib.suppress(ValueError):
                    stopped = seconds_of(when)
                    if marks[-1].time < stopped < time:
                        marks.append(Mark(event="last", time=stopped, step=step, samples=samples, saving=saving))
            saving = 0.0
            born = time - _number(entry.details.get("startup_seconds"))
            marks.append(Mark(event="start", time=time, born=born, attempt=attempt, **place))
        elif entry.kind == "checkpoint":
            saving += seconds
            marks.append(Mark(event="save", time=time + seconds, saving=saving, **place))
        elif entry.kind == "finished":
            marks.append(Mark(event="end", time=time, saving=saving, **place))
    return marks


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def all_marks(measured: Sequence[Mark], entries: Sequence[LedgerEntry], position: Position | None = None) -> list[Mark]:
    """The marks of a run: measured ones; for starts that were not measured, those in the ledger; finally the last
    recorded position.

    Args:
        measured: see `megaresume.checkpoint.metrics.record.marks_of`.
        entries: of the ledger.
        position: the last one recorded; None: there is none.
    """
    starts = [entry for entry in entries if entry.kind == "start"]
    idle = {attempt for attempt, entry in enumerate(starts, 1) if entry.details.get(NOTHING_TO_TRAIN)}
    told = {attempt: marks for attempt, marks in _by_attempt(marks_of_ledger(entries)).items() if attempt not in idle}
    marks = [mark for _, of in sorted((told | _by_attempt(measured)).items()) for mark in of]
    if marks and position is not None and position.start == len(starts):
        now = seconds_of(position.time)
        if now > marks[-1].time:
            last = marks[-1]
            place = {"step": position.iteration, "samples": position.samples}
            marks.append(Mark(event="now", time=now, waited=last.waited, saving=last.saving, **place))
    return marks


def shows_kills(measured: Sequence[Mark], entries: Sequence[LedgerEntry], position: Position | None) -> bool:
    """Whether anything shows how far a killed process had come: of a run that was not measured, the ledger does not.

    Args:
        measured, entries, position: see `all_marks`.
    """
    return bool(measured) or position is not None or any(reached_of(entry.details) for entry in entries)


def has_gaps(measured: Sequence[Mark]) -> bool:
    """Whether any start before the last was not measured."""
    return bool(measured) and len(_by_attempt(measured)) < max(mark.attempt for mark in measured)


def _by_attempt(marks: Sequence[Mark]) -> dict[int, list[Mark]]:
    found: dict[int, list[Mark]] = {}
    attempt = 0
    for mark in marks:
        attempt = mark.attempt or attempt
        found.setdefault(attempt, []).append(mark)
    return found
