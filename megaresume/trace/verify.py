"""What the records of a run say about its past, point by point, and whether its corpora are those of today."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megaresume.checkpoint.layout import manifest_path, records_dir
from megaresume.checkpoint.ledger import LedgerProblem, abandoned_checkpoints
from megaresume.checkpoint.manifest import read_manifest
from megaresume.checkpoint.step_file import StepFile
from megaresume.corpora.base import Source, TokenSource
from megaresume.runs.history import History
from megaresume.runs.run import Run
from megaresume.stream.cursor import comparable
from megaresume.stream.errors import CheckpointError, CorpusError, MegaresumeError, UsageError
from megaresume.stream.fingerprints import check_fingerprint
from megaresume.stream.state import StreamState
from megaresume.trace.replay import Recorded

__all__ = ["Points", "between", "corpus_problems", "read_points"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Every recorded point of a run."""

    #: every data state that is there.
    states: tuple[StepFile, ...]
    #: those states, then the lines of the ledger.
    recorded: tuple[Recorded, ...]
    #: lines of the ledger that say nothing.
    unreadable: tuple[LedgerProblem, ...]
    #: of the checkpoints whose weights are there: what ranks added and is missing or damaged, in words.
    lost: tuple[str, ...] = ()

    @property
    def newest(self) -> StreamState:
        """The state that is furthest on the path to the present."""
        present = [s for s, point in zip(self.states, self.recorded, strict=False) if not point.given_up]
        return max((step.stream for step in present or self.states), key=lambda state: state.samples)


def read_points(run: Run) -> Points:
    """Every point that the records of a run tell.

    Raises:
        CheckpointError: there is nothing to verify.
        StateError: a record is damaged.
    """
    entries, records = run.ledger.entries, records_dir(run.root)
    abandoned = abandoned_checkpoints(entries)
    checkpoints = [entry for entry in entries if entry.kind == "checkpoint" and entry.tag is not None]
    gone = {(e.samples, e.digest) for e in checkpoints if (e.iteration, e.tag) in abandoned}
    gone -= {(e.samples, e.digest) for e in checkpoints if (e.iteration, e.tag) not in abandoned}
    states = tuple(run.state(path) for path in run.states)
    recorded = [
        Recorded(
            origin=f"state of step {step.iteration}",
            sample=step.state.samples,
            digest=step.state.digest,
            position=comparable({f: getattr(step.stream, f) for f in step.stream.__dataclass_fields__}),
            given_up=(step.iteration, step.tag) in abandoned,
        )
        for step in states
    ]
    recorded += [
        Recorded(
            origin=f"ledger: {entry.kind} at step {entry.iteration}",
            sample=entry.samples,
            digest=entry.digest,
            given_up=(entry.samples, entry.digest) in gone,
        )
        for entry in entries
    ]
    if not states:
        raise CheckpointError(
            "there is nothing to verify",
            found=f"no data state in {records}",
            expected="step_0000010.json or the like, written with a checkpoint",
            cause="not a --save directory, or the run has saved no checkpoint with megaresume",
            action=f"megaresume inspect {run.root}",
        )
    lost = tuple(words for step in states for words in _lost(run.root, step))
    return Points(states=states, recorded=tuple(recorded), unreadable=run.ledger.problems, lost=lost)


def _lost(root: Path, step: StepFile) -> list[str]:
    """What is wrong with the random states, and the loaders' states, of one checkpoint."""
    if not (root / step.tag).is_dir():
        return []
    try:
        manifest = read_manifest(manifest_path(root, step.iteration, step.tag))
    except CheckpointError:
        return []  # incomplete: never taken
    return [f"{step.tag}: {problem.detail}" for problem in manifest.verify_beside(root)]


def between(history: History, first: int | None, last: int | None) -> tuple[int, int]:
    """The samples at two recorded steps; None: the beginning, the newest state.

    Raises:
        UsageError: no record is of such a step, naming the nearest; or they stand the wrong way round.
    """
    by_step = {0: 0} | {point.iteration: point.samples for point in history.points}
    ends = []
    for step, otherwise in ((first, 0), (last, max(by_step))):
        step = otherwise if step is None else step
        if step not in by_step:
            below = max((s for s in by_step if s < step), default=None)
            above = min((s for s in by_step if s > step), default=None)
            near = " or ".join(str(s) for s in (below, above) if s is not None)
            raise UsageError(
                f"no record is of step {step}",
                found=f"{len(by_step) - 1} recorded steps, {min(by_step)} to {max(by_step)}",
                expected=f"a step with a line in the ledger: {near} is the nearest",
                action=f"megaresume inspect {history.root} lists them",
            )
        ends.append(by_step[step])
    if ends[0] >= ends[1]:
        raise UsageError(
            "there is nothing between these steps",
            found=f"--from {first} --to {last}",
            expected="a step, and a later one",
            action="exchange the two" if ends[0] > ends[1] else None,
        )
    return ends[0], ends[1]


def corpus_problems(sources: Mapping[str, Source], state: StreamState, *, recompute: bool) -> list[str]:
    """What differs between the corpora as they are and as a state knows them.

    Args:
        sources: opened, by name.
        state: of the run.
        recompute: read the corpora's indexes from end to end; else what lies beside them is believed.
    """
    problems = []
    for name, source in sources.items():
        try:
            check_fingerprint(name, state.fingerprints[name], source.fingerprint(recompute=recompute))
        except MegaresumeError as error:
            gap = _first_gap(source)
            problems.append(str(error) + ("" if gap is None else f"\n  {'where:':<14}{gap}"))
    return problems


def _first_gap(source: Source) -> str | None:
    """The first document that does not end where the next one starts: a damaged length, in words."""
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
