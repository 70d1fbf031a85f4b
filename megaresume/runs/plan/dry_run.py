"""`dry_run`: plans a whole resume, and predicts: last step and sample, epochs left, end of the stream."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from megaresume.checkpoint.load.choose import check_root
from megaresume.checkpoint.system import Topology
from megaresume.runs.answer import Answer, live, plain, told
from megaresume.runs.directory import Run
from megaresume.runs.plan.data import PlannedData, read_data
from megaresume.runs.plan.gain import Gain, gain
from megaresume.runs.plan.guarded import Guarded, compare_with_record
from megaresume.runs.plan.start import (
    Findings,
    Flags,
    PlannedLaunch,
    StartingPoint,
    check_layout,
    find_start,
    planned_sizes,
    steps_until,
    topology,
)
from megaresume.stream.batches import BatchSchedule, end_of_run, is_over
from megaresume.stream.changes import SourceOutlook, outlook
from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.errors import StreamExhausted, UsageError
from megaresume.stream.state import StreamState

#: Samples planned between two looks at the clock, and seconds after which the search for the end gives up.
_CHUNK, _PATIENCE = 2048, 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """Where a run ends, in optimizer steps and samples since its start."""

    step: int
    sample: int
    #: whether nothing is left to train.
    finished: bool
    #: (step, sample) of the end with the checkpoint's batch size; None if it is the same.
    before: tuple[int, int] | None


def ending(launch: PlannedLaunch, planned: BatchSchedule) -> Ending | None:
    """The end of the run; None if its length is not given.

    Args:
        launch: under Megatron, it ends as Megatron's training loop does, otherwise as `megaresume.cluster.training`.
        planned: global batch sizes by the flags, from sample 0.
    """
    flags, step, sample = launch.flags, launch.step, launch.state.samples
    if launch.schedule is None or (flags.train_iters is None and flags.train_samples is None):
        return None
    before = BatchSchedule(launch.state.batches) if launch.state.batches else launch.schedule
    rule = _megatron if launch.is_megatron else _ours
    end, old = (rule(launch, *sizes) for sizes in ((planned, launch.schedule), (before, before)))
    finished = end[0] <= step
    if finished:
        name, given, done = "iters", flags.train_iters, step
        if flags.train_samples is not None:
            name, given, done = "samples", flags.train_samples, sample
        found = f"{step} steps over {sample} samples are trained; --train-{name} {given}"
        _warn_finished(launch.findings, found, f"--train-{name} above {done}")
    elif launch.is_megatron:
        _check_megatron_steps(launch, planned, end)
    return Ending(step=end[0], sample=end[1], finished=finished, before=None if old == end else old)


def _ours(launch: PlannedLaunch, planned: BatchSchedule, schedule: BatchSchedule) -> tuple[int, int]:
    step, sample = launch.step, launch.state.samples
    length = {"train_iters": launch.flags.train_iters, "train_samples": launch.flags.train_samples}
    return (step, sample) if is_over(step, sample, **length) else end_of_run(schedule, step, sample, **length)


def _megatron(launch: PlannedLaunch, planned: BatchSchedule, schedule: BatchSchedule) -> tuple[int, int]:
    last = max(_megatron_iterations(planned, launch.flags), launch.step)
    return last, schedule.after(launch.state.samples, last - launch.step)


def _megatron_iterations(planned: BatchSchedule, flags: Flags) -> int:
    """``args.train_iters`` as set by Megatron's ``update_train_iters``: from the flags alone, not the checkpoint, and
    without a partial last batch.
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
    """The end of a guarded run: its steps are known, its samples only up to the checkpoint."""
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


def _check_megatron_steps(launch: PlannedLaunch, planned: BatchSchedule, end: tuple[int, int]) -> None:
    """Compare with Megatron's own arithmetic for a batch size that changed in the middle of a run."""
    final, samples = planned.segments[-1][1], launch.flags.train_samples
    if samples is not None and samples - end[1] >= final:
        needed = launch.step + (samples - launch.state.samples) // final
        launch.findings.warn(
            "Megatron would end before all samples are trained",
            found=f"step {end[0]}, sample {end[1]} of --train-samples {samples}",
            expected=f"step {needed}",
            cause="Megatron takes the number of steps from --train-samples and the batch size of today, as if it "
            "had been that from the start",
            action=f"--train-iters {needed} in place of --train-samples",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceForecast:
    """One source from the resume point on, under the weights from there on. Samples and steps are estimates."""

    now: SourceOutlook
    #: epochs that may still begin or finish, including the current one; None: no limit.
    epochs_left: int | None
    #: the end of the current epoch; None if the source is not drawn.
    sample: int | None
    step: int | None
    #: the end of its last epoch; None if it has none, or is not drawn from.
    last_sample: int | None
    last_step: int | None
    #: epochs drawn when the run ends, with a fraction; None if unknown.
    epochs_at_end: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON: the current state of the source, and the forecast."""
        ahead = asdict(self)
        return {**ahead.pop("now"), **ahead}


def sources_ahead(launch: PlannedLaunch, data: PlannedData, end: Ending | None) -> list[SourceForecast]:
    """Every source under the config from the resume point on."""
    assert data.in_force is not None
    known = launch.state.replace(fingerprints={**data.fingerprints, **launch.state.fingerprints})
    rows = outlook(known, data.in_force)
    return [_ahead(launch, row, source, end) for row, source in zip(rows, data.in_force.sources, strict=True)]


def _ahead(launch: PlannedLaunch, row: SourceOutlook, source: SourceConfig, end: Ending | None) -> SourceForecast:
    state = launch.state
    cursor = state.sources.get(row.name)
    left = None
    if source.max_epochs is not None and source.on_exhausted != "repeat":
        left = max(source.max_epochs - row.epoch, 0)

    def at(samples: float | None) -> tuple[int | None, int | None]:
        if samples is None:
            return None, None
        sample = state.samples + round(samples)
        return sample, launch.steps_until(sample)

    # Samples that one piece of the source takes, by the estimate of `outlook`.
    rate = None if row.samples_left is None or not row.remaining else row.samples_left / row.remaining
    last = None if rate is None or left is None else max((left - 1) * row.size + row.remaining, 0) * rate
    sample, until = at(row.samples_left)
    last_sample, last_step = at(last)
    drawn = None
    if row.size and end is not None:
        further = 0.0 if rate is None else (end.sample - state.samples) / max(rate, 1e-9)
        drawn = (0.0 if cursor is None else cursor.epochs) + further / row.size
        drawn = drawn if left is None else min(drawn, row.epoch + left)
    return SourceForecast(
        now=row,
        epochs_left=left,
        sample=sample,
        step=until,
        last_sample=last_sample,
        last_step=last_step,
        epochs_at_end=drawn,
    )


def end_of_stream(launch: PlannedLaunch, data: PlannedData, end: Ending | None) -> int | None:
    """The number of samples in the stream, if that is fewer than the run needs; None: enough.

    Planned, not estimated. Only streams whose sources end are examined.
    """
    configs = [data.in_force, *(stage.config for stage in data.to_come)]
    if not any(config is not None and _may_end(config) for config in configs):
        return None
    stream = data.stream(launch)
    if stream is None or data.config is None:
        launch.findings.note(
            "whether the stream ends before the run does is not known: its corpora were not opened",
            action="--data DATA.yaml",
        )
        return None
    first = launch.state.samples
    held = _search(stream.plan, first, None if end is None or end.sample <= first else end.sample, launch.findings)
    if held is None:
        return None
    last = launch.steps_until(held)
    names = [s.name for s in data.config.sources if s.max_epochs is not None and s.on_exhausted != "repeat"]
    if end is None:
        enough = "" if last is None else f", after {last} whole steps"
        launch.findings.note(
            f"the stream ends at sample {held:,}{enough}",
            action=f"to train further, raise max_epochs of {', '.join(names)}",
        )
    elif held < end.sample:
        launch.findings.warn(
            "the stream ends before the run does",
            found=f"{held} samples" + ("" if last is None else f", enough for {last} whole steps"),
            expected=f"{end.sample} samples, for step {end.step}",
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
    """Plan samples up to a goal. Returns their number if the stream ends before it."""
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
            low, high = position, stop  # the stream has low samples, but not high
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


@dataclass(kw_only=True)
class DryRun(Answer):
    """What a launch would do."""

    root: Path
    flags: Flags = live()
    found: StartingPoint = live()
    #: the findings, as the launch would print them, most important first.
    findings: Findings = field(default_factory=Findings)
    #: the layout of the run when it saved, and now; None if not recorded.
    before: Topology | None = live(default=None)
    now: Topology | None = live(default=None)
    #: planned global batch sizes of the whole run, including the past.
    schedule: BatchSchedule | None = live(default=None)
    ending: Ending | None = live(default=None)
    data: PlannedData | None = None
    sources: list[SourceForecast] = field(default_factory=list)
    #: the number of samples in the stream, if it ends before the run; None: enough.
    stream_ends: int | None = None
    #: the gain of balanced ranks; None if not requested or unknown.
    balance: Gain | None = None
    #: the findings about Megatron's own datasets.
    guard: Guarded | None = None

    @property
    def state(self) -> StreamState | None:
        """The data state that the launch would resume from."""
        state = None if self.found.choice is None else self.found.choice.state
        return state if isinstance(state, StreamState) else None

    @told
    def refused(self) -> bool:
        """Whether the launch would stop before its first step."""
        return self.findings.refused

    @property
    def status(self) -> int:
        """The exit status: 1 if the launch would be refused."""
        return 1 if self.refused else 0

    @property
    def last(self) -> tuple[int, int] | None:
        """(step, sample) where the run ends: by the flags, or at the last whole step of a stream that ends earlier."""
        if self.ending is None or self.stream_ends is None or self.schedule is None or self.state is None:
            return None if self.ending is None else (self.ending.step, self.ending.sample)
        steps = steps_until(self.schedule, self.state.samples, self.stream_ends)
        return self.found.iteration + steps, self.schedule.after(self.state.samples, steps)

    @told
    def verdict(self) -> str:
        """``refused``, ``fresh``, ``finished`` or ``resumes``."""
        if self.refused:
            return "refused"
        if self.found.kind == "fresh":
            return "fresh"
        if self.state is not None and self.stream_ends is not None and self.stream_ends <= self.state.samples:
            return "finished"
        return "finished" if self.ending is not None and self.ending.finished else "resumes"

    @told
    def headline(self) -> str:
        """The verdict as a sentence."""
        tag = "the checkpoint" if self.found.choice is None else self.found.choice.tag
        match self.verdict:
            case "refused":
                return next(finding.headline for finding in self.findings if finding.kind == "refused")
            case "fresh":
                return "there is no checkpoint: the launch would begin at sample 0"
            case "finished":
                return f"{tag} is the end of the run: nothing is left to train"
        where, last = f"resumes from {tag}", self.last
        if self.state is not None:
            where += f" at step {self.found.iteration:,}, sample {self.state.samples:,}"
            if self.data is not None and self.data.outcome == "new stage":
                where += ", in a new stage"
        if last is not None:
            where += f", and ends at step {last[0]:,}" + ("" if self.state is None else f", sample {last[1]:,}")
        return where

    @told
    def checkpoint(self) -> dict[str, Any] | None:
        """The checkpoint that would be loaded."""
        choice = self.found.choice
        if choice is None:
            return None
        facts = choice.to_dict()
        del facts["save_id"]
        samples = None if self.state is None else self.state.samples
        return facts | {"samples": samples, "rejected": plain(choice.rejected), "notes": list(choice.notes)}

    @told
    def layout(self) -> dict[str, Topology | None]:
        """The layout of the run, then and now."""
        return {"before": self.before, "now": self.now}

    @told
    def batches(self) -> Sequence[tuple[int, int]] | None:
        """[first sample, samples per step] of the whole run."""
        return None if self.schedule is None else self.schedule.segments

    @told
    def end(self) -> dict[str, int | None] | None:
        """The last step of the run."""
        last = self.last
        return None if last is None else {"step": last[0], "samples": None if self.state is None else last[1]}

    @told
    def end_with_the_batch_size_before(self) -> dict[str, int] | None:
        """Where the run would end with its previous batch size; None if that is the same."""
        if self.ending is None or self.ending.before is None:
            return None
        return dict(zip(("step", "samples"), self.ending.before, strict=True))


def dry_run(directory: Path, flags: Flags) -> DryRun:
    """Simulate a resume from a ``--save`` directory. Only reads.

    Raises:
        UsageError: no such directory, a tag directory, or flags that are incomplete or contradictory.
    """
    run = _check(directory, flags)
    findings = Findings()
    found = find_start(run, flags, findings)
    result = DryRun(root=directory, flags=flags, found=found, findings=findings)
    if found.record is not None:
        result.guard = compare_with_record(found.record, flags, findings)
    choice, state = found.choice, result.state
    if found.kind in ("guard", "adopt"):
        result.ending = guarded_ending(found.iteration, flags, findings)
    if choice is not None and choice.record is not None and state is not None:
        _stream(result, choice.record.topology, state)
    order = {"refused": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: order[finding.kind])
    return result


def _check(directory: Path, flags: Flags) -> Run:
    check_root(directory, lambda root, _: f"megaresume plan {root} --ckpt-step N")
    if flags.data is not None and not flags.data.is_file():
        raise UsageError(
            "no such data config", found=f"--data {flags.data}", expected="a data.yaml", action="check the path"
        )
    if flags.train_iters is not None and flags.train_samples is not None:
        raise UsageError(
            "the length of the run must be given once",
            found=f"--train-iters {flags.train_iters}, --train-samples {flags.train_samples}",
            expected="one of the two",
            action="remove one of the flags",
        )
    return Run(directory)


def _stream(result: DryRun, before: Topology, state: StreamState) -> None:
    flags, findings, found, choice = result.flags, result.findings, result.found, result.found.choice
    assert choice is not None
    result.before, result.now = before, topology(before, flags)
    launch = PlannedLaunch(
        root=result.root.absolute(),
        flags=flags,
        findings=findings,
        choice=choice,
        state=state,
        is_megatron=found.is_megatron,
        step=found.iteration,
        now=result.now,
    )
    planned = findings.attempt(lambda: planned_sizes(launch.now, flags, is_megatron=launch.is_megatron))
    if planned is not None:
        ahead = planned_sizes(launch.now, flags, is_megatron=launch.is_megatron, start=state.samples)
        result.schedule = None if ahead is None else ahead.resumed(state.batches, state.samples)
        launch = replace(launch, schedule=result.schedule)
        is_said = flags.rampup_batch_size is not None or flags.global_batch_size is not None
        if len({size for _, size in state.batches}) > 1 and not is_said:
            findings.note(
                f"the batch size changed in this run; {launch.now.global_batch_size} samples a step are taken from "
                "here on",
                action="--rampup-batch-size START INCREMENT SAMPLES, if the launch has it",
            )
    check_layout(launch)
    if planned is not None:
        result.ending = ending(launch, planned)
    end = result.ending
    result.data = data = read_data(launch, end=None if end is None else end.sample)
    if data.in_force is None:
        return
    result.sources = sources_ahead(launch, data, end)
    if end is None or not end.finished:
        result.stream_ends = end_of_stream(launch, data, end)
    if flags.balance is not None:
        result.balance = gain(launch, data)
