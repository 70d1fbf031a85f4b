"""Saving DeepSpeed engines of 1, 4 and 10 GB: what makes the training wait longer, and what goes on beside it."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.corpora import config
from benchmarks.lengths import write_lengths
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, wall

#: Side of the square matrix: weights and the two moments of Adam, fp32, are 12 bytes a parameter.
FULL_SIDES, QUICK_SIDES = (9216, 18_432, 28_868), (256,)
#: of the bytes of a save, in memory: the engine without its gradients, and the files in the page cache.
MEMORY_SHARE = 2.1
MOST_LONGER = 0.05
LEAST_GB = 2.0
#: products of matrices, about 10 ms each.
STEPS = 100
TAG = "global_step1"
ROUNDS = 5


def rows(setup: Setup) -> Iterator[Row]:
    """Engines, saved in turn by DeepSpeed alone and with megaresume; a size that does not fit is left out."""
    quick = setup.sizes.corpus_documents < 100_000
    lengths = write_lengths(setup.directory / "saved", 10_000)
    for side in QUICK_SIDES if quick else FULL_SIDES:
        if psutil.virtual_memory().available > MEMORY_SHARE * 12 * side**2:
            yield from _of_one_size(setup.directory / "saves", side, lengths, repetitions=1 if quick else ROUNDS)


def _of_one_size(saves: Path, side: int, lengths: Path, *, repetitions: int) -> Iterator[Row]:
    """What the training waits for is measured within a save: its time without that of DeepSpeed's own method inside
    it. The times of two saves of a gigabyte differ by more than that.
    """
    engine, inner, data = _engine(side, lengths)
    added: list[float] = []
    durable: list[float] = []
    saved: dict[str, list[float]] = {"stock": [], "hooked": []}
    beside: dict[str, list[float]] = {"stock": [], "hooked": []}

    def save(name: str, method: Any) -> float:
        """Save, then train beside what goes on in the background. Returns when the save began."""
        shutil.rmtree(saves / name, ignore_errors=True)
        begin = time.perf_counter()
        method(str(saves / name))
        end = time.perf_counter()
        saved[name].append(end - begin)
        _steps()
        beside[name].append(time.perf_counter() - end)
        return begin

    def save_hooked(repetition: int) -> None:
        inner.seconds = 0.0
        begin = save("hooked", engine.save_checkpoint)
        added.append(saved["hooked"][-1] - inner.seconds)
        data.session.durability.wait_for(saves / "hooked", TAG)
        durable.append(time.perf_counter() - begin)

    interleaved({"stock": lambda _: save("stock", inner.write), "hooked": save_hooked}, repetitions, clock=wall)
    size = sum(file.stat().st_size for file in (saves / "hooked" / TAG).iterdir())
    what = f"DeepSpeed save of {size / 1e9:.2f} GB"
    plain, extra = median(saved["stock"][1:]), median(added[1:])
    yield Row(
        what=f"{what}, with megaresume",
        ours=median(saved["hooked"][1:]),
        unit="s",
        baseline=plain,
        against="DeepSpeed alone",
    )
    yield Row(
        what=f"{what}: what the training waits longer",
        ours=extra * 1e3,
        unit="ms",
        must="<= 5 %",
        holds=extra <= MOST_LONGER * plain,
    )
    yield Row(
        what=f"{what}: the same computing right after it",
        ours=median(beside["hooked"][1:]),
        unit="s",
        baseline=median(beside["stock"][1:]),
        against="after DeepSpeed alone",
        ratio=median([stock / hooked for stock, hooked in zip(beside["stock"][1:], beside["hooked"][1:], strict=True)]),
    )
    yield Row(what=f"{what}: until it is durable, checksums included", ours=median(durable[1:]), unit="s")
    yield _checksums(saves / "hooked" / TAG, size, repetitions)
    shutil.rmtree(saves)


def _steps() -> None:
    """Some seconds of computing, on as many cores as torch takes."""
    import torch

    matrix = torch.ones(1024, 1024)
    for _ in range(STEPS):
        matrix = (matrix @ matrix).clamp(max=1.0)


def _checksums(tag: Path, size: int, repetitions: int) -> Row:
    """Read and hashed on one core, from the page cache."""
    from megaresume.checkpoint.records.manifest import checksum_files

    names = [file.name for file in tag.iterdir()]
    found = interleaved({"all": lambda _: checksum_files(tag, names)}, repetitions, clock=cpu)
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


def _engine(side: int, lengths: Path) -> tuple[Any, _Timed, Any]:
    """An engine that has trained one step of an attached stream; DeepSpeed's own save; and what is attached."""
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
    model.zero_grad(set_to_none=True)
    return engine, inner, data
