"""Measuring side by side on a machine that others use too.

What is compared runs in turn, repetition by repetition, each time in another order; a ratio is the median of the
ratios within repetitions, so that a slow minute slows both sides. Code that computes in this process on its one core
is measured in processor time, which leaves out what other programs take (on an idle machine it is the elapsed time);
what waits for disks or other processes is measured in elapsed time.
"""

from __future__ import annotations

import gc
import resource
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

cpu = time.process_time
wall = time.perf_counter
median = statistics.median


def children() -> float:
    """Seconds of processor time of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def interleaved(
    functions: Mapping[str, Callable[[int], object]],
    repetitions: int,
    *,
    clock: Callable[[], float] = cpu,
    warm_up: bool = True,
) -> dict[str, list[float]]:
    """Seconds of every call.

    Args:
        functions: each is called with the number of the repetition.
        repetitions: measured calls of each.
        clock: `cpu` or `wall`.
        warm_up: call each once before, with number 0; measured calls start at 1.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    if warm_up:
        for function in functions.values():
            function(0)
    names = list(functions)
    gc.collect()
    gc.disable()
    try:
        for repetition in range(1, repetitions + 1):
            turn = repetition % len(names)
            for name in names[turn:] + names[:turn]:
                begin = clock()
                functions[name](repetition)
                seconds[name].append(clock() - begin)
    finally:
        gc.enable()
    return seconds


def ratio(ours: Sequence[float], baseline: Sequence[float]) -> float:
    """How many times as fast as the baseline: the median over repetitions."""
    return median(b / max(o, 1e-9) for o, b in zip(ours, baseline, strict=True))
