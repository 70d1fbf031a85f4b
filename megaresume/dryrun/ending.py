"""What lies ahead: the last step and sample, the epochs left of every source, and whether the stream itself ends."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from megaresume.checkpoint.topology import Topology
from megaresume.dryrun.data import Data
from megaresume.dryrun.findings import Findings, Flags
from megaresume.dryrun.start import planned_sizes
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.changes import SourceOutlook, outlook
from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.errors import StreamExhausted
from megaresume.stream.state import Fingerprint, StreamState
from megaresume.training.arguments import end_of_run, is_over

#: samples planned between two looks at the clock, and seconds after which the search for the end is given up.
_CHUNK, _PATIENCE = 2048, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """In optimizer steps and samples since the start of the run."""

    step: int
    sample: int
    #: nothing is left to train.
    finished: bool
    #: (step, sample) of the end with the batch size that the checkpoint was saved with; None: it is the same.
    before: tuple[int, int] | None


def ending(
    planned: BatchSchedule,
    schedule: BatchSchedule,
    history: tuple[tuple[int, int], ...],
    step: int,
    sample: int,
    flags: Flags,
    findings: Findings,
    *,
    is_megatron: bool,
) -> Ending | None:
    """The end of the run; None: neither steps nor samples are given.

    Args:
        planned: global batch sizes that the flags mean, from sample 0.
        schedule: those of the whole run, the past included.
        history: those of the run so far.
        step, sample: where it goes on.
        is_megatron: ends as Megatron's training loop does, otherwise as `megaresume.training`.
    """
    if flags.train_iters is None and flags.train_samples is None:
        return None
    before = BatchSchedule(history) if history else schedule
    rule = _megatron if is_megatron else _ours
    end, old = (rule(*sizes, step, sample, flags) for sizes in ((planned, schedule), (before, before)))
    finished = end[0] <= step
    if finished:
        name, given, done = "iters", flags.train_iters, step
        if flags.train_samples is not None:
            name, given, done = "samples", flags.train_samples, sample
        found = f"{step} steps over {sample} samples are trained; --train-{name} {given}"
        _warn_finished(findings, found, f"--train-{name} above {done}")
    elif is_megatron:
        _check_megatron_steps(planned, end, step, sample, flags, findings)
    return Ending(step=end[0], sample=end[1], finished=finished, before=None if old == end else old)


def _ours(planned: BatchSchedule, schedule: BatchSchedule, step: int, sample: int, flags: Flags) -> tuple[int, int]:
    if is_over(step, sample, train_iters=flags.train_iters, train_samples=flags.train_samples):
        return step, sample
    return end_of_run(schedule, step, sample, train_iters=flags.train_iters, train_samples=flags.train_samples)


def _megatron(planned: BatchSchedule, schedule: BatchSchedule, step: int, sample: int, flags: Flags) -> tuple[int, int]:
    last = max(_megatron_iterations(planned, flags), step)
    return last, schedule.after(sample, last - step)


def _megatron_iterations(planned: BatchSchedule, flags: Flags) -> int:
    """``args.train_iters`` as Megatron's ``update_train_iters`` sets it: from the flags alone, never from the
    checkpoint, and without a partial last batch.
    """
    if flags.train_samples is None:
        return flags.train_iters or 0
    steps, samples, total = 0, 0, flags.train_samples
    ramp, final = flags.rampup_batch_size, planned.segments[-1][1]
    while ramp is not None and samples <= ramp[2] and samples <= total:
        samples = planned.after(samples, 1)
        steps += 1
    return steps + max(total - samples, 0) // final


def guarded_ending(step: int, flags: Flags, findings: Findings) -> Ending | None:
    """The end of a run under guard; its steps are known, its samples are inside the checkpoint."""
    size = flags.global_batch_size
    if (flags.train_iters is None and flags.train_samples is None) or size is None:
        return None
    rampup = Topology(global_batch_size=size)
    planned = findings.attempt(lambda: planned_sizes(rampup, flags, is_megatron=True))
    if planned is None:
        return None
    last = _megatron_iterations(planned, flags)
    finished = last <= step
    if finished:
        _warn_finished(findings, f"{step} steps are trained; the flags mean {last}", f"--train-iters above {step}")
    return Ending(step=max(last, step), sample=planned.after(0, last), finished=finished, before=None)


def _warn_finished(findings: Findings, found: str, action: str) -> None:
    headline = "the run is finished already: the launch would train nothing and exit with 0"
    findings.warn(headline, found=found, expected="a longer run, or none", action=action)


def _check_megatron_steps(
    planned: BatchSchedule, end: tuple[int, int], step: int, sample: int, flags: Flags, findings: Findings
) -> None:
    """What Megatron's arithmetic makes of a batch size that changed in the middle of a run."""
    final = planned.segments[-1][1]
    if flags.train_samples is not None and flags.train_samples - end[1] >= final:
        needed = step + (flags.train_samples - sample) // final
        findings.warn(
            "Megatron would end before all samples are trained",
            found=f"step {end[0]}, sample {end[1]} of --train-samples {flags.train_samples}",
            expected=f"step {needed}",
            cause="Megatron takes the number of steps from --train-samples and the batch size of today, as if it "
            "had been that from the start",
            action=f"--train-iters {needed} in place of --train-samples",
        )


def steps_until(schedule: BatchSchedule, sample: int, target: int) -> int:
    """Whole steps from ``sample`` on that end at or before ``target``."""
    high = 1
    while schedule.after(sample, high) <= target:
        high *= 2
    low = 0
    while low < high - 1:
        middle = (low + high) // 2
        low, high = (middle, high) if schedule.after(sample, middle) <= target else (low, middle)
    return low


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
    findings: Findings,
) -> int | None:
    """Samples that the stream holds, where that is fewer than the run is to train; None: enough.

    Planned, not estimated. Only a stream whose sources have an end is looked at.
    """
    configs = [data.in_force, *(stage.config for stage in data.to_come)]
    if not any(config is not None and _may_end(config) for config in configs):
        return None
    if not data.sources or data.config is None:
        findings.note(
            "whether the stream ends before the run does is not known: its corpora were not opened",
            action="--data DATA.yaml",
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
        findings.warn(
            "the stream ends before the run does",
            found=f"{held} samples" + ("" if last is None else f", enough for {last} steps"),
            expected="no end" if end is None else f"{end.sample} samples, for step {end.step}",
            cause=f"sources with an end: {', '.join(names)}",
            action=("" if last is None else f"--train-iters {last}, or ")
            + f"in the data config raise max_epochs of {', '.join(names)} or set on_exhausted: repeat",
        )
    return held


def _may_end(config: StreamConfig) -> bool:
    drawn = [source for source in config.sources if source.weight]
    ends = [s for s in drawn if s.max_epochs is not None and s.on_exhausted != "repeat"]
    return len(ends) == len(drawn) or any(s.on_exhausted == "stop" for s in ends)


def _search(plan: object, first: int, goal: int | None, findings: Findings) -> int | None:
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
            findings.note(
                f"the stream has no end before sample {position}; further was not looked",
                found=f"planned for {_PATIENCE:.0f} s",
            )
            return None
    return None
