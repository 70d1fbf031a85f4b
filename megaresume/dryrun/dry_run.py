"""`dry_run`: all of it together."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from megaresume.checkpoint.paths import split_root
from megaresume.checkpoint.topology import Topology
from megaresume.dryrun.balance import Gain, gain
from megaresume.dryrun.data import Data, read_data
from megaresume.dryrun.ending import Ahead, Ending, end_of_stream, ending, guarded_ending, sources_ahead
from megaresume.dryrun.findings import Findings, Flags
from megaresume.dryrun.guard import Guarded, compare_with_record
from megaresume.dryrun.start import (
    Launch,
    StartingPoint,
    check_layout,
    find_start,
    planned_sizes,
    steps_until,
    topology,
)
from megaresume.runs.run import Run
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError
from megaresume.stream.state import StreamState


@dataclass(kw_only=True)
class DryRun:
    """What a launch would do."""

    root: Path
    flags: Flags
    found: StartingPoint
    #: what the launch would be told, the most important first.
    findings: Findings = field(default_factory=Findings)
    #: how the run was laid out when it saved, and would be now; None: not recorded.
    before: Topology | None = None
    now: Topology | None = None
    #: planned global batch sizes of the whole run, the past included.
    schedule: BatchSchedule | None = None
    ending: Ending | None = None
    data: Data | None = None
    sources: list[Ahead] = field(default_factory=list)
    #: samples that the stream holds, where it ends before the run; None: enough.
    stream_ends: int | None = None
    #: what balanced ranks gain; None: not asked for, or not known.
    gain: Gain | None = None
    guarded: Guarded | None = None

    @property
    def state(self) -> StreamState | None:
        """The data state that the launch would go on from."""
        state = None if self.found.choice is None else self.found.choice.state
        return state if isinstance(state, StreamState) else None

    @property
    def refused(self) -> bool:
        """Whether the launch would stop before its first step."""
        return self.findings.refused

    @property
    def last(self) -> tuple[int, int] | None:
        """(step, sample) at which the run ends: the flags' end, or the last whole step of a stream that ends before."""
        if self.ending is None or self.stream_ends is None or self.schedule is None or self.state is None:
            return None if self.ending is None else (self.ending.step, self.ending.sample)
        steps = steps_until(self.schedule, self.state.samples, self.stream_ends)
        return self.found.iteration + steps, self.schedule.after(self.state.samples, steps)


def dry_run(directory: Path, flags: Flags) -> DryRun:
    """Try a resume from a ``--save`` directory. Reads only.

    Raises:
        UsageError: no such directory, a tag directory, or flags that say too little or contradict each other.
    """
    run = _check(directory, flags)
    findings = Findings()
    found = find_start(run, flags, findings)
    result = DryRun(root=directory, flags=flags, found=found, findings=findings)
    if found.record is not None:
        result.guarded = compare_with_record(found.record, flags, findings)
    choice, state = found.choice, result.state
    if found.kind in ("guard", "adopt"):
        result.ending = guarded_ending(found.iteration, flags, findings)
    if choice is not None and choice.step is not None and state is not None:
        _stream(result, choice.step.topology, state)
    order = {"refused": 0, "warning": 1, "note": 2}
    findings.sort(key=lambda finding: order[finding.kind])
    return result


def _check(directory: Path, flags: Flags) -> Run:
    root, tag = split_root(directory)
    if tag is not None:
        raise UsageError(
            "this is a tag directory, not a checkpoint root",
            found=str(directory),
            expected=f"the directory that holds it: {root}",
            action=f"megaresume plan {root} --ckpt-step N",
        )
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
    launch = Launch(
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
        result.gain = gain(launch, data)
