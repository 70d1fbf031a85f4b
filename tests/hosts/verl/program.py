"""VeRL's own SFTTrainer with a tiny Llama on CPUs, and what it trains written down.

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

import cpu  # noqa: F401  before VeRL
import torch
import torch.distributed as dist
from hydra import compose, initialize_config_module
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from verl.trainer import sft_trainer
from verl.utils import tensordict_utils

import megaresume

ITEMS, BASE, LENGTH = 100, 32, 8


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i holds i, in its first two tokens."""

    def __init__(self, items: int) -> None:
        self.items = items

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = torch.tensor([i // BASE, i % BASE, *(i * k % BASE for k in range(1, LENGTH - 1))])
        ones = torch.ones_like(tokens)
        return {
            "input_ids": tokens,
            "attention_mask": ones,
            "position_ids": torch.arange(LENGTH),
            "loss_mask": ones,
        }


def model_in(directory: Path) -> Path:
    """A tiny model, and a tokenizer that nothing is read with."""
    if dist.get_rank() == 0 and not directory.exists():
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
        )
        LlamaForCausalLM(config).save_pretrained(directory)
        words = {f"w{number}": number for number in range(64)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w1").save_pretrained(directory)
    dist.barrier()
    return directory


class Recorded(sft_trainer.SFTTrainer):
    """Writes down what each step has trained; may die in a save."""

    def __init__(self, config: Any, directory: Path, attempt: int, kill: int) -> None:
        self.directory, self.attempt, self.kill = directory, attempt, kill
        self.count: int | None = None
        super().__init__(config)

    def _build_dataset(self) -> None:
        self.train_dataset, self.val_dataset = Numbers(self.config.data.train_max_samples), None

    def _build_ckpt_handler(self) -> None:
        super()._build_ckpt_handler()
        save, train = self.ckpt_handler.save_checkpoint, self.training_client.train_batch
        self.ckpt_handler.save_checkpoint = lambda step: (self._die(step), save(step))
        self.training_client.train_batch = lambda data: self._recorded(train, data)

    def _die(self, step: int) -> None:
        if step != self.kill:
            return
        write, left = torch.save, iter(range(2))

        def killed(*args: Any, **more: Any) -> None:
            if next(left, 0) == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            write(*args, **more)

        torch.save = killed

    def _recorded(self, train: Any, data: Any) -> Any:
        rows = data["input_ids"].unbind()
        output = train(data=data)
        self.count = (self.resume_global_step if self.count is None else self.count) + 1
        line = {
            "rank": dist.get_rank(),
            "attempt": self.attempt,
            "step": self.count,
            "items": [int(row[0]) * BASE + int(row[1]) for row in rows],
            "loss": tensordict_utils.get(output, "metrics")["loss"],
        }
        with self.directory.with_name(f"{self.directory.name}.record.{dist.get_rank()}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return output


def run(
    directory: Path,
    *,
    attempt: int = 1,
    step: int = 8,
    epochs: int = 3,
    items: int = ITEMS,
    workers: int = 0,
    kill: int = 0,
    attached: bool = True,
    append: str | None = None,
    checkpoints: dict[str, Any] | None = None,
    config: list[str] | None = None,
    trainer_class: type[Recorded] = Recorded,
) -> None:
    """Train to the end, or to the death in the save of step ``kill``."""
    if attached:
        megaresume.attach(trainer_class, checkpoints=megaresume.Checkpoints(**checkpoints or {}), append=append)
    model = model_in(directory.with_name("model"))
    settings = [
        f"model.path={model}",
        "model.use_remove_padding=False",
        "model.enable_gradient_checkpointing=False",
        "+model.override_config.attn_implementation=eager",
        "engine.use_torch_compile=False",
        "engine.strategy=fsdp2",
        "engine.reshard_after_forward=False",
        "+engine.mixed_precision.param_dtype=fp32",
        f"data.train_batch_size={step}",
        "data.micro_batch_size_per_gpu=2",
        "data.use_dynamic_bsz=False",
        f"data.num_workers={workers}",
        f"data.train_max_samples={items}",
        f"trainer.total_epochs={epochs}",
        "trainer.save_freq=8",
        f"trainer.default_local_dir={directory}",
        "trainer.logger=[console]",
        "trainer.device=cpu",
        *(config or []),
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        trainer = trainer_class(compose("sft_trainer_engine", settings), directory, attempt, kill)
    trainer.fit()


if __name__ == "__main__":
    dist.init_process_group("gloo")
    run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
    dist.destroy_process_group()
