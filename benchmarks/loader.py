"""Micro-batches of 8 as torch tensors, as a training loop receives them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks import gpt
from benchmarks.corpora import SEQ_LENGTH, config
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, ratio, wall
from megaresume.batches.loader import StreamLoader
from megaresume.batches.workers import whole
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.stream import Stream

MICRO_BATCH = 8
WORKERS = 2


def rows(setup: Setup) -> Iterator[Row]:
    """In process with and without the prefetch thread, and through two worker processes, against the same of Megatron.

    Megatron's: a `DataLoader` over the blended `GPTDataset` with its sampler and the default collate function.
    """
    torch.set_num_threads(1)
    baseline = "GPTDataset, DataLoader in process"
    compared = {
        "ours": _ours(setup),
        "thread": _ours(setup, prefetch=2),
        "gpt": _gpt(setup),
        "apart": _gpt(setup, apart=True),
    }
    seconds = interleaved(compared, setup.sizes.repetitions, clock=cpu)
    yield _row(setup, "loader, in process", seconds["ours"], seconds["gpt"], baseline, least=3)
    yield _row(setup, "loader, prefetch thread", seconds["thread"], seconds["gpt"], baseline, least=3)
    yield _row(setup, "loader, in process", seconds["ours"], seconds["apart"], f"{baseline}, documents kept apart")
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    try:
        compared = {"ours": _ours(setup, num_workers=WORKERS), "gpt": _gpt(setup, num_workers=WORKERS)}
        seconds = interleaved(compared, setup.sizes.slow_repetitions, clock=wall)
        handed_over = list(_workers(setup))
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(setup.cores)})
    yield _row(
        setup,
        f"loader, {WORKERS} workers on all cores, their start included",
        seconds["ours"],
        seconds["gpt"],
        f"GPTDataset, {WORKERS} workers",
    )
    yield from handed_over


def _workers(setup: Setup) -> Iterator[Row]:
    """What two workers hand over once they run, small and large: in shared memory that is used again, or as torch does.

    The baseline reads the same samples with the same workers; torch collates nothing there, and pickles every tensor.
    """
    for micro_batch in (1, MICRO_BATCH):
        seconds: dict[str, list[float]] = {"ours": [], "torch": []}
        for repetition in range(setup.sizes.slow_repetitions):
            for name in sorted(seconds, reverse=bool(repetition % 2)):
                seconds[name].append(_steady(setup, micro_batch, ours=name == "ours"))
        yield _row(
            setup,
            f"loader, {WORKERS} workers on all cores, micro-batches of {micro_batch}, once they run",
            seconds["ours"],
            seconds["torch"],
            "torch's own hand-over of the same batches",
            least=3,
        )


def _steady(setup: Setup, micro_batch: int, *, ours: bool) -> float:
    """Seconds from the first batch to the last, for the samples of a repetition."""
    stream = Stream(config("split"), setup.sources(setup.corpora))
    samples, ahead = setup.sizes.read_samples, 4
    loader = StreamLoader(
        stream,
        BatchSchedule.constant(micro_batch),
        micro_batch_size=micro_batch,
        stop=samples + micro_batch,
        prefetch=ahead,
        num_workers=WORKERS,
    )
    others = DataLoader(
        loader.dataset,
        batch_sampler=[list(numbers) for numbers in loader.indices()],
        num_workers=WORKERS,
        prefetch_factor=ahead,
        collate_fn=whole,
    )
    batches = iter(loader if ours else others)
    next(batches)
    begin = wall()
    for batch in batches:
        assert batch["tokens"].shape == (micro_batch, SEQ_LENGTH)
    return wall() - begin


def _row(
    setup: Setup, what: str, ours: list[float], baseline: list[float], against: str, least: float | None = None
) -> Row:
    tokens = setup.sizes.read_samples * SEQ_LENGTH / 1e6
    times = ratio(ours, baseline)
    return Row(
        what=what,
        ours=tokens / median(ours),
        unit="M tokens/s",
        baseline=tokens / median(baseline),
        against=against,
        ratio=times,
        must="" if least is None else f">= {least} x",
        holds=None if least is None else times >= least,
    )


def _ours(setup: Setup, *, prefetch: int = 0, num_workers: int = 0) -> Callable[[int], object]:
    stream = Stream(config("split"), setup.sources(setup.corpora))
    num = setup.sizes.read_samples

    def read(repetition: int) -> None:
        loader = StreamLoader(
            stream,
            BatchSchedule.constant(MICRO_BATCH),
            micro_batch_size=MICRO_BATCH,
            start=repetition * num,
            stop=(repetition + 1) * num,
            prefetch=prefetch,
            num_workers=num_workers,
        )
        _consume(loader)

    return read


def _gpt(setup: Setup, *, apart: bool = False, num_workers: int = 0) -> Callable[[int], object]:
    num = setup.sizes.read_samples
    blend = gpt.build(setup.corpora, num * (setup.sizes.repetitions + 1), apart=apart)

    def read(repetition: int) -> None:
        sampler = gpt.Sampler(repetition * num, (repetition + 1) * num, MICRO_BATCH)
        _consume(DataLoader(blend, batch_sampler=sampler, num_workers=num_workers))

    return read


def _consume(loader: Any) -> None:
    for batch in loader:
        assert batch["tokens"].shape == (MICRO_BATCH, SEQ_LENGTH)
