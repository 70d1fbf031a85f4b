"""What a host adds to each step and each save of its trainer: the same trainer alone beside it, in turn.

A step lasts 20 ms, and then a value is read from the device as a printed loss is. Without a GPU the thread reads memory
for as long, after which the caches of its core are cold; that time is left out. A sleep would let the core rest, and
other programs run on it.

Both sides read the same small items with their own loader, and save the same small model. What a save takes is the time
of a step with one less that of the others.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data

import megaresume
from benchmarks.first_step import MEGATRON, ROOT, megatron_data, ranks_at
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, wall

STEP, BATCH, STEPS, EVERY = 0.02, 8, 100, 20
TURNS = 10  # of each side: a core that runs faster or slower does so for seconds
MOST_OF_A_STEP, MOST = 0.5, 0.1
#: what is timed, as in `Clock.steps`.
TIMES = ("processor time of the training thread", "processor time of all threads", "elapsed")
#: more than the caches of one core hold: float64[4, 1 MB]. Of ones, as zeros would be one page.
MEMORY = np.ones((4, 1 << 17))


@dataclass(slots=True)
class Clock:
    """Times of the ends of steps.

    Args:
        device: where a step lasts.
    """

    device: torch.device
    seconds: float
    #: seconds of `TIMES` at each, without what was spun: float[steps, 3].
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    #: of the device in a step; 0: there is none, and the thread spins.
    cycles: int = 0
    #: seconds of the training thread.
    spun: float = 0.0

    def __post_init__(self) -> None:
        if self.device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            for cycles in (1_000_000, 10_000_000):
                begin.record()
                torch.cuda._sleep(cycles)
                end.record()
                torch.cuda.synchronize()
            self.cycles = int(10_000_000 * 1000 * self.seconds / begin.elapsed_time(end))

    def work(self, loss: torch.Tensor) -> None:
        """Let the step last, and wait for its loss."""
        if self.cycles:
            torch.cuda._sleep(self.cycles)
        else:
            begin, end = time.thread_time(), wall() + self.seconds
            for part in itertools.cycle(MEMORY):
                part.sum()
                if wall() >= end:
                    break
            self.spun += time.thread_time() - begin
        loss.item()

    def tick(self) -> None:
        """A step has ended. A save after it counts for the next."""
        self.steps.append((time.thread_time() - self.spun, cpu() - self.spun, wall()))

    def spent(self) -> tuple[np.ndarray, np.ndarray]:
        """ms of every step after the first tenth that follows no save, and of every save: float64[s, 3] each."""
        steps = 1000 * np.diff(np.array(self.steps), axis=0)
        numbers = np.arange(1, len(self.steps))
        after_save = numbers % EVERY == 0
        plain = steps[~after_save & (numbers > len(numbers) // 10)]
        return plain, steps[after_save] - np.median(plain, axis=0)


class Rows(torch.utils.data.Dataset[Any]):
    """Item i is a vector and its sum."""

    def __len__(self) -> int:
        return BATCH * (STEPS + 10)

    def __getitem__(self, i: int) -> Any:
        inputs = torch.full((8,), i / len(self))
        return {"inputs": inputs, "labels": inputs.sum().reshape(1)}


class Net(torch.nn.Module):
    """A small model that gives its loss, as transformers' do."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)
        self._clock = [clock]

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        loss = torch.nn.functional.mse_loss(self.net(inputs), labels)
        self._clock[0].work(loss.detach())
        return {"loss": loss}


def loader_of(is_ours: bool, **options: Any) -> Any:
    """megaresume's loader, or torch's."""
    if is_ours:
        return megaresume.DataLoader(Rows(), batch_size=BATCH, **options)
    return torch.utils.data.DataLoader(Rows(), batch_size=BATCH, shuffle=True)


def torch_loop(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """A loop of one's own; alone it saves with torch.save."""
    model = Net(clock).to(clock.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = batches = loader_of(is_ours, max_epochs=1)
    if is_ours:
        parts = {"model": model, "optimizer": optimizer}
        loop = batches = megaresume.attach(parts, loader, checkpoints=megaresume.Checkpoints(save_dir=directory))
        loop.load()
    for step, batch in enumerate(batches, start=1):
        model(**{name: tensor.to(clock.device) for name, tensor in batch.items()})["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        if is_ours:
            loop.stepped()
        clock.tick()
        if step % EVERY == 0:
            if is_ours:
                loop.save()
            else:
                torch.save([model.state_dict(), optimizer.state_dict()], directory / f"{step}.pt")
        if step == steps:
            break
    if is_ours:
        loop.close()


def trainer(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """Hugging Face's Trainer."""
    import transformers

    class Ticks(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.tick()

    arguments = transformers.TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        per_device_train_batch_size=BATCH,
        save_steps=EVERY,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
    )
    made = transformers.Trainer(Net(clock), arguments, train_dataset=Rows(), callbacks=[Ticks()])
    if is_ours:
        megaresume.attach(made)
    made.train()


def accelerate(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """A loop with Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    accelerator = Accelerator(project_config=ProjectConfiguration(str(directory), automatic_checkpoint_naming=True))
    model = Net(clock)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = loader_of(is_ours, max_epochs=1)
    batches = megaresume.attach(accelerator, loader) if is_ours else accelerator.prepare(loader)
    for step, batch in enumerate(batches, start=1):
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
        clock.tick()
        if step % EVERY == 0:
            accelerator.save_state()
        if step == steps:
            break
    if is_ours:
        batches.close()
    accelerator.free_memory()


def lightning(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """Lightning's Trainer."""
    import lightning as L

    class Ticks(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    saves = L.pytorch.callbacks.ModelCheckpoint(directory, every_n_train_steps=EVERY, save_top_k=-1)
    made = L.Trainer(
        max_steps=steps,
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks(), saves],
        default_root_dir=directory,
        accelerator="gpu" if clock.device.type == "cuda" else "cpu",
    )
    if is_ours:
        megaresume.attach(made, checkpoints=megaresume.Checkpoints(save_dir=directory))
    made.fit(Model(), loader_of(is_ours, max_epochs=1))


def deepspeed(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """DeepSpeed's engine; alone with torch's loader, as the one that DeepSpeed makes reads in processes of its own."""
    import deepspeed as ds

    os.environ.update(*ranks_at(1))
    model = Net(clock)
    config = {"train_batch_size": BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = ds.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = loader_of(is_ours)
    if is_ours:
        where = megaresume.Checkpoints(save_dir=directory)
        batches = megaresume.attach(engine, batches, checkpoints=where)
        engine.load_checkpoint(str(directory))
    for step, batch in enumerate(batches, start=1):
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()})["loss"]
        engine.backward(loss)
        engine.step()
        clock.tick()
        if step % EVERY == 0:
            engine.save_checkpoint(str(directory))
        if step == steps:
            break
    if is_ours:
        batches.close()
    engine.destroy()


#: by the package that each needs.
HOSTS: dict[str, Callable[[bool, Path, Clock, int], None]] = {
    "torch": torch_loop,
    "transformers": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "deepspeed": deepspeed,
}


def megatron(setup: Setup, is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """Megatron's loop (a stand-in for its training package) under `megaresume.run`, with a stream; alone with its own
    datasets. A program of its own, on the CPU."""
    times = directory / "times.npy"
    data = megatron_data(setup)["ours" if is_ours else "alone"]
    flags = ["--train-iters", steps, "--save", directory / "saves", "--save-interval", EVERY]
    launcher = ["-m", "megaresume.run"] if is_ours else []
    words = [sys.executable, *launcher, MEGATRON / "pretrain_timed.py", *data, *flags]
    (rank,) = ranks_at(1)
    env = os.environ | rank | {"PYTHONPATH": str(ROOT), "TIMES": str(times), "SECONDS": str(clock.seconds)}
    subprocess.run([*map(str, words)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    clock.steps = np.load(times).tolist()


def rows(setup: Setup) -> Iterator[Row]:
    """Each trainer whose package is here."""
    quick = setup.sizes.repetitions <= 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("megaresume").setLevel(logging.ERROR)
    steps = 25 if quick else STEPS
    for name, run in HOSTS.items():
        if importlib.util.find_spec(name):
            yield from _rows_of(name, partial(_quietly, run), setup, device, steps)
    if importlib.util.find_spec("megatron") and importlib.util.find_spec("megatron.core"):
        yield from _rows_of("Megatron", partial(megatron, setup), setup, torch.device("cpu"), steps)


def _quietly(run: Callable[..., None], *given: Any) -> None:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        run(*given)


def _rows_of(name: str, run: Callable[..., None], setup: Setup, device: torch.device, steps: int) -> Iterator[Row]:
    clocks: dict[bool, list[Clock]] = {True: [], False: []}

    def train(is_ours: bool, repetition: int) -> None:
        clock = Clock(device, STEP if steps == STEPS else 0.001)
        directory = setup.directory / f"hosts-{name}-{is_ours}-{repetition}"
        directory.mkdir()
        run(is_ours, directory, clock, steps)
        if repetition:
            clocks[is_ours].append(clock)

    sides = {"ours": partial(train, True), "alone": partial(train, False)}
    interleaved(sides, TURNS if steps == STEPS else setup.sizes.slow_repetitions, clock=wall)

    yield from _rows_of_clocks(name, clocks[True], clocks[False])


def _rows_of_clocks(name: str, ours: list[Clock], alone: list[Clock]) -> Iterator[Row]:
    of_ours, of_alone = [clock.spent() for clock in ours], [clock.spent() for clock in alone]
    for (column, what), percentile in itertools.product(enumerate(TIMES), (50, 99)):
        ours_turns, alone_turns = (
            np.array([np.percentile(steps[:, column], percentile) for steps, _ in side]) for side in (of_ours, of_alone)
        )
        more = float(np.median(ours_turns - alone_turns))
        per_cent = 100 * more / float(np.median(alone_turns))
        must, holds = {
            (0, 50): (f"at most {MOST} ms more", more <= MOST),
            (2, 50): (f"at most {MOST_OF_A_STEP} % more", per_cent <= MOST_OF_A_STEP),
        }.get((column, percentile), ("", None))
        yield Row(
            what=f"{name}: a step of {1000 * STEP:.0f} ms, {what}, p{percentile}",
            ours=float(np.median(ours_turns)),
            unit="ms",
            baseline=float(np.median(alone_turns)),
            against=f"the trainer alone; {more:+.3f} ms, {per_cent:+.2f} %",
            must=must,
            holds=holds,
        )
    for (column, what), percentile in itertools.product(enumerate(TIMES), (50, 99)):
        of_saves = (np.concatenate([saves[:, column] for _, saves in side]) for side in (of_ours, of_alone))
        ours_ms, alone_ms = (float(np.percentile(each, percentile)) for each in of_saves)
        what = f"{name}: a save, {what}, p{percentile}"
        yield Row(what=what, ours=ours_ms, unit="ms", baseline=alone_ms, against="the trainer alone")
