"""Time per ``next()`` under Megatron's data loader: our provider's datasets against Megatron's own."""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from benchmarks import gpt
from benchmarks.corpora import END_OF_DOCUMENT, SEQ_LENGTH, config
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio
from megaresume.hosts.megatron.provider import form_of
from megaresume.hosts.megatron.samples import SampleDataset
from megaresume.stream.stream import Stream

MICRO_BATCH = 4
WORKERS = 2


def rows(setup: Setup) -> Iterator[Row]:
    """A `DataLoader` with Megatron's sampler and torch's default collation, without and with worker processes.

    Stock is the blended `GPTDataset` over the same corpora, in its fastest setting (masks and position ids made once
    and reused), and with ``--reset-position-ids --eod-mask-loss``, which our ``best_fit`` samples always have. Counted
    is the processor time of all processes together: on a busy machine nothing else can be compared.
    """
    torch.set_num_threads(1)  # of the workers too
    for num_workers in (0, WORKERS):
        on_all_cores = num_workers > 0 and hasattr(os, "sched_setaffinity")
        if on_all_cores:
            os.sched_setaffinity(0, setup.cores)
        try:
            yield from _compare(setup, num_workers)
        finally:
            if on_all_cores:
                os.sched_setaffinity(0, {max(setup.cores)})


def _compare(setup: Setup, num_workers: int) -> Iterator[Row]:
    repetitions = setup.sizes.slow_repetitions if num_workers else setup.sizes.repetitions
    num = setup.sizes.read_samples * (repetitions + 1)
    readers = {
        "split": _reader(setup, _ours(setup, "split", num), num_workers),
        "best_fit": _reader(setup, _ours(setup, "best_fit", num), num_workers),
        "stock": _reader(setup, gpt.build(setup.corpora, num), num_workers),
        "apart": _reader(setup, gpt.build(setup.corpora, num, apart=True), num_workers),
    }
    seconds = interleaved(readers, repetitions, clock=_processor_time)
    workers = f"{num_workers} workers" if num_workers else "in process"
    for packing, stock, what in (
        ("split", "stock", "GPTDataset"),
        ("best_fit", "stock", "GPTDataset"),
        ("best_fit", "apart", "GPTDataset, documents kept apart"),
    ):
        ours, theirs = seconds[packing], seconds[stock]
        times = ratio(ours, theirs)
        batches = setup.sizes.read_samples // MICRO_BATCH
        yield Row(
            what=f"Megatron's loader, {workers}, {packing}",
            ours=median(ours) / batches * 1e3,
            unit="ms",
            baseline=median(theirs) / batches * 1e3,
            against=what,
            ratio=times,
            must=">= 1 x",
            holds=times >= 1,
        )


def _processor_time() -> float:
    """Seconds of this process and of its workers (where the system tells: Linux)."""
    seconds = time.process_time()
    for worker in multiprocessing.active_children():
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
            seconds += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return seconds


def _ours(setup: Setup, packing: str, num_samples: int) -> SampleDataset:
    stream = Stream(config(packing), setup.sources(setup.corpora))
    args = argparse.Namespace(create_attention_mask_in_dataloader=False)
    form = form_of(args, stream.config.packing, text=False, eod=lambda: END_OF_DOCUMENT)
    return SampleDataset(stream, form, num_samples=num_samples)


def _reader(setup: Setup, dataset: Any, num_workers: int) -> Callable[[int], object]:
    """Each repetition goes on where the last one ended, in one loader, as a training loop does."""
    sampler = gpt.Sampler(0, len(dataset), MICRO_BATCH)
    batches: list[Iterator[Any]] = []

    def read(repetition: int) -> None:
        if not batches:  # repetition 0, the warm-up, starts the workers
            batches.append(iter(DataLoader(dataset, batch_sampler=sampler, num_workers=num_workers)))
        for _ in range(setup.sizes.read_samples // MICRO_BATCH):
            assert next(batches[0])["tokens"].shape == (MICRO_BATCH, SEQ_LENGTH)

    return read
