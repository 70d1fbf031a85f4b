"""What batches add to a step on a GPU: from page-locked memory, whose copies wait for nobody, and from other memory.

A step is 20 ms of the device, of which up to two are under way, as in a loop that reads no loss. Time is elapsed, and
what is compared takes turns. Without a GPU there are no rows.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.utils.data

import megaresume
from benchmarks.corpora import config
from benchmarks.hosts import Clock
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, wall
from megaresume.batches.loader import StreamLoader
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.stream import Stream

SECONDS, STEPS, BATCH, WORKERS = 0.02, 60, 16, 2
MICRO_BATCH = 8


class Items(torch.utils.data.Dataset[torch.Tensor]):
    """Tensors of one shape, as pictures or tokens come from a disk cache."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.item = torch.zeros(shape, dtype=dtype)

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, i: int) -> torch.Tensor:
        return self.item + i % 7


KINDS = {
    f"{BATCH} pictures of 3 x 512 x 512 bytes, {WORKERS} workers": ((3, 512, 512), torch.uint8),
    f"{BATCH} texts of 4,096 tokens, {WORKERS} workers": ((4096,), torch.int64),
}


def rows(setup: Setup) -> Iterator[Row]:
    """Items from worker processes, beside torch's loader; and packed text from the thread that reads ahead."""
    if not torch.cuda.is_available():
        return
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, setup.cores)
    step = Step()
    for what, (shape, dtype) in KINDS.items():
        loaders = {
            "ours": _items(megaresume.DataLoader, shape, dtype, pin_memory=True),
            "theirs": _items(torch.utils.data.DataLoader, shape, dtype, pin_memory=True),
            "other": _items(megaresume.DataLoader, shape, dtype, pin_memory=False),
        }
        added = step.added(loaders, setup.sizes.slow_repetitions)
        yield _row(what, added["ours"], added["theirs"], "torch's DataLoader, page-locked")
        yield _row(what, added["ours"], added["other"], "ours, not page-locked")
    texts = {"ours": _packed(setup, pin_memory=True), "other": _packed(setup, pin_memory=False)}
    added = step.added(texts, setup.sizes.slow_repetitions)
    yield _row(f"{MICRO_BATCH} x 4,096 packed tokens", added["ours"], added["other"], "ours, not page-locked")


class Step:
    """Work of the device."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self._cycles = Clock(self.device, SECONDS).cycles
        self._ends = [torch.cuda.Event() for _ in range(2)]

    def added(self, loaders: dict[str, Callable[[], Iterator[Any]]], repetitions: int) -> dict[str, float]:
        """Of each loader: ms that a step takes longer than with nothing to read."""
        batches: dict[str, Iterator[Any]] = {"none": itertools.repeat({})}
        batches |= {name: make() for name, make in loaders.items()}
        run = {name: (lambda _, of=of: self._train(of)) for name, of in batches.items()}
        seconds = interleaved(run, repetitions, clock=wall)
        alone = seconds.pop("none")
        return {
            name: 1000 / STEPS * median(s - a for s, a in zip(of, alone, strict=True)) for name, of in seconds.items()
        }

    def _train(self, batches: Iterator[Any]) -> None:
        for number in range(STEPS):
            batch = next(batches)
            tensors = batch.values() if isinstance(batch, dict) else [batch]
            there = [tensor.to(self.device, non_blocking=True) for tensor in tensors if torch.is_tensor(tensor)]
            torch.cuda._sleep(self._cycles)
            end = self._ends[number % 2]
            end.synchronize()
            end.record()
            del there
        torch.cuda.synchronize()


def _items(loader: Any, shape: tuple[int, ...], dtype: torch.dtype, *, pin_memory: bool) -> Callable[[], Iterator[Any]]:
    options = {"batch_size": BATCH, "num_workers": WORKERS, "pin_memory": pin_memory}
    if loader is torch.utils.data.DataLoader:
        options["shuffle"] = True
    return lambda: iter(loader(Items(shape, dtype), **options))


def _packed(setup: Setup, *, pin_memory: bool) -> Callable[[], Iterator[Any]]:
    stream = Stream(config("best_fit"), setup.sources(setup.corpora))
    options: dict[str, Any] = {"micro_batch_size": MICRO_BATCH, "prefetch": 2, "pin_memory": pin_memory}
    return lambda: iter(StreamLoader(stream, BatchSchedule.constant(MICRO_BATCH), **options))


def _row(what: str, ours: float, baseline: float, against: str) -> Row:
    return Row(
        what=f"a step of 20 ms on a GPU with {what}: added", ours=ours, unit="ms", baseline=baseline, against=against
    )
