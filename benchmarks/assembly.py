"""Batches written into arrays that are there already: tokens, labels, loss mask, position ids; 28 bytes a token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import numpy as np

from benchmarks import gpt
from benchmarks.corpora import SEQ_LENGTH, config
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import interleaved, median, ratio
from megaresume.batches.assemble import Assembler
from megaresume.batches.batch import BatchArrays
from megaresume.stream.stream import Stream

FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
#: Ready-made batches to copy: more than any cache holds.
READY_MADE_SAMPLES = 1024


def rows(setup: Setup) -> Iterator[Row]:
    """Against `GPTDataset` item by item, and against copying ready-made batches; micro-batches of 8 and of 32."""
    for batch in (8, 32):
        for packing in ("split", "best_fit"):
            functions: dict[str, Callable[[int], object]] = {
                "ours": _ours(setup, packing, batch),
                "copy": _copy(setup, batch),
            }
            if packing == "split":
                functions["gpt"] = _gpt(setup)
            seconds = interleaved(functions, setup.sizes.repetitions)
            yield from _rows(setup, f"batches of {batch}, {packing}", seconds)


def _rows(setup: Setup, what: str, seconds: dict[str, list[float]]) -> Iterator[Row]:
    tokens = setup.sizes.read_samples * SEQ_LENGTH / 1e6
    for name, against, least in (("gpt", "GPTDataset.__getitem__", 3), ("copy", "plain copy", 0.5)):
        if name in seconds:
            times = ratio(seconds["ours"], seconds[name])
            yield Row(
                what=f"assembly, {what}",
                ours=tokens / median(seconds["ours"]),
                unit="M tokens/s",
                baseline=tokens / median(seconds[name]),
                against=against,
                ratio=times,
                must=f">= {least} x",
                holds=times >= least,
            )


def _ours(setup: Setup, packing: str, batch: int) -> Callable[[int], object]:
    sources = setup.sources(setup.corpora)
    stream = Stream(config(packing), sources)
    assembler, out = Assembler(sources, seq_length=SEQ_LENGTH), BatchArrays.empty(batch, SEQ_LENGTH)
    num = setup.sizes.read_samples
    plans = [
        [stream.plan(sample, sample + batch) for sample in range(r * num, (r + 1) * num, batch)]
        for r in range(setup.sizes.repetitions + 1)
    ]

    def fill(repetition: int) -> None:
        for plan in plans[repetition]:
            assembler.fill(plan, out)

    return fill


def _copy(setup: Setup, batch: int) -> Callable[[int], object]:
    num = min(READY_MADE_SAMPLES, setup.sizes.read_samples) // batch
    ready = [BatchArrays.empty(batch, SEQ_LENGTH) for _ in range(num)]
    for arrays in ready:
        for field in FIELDS:
            getattr(arrays, field)[:] = 1
    out = BatchArrays.empty(batch, SEQ_LENGTH)
    turns = cycle(ready)

    def copy(repetition: int) -> None:
        for _ in range(setup.sizes.read_samples // batch):
            arrays = next(turns)
            for field in FIELDS:
                np.copyto(getattr(out, field), getattr(arrays, field))

    return copy


def _gpt(setup: Setup) -> Callable[[int], object]:
    num = setup.sizes.read_samples
    blend = gpt.build(setup.corpora, num * (setup.sizes.repetitions + 1))

    def read(repetition: int) -> None:
        for sample in range(repetition * num, (repetition + 1) * num):
            blend[sample]

    return read
