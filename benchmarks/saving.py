"""Saving a DeepSpeed engine of about 1 GB: what the hooks, the manifest and the pointers add; checksums."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.corpora import config
from benchmarks.lengths import write_lengths
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, wall

__all__ = ["rows"]

#: Side of the square matrix: weights and the two moments of Adam, fp32, are 12 bytes a parameter.
FULL_SIDE, QUICK_SIDE = 9216, 256
MOST_SHARE, MOST_SECONDS = 0.01, 0.05
LEAST_GB = 2.0
ROUNDS = 5


def rows(setup: Setup) -> Iterator[Row]:
    """One engine, saved in turn by DeepSpeed alone and with megaresume.

    What is added is measured within a save: its time without that of DeepSpeed's own method inside it. The times of
    two saves of a gigabyte differ by more than it.
    """
    quick = setup.sizes.corpus_documents < 100_000
    saves = setup.directory / "saves"
    engine, inner = _engine(QUICK_SIDE if quick else FULL_SIDE, write_lengths(setup.directory / "saved", 10_000))
    stock, hooked = inner.write, engine.save_checkpoint
    added: list[float] = []

    def save_stock(repetition: int) -> None:
        shutil.rmtree(saves / "stock", ignore_errors=True)
        stock(str(saves / "stock"))

    def save_hooked(repetition: int) -> None:
        shutil.rmtree(saves / "hooked", ignore_errors=True)
        inner.seconds = 0.0
        begin = time.perf_counter()
        hooked(str(saves / "hooked"))
        added.append(time.perf_counter() - begin - inner.seconds)

    repetitions = 1 if quick else ROUNDS
    seconds = interleaved({"stock": save_stock, "hooked": save_hooked}, repetitions, clock=wall)
    tag = saves / "hooked/global_step1"
    size = sum(file.stat().st_size for file in tag.iterdir())
    name = f"DeepSpeed save of {size / 1e9:.2f} GB"
    save, extra = median(seconds["stock"]), median(added[1:])
    yield Row(
        what=f"{name}, with megaresume",
        ours=median(seconds["hooked"]),
        unit="s",
        baseline=save,
        against="DeepSpeed alone",
    )
    yield Row(
        what=f"{name}: what megaresume adds",
        ours=extra * 1e3,
        unit="ms",
        must="<= 1 % or 50 ms",
        holds=extra <= max(MOST_SECONDS, MOST_SHARE * save),
    )
    yield _checksums(tag, size, repetitions)
    shutil.rmtree(saves)


def _checksums(tag: Path, size: int, repetitions: int) -> Row:
    """Read and hashed on one core, from the page cache."""
    from megaresume.checkpoint.manifest import checksum_files

    names = [file.name for file in tag.iterdir()]
    found = interleaved({"all": lambda _: checksum_files(tag, names, threads=1)}, repetitions, clock=cpu)
    speed = size / max(median(found["all"]), 1e-9) / 1e9
    return Row(
        what="checksums of a checkpoint, one core",
        ours=speed,
        unit="GB/s",
        must=">= 2 GB/s",
        holds=speed >= LEAST_GB,
    )


class _Timed:
    """A method that knows how long it took."""

    def __init__(self, write: Any) -> None:
        self.write = write
        self.seconds = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return self.write(*args, **kwargs)
        finally:
            self.seconds += time.perf_counter() - begin


def _engine(side: int, lengths: Path) -> tuple[Any, _Timed]:
    """An engine that has trained one step of an attached stream; and DeepSpeed's own save."""
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed
    import torch

    import megaresume
    from benchmarks.lengths import open_lengths
    from megaresume.stream.stream import Stream

    deepspeed.utils.logger.setLevel("ERROR")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if not torch.distributed.is_initialized():
        deepspeed.init_distributed("gloo", verbose=False)
    model = torch.nn.Linear(side, side, bias=False)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.Adam(model.parameters()),
        config={"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1},
    )
    inner = _Timed(engine.save_checkpoint)
    engine.save_checkpoint = inner
    data = megaresume.attach(engine, Stream(config("best_fit"), open_lengths(lengths)))
    next(iter(data))
    engine.backward(engine(torch.ones(1, side)).sum())
    engine.step()
    return engine, inner
