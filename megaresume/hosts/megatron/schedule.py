"""`BatchSchedule` from Megatron's arguments: the global batch size of every step, as Megatron will have it.

Three kinds (megatron.core.num_microbatches_calculator): constant; ``--rampup-batch-size`` up to 0.17, which 0.18 still
parses and ignores; ``--step-batch-size-schedule`` since 0.18, whose thresholds are tokens, counted in whole samples.
A size changes only between two steps, so the step that crosses a threshold is still of the old size.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError

_SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def schedule_from_args(args: Any, project: Any = None, start: int = 0) -> BatchSchedule:
    """The planned sizes of a run from a step on that begins at ``start``; before it, of that step alone.

    Args:
        args: Megatron's namespace.
        project: which Megatron; None: what is known from the arguments alone.
        start: samples trained. Where a size changes depends on it: steps of another size led here, perhaps.

    Raises:
        UsageError: no size at all, or a schedule that Megatron would refuse too.
    """
    steps = getattr(args, "step_batch_size_schedule", None)
    rampup = getattr(args, "rampup_batch_size", None)
    if steps:
        return _walk(*_step_sizes(steps, int(args.seq_length)), _running(args), start)
    final = getattr(args, "global_batch_size", None)
    if not final:
        raise UsageError(
            "the global batch size is not known",
            found=f"--global-batch-size {final}",
            expected="samples of one optimizer step",
            action="pass --global-batch-size",
        )
    if rampup and not ignores_rampup(args, project):
        return _walk(*_ramp_sizes([int(number) for number in rampup], int(final)), _running(args), start)
    return BatchSchedule.constant(_running(args)(int(final)))


def ignores_rampup(args: Any, project: Any = None) -> bool:
    """Whether this Megatron parses ``--rampup-batch-size`` and then trains with a constant size."""
    # 0.18 brought both: the flag that replaces it, and the end of it.
    newer = hasattr(args, "step_batch_size_schedule")
    return newer or (project is not None and project.kind == "megatron-lm" and project.at_least(0, 18))


def _running(args: Any) -> Callable[[int], int]:
    """What is trained of a planned size: with ``--decrease-batch-size-if-needed``, what divides over the ranks."""
    if not getattr(args, "decrease_batch_size_if_needed", False):
        return lambda size: size
    stride = int(args.micro_batch_size) * int(args.data_parallel_size)

    def rounded(size: int) -> int:
        if size < stride:
            raise UsageError(
                "the global batch is smaller than one micro-batch on every rank",
                found=f"global batch size {size}, micro-batch size {args.micro_batch_size}, "
                f"data-parallel size {args.data_parallel_size}",
                expected=f"at least {stride}",
                action="fewer ranks, or a smaller --micro-batch-size",
            )
        return size // stride * stride

    return rounded


_Sizes = tuple[Callable[[int], int], Sequence[float]]


def _ramp_sizes(rampup: Sequence[int], final: int) -> _Sizes:
    """The planned size at a sample, and the samples around which it changes."""
    start, increment, samples = rampup if len(rampup) == 3 else (0, 0, 0)
    if start < 1 or increment < 1 or samples < 1 or final <= start or (final - start) % increment:
        raise UsageError(
            "bad --rampup-batch-size",
            found=f"{' '.join(map(str, rampup))}, with --global-batch-size {final}",
            expected="start, increment and ramp-up samples, where the final size is the start plus a whole number of "
            "increments, at least one",
            action="change the increment or --global-batch-size",
        )
    # Megatron's division, in floating point, so that the steps are Megatron's.
    per_increment = samples / ((final - start) // increment)

    def size_at(sample: int) -> int:
        return final if sample > samples else min(start + int(sample / per_increment) * increment, final)

    return size_at, [k * per_increment for k in range(1, (final - start) // increment + 1)]


def _step_sizes(text: str, seq_length: int) -> _Sizes:
    try:
        words = [word.split(":", 1) for word in text.replace(",", " ").split()]
        pairs = sorted((_number(first) // seq_length, _number(size)) for first, size in words)
    except ValueError as error:
        raise _bad_steps(text) from error
    firsts, sizes = [first for first, _ in pairs], [size for _, size in pairs]
    if not pairs or firsts[0] != 0 or len(set(firsts)) != len(firsts) or min(sizes) < 1:
        raise _bad_steps(text)
    return (lambda sample: sizes[bisect_right(firsts, sample) - 1]), firsts[1:]


def _number(word: str) -> int:
    word = word.strip().upper()
    factor = _SUFFIXES.get(word[-1:], 1)
    return int(float(word[:-1] if factor > 1 else word) * factor)


def _bad_steps(text: str) -> UsageError:
    return UsageError(
        "bad --step-batch-size-schedule",
        found=repr(text),
        expected='TOKENS:SIZE pairs, the first at 0, each at another sample: "0:768 250B:1536"',
    )


def _walk(
    size_at: Callable[[int], int], bounds: Sequence[float], running: Callable[[int], int], start: int
) -> BatchSchedule:
    """Step by step where the size may change, in one leap if it cannot."""
    segments: list[tuple[int, int]] = []
    sample = start
    while True:
        size = running(size_at(sample))
        if not segments or segments[-1][1] != size:
            segments.append((sample if segments else 0, size))
        # Within one sample of a bound, what floating point says is taken step by step.
        ahead = next((bound for bound in bounds if bound >= sample - 1), None)
        if ahead is None:
            return BatchSchedule(tuple(segments))
        sample += size * max(int((ahead - 1 - sample) // size), 1)
