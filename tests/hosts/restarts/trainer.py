"""What Hugging Face's Trainer trains while its workers are started again in place: as `program.py`, by its recorder.

torchrun --nnodes 1:2 ... trainer.py DIRECTORY JSON-OPTIONS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback, TrainingArguments

import megaresume
from tests.hosts.restarts.program import BATCH, GLOBAL, ITEMS, Model, Recorder


class Items(torch.utils.data.Dataset[Any]):
    """Item i holds i."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"items": torch.tensor([float(i)])}


class WithLoss(torch.nn.Module):
    """As the Trainer calls a model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Model()

    def forward(self, items: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.inner(items)}


def main(directory: Path, *, steps: int, save_every: int = 3, seconds: float = 0.0) -> None:
    """Train."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    model = WithLoss()
    args = TrainingArguments(
        output_dir=str(directory / "run"),
        per_device_train_batch_size=BATCH,
        max_steps=steps,
        save_steps=save_every,
        optim="sgd",
        learning_rate=0.05,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        remove_unused_columns=False,
        logging_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    ranks = args.world_size  # which makes the process group
    args.gradient_accumulation_steps = GLOBAL // (BATCH * ranks)
    if ranks == 1 and not dist.is_initialized():
        dist.init_process_group("gloo")
    recorder = Recorder(directory / "record", model.inner, seconds)

    class Records(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            recorder.made(state.global_step)

    trainer = Trainer(model, args, train_dataset=Items(), callbacks=[Records()])
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(max_starts=0))
    trainer.train(resume_from_checkpoint=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
