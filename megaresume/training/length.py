"""Where a run ends: by steps, or by samples. Pure, so that `megaresume plan` and the loop say the same."""

from __future__ import annotations

from megaresume.stream.batches import BatchSchedule

__all__ = ["end_of_run", "is_over"]


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
