"""`BatchSchedule`: which samples belong to which step; `Balance`: how they are dealt so that no rank waits for another.

A run is a list of segments (first sample, global batch size). A step at sample c trains samples ``c .. c + size``;
rank r of D, micro-step k of size m takes ``c + k*(D*m) + r*m .. + m`` of them, as Megatron's sampler does.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import index
from typing import Any, Literal

from megaresume.stream.arguments import checked
from megaresume.stream.errors import StateError, UsageError

#: step: balance each rank's samples of a step as a whole, for ranks that synchronize once a step. micro-step: balance
#: every micro-batch, for ranks that synchronize in each: ZeRO 3, FSDP, pipelines.
Objective = Literal["step", "micro-step"]
#: The cost of a token apart from attention, in units of one attended pair, for hidden states of 4096 numbers.
TOKEN_COST = 6 * 4096
#: The largest token cost: with the longest samples, a larger one would overflow 64 bits.
MOST_COST = 1 << 30
#: The version of the algorithm; raise it if the same samples would go to other ranks than before.
ALGORITHM = 1


def ramp_sizes(start: int, increment: int, ramp_samples: int, final: int) -> tuple[Callable[[int], int], list[float]]:
    """Megatron's ``--rampup-batch-size`` for `BatchSchedule.stepwise`: the size at a sample, and where it changes."""
    num_increments = (final - start) // increment
    # Megatron's floating-point division, to get the same steps.
    per_increment = ramp_samples / num_increments

    def planned(sample: int) -> int:
        return final if sample > ramp_samples else min(start + increment * int(sample / per_increment), final)

    return planned, [k * per_increment for k in range(1, num_increments + 1)]


@checked("BatchSchedule.constant(SIZE) for one size, BatchSchedule.ramp_up(...) for a growing one", types_too=False)
@dataclass(frozen=True, slots=True)
class BatchSchedule:
    """Global batch sizes over a run. All positions are in samples."""

    #: (first sample, global batch size in samples), ascending, the first at sample 0.
    segments: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        try:
            firsts, sizes = zip(*((index(first), index(size)) for first, size in self.segments), strict=True)
        except (TypeError, ValueError):  # not pairs, not whole numbers, or none at all
            firsts, sizes = (), ()
        if not firsts or firsts[0] != 0 or list(firsts) != sorted(set(firsts)) or min(sizes) < 1:
            raise UsageError(
                "bad schedule of batch sizes",
                found=f"{self.segments!r:.200}",
                expected="(first sample, size) pairs, ascending from sample 0, sizes of at least 1",
                action="BatchSchedule.constant(SIZE) for one size (Megatron: check --global-batch-size and "
                "--rampup-batch-size)",
            )
        # JSON turns pairs into lists, which do not compare equal to tuples.
        object.__setattr__(self, "segments", tuple(zip(firsts, sizes, strict=True)))

    @classmethod
    def constant(cls, global_batch_size: int) -> BatchSchedule:
        """A schedule with one batch size for the whole run."""
        return cls(((0, global_batch_size),))

    @classmethod
    def ramp_up(cls, start: int, increment: int, ramp_samples: int, final: int) -> BatchSchedule:
        """Megatron's ``--rampup-batch-size start increment ramp_samples``, up to ``final``.

        The size grows by ``increment`` every ``ramp_samples / ((final - start) / increment)`` samples, and changes
        only between steps (megatron.core.num_microbatches_calculator, RampupBatchsizeNumMicroBatchesCalculator).

        Raises:
            UsageError: ``final - start`` is not a positive multiple of ``increment``.
        """
        if start < 1 or increment < 1 or ramp_samples < 0 or final < start or (final - start) % increment:
            raise UsageError(
                "bad --rampup-batch-size",
                found=f"start {start}, increment {increment}, ramp samples {ramp_samples}, final size {final}",
                expected="a final size that is the start plus a whole number of increments",
                action="change the increment or --global-batch-size",
            )
        if final == start or not ramp_samples:
            return cls.constant(final)
        return cls.stepwise(*ramp_sizes(start, increment, ramp_samples, final))

    @classmethod
    def stepwise(cls, planned: Callable[[int], int], bounds: Sequence[float], *, first: int = 0) -> BatchSchedule:
        """A schedule whose steps each look up their size as they begin, so the ramp can have any shape.

        Args:
            planned: the size of a step that begins at this sample.
            bounds: the samples near which that changes, ascending; they may be off by floating-point error.
            first: where the first step begins, which later steps depend on. Samples before it get this step's size.
        """
        segments: list[tuple[int, int]] = []
        sample = first
        while True:
            size = planned(sample)
            if not segments or segments[-1][1] != size:
                segments.append((sample if segments else 0, size))
            # Within one sample of a bound, go step by step, as floating point decides.
            ahead = bisect_left(bounds, sample - 1)
            if ahead == len(bounds):
                return cls(tuple(segments))
            sample += size * max(int((bounds[ahead] - 1 - sample) // size), 1)

    def size_at(self, sample: int) -> int:
        """Global batch size of the step that begins at ``sample``."""
        return self.segments[self._index(sample)][1]

    def steps_at(self, sample: int) -> tuple[int, int | None]:
        """Global batch size of the step that begins at ``sample``, and how many steps have it; None: all."""
        index = self._index(sample)
        size = self.segments[index][1]
        if index + 1 == len(self.segments):
            return size, None
        return size, -(-(self.segments[index + 1][0] - sample) // size)

    def _index(self, sample: int) -> int:
        return bisect_left(self.segments, (sample + 1,)) - 1

    def after(self, sample: int, num_steps: int) -> int:
        """The sample at which the step begins that is ``num_steps`` after the one at ``sample``."""
        index = self._index(sample)
        while num_steps:
            size = self.segments[index][1]
            if index + 1 == len(self.segments):
                return sample + num_steps * size
            # a step that begins before the segment's end is of the segment's size
            fit = min(num_steps, -(-(self.segments[index + 1][0] - sample) // size))
            sample += fit * size
            num_steps -= fit
            index = self._index(sample)
        return sample

    def step_of(self, sample: int) -> tuple[int, int]:
        """[first, stop) samples of the step that trains ``sample``."""
        *_, (begin, size, _) = self.runs(sample + 1)
        first = begin + (sample - begin) // size * size
        return first, first + size

    def runs(self, stop: int) -> Iterator[tuple[int, int, int]]:
        """(first sample, size, number) of the steps that begin before ``stop``, by segment; none where there are no."""
        begin = 0
        for (_, size), end in zip(self.segments, [*(f for f, _ in self.segments[1:]), stop], strict=True):
            if (num := -(-(min(end, stop) - begin) // size)) > 0:
                yield begin, size, num
                begin += num * size

    def steps_before(self, sample: int) -> int:
        """Steps that end at or before ``sample``, counted from sample 0.

        Raises:
            StateError: ``sample`` is not the end of a step.
        """
        runs = list(self.runs(sample))
        position = sum(size * num for _, size, num in runs)
        if position != sample:
            raise StateError(
                f"sample {sample} is inside a step",
                found=f"the next step boundary at sample {position}",
                expected="a state taken at the end of a step",
                cause="the schedule of batch sizes differs from the run's",
                action="check the batch sizes recorded in the state: megaresume inspect DIR",
            )
        return sum(num for *_, num in runs)

    def until(self, sample: int) -> tuple[tuple[int, int], ...]:
        """The segments that begin before ``sample``: what a state at ``sample`` records."""
        return tuple(s for s in self.segments if s[0] < sample)

    def resumed(self, history: Iterable[tuple[int, int]], sample: int) -> BatchSchedule:
        """This schedule from ``sample`` on, after the past that a state records."""
        past = [s for s in history if s[0] < sample]
        future = [(sample, self.size_at(sample)), *(s for s in self.segments if s[0] > sample)]
        if past and past[-1][1] == future[0][1]:
            future = future[1:]
        return BatchSchedule(tuple(past + future))


def is_over(step: int, samples: int, *, train_iters: int | None, train_samples: int | None) -> bool:
    """Whether a run that has made ``step`` steps over ``samples`` samples is finished."""
    if train_samples is not None:
        return samples >= train_samples
    return step >= (train_iters or 0)


def end_of_run(
    schedule: BatchSchedule, step: int, sample: int, *, train_iters: int | None, train_samples: int | None
) -> tuple[int, int]:
    """The (steps, samples) at which a run stops that has made ``step`` steps over ``sample`` samples."""

    def over(more: int) -> bool:
        samples = schedule.after(sample, more)
        return is_over(step + more, samples, train_iters=train_iters, train_samples=train_samples)

    high = 1
    while not over(high):
        high *= 2
    low = 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if over(middle) else (middle + 1, high)
    return step + low, schedule.after(sample, low)


def check_divides(global_batch_size: int, *, micro_batch_size: int, dp_size: int) -> None:
    """Raise a UsageError if a global batch is not a multiple of micro-batch size times data-parallel size."""
    stride = micro_batch_size * dp_size
    if global_batch_size % stride:
        low, high = global_batch_size // stride * stride, -(-global_batch_size // stride) * stride
        sizes = [m for m in range(1, global_batch_size // dp_size + 1) if global_batch_size % (m * dp_size) == 0]
        fixes = [f"--global-batch-size {low} or {high}" if low else f"--global-batch-size {high}"]
        if sizes:
            nearest = min(sizes, key=lambda m: (abs(m - micro_batch_size), m))
            fixes.append(f"--micro-batch-size {nearest}")
        raise UsageError(
            "the global batch does not divide over the ranks",
            found=f"global batch size {global_batch_size}, micro-batch size {micro_batch_size}, "
            f"data-parallel size {dp_size}",
            expected=f"a multiple of {micro_batch_size} * {dp_size} = {stride}",
            action=" or ".join(fixes),
        )


def check_sizes(schedule: BatchSchedule, sample: int, *, micro_batch_size: int, dp_size: int) -> None:
    """Check every global batch size from ``sample`` on, so that a ramp-up fails now and not when it gets there.

    Raises:
        UsageError: as `check_divides`.
    """
    sizes = {schedule.size_at(sample), *(size for first, size in schedule.segments if first > sample)}
    for size in sorted(sizes):
        check_divides(size, micro_batch_size=micro_batch_size, dp_size=dp_size)


@checked("docs/batches.md says what each setting of it does")
@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How the samples of a global batch are dealt so that all ranks have equal work.

    Args:
        objective: what to make equal. ``step``: a rank's work in a step; ``micro-step``: that of every micro-batch.
        token_cost: the cost of a token apart from attention, in units of one token's attention to another. 6 times the
            hidden size of a dense model, or measured (docs/batches.md). A sample costs the sum of
            length * (length + token_cost) over its documents.
        algorithm: version of the algorithm.

    Raises:
        UsageError: unknown objective or argument, or a cost that is not an integer from 0 to `MOST_COST`.
    """

    objective: Objective = "step"
    token_cost: int = TOKEN_COST
    algorithm: int = ALGORITHM

    def __post_init__(self) -> None:
        if type(self.token_cost) is not int or not 0 <= self.token_cost <= MOST_COST:
            raise UsageError(
                "bad cost of a token",
                found=repr(self.token_cost),
                expected=f"a whole number from 0 to {MOST_COST:,}",
                action="give 6 * hidden size, or measure it: docs/batches.md",
            )

    def to_dict(self) -> dict[str, Any]:
        """The balance as plain JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Balance:
        """Read what `to_dict` wrote.

        Raises:
            ValueError: it is malformed.
        """
        try:
            return cls(**{name: data[name] for name in ("objective", "token_cost", "algorithm")})
        except (KeyError, TypeError, UsageError) as error:
            raise ValueError(f"balance: {data!r:.80} is not a balance") from error
