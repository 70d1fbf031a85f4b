"""What live figures cost a training: the processor time of a run with them, beside the same run without.

A step waits 100 ms, as for a device. Then all processor time is of the loop, the loader and the meter, whichever thread
spends it, and what is added to the same run is what the meter takes, its readings every 10 s included.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path

import torch

import megaresume
from benchmarks.corpora import config
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, wall
from megaresume import BatchSchedule, Checkpoints, Stream, StreamLoader

STEP, SAMPLES, MICRO = 0.1, 16, 8
MOST = 0.1


def rows(setup: Setup) -> Iterator[Row]:
    """Runs of 16 samples of 4096 tokens a step, in turn with and without."""
    quick = setup.sizes.corpus_documents < 100_000
    steps, seconds = (10, 0.001) if quick else (300, STEP)
    spent: dict[str, list[tuple[float, float]]] = {"with": [], "without": []}

    def run(name: str, repetition: int) -> None:
        directory = setup.directory / f"metrics-{name}-{repetition}"
        spent[name].append(_train(setup, directory, name == "with", steps, seconds))

    interleaved({name: partial(run, name) for name in spent}, setup.sizes.slow_repetitions)
    times = {name: [processor for processor, _ in of[1:]] for name, of in spent.items()}
    waited = {name: median(elapsed for _, elapsed in of[1:]) for name, of in spent.items()}
    added = median(a - b for a, b in zip(times["with"], times["without"], strict=True))
    yield Row(
        what=f"live figures, processor time added to a step of {1000 * STEP:.0f} ms",
        ours=100 * added / STEP,
        unit="%",
        baseline=100 * median(times["without"]) / STEP,
        against="the loop and its loader",
        must=f"at most {MOST} %",
        holds=100 * added / STEP <= MOST,
    )
    yield Row(
        what="a step of the run with live figures",
        ours=1000 * waited["with"],
        unit="ms",
        baseline=1000 * waited["without"],
        against="the same without",
    )


def _train(setup: Setup, directory: Path, is_measured: bool, steps: int, seconds: float) -> tuple[float, float]:
    """(processor time, elapsed time) of a step, without the first ones, in which files are opened."""
    model, stream = torch.nn.Linear(1, 1), Stream(config("split"), setup.sources(setup.corpora))
    loop = megaresume.attach(
        {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)},
        StreamLoader(stream, BatchSchedule.constant(SAMPLES), micro_batch_size=MICRO),
        checkpoints=Checkpoints(save_dir=directory),
        metrics="jsonl" if is_measured else None,
    )
    first, begin = steps // 10, (0.0, 0.0)
    for _ in islice(loop, steps * SAMPLES // MICRO):
        if loop.ends_step:
            time.sleep(seconds)
            loop.stepped()
            if loop.step == first:
                begin = cpu(), wall()
    end = cpu(), wall()
    loop.close()
    return (end[0] - begin[0]) / (steps - first), (end[1] - begin[1]) / (steps - first)
