"""Programs that train as a user's do, each with dropout; replayed unchanged.

    python programs.py TRAINER DIRECTORY STEPS [KEEP_LAST]

A checkpoint every 3 steps. $FAULT=STEP: what a bad device does, in that step; $DIE=STEP: a kill after it.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

import megaresume
from megaresume import BatchSchedule, Checkpoints, StreamLoader, open_stream

RANKS = int(os.environ.get("WORLD_SIZE", "1"))
#: samples of a step, steps between saves.
STEP, SAVE = 8, 3
METRICS = "jsonl every=0.2"


class Items(torch.utils.data.Dataset[Any]):
    """Item i is made of i."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.tensor([i // 32, i % 32, (3 * i) % 32]), "labels": torch.tensor([i % 32] * 3)}


class Model(torch.nn.Module):
    """With dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.words = torch.nn.Embedding(64, 16)
        self.body = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2))
        self.head = torch.nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.head(self.body(self.words(input_ids % 64)))
        if labels is None:
            return logits
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}


def after_step(directory: Path, step: int, model: torch.nn.Module) -> None:
    """What happens to it there. At the step in a file ``wait`` it waits until that file is gone."""
    if str(step + 1) == os.environ.get("FAULT"):
        with torch.no_grad():
            next(model.parameters())[1, 0] += 1e-6
    if str(step) == os.environ.get("DIE"):
        os.kill(os.getpid(), signal.SIGKILL)
    wait = directory.with_name("wait")
    while wait.exists() and step == int(wait.read_text()) and "MEGARESUME_REPLAY" not in os.environ:
        directory.with_name("waits").touch()
        time.sleep(0.05)


def loop(directory: Path, steps: int, keep: int | None = None) -> None:
    """A loop of one's own over packed text; each token's loss goes to the meter."""
    if RANKS > 1:
        torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank() if RANKS > 1 else 0
    module = Model()
    model = torch.nn.parallel.DistributedDataParallel(module) if RANKS > 1 else module
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    stream = open_stream(str(directory.with_name("data.yaml")))
    loader = StreamLoader(stream, BatchSchedule.constant(STEP), micro_batch_size=2, dp_rank=rank, dp_size=RANKS)
    objects = {"model": model, "optimizer": optimizer}
    loop = megaresume.attach(
        objects, loader, checkpoints=Checkpoints(save_dir=directory, keep_last=keep), metrics=METRICS
    )
    loop.load()
    for batch in loop:
        logits = model(batch["tokens"])
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), (batch["labels"] % 64).flatten(), reduction="none"
        ).view_as(batch["tokens"])
        loop.meter.losses(batch, losses)
        (losses * batch["loss_mask"]).sum().div(256).backward()
        if not loop.ends_step:
            continue
        optimizer.step()
        optimizer.zero_grad()
        loop.stepped()
        after_step(directory, loop.step, module)
        if loop.step % SAVE == 0:
            loop.save()
        if loop.step == steps:
            break
    loop.finish()


def trainer(directory: Path, steps: int) -> None:
    """Hugging Face's, which logs to TensorBoard in its output_dir."""
    import transformers

    args = transformers.TrainingArguments(
        str(directory),
        max_steps=steps,
        per_device_train_batch_size=4 // RANKS,
        gradient_accumulation_steps=2,
        save_steps=SAVE,
        logging_steps=2,
        learning_rate=1e-2,
        report_to=["tensorboard"],
        use_cpu=True,
    )
    trainer = transformers.Trainer(Model(), args, train_dataset=Items())
    megaresume.attach(trainer, metrics=METRICS)
    trainer.train(resume_from_checkpoint=True)
    trainer.save_model()


def lightning(directory: Path, steps: int) -> None:
    """Lightning's, with a ModelCheckpoint that keeps one file."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.loggers import CSVLogger

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()

        def training_step(self, batch: Any) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=CSVLogger(str(directory.with_name("logs"))),
        callbacks=[ModelCheckpoint(directory / "best", every_n_train_steps=SAVE, save_top_k=1)],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    megaresume.attach(trainer, checkpoints=Checkpoints(save_dir=directory), metrics=METRICS)
    trainer.fit(Module(), megaresume.DataLoader(Items(), batch_size=4, accumulation=2), ckpt_path="last")


def accelerate(directory: Path, steps: int) -> None:
    """A loop with Accelerate that names its checkpoints by itself."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    loader = megaresume.DataLoader(Items(), batch_size=4, accumulation=2, max_epochs=None)
    loop = megaresume.attach(accelerator, loader, checkpoints=Checkpoints(save_dir=directory), metrics=METRICS)
    accelerator.load_state()
    while loop.step < steps:
        for batch in loop:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients and loop.step % SAVE == 0:
                accelerator.save_state(str(directory / f"checkpoint-{loop.step}"))
            if loop.step == steps:
                break
    loop.finish()


def deepspeed(directory: Path, steps: int) -> None:
    """A DeepSpeed engine, ZeRO 1."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "0")
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "train_batch_size": STEP,
        "zero_optimization": {"stage": 1},
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        "steps_per_print": 1 << 40,
    }
    deepspeed.init_distributed("gloo", verbose=False)
    model = Model()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    checkpoints = Checkpoints(save_dir=directory)
    data = megaresume.attach(engine, str(directory.with_name("data.yaml")), checkpoints=checkpoints, metrics=METRICS)
    engine.load_checkpoint(str(directory))
    while engine.global_steps < steps:
        batch = next(data)
        logits = engine(batch["tokens"])
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), (batch["labels"] % 64).flatten(), reduction="none"
        )
        engine.backward((losses * batch["loss_mask"].flatten()).sum() / 256)
        is_last = engine.is_gradient_accumulation_boundary()
        engine.step()
        if is_last and engine.global_steps % SAVE == 0:
            assert engine.save_checkpoint(str(directory))
    data.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    which, where, *numbers = sys.argv[1:]
    globals()[which](Path(where), *map(int, numbers))
