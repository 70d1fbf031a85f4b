"""What a host adds to each step of its trainer: the same trainer alone beside it, in the same run.

A step lasts 20 ms, of the GPU if there is one, otherwise asleep, and then a value is read from the device as a printed
loss is. Both sides read the same small items with their own loader. Processor time is that of the training thread; all
other threads' counts as well in the second row. Saves are those that the trainer makes anyway, of a small model.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import socket
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
from benchmarks.setup import Setup
from benchmarks.table import Row
from benchmarks.timing import cpu, interleaved, median, wall

STEP, BATCH, STEPS, EVERY = 0.02, 8, 100, 25
TURNS = 10  # of each side: a core that runs faster or slower does so for seconds
MOST_OF_A_STEP, MOST = 0.5, 0.1


@dataclass(slots=True)
class Clock:
    """Times of the ends of steps, and of saves.

    Args:
        device: where a step lasts.
    """

    device: torch.device
    seconds: float
    #: of the training thread, of the process, elapsed: float[steps + 1, 3].
    steps: list[tuple[float, float, float]] = field(default_factory=list)
    saves: list[float] = field(default_factory=list)
    #: of the device in a step; 0: the step sleeps.
    cycles: int = 0

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
            time.sleep(self.seconds)
        loss.item()

    def tick(self) -> None:
        """A step has ended."""
        self.steps.append((time.thread_time(), cpu(), wall()))

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """A save, which is not of the steps' time."""
        begin = wall()
        yield
        self.saves.append(wall() - begin)
        self.steps.append((np.nan, np.nan, np.nan))

    def spent(self) -> np.ndarray:
        """Of every step after the first tenth, without those in which something was saved: float64[s, 3]."""
        found = np.diff(np.array(self.steps), axis=0)[len(self.steps) // 10 :]
        return found[~np.isnan(found[:, 0])]


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
            with clock.saving():
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
        save_strategy="no",
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
            with clock.saving():
                accelerator.save_state()
        if step == steps:
            break
    if is_ours:
        batches.close()
    accelerator.free_memory()


def lightning(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """Lightning's Trainer."""
    import lightning as L

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net(clock)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(**batch)["loss"]

        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    made = L.Trainer(
        max_steps=steps,
        devices=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=directory,
        accelerator="gpu" if clock.device.type == "cuda" else "cpu",
    )
    if is_ours:
        megaresume.attach(made, checkpoints=megaresume.Checkpoints(save_dir=directory))
    made.fit(Model(), loader_of(is_ours, max_epochs=1))


def deepspeed(is_ours: bool, directory: Path, clock: Clock, steps: int) -> None:
    """DeepSpeed's engine; alone with torch's loader, as the one that DeepSpeed makes reads in processes of its own."""
    import deepspeed as ds

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        os.environ.update(rank, MASTER_PORT=str(found.getsockname()[1]))
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
            with clock.saving():
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


def rows(setup: Setup) -> Iterator[Row]:
    """Each trainer whose package is here."""
    quick = setup.sizes.repetitions <= 2
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.getLogger("megaresume").setLevel(logging.ERROR)
    for name, run in HOSTS.items():
        if importlib.util.find_spec(name):
            yield from _rows_of(name, partial(_quietly, run), setup, device, 12 if quick else STEPS)


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

    def of_turns(column: int, percentile: int) -> tuple[float, float, float]:
        """ms: ours, alone, and the median over turns of what ours takes more."""
        ours, alone = (
            1000 * np.array([np.percentile(clock.spent()[:, column], percentile) for clock in clocks[is_ours]])
            for is_ours in (True, False)
        )
        return float(np.median(ours)), float(np.median(alone)), float(np.median(ours - alone))

    for column, what in enumerate(("the training thread", "all threads")):
        ours, alone, more = of_turns(column, 50)
        yield Row(
            what=f"{name}: processor time of a step of {1000 * STEP:.0f} ms, {what}",
            ours=ours,
            unit="ms",
            baseline=alone,
            against=f"the trainer alone; {more:+.3f} ms",
            must=f"at most {MOST} ms more",
            holds=more <= MOST,
        )
    for percentile in (50, 99):
        ours, alone, more = of_turns(2, percentile)
        yield Row(
            what=f"{name}: a step, p{percentile}",
            ours=ours,
            unit="ms",
            baseline=alone,
            against=f"the trainer alone; {100 * more / alone:+.2f} %",
            must=f"at most {MOST_OF_A_STEP} % more" if percentile == 50 else "",
            holds=100 * more / alone <= MOST_OF_A_STEP if percentile == 50 else None,
        )
    if all(clock.saves for of in clocks.values() for clock in of):
        ours, alone = (1000 * median(s for clock in clocks[is_ours] for s in clock.saves) for is_ours in (True, False))
        yield Row(what=f"{name}: a save", ours=ours, unit="ms", baseline=alone, against="the trainer alone")
