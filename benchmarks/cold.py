"""Tokens of files that are not in memory: our loader at its default shuffle beside a sequential read of as many bytes.

Before each reading the files are dropped from the page cache, which needs no rights. A file system that keeps its files
in memory cannot be measured. Of other packages those that are installed read their own files of as many tokens, dropped
as well. Elapsed time, from the second batch on.
"""

from __future__ import annotations

import gc
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from benchmarks import tokens
from benchmarks.corpora import write_corpus
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import median, ratio
from megaresume.batches.cold_pages import ColdPages
from megaresume.batches.loader import StreamLoader
from megaresume.batches.open import open_stream
from megaresume.data.layout import bin_path
from megaresume.stream.batches import BatchSchedule

SEQ_LENGTH = tokens.SEQ_LENGTH
MICRO_BATCH = 4
#: seconds between two batches that are trained on, so that a million tokens are in a second; and how many.
STEP = MICRO_BATCH * SEQ_LENGTH / 1e6
STEPS = 300
#: tokens of a document: as long as web pages, and as books' chapters or files of a long context are.
LENGTHS = (600, 32_768)
LEAST = 0.8
#: bytes of documents that lie together and stay near each other.
BLOCK = 1 << 20
IN_BLOCKS = "in blocks of 1 MiB"
IN_MEMORY = "in blocks of 1 MiB, in memory already"


def rows(setup: Setup) -> Iterator[Row]:
    """See the module."""
    samples = 8 * setup.sizes.read_samples
    for length in LENGTHS:
        yield from _compare(setup, length, samples)


def _compare(setup: Setup, length: int, samples: int) -> Iterator[Row]:
    num = max(600 * setup.sizes.corpus_documents // 2 // length, 8)
    directory = setup.directory / f"cold{length}"
    directory.mkdir()
    lengths = np.random.default_rng(length).lognormal(np.log(length) - 0.5, 1.0, num).astype(np.int32) + 1
    path = write_corpus(directory / "all", lengths)
    samples = min(samples, int(lengths.sum(dtype=np.int64)) // SEQ_LENGTH // 2)
    blocks = {"block": BLOCK // (4 * min(length, SEQ_LENGTH)), "window": 16}
    opened = {"asked for ahead": _ours(path), "not asked for": _ours(path), IN_BLOCKS: _ours(path, blocks)}
    opened[IN_MEMORY] = opened[IN_BLOCKS]  # what was read just now
    if length == LENGTHS[0]:
        found = np.memmap(bin_path(path), np.int32, "r")[: samples * SEQ_LENGTH].reshape(-1, SEQ_LENGTH)
        others = tokens.installed(setup, found, tokens.STREAMING)
        opened |= {name: partial(open_, MICRO_BATCH) for name, open_ in others.items()}
        del found
    seconds: dict[str, list[float]] = {name: [] for name in (*opened, "sequential")}
    num = samples // MICRO_BATCH - 1
    for _ in range(setup.sizes.slow_repetitions):
        for name, open_ in opened.items():
            if name != IN_MEMORY:
                _drop(setup.directory)
            with _mute() if name == "not asked for" else nullcontext():
                seconds[name].append(_read(open_, num))
        seconds["sequential"].append(_sequential(setup.directory, path, 4 * SEQ_LENGTH * samples))
    waits: dict[str, list[float]] = {"asked for ahead": [], "not asked for": [], "in memory": []}
    for _ in range(setup.sizes.slow_repetitions):
        for name, its in waits.items():
            if name != "in memory":
                _drop(setup.directory)
            with _mute() if name == "not asked for" else nullcontext():
                its.append(_wait(_ours(path), min(num, STEPS)))
    shutil.rmtree(directory)
    for name in ("asked for ahead", "not asked for"):
        yield Row(
            what=f"tokens that are not in memory, documents of {length:,}, a million a second, {name}: wait a batch",
            ours=1000 * median(waits[name]),
            unit="ms",
            baseline=1000 * median(waits["in memory"]),
            against="in memory",
        )
    a_second = {name: 4e-6 * SEQ_LENGTH * samples / median(its) for name, its in seconds.items()}
    for name in opened:
        times = ratio(seconds[name], seconds["sequential"])
        ours = name in ("asked for ahead", IN_BLOCKS)
        yield Row(
            what=f"tokens that are not in memory, documents of {length:,}, shuffled, {name}",
            ours=a_second[name],
            unit="MB/s",
            baseline=a_second["sequential"],
            against="one read after another of as many bytes",
            ratio=times,
            must=f">= {LEAST} x" if ours else "",
            holds=times >= LEAST if ours else None,
        )


def _ours(path: Path, shuffle: object = "full") -> Callable[[], Iterator[Any]]:
    def open_() -> Iterator[Any]:
        source = {"path": str(path), "shuffle": shuffle}
        data = {"seed": 1, "seq_length": SEQ_LENGTH, "packing": "split", "sources": {"all": source}}
        schedule = BatchSchedule.constant(MICRO_BATCH)
        return iter(StreamLoader(open_stream(data), schedule, micro_batch_size=MICRO_BATCH, prefetch=0, fields=()))

    return open_


def _read(open_: Callable[[], Iterator[Any]], num: int) -> float:
    batches = open_()
    next(batches)
    begin = time.perf_counter()
    for _ in islice(batches, num):
        pass
    return time.perf_counter() - begin


def _wait(open_: Callable[[], Iterator[Any]], num: int) -> float:
    """Seconds that a training which takes a batch every `STEP` waits for one."""
    batches = open_()
    next(batches)
    waited = 0.0
    for _ in range(num):
        time.sleep(STEP)
        begin = time.perf_counter()
        next(batches)
        waited += time.perf_counter() - begin
    return waited / num


def _mute() -> AbstractContextManager[object]:
    return mock.patch.multiple(ColdPages, begin=lambda *_: None, end=lambda *_: None, _expect=lambda *_, cold: None)


def _sequential(directory: Path, path: Path, num_bytes: int) -> float:
    _drop(directory)
    begin = time.perf_counter()
    with open(bin_path(path), "rb", buffering=0) as file:
        while num_bytes > 0 and (data := file.read(min(8 << 20, num_bytes))):
            num_bytes -= len(data)
    return time.perf_counter() - begin


def _drop(directory: Path) -> None:
    """All files, none of which may still be mapped."""
    gc.collect()
    for path in directory.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
