"""TRL's AsyncGRPOTrainer on a CPU, its own worker process and loops; what each step has trained, written down.

    python program.py DIRECTORY JSON-OPTIONS

The recorder reads from the arguments of the loss which prompt each rollout continues: the token before its first
trained one. vLLM is `server.py`, FlashAttention 3 is `tiny.CpuAttention`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import datasets
import torch
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

import megaresume
from tests.hosts.trl.tiny import PROMPTS, CpuAttention, tiny_model, tiny_tokenizer

torch.set_num_threads(1)
async_rollout_worker.is_vllm_available = lambda *_: True
packing._flash_attn = CpuAttention  # type: ignore[assignment]
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None  # asks CUDA


def reward(completions: Any, **_: Any) -> list[float]:
    """A number of words, by which a group differs."""
    return [float(len(str(completion[0]["content"]).split()) % 3) for completion in completions]


class SentByFile:
    """The weights on their way to the server."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send_weights(self, named: Any) -> None:
        """All of them, replaced at once."""
        new = self._path.with_suffix(".new")
        torch.save({name: weight.detach().clone() for name, weight in named}, new)
        os.replace(new, self._path)

    def init_weight_transfer(self) -> None:
        """Nothing to do, as for the rest."""

    pause = resume = destroy = init_weight_transfer


class Recorder(AsyncGRPOTrainer):
    """Writes down, and dies when it is told to."""

    log_path: Path
    kill = 0

    def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        """A micro-batch: the prompt of each of its rollouts."""
        places = inputs["token_index"].flatten()
        is_trained = places >= 0  # others pad the row of a rank
        before = inputs["input_ids"].flatten()[places[is_trained]]
        segments = inputs["segment_id"].flatten()[is_trained].tolist()
        found = [int(before[k]) - 2 for k in range(len(segments)) if not k or segments[k] != segments[k - 1]]
        result = super().training_step(model, inputs, *args, **more)
        with self.log_path.open("a") as file:
            line = {"rank": self.accelerator.process_index, "step": self.state.global_step + 1, "prompts": found}
            file.write(json.dumps(line) + "\n")
        if self.state.global_step + 1 == self.kill:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


def main(directory: Path, *, attached: bool, port: int, kill: int = 0, resume: bool = False, **options: Any) -> None:
    """Train to the end, or to the death in a step."""
    model = directory / "model"
    if not model.exists():
        tiny_model().save_pretrained(model)
    settings: dict[str, Any] = {
        "num_generations": 4,
        "max_completion_length": 6,
        "per_device_train_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_staleness": 2,
        "max_inflight_tasks": 40,
        "max_steps": 40,
        "save_steps": 3,
        "token_budget": 0,
        "learning_rate": 1e-3,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "vllm_server_base_url": f"http://127.0.0.1:{port}",
    }
    data = datasets.Dataset.from_list([{"prompt": [{"role": "user", "content": f"p{k}"}]} for k in range(PROMPTS)])
    trainer = Recorder(
        str(model),
        reward,
        AsyncGRPOConfig(output_dir=str(directory / "run"), **settings | options),
        train_dataset=data,
        processing_class=tiny_tokenizer(),
        weight_transfer=SentByFile(directory / "weights.pt"),
    )
    trainer.log_path, trainer.kill = directory / "trained.jsonl", kill
    if attached:
        megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=resume or None)


if __name__ == "__main__":
    main(Path(sys.argv[1]), **json.loads(sys.argv[2]))
