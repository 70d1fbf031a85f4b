"""Where the run would end: last step, last sample."""

from __future__ import annotations

from dataclasses import dataclass

from megaresume.dryrun.findings import Finding
from megaresume.dryrun.flags import Flags
from megaresume.stream.batches import BatchSchedule
from megaresume.training.length import end_of_run, is_over

__all__ = ["Ending", "ending", "megatron_iterations", "steps_until"]


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
    history: tuple[tuple[int, int], ...],
    step: int,
    sample: int,
    flags: Flags,
    findings: list[Finding],
    *,
    is_megatron: bool,
) -> Ending | None:
    """The end of the run; None: neither steps nor samples are given.

    Args:
        planned: global batch sizes that the flags mean, from sample 0.
        history: those of the run so far.
        step, sample: where it goes on.
        is_megatron: ends as Megatron's training loop does, otherwise as `megaresume.training`.
    """
    if flags.train_iters is None and flags.train_samples is None:
        return None
    schedule = planned.resumed(history, sample)
    before = BatchSchedule(history) if history else schedule
    rule = _megatron if is_megatron else _ours
    end, old = (rule(*sizes, step, sample, flags) for sizes in ((planned, schedule), (before, before)))
    finished = end[0] <= step
    if finished:
        _is_over(findings, step, sample, flags)
    elif is_megatron:
        _check_megatron_steps(planned, end, step, sample, flags, findings)
    return Ending(step=end[0], sample=end[1], finished=finished, before=None if old == end else old)


def _ours(planned: BatchSchedule, schedule: BatchSchedule, step: int, sample: int, flags: Flags) -> tuple[int, int]:
    if is_over(step, sample, train_iters=flags.train_iters, train_samples=flags.train_samples):
        return step, sample
    return end_of_run(schedule, step, sample, train_iters=flags.train_iters, train_samples=flags.train_samples)


def _megatron(planned: BatchSchedule, schedule: BatchSchedule, step: int, sample: int, flags: Flags) -> tuple[int, int]:
    last = max(megatron_iterations(planned, flags), step)
    return last, schedule.after(sample, last - step)


def megatron_iterations(planned: BatchSchedule, flags: Flags) -> int:
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


def _is_over(findings: list[Finding], step: int, sample: int, flags: Flags) -> None:
    by_samples = flags.train_samples is not None
    more = f"--train-samples above {sample}" if by_samples else f"--train-iters above {step}"
    findings.append(
        Finding(
            kind="warning",
            headline="the run is finished already: the launch would train nothing and exit with 0",
            found=f"{step} steps over {sample} samples are trained; "
            + (f"--train-samples {flags.train_samples}" if by_samples else f"--train-iters {flags.train_iters}"),
            expected="a longer run, or none",
            action=more,
        )
    )


def _check_megatron_steps(
    planned: BatchSchedule, end: tuple[int, int], step: int, sample: int, flags: Flags, findings: list[Finding]
) -> None:
    """What Megatron's arithmetic makes of a batch size that changed in the middle of a run."""
    final = planned.segments[-1][1]
    if flags.train_samples is not None and flags.train_samples - end[1] >= final:
        needed = step + (flags.train_samples - sample) // final
        findings.append(
            Finding(
                kind="warning",
                headline="Megatron would end before all samples are trained",
                found=f"step {end[0]}, sample {end[1]} of --train-samples {flags.train_samples}",
                expected=f"step {needed}",
                cause="Megatron takes the number of steps from --train-samples and the batch size of today, as if it "
                "had been that from the start",
                action=f"--train-iters {needed} in place of --train-samples",
            )
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
