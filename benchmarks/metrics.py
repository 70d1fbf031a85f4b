"""What live figures cost a training: the processor time of a run with them, beside the same run without.

A step waits 100 ms, as for a device. What is added to the thread that trains is what delays its steps; what is added to
the process, whichever thread spends it, is that and the readings every 10 s, for which the meter's thread plans the
samples again.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import megaresume
from benchmarks.corpora import config
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, ratio, wall
from megaresume import BatchSchedule, Checkpoints, Stream, StreamLoader

STEP, SAMPLES, MICRO = 0.1, 16, 8
MOST = 0.1


def rows(setup: Setup) -> Iterator[Row]:
    """Runs of 16 samples of 4096 tokens a step, in turn with and without."""
    quick = setup.sizes.corpus_documents < 100_000
    steps, seconds = (10, 0.001) if quick else (300, STEP)
    spent: dict[str, list[_Spent]] = {"with": [], "without": []}

    def run(name: str, repetition: int) -> None:
        directory = setup.directory / f"metrics-{name}-{repetition}"
        spent[name].append(_train(setup, directory, name == "with", steps, seconds))

    interleaved({name: partial(run, name) for name in spent}, setup.sizes.slow_repetitions)
    measured, plain = spent["with"][1:], spent["without"][1:]  # without the warm-up
    for what, of, bound in (("thread that trains", "thread", MOST), ("process, all threads", "process", 2 * MOST)):
        added = median(getattr(a, of) - getattr(b, of) for a, b in zip(measured, plain, strict=True))
        yield Row(
            what=f"live figures, processor time added to a step of {1000 * STEP:.0f} ms: {what}",
            ours=100 * added / STEP,
            unit="%",
            baseline=100 * median(getattr(one, of) for one in plain) / STEP,
            against="the loop and its loader",
            must=f"at most {bound} %",
            holds=100 * added / STEP <= bound,
        )
    yield Row(
        what="a step of the run with live figures",
        ours=1000 * median(one.elapsed for one in measured),
        unit="ms",
        baseline=1000 * median(one.elapsed for one in plain),
        against="the same without",
        ratio=ratio([one.elapsed for one in measured], [one.elapsed for one in plain]),
    )


@dataclass(frozen=True, slots=True)
class _Spent:
    """Seconds of a step: processor time of the thread that trains, of the process, and elapsed."""

    thread: float
    process: float
    elapsed: float


def _train(setup: Setup, directory: Path, is_measured: bool, steps: int, seconds: float) -> _Spent:
    """Of a step, without the first ones, in which files are opened."""
    model, stream = torch.nn.Linear(1, 1), Stream(config("split"), setup.sources(setup.corpora))
    loop = megaresume.attach(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        StreamLoader(stream, BatchSchedule.constant(SAMPLES), micro_batch_size=MICRO),
        checkpoints=Checkpoints(save_dir=directory),
        metrics="jsonl" if is_measured else None,
    )
    first, begin = steps // 10, (0.0, 0.0, 0.0)
    for _ in islice(loop, steps * SAMPLES // MICRO):
        if loop.ends_step:
            time.sleep(seconds)
            loop.stepped()
            if loop.step == first:
                begin = time.thread_time(), cpu(), wall()
    end = time.thread_time(), cpu(), wall()
    loop.close()
    return _Spent(*((b - a) / (steps - first) for a, b in zip(begin, end, strict=True)))
