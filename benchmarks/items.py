"""`megaresume.DataLoader` against torch's over one map-style dataset, and Trainers that resume with it and without.

Items are texts of 512 tokens that lie in memory; and numbers, read in no time, so that what is left is what a loader
costs. A Trainer's time to the first batch is processor time, from ``megaresume.attach`` to the first training step.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, ratio, wall
from megaresume.batches.data_loader import DataLoader

BATCH = 8
#: items of a micro-batch, ranks, micro-batches of a step.
LAYOUTS = ((8, 1, 1), (16, 1, 4), (4, 8, 2))
ITEMS_OF_MANY_LENGTHS = 52_000
WORKERS = (0, 2, 4)
#: batches that a worker is asked for, as a fraction of those in process: its messages take longer.
SLOWER = 8


class Numbers(torch.utils.data.Dataset[int]):
    """Item i is i."""

    def __init__(self, items: int) -> None:
        self._items = items

    def __len__(self) -> int:
        return self._items

    def __getitem__(self, i: int) -> int:
        return i


class Texts(Numbers):
    """Item i has 512 tokens."""

    _tokens = torch.arange(1 << 16)

    def __getitem__(self, i: int) -> Any:
        first = i % 1000
        return {"input_ids": self._tokens[first : first + 512], "labels": self._tokens[first + 1 : first + 513]}


class Short(Numbers):
    """Item i is a text of four tokens."""

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": [i % 8, 1, 2, 3], "labels": [i % 8, 1, 2, 3]}


def rows(setup: Setup) -> Iterator[Row]:
    """The loader at 0, 2 and 4 workers; the first batch after a resume; Trainers, if they are installed."""
    torch.set_num_threads(1)
    yield _overhead(setup, 0, Numbers, "numbers")
    for workers in WORKERS:
        yield _overhead(setup, workers, Texts, "texts")
    yield _first_batch(setup)
    if all(importlib.util.find_spec(name) for name in ("transformers", "accelerate")):
        yield _trainers(setup)
        for layout in LAYOUTS:
            yield from _like_lengths(*layout)


def _overhead(setup: Setup, workers: int, kind: type[Numbers], items: str) -> Row:
    batches = setup.sizes.item_batches // (SLOWER if workers else 1)
    dataset = kind(batches * BATCH)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    loaders = {
        "ours": DataLoader(dataset, BATCH, **options),
        "torch": torch.utils.data.DataLoader(dataset, BATCH, shuffle=True, **options),
    }
    if hasattr(os, "sched_setaffinity") and workers:
        os.sched_setaffinity(0, setup.cores)
    try:
        compared = {name: _epoch(loader) for name, loader in loaders.items()}
        seconds = interleaved(compared, setup.sizes.repetitions, clock=wall if workers else cpu)
    finally:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {max(setup.cores)})
    faster = ratio(seconds["ours"], seconds["torch"])
    return Row(
        what=f"DataLoader, {workers} workers, a batch of {BATCH} {items}",
        ours=median(seconds["ours"]) / batches * 1e6,
        unit="us",
        baseline=median(seconds["torch"]) / batches * 1e6,
        against="torch's DataLoader",
        ratio=faster,
        must=">= 1 x",
        holds=faster >= 1,
    )


def _epoch(loader: Any) -> Callable[[int], object]:
    def read(repetition: int) -> None:
        for _ in loader:
            pass

    return read


def _first_batch(setup: Setup) -> Row:
    items = setup.sizes.index_documents
    loader = DataLoader(Numbers(items), BATCH)
    state = loader.state_at(items * 5 // 2).to_dict()
    seconds = []
    for _ in range(setup.sizes.repetitions):
        begin = wall()
        other = DataLoader(Numbers(items), BATCH)
        other.load_state_dict(state)
        next(iter(other))
        seconds.append(wall() - begin)
    return Row(
        what=f"DataLoader, resumed in the third epoch of {items:,} items: first batch",
        ours=median(seconds) * 1e3,
        unit="ms",
        must="< 1000 ms",
        holds=median(seconds) < 1,
    )


def _trainers(setup: Setup) -> Row:
    steps = setup.sizes.trainer_steps
    for attached in (True, False):
        _train(setup.directory / f"trainer-{attached}", steps, steps, attached=attached)
    compared = {
        "ours": lambda _: _train(setup.directory / "trainer-True", steps, steps + 1, attached=True),
        "theirs": lambda _: _train(setup.directory / "trainer-False", steps, steps + 1, attached=False),
    }
    seconds: dict[str, list[float]] = {name: [] for name in compared}
    for repetition in range(setup.sizes.slow_repetitions):
        for name in sorted(compared, reverse=bool(repetition % 2)):
            seconds[name].append(compared[name](repetition))
    for attached in (True, False):
        shutil.rmtree(setup.directory / f"trainer-{attached}")
    return Row(
        what=f"Trainer with megaresume.attach, resumed after {steps:,} steps of {BATCH} items: first batch",
        ours=median(seconds["ours"]) * 1e3,
        unit="ms",
        baseline=median(seconds["theirs"]) * 1e3,
        against="the Trainer alone, which passes over batches",
        ratio=ratio(seconds["ours"], seconds["theirs"]),
        must="< 1000 ms",
        holds=median(seconds["ours"]) < 1,
    )


class _Reached(BaseException):
    """The first training step of a resumed run."""


def _train(output: Path, save: int, steps: int, *, attached: bool) -> float:
    """Train up to a step from the newest checkpoint, or until the first step if there is one.

    Returns:
        seconds of processor time to that first step.
    """
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import megaresume

    resumes = output.exists()

    class Stopping(Trainer):
        def training_step(self, *args: Any, **more: Any) -> Any:
            if resumes:
                raise _Reached
            return super().training_step(*args, **more)

    settings = TrainingArguments(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_strategy="steps",
        save_steps=save,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    trainer = Stopping(model, settings, train_dataset=Short(2 * save * BATCH))
    begin = cpu()
    if attached:
        megaresume.attach(trainer)
    with contextlib.suppress(_Reached):
        trainer.train(resume_from_checkpoint=resumes or None)
    return cpu() - begin


def _like_lengths(batch: int, ranks: int, accumulation: int) -> Iterator[Row]:
    """Padding of a random order, by length, and by transformers' sampler; and how long the slowest rank takes."""
    from transformers.trainer_pt_utils import get_length_grouped_indices

    normal = np.random.default_rng(0).normal(5.0, 0.8, ITEMS_OF_MANY_LENGTHS)
    lengths = np.exp(normal).astype(int).clip(8, 2048)
    orders = {
        "random": _order(lengths, batch * ranks * accumulation, grouped=False),
        "ours": _order(lengths, batch * ranks * accumulation, grouped=True),
        # which sorts for a step of one rank
        "theirs": np.array(get_length_grouped_indices(lengths.tolist(), batch * accumulation)),
    }
    found = {name: _padded(lengths[order], batch, ranks) for name, order in orders.items()}
    layout = f"{batch} x {accumulation} items on {ranks} rank{'s' if ranks > 1 else ''}"
    yield Row(
        what=f"padding by length, {layout}; {found['random'][0]:.0f} % in a random order",
        ours=found["ours"][0],
        unit="%",
        baseline=found["theirs"][0],
        against="transformers' sampler",
    )
    if ranks > 1:
        yield Row(
            what=f"slowest rank by length, {layout}; {found['random'][1]:.2f} in a random order",
            ours=found["ours"][1],
            unit="of the mean",
            baseline=found["theirs"][1],
            against="transformers' sampler",
        )


def _order(lengths: Any, step: int, *, grouped: bool) -> Any:
    given = {"group_by_length": True, "lengths": lengths} if grouped else {}
    loader = DataLoader(Numbers(len(lengths)), step, collate_fn=list, max_epochs=1, **given)
    return np.concatenate([np.array(batch) for batch in loader])


def _padded(lengths: Any, batch: int, ranks: int) -> tuple[float, float]:
    """Places without a token, in %; places of the slowest rank of a micro-batch, by those of the mean."""
    whole = lengths[: len(lengths) // (batch * ranks) * batch * ranks].reshape(-1, ranks, batch)
    places = whole.max(2) * batch
    return 100 * float(1 - whole.sum() / places.sum()), float(places.max(1).sum() / places.mean(1).sum())
