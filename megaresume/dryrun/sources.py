"""What is ahead of every source: epochs left, until which step they last, and whether the stream itself ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megaresume.dryrun.data import Data
from megaresume.dryrun.ending import Ending, steps_until
from megaresume.dryrun.findings import Finding
from megaresume.dryrun.flags import Flags
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.errors import StreamExhausted
from megaresume.stream.outlook import SourceOutlook, outlook
from megaresume.stream.state import Fingerprint, StreamState

__all__ = ["Ahead", "end_of_stream", "sources_ahead"]

#: samples planned between two looks at the clock, and seconds after which the search for the end is given up.
_CHUNK, _PATIENCE = 2048, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ahead:
    """One source from the resume point on, under the weights that hold there. Samples and steps are estimates."""

    now: SourceOutlook
    #: epochs that may still be begun or finished, the one at hand included; None: no end.
    epochs_left: int | None
    #: the end of the epoch at hand; None: the source is not drawn.
    sample: int | None
    step: int | None
    #: the end of its last epoch; None: it has none, or is not drawn.
    last_sample: int | None
    last_step: int | None
    #: epochs drawn when the run ends, with a fraction; None: not known.
    epochs_at_end: float | None


def sources_ahead(
    state: StreamState,
    fingerprints: Mapping[str, Fingerprint],
    config: StreamConfig,
    schedule: BatchSchedule | None,
    step: int,
    end: Ending | None,
) -> list[Ahead]:
    """Every source under the config that holds from the resume point on."""
    known = state.replace(fingerprints={**fingerprints, **state.fingerprints})
    rows = outlook(known, config)
    return [_ahead(row, source, known, schedule, step, end) for row, source in zip(rows, config.sources, strict=True)]


def _ahead(
    row: SourceOutlook,
    source: SourceConfig,
    state: StreamState,
    schedule: BatchSchedule | None,
    step: int,
    end: Ending | None,
) -> Ahead:
    cursor = state.sources.get(row.name)
    left = None
    if source.max_epochs is not None and source.on_exhausted != "repeat":
        left = max(source.max_epochs - row.epoch, 0)

    def at(samples: float | None) -> tuple[int | None, int | None]:
        if samples is None:
            return None, None
        sample = state.samples + round(samples)
        steps = None if schedule is None else step + steps_until(schedule, state.samples, sample)
        return sample, steps

    # Samples that one piece of the source takes, as `outlook` reckons.
    rate = None if row.samples_left is None or not row.remaining else row.samples_left / row.remaining
    last = None if rate is None or left is None else max((left - 1) * row.size + row.remaining, 0) * rate
    sample, until = at(row.samples_left)
    last_sample, last_step = at(last)
    drawn = None
    if row.size and end is not None:
        further = 0.0 if rate is None else (end.sample - state.samples) / max(rate, 1e-9)
        drawn = (0.0 if cursor is None else cursor.epochs) + further / row.size
        drawn = drawn if left is None else min(drawn, row.epoch + left)
    return Ahead(
        now=row,
        epochs_left=left,
        sample=sample,
        step=until,
        last_sample=last_sample,
        last_step=last_step,
        epochs_at_end=drawn,
    )


def end_of_stream(
    data: Data,
    state: StreamState,
    schedule: BatchSchedule | None,
    step: int,
    end: Ending | None,
    flags: Flags,
    findings: list[Finding],
) -> int | None:
    """Samples that the stream holds, where that is fewer than the run is to train; None: enough.

    Planned, not estimated. Only a stream whose sources have an end is looked at.
    """
    configs = [data.in_force, *(stage.config for stage in data.to_come)]
    if not any(config is not None and _may_end(config) for config in configs):
        return None
    if not data.sources or data.config is None:
        findings.append(
            Finding(
                kind="note",
                headline="whether the stream ends before the run does is not known: its corpora were not opened",
                action="--data DATA.yaml",
            )
        )
        return None
    from megaresume.stream.stream import Stream  # deferred: the compiled planner takes a second to import

    stream = Stream(data.config, list(data.sources.values()), state=state, on_change=flags.on_change)
    if schedule is not None:
        stream.schedule = schedule
    stream.skip(flags.skip)
    goal = None if end is None or end.sample <= state.samples else end.sample
    held = _search(stream.plan, state.samples, goal, findings)
    if held is None:
        return None
    last = None if schedule is None else step + steps_until(schedule, state.samples, held)
    names = [s.name for s in data.config.sources if s.max_epochs is not None and s.on_exhausted != "repeat"]
    is_early = end is None or held < end.sample
    if is_early:
        findings.append(
            Finding(
                kind="warning",
                headline="the stream ends before the run does",
                found=f"{held} samples" + ("" if last is None else f", enough for {last} steps"),
                expected="no end" if end is None else f"{end.sample} samples, for step {end.step}",
                cause=f"sources with an end: {', '.join(names)}",
                action=("" if last is None else f"--train-iters {last}, or ")
                + f"in the data config raise max_epochs of {', '.join(names)} or set on_exhausted: repeat",
            )
        )
    return held


def _may_end(config: StreamConfig) -> bool:
    drawn = [source for source in config.sources if source.weight]
    ends = [s for s in drawn if s.max_epochs is not None and s.on_exhausted != "repeat"]
    return len(ends) == len(drawn) or any(s.on_exhausted == "stop" for s in ends)


def _search(plan: object, first: int, goal: int | None, findings: list[Finding]) -> int | None:
    """Plan up to the goal; the number of samples that there are, if the stream ends before."""
    began, position = time.monotonic(), first

    def reaches(stop: int) -> bool:
        try:
            plan(stop - 1, stop)  # type: ignore[operator]
        except StreamExhausted:
            return False
        return True

    while goal is None or position < goal:
        stop = position + _CHUNK if goal is None else min(position + _CHUNK, goal)
        if not reaches(stop):
            low, high = position, stop  # the stream holds low samples, and not high
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (middle, high) if reaches(middle) else (low, middle)
            return low
        position = stop
        if time.monotonic() - began > _PATIENCE:
            findings.append(
                Finding(
                    kind="note",
                    headline=f"the stream has no end before sample {position}; further was not looked",
                    found=f"planned for {_PATIENCE:.0f} s",
                )
            )
            return None
    return None
