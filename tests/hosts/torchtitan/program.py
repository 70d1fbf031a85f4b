"""torchtitan's own Trainer with a tiny Llama on CPUs, and what it trains written down.

    torchrun ... program.py DIRECTORY JSON-OPTIONS

The recorder reads the number of an item from its tokens, and shares no code with megaresume.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import cpu  # noqa: F401  before torchtitan
import torch
import torchtitan.protocols.train_spec as specs
from torchtitan.config import JobConfig
from torchtitan.models import llama3
from torchtitan.train import Trainer

import megaresume

ITEMS, BASE, LENGTH = 100, 32, 8


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i holds i, in its first two tokens."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i // BASE, i % BASE, *(i * k % BASE for k in range(1, LENGTH))])


def collate(items: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    rows = torch.stack(items)
    return {"input": rows[:, :-1]}, rows[:, 1:]


class Recorded(Trainer):
    """Writes down what goes through the forward and backward of each step."""

    def __init__(self, config: JobConfig, directory: Path, attempt: int) -> None:
        super().__init__(config)
        self.directory, self.attempt = directory, attempt

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:  # type: ignore[override]
        tokens = arguments["input_dict"]["input"]
        numbers = (tokens[:, 0] * BASE + tokens[:, 1]).tolist()
        loss: torch.Tensor = super().forward_backward_step(**arguments)
        rank = torch.distributed.get_rank()
        line = {"rank": rank, "attempt": self.attempt, "step": self.step, "items": numbers, "loss": loss.item()}
        with self.directory.with_name(f"{self.directory.name}.record.{rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return loss


def config_of(directory: Path, *, batch: int, step: int, steps: int, **more: Any) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder, config.model.name, config.model.flavor = str(directory), "tiny", "tiny"
    config.training.local_batch_size, config.training.global_batch_size = batch, step
    config.training.seq_len, config.training.steps = LENGTH, steps
    config.training.mixed_precision_param = "float32"
    config.optimizer.implementation = "for-loop"
    config.lr_scheduler.warmup_steps = 2
    config.activation_checkpoint.mode = "none"
    config.checkpoint.enable, config.checkpoint.folder, config.checkpoint.interval = True, "", 8
    config.checkpoint.last_save_model_only = False
    config.comm.trace_buf_size = 0
    config.debug.seed = 1
    for name, value in more.items():
        section, _, key = name.partition(".")
        assert hasattr(getattr(config, section), key), name
        setattr(getattr(config, section), key, value)
    return config


def register(items: int, **options: Any) -> None:
    """The model ``tiny``, with our loader."""
    spec = llama3.get_train_spec()
    args = {"tiny": llama3.TransformerModelArgs(dim=16, n_layers=1, n_heads=2, vocab_size=64, max_seq_len=LENGTH)}
    spec.model_args, spec.build_tokenizer_fn = args, None

    def build(*, dp_world_size: int, dp_rank: int, job_config: JobConfig, **_: Any) -> Any:
        training = job_config.training
        return megaresume.DataLoader(
            Numbers(items),
            training.local_batch_size,
            collate_fn=collate,
            dp_rank=dp_rank,
            dp_size=dp_world_size,
            **{"accumulation": training.global_batch_size // (training.local_batch_size * dp_world_size)} | options,
        )

    spec.build_dataloader_fn = build
    specs.register_train_spec("tiny", spec)


def die_in_save_of(step: int, trainer: Any) -> None:
    """Of the second tensor that torch writes then."""
    save = trainer.checkpointer.save

    def dying(curr_step: int, last_step: bool = False) -> Any:
        if curr_step == step:
            write, left = torch.save, iter(range(2))

            def killed(*args: Any, **more: Any) -> None:
                if next(left, 0) == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                write(*args, **more)

            torch.save = killed
        return save(curr_step, last_step)

    trainer.checkpointer.save = dying


def run(
    directory: Path,
    *,
    attempt: int = 1,
    batch: int = 2,
    step: int = 8,
    steps: int = 37,
    items: int = ITEMS,
    kill: int = 0,
    config: dict[str, Any] | None = None,
    attached: bool = True,
    **options: Any,
) -> Any:
    """Train to the end, or to the death in the save of step ``kill``."""
    register(items, **options)
    if attached:
        megaresume.attach(Recorded)
    trainer = Recorded(config_of(directory, batch=batch, step=step, steps=steps, **config or {}), directory, attempt)
    if kill:
        die_in_save_of(kill, trainer)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


if __name__ == "__main__":
    run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    torch.distributed.destroy_process_group()
