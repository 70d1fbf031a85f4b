"""Compares the steps of a replay with the run's record: samples by their digest, losses, gradient norms.

    of both    meter/rank_*.jsonl   per process: loss and norm of a step, losses of the segments; digests
    of the run ledger.jsonl         digests of its checkpoints; without one, its stream is planned again

Losses of segments (``meter.losses``) are compared sample by sample, whichever process trained them. Losses of processes
are compared process by process, bit for bit; with another number of processes, only their means, within
``--tolerance``.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megaresume.checkpoint.metrics.record import meter_dir, read_lines
from megaresume.checkpoint.metrics.segments import read_sums
from megaresume.checkpoint.metrics.steps import Made
from megaresume.checkpoint.records.ledger import read_ledger
from megaresume.checkpoint.records.names import ledger_path
from megaresume.runs.answer import told
from megaresume.runs.directory import Run
from megaresume.runs.trace.replan import Replan, open_corpora
from megaresume.stream.errors import MegaresumeError

_RANK = re.compile(r"rank_(\d+)\.jsonl")
#: float64[segments, 2]: see `read_sums`.
SumsOfSample = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class StepAgain:
    """A replayed step. None: not recorded."""

    step: int
    #: the digest of all samples up to and with the step, 16 hex digits.
    digest: str | None
    recorded_digest: str | None
    #: the loss per token, if both have the losses of all its segments; otherwise the mean over processes.
    loss: float | None
    recorded_loss: float | None
    norm: float | None
    recorded_norm: float | None
    #: whether every loss and norm in both is the same, bit for bit; None: there is none to compare.
    bitwise: bool | None

    @told
    def same_samples(self) -> bool | None:
        """Whether the same samples were trained, by number."""
        return None if None in (self.digest, self.recorded_digest) else self.digest == self.recorded_digest

    @told
    def loss_difference(self) -> float | None:
        """The difference relative to the larger of the two."""
        return relative(self.loss, self.recorded_loss)

    @told
    def norm_difference(self) -> float | None:
        """The difference relative to the larger of the two."""
        return relative(self.norm, self.recorded_norm)


def relative(one: float | None, other: float | None) -> float | None:
    """The difference of two numbers, relative to the larger one; None if one is missing."""
    if one is None or other is None:
        return None
    if _bits(one) == _bits(other):
        return 0.0
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Step:
    """A step as recorded by the processes of one start."""

    ranks: Mapping[int, Made]

    @property
    def digest(self) -> str | None:
        return next((made.digest for made in self.ranks.values() if made.digest is not None), None)

    @property
    def samples(self) -> int | None:
        return next((made.samples for made in self.ranks.values()), None)

    @property
    def losses(self) -> dict[int, float]:
        return {rank: made.loss for rank, made in self.ranks.items() if made.loss is not None}

    @property
    def loss(self) -> float | None:
        losses = self.losses
        return sum(losses.values()) / len(losses) if losses else None

    @property
    def norm(self) -> float | None:
        return next((made.norm for made in self.ranks.values() if made.norm is not None), None)


def read_steps(root: Path) -> dict[int, _Step]:
    """The steps of a run as recorded by its processes; of a repeated step, only the last start's record.

    Args:
        root: the checkpoint root.
    """
    found: dict[int, dict[int, tuple[int, Made]]] = {}
    for path in sorted(meter_dir(root).glob("rank_*.jsonl")):
        name = _RANK.fullmatch(path.name)
        for line in read_lines(path) if name is not None else ():
            for one in line.get("steps", ()):
                with contextlib.suppress(KeyError, TypeError, ValueError):
                    made = Made.from_dict(one)
                    found.setdefault(made.step, {})[int(name[1])] = int(line["attempt"]), made  # type: ignore[index]
    steps: dict[int, _Step] = {}
    for step, ranks in found.items():
        last = max(attempt for attempt, _ in ranks.values())
        steps[step] = _Step(ranks={rank: made for rank, (attempt, made) in sorted(ranks.items()) if attempt == last})
    return steps


def compare_steps(run: Run, out: Path, first: int, last: int) -> list[StepAgain]:
    """Compare the steps of a replay with its run.

    Args:
        run: the run that was replayed.
        out: where the replay recorded its steps: see `Replay.out`.
        first, last: the requested steps, both included.

    Returns:
        the replayed steps, in order.
    """
    again, before = read_steps(out), read_steps(run.root)
    begins = {
        entry.iteration: entry.samples for entry in read_ledger(ledger_path(out)).entries if entry.kind == "start"
    }
    begins |= {step: one.samples for step, one in again.items() if one.samples is not None}
    wanted = [step for step in range(first, last + 1) if step in again]
    if not wanted:
        return []
    span = begins.get(wanted[0] - 1, 0), max(begins[step] for step in wanted)
    digests = _digests(run, before, {step: begins[step] for step in wanted}, span[0])
    sums, recorded_sums = read_sums(meter_dir(out), *span), read_sums(meter_dir(run.root), *span)

    def compared(step: int) -> StepAgain:
        samples = range(begins.get(step - 1, begins[step]), begins[step])
        segments = _Segments.of(samples, sums, recorded_sums)
        return _compared(step, again[step], before.get(step, _Step(ranks={})), segments, digests.get(step))

    return [compared(step) for step in wanted]


def _compared(
    step: int, replayed: _Step, recorded: _Step, segments: _Segments | None, recorded_digest: str | None
) -> StepAgain:
    """Compare one step.

    Args:
        step: its number.
        replayed, recorded: the replay's record of it and the run's.
        segments: the losses of its segments; None: one of the two lacks some.
        recorded_digest: the digest in the run's records.
    """
    losses, recorded_losses = [*replayed.losses.values()], [*recorded.losses.values()]
    same: list[bool] = []
    if segments is not None:
        same.append(segments.is_same)
    # With another number of ranks, the losses by process are worth less than the segments.
    if losses and recorded_losses and (segments is None or len(losses) == len(recorded_losses)):
        same.append([*map(_bits, losses)] == [*map(_bits, recorded_losses)])
    if replayed.norm is not None and recorded.norm is not None:
        same.append(_bits(replayed.norm) == _bits(recorded.norm))
    return StepAgain(
        step=step,
        digest=replayed.digest,
        recorded_digest=recorded_digest,
        loss=replayed.loss if segments is None else segments.loss,
        recorded_loss=recorded.loss if segments is None else segments.recorded_loss,
        norm=replayed.norm,
        recorded_norm=recorded.norm,
        bitwise=all(same) if same else None,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Segments:
    """The losses of all segments of a step, in a replay and its run."""

    #: the loss per token; None: no token counts.
    loss: float | None
    recorded_loss: float | None
    #: whether the losses are equal, bit for bit.
    is_same: bool

    @classmethod
    def of(
        cls, samples: range, sums: Mapping[int, SumsOfSample], recorded_sums: Mapping[int, SumsOfSample]
    ) -> _Segments | None:
        """Compare the losses of some samples; None: one of the two lacks the record of some."""
        if not samples or not all(n in sums and n in recorded_sums for n in samples):
            return None
        return cls(
            loss=_by_token(sums, samples),
            recorded_loss=_by_token(recorded_sums, samples),
            is_same=all(sums[n].tobytes() == recorded_sums[n].tobytes() for n in samples),
        )


def _by_token(sums: Mapping[int, SumsOfSample], samples: range) -> float | None:
    total = np.concatenate([sums[n] for n in samples]).sum(axis=0)
    return float(total[0] / total[1]) if total[1] else None


def _digests(run: Run, before: Mapping[int, _Step], ends: Mapping[int, int], begin: int) -> dict[int, str]:
    """The digest of each step, from the run's records.

    Args:
        run: the run.
        before: its steps.
        ends: step -> samples trained up to and with it.
        begin: samples trained before the first step.
    """
    found = {step: one.digest for step, one in before.items() if one.digest is not None}
    found |= {point.iteration: point.digest for point in _points(run)}
    missing = [step for step in ends if step not in found]
    if not missing:
        return found
    with contextlib.suppress(MegaresumeError, OSError):  # otherwise unknown
        replan = Replan(run.history, open_corpora(run.root, run.history.state, data=None, split=None))
        for planned in replan.plans(begin, max(ends.values())):
            plan = planned.plan
            for step in missing:
                if plan.first < ends[step] <= plan.stop:
                    found[step] = f"{int(plan.digests[ends[step] - plan.first - 1]):016x}"
    return found


def _points(run: Run) -> Sequence[Any]:
    try:
        return run.history.points
    except MegaresumeError:
        return ()
