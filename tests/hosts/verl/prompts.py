"""The prompts of VeRL's trainers of reinforcement learning, without its workers: what they hand out written down.

    python prompts.py JSON-OPTIONS-OF-RUNS

The trainers' own functions make their dataloaders, hand out the prompts of each step, save and load. Only the workers,
which would hold the weights, hold none. The recorder reads the number of a prompt from its text.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cpu  # noqa: F401  before VeRL
import numpy as np
import torch
from hydra import compose, initialize_config_module
from omegaconf import open_dict
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.dataset.rl_dataset import collate_fn

import megaresume


class Numbers(torch.utils.data.Dataset[Any]):
    """Prompt i says i. As VeRL makes a dataset of ``data.custom_cls``."""

    def __init__(self, *_: Any, max_samples: int = 100, **__: Any) -> None:
        self.items = max_samples if max_samples > 0 else 4

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"raw_prompt": [{"role": "user", "content": str(i)}], "index": i, "ids": torch.tensor([i])}


class Workers:
    """Hold no weights."""

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        """As a trainer asks for it."""
        Path(path).mkdir(parents=True)

    def load_checkpoint(self, *_: Any, **more: Any) -> None:
        """As a trainer asks for it."""


class Old(RayPPOTrainer):
    """The trainer of ``trainer.use_v1=False``."""

    def __init__(self, config: Any) -> None:
        self.config, self.tokenizer, self.processor, self.use_critic = config, None, None, False
        self.actor_rollout_wg = Workers()
        items = config.data.train_max_samples
        self._create_dataloader(Numbers(max_samples=items), Numbers(max_samples=4), collate_fn, None)

    def steps(self) -> Any:
        """The prompts of each step, as ``fit`` takes them."""
        self.global_steps = 0
        self._load_checkpoint()
        current_epoch = self.global_steps // len(self.train_dataloader)
        self.global_steps += 1
        for _ in range(current_epoch, self.config.trainer.total_epochs):
            for batch in self.train_dataloader:
                yield batch["raw_prompt"]
                self.global_steps += 1
                if self.global_steps > self.total_training_steps:
                    return


class New(PPOTrainer):
    """The trainer of ``trainer.use_v1=True``."""

    trainer_mode, parameter_sync_step = "sync", 1

    def __init__(self, config: Any) -> None:
        self.config, self.tokenizer, self.processor, self.use_critic = config, None, None, False
        self.actor_rollout_wg = Workers()
        self.checkpoint_callback = SimpleNamespace(on_save=lambda **_: None)
        self._init_dataloader()

    def steps(self) -> Any:
        """The prompts of each step, as ``fit`` takes them."""
        self._load_checkpoint()
        self.global_steps += 1
        epoch = (self.global_steps - 1) // self.steps_per_epoch
        while epoch < self.config.trainer.total_epochs and self.global_steps <= self.total_training_steps:
            yield list(self._next_train_batch()["raw_prompt"])
            self.global_steps += 1
            epoch = (self.global_steps - 1) // self.steps_per_epoch


New.__abstractmethods__ = frozenset()  # type: ignore[attr-defined]


def run(
    directory: Path,
    *,
    trainer: str = "new",
    step: int = 8,
    gen: int | None = None,
    epochs: int = 3,
    items: int = 100,
    workers: int = 0,
    kill: int = 0,
    attached: bool = True,
    append: Any = None,
) -> None:
    """To the end, or to the death after the save of step ``kill``."""
    settings = [
        f"data.train_batch_size={step}",
        f"data.dataloader_num_workers={workers}",
        f"data.train_max_samples={items}",
        f"data.custom_cls.path={__file__}",
        "data.custom_cls.name=Numbers",
        "data.seed=5",
        f"trainer.total_epochs={epochs}",
        f"trainer.default_local_dir={directory}",
    ]
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose("ppo_trainer", settings)
    with open_dict(config):
        config.data.gen_batch_size = gen
    made = {"new": New, "old": Old}[trainer]
    if attached:
        megaresume.attach(made, append=append)
    one: Any = made(config)
    with directory.with_name("handed.jsonl").open("a") as file:
        for prompts in one.steps():
            found = [int(np.asarray(prompt).item(0)["content"]) for prompt in prompts]
            file.write(json.dumps({"step": one.global_steps, "items": found}) + "\n")
            file.flush()
            if one.global_steps % 6 == 0:
                one._save_checkpoint()
            if one.global_steps == kill:
                os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    for options in json.loads(sys.argv[1]):
        directory = Path(options.pop("directory"))
        try:
            run(directory, **options)
        except megaresume.MegaresumeError as error:
            directory.with_name("error").write_text(str(error))
