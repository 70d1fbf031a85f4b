"""A program with Hugging Face's Trainer, and what it trains written down: run by tests in their own process, or as

    torchrun ... program.py OUTPUT_DIR JSON-OPTIONS

The recorder stands in the training step and reads the number of an item from its tokens; it shares no code with
megaresume.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from tests.hosts.torch.program import without_shared_memory

ITEMS, BASE = 100, 32


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i is a text of four tokens that hold i."""

    def __init__(self, items: int = ITEMS, first: int = 0) -> None:
        self.items, self.first = items, first

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        tokens = [(self.first + i) // BASE, (self.first + i) % BASE, 1, 2]
        return {"input_ids": tokens, "labels": tokens}


class Texts(Numbers):
    """Item i is a text of three to eight tokens, the first two of which hold i."""

    def __getitem__(self, i: int) -> dict[str, list[int]]:
        return {"input_ids": [(self.first + i) // BASE, (self.first + i) % BASE, *[1] * (1 + i % 6)]}


def pad(items: list[Any]) -> dict[str, torch.Tensor]:
    """Texts side by side, filled up with zeros that are no targets."""
    rows = [torch.tensor(item["input_ids"]) for item in items]
    inputs, labels = (torch.nn.utils.rnn.pad_sequence(rows, True, filler) for filler in (0, -100))
    return {"input_ids": inputs, "labels": labels}


def numbers(inputs: Any) -> list[int]:
    """The items of a batch: of each row, or of a packed row from each place on at which positions begin again."""
    tokens = inputs["input_ids"]
    if "position_ids" in inputs:
        starts = torch.nonzero(inputs["position_ids"][0] == 0)[:, 0]
        tokens = torch.stack([tokens[0, starts], tokens[0, starts + 1]], dim=1)
    return (tokens[:, 0] * BASE + tokens[:, 1]).tolist()  # type: ignore[no-any-return]


class Recorder(Trainer):
    """A Trainer that writes down the items of every training step, and may be killed."""

    record: Path
    #: number of the process that trains, as the test counts them.
    attempt: int
    kill: tuple[str, int] = ("", 0)

    def training_step(self, model: Any, inputs: Any, *args: Any, **more: Any) -> Any:
        items = numbers(inputs)
        step = self.state.global_step + 1
        loss = super().training_step(model, inputs, *args, **more)
        rank = self.args.process_index
        line = {"attempt": self.attempt, "step": step, "rank": rank, "items": items, "loss": loss.item()}
        with self.record.with_name(f"{self.record.name}.{rank}").open("a") as file:
            file.write(json.dumps(line) + "\n")
        self.die("step", step)
        return loss

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.die("save", self.state.global_step)
        super()._save_optimizer_and_scheduler(output_dir)

    def die(self, where: str, step: int) -> None:
        if self.kill == (where, step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kill == ("interrupt", step) and where == "step":
            raise KeyboardInterrupt
        if self.kill == ("stop", step):
            self.record.with_name("stop").touch()


def make(
    output: Path,
    *,
    attempt: int = 1,
    kill: tuple[str, int] = ("", 0),
    data: Any = None,
    padded: bool = False,
    **options: Any,
) -> Recorder:
    """A Trainer of a small model with dropout, saving every 5 steps; its record lies beside its output.

    ``padded``: of texts, which are padded.
    """
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=BASE, n_positions=8, n_embd=8, n_layer=1, n_head=2)
    defaults: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "save_strategy": "steps",
        "save_steps": 5,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(output), **defaults | options)
    if args.fsdp:
        _take_cpus_for_gpus(args)
    data = (Texts() if padded else Numbers()) if data is None else data
    trainer = Recorder(GPT2LMHeadModel(config), args, train_dataset=data, eval_dataset=Numbers(4))
    if padded:
        trainer.data_collator = pad
    trainer.record, trainer.attempt, trainer.kill = output.with_suffix(".record"), attempt, kill
    return trainer


def _take_cpus_for_gpus(args: TrainingArguments) -> None:
    """Accelerate shards models over GPUs alone, and would train these with DDP; FSDP itself runs on CPUs."""
    assert args.device.type == "cpu"
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    import megaresume

    torch.set_num_threads(1)
    asked = json.loads(sys.argv[2])
    # With torchrun --max-restarts the ranks start again, and only the first time they are killed.
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        asked |= {"attempt": 1 + restarts, "kill": ("", 0)}
    if asked.get("deepspeed"):
        without_shared_memory()
    attached = asked.pop("attach", {})
    if number := asked.pop("items", 0):
        asked["data"] = Numbers(number)
    if asked.pop("texts", False):
        asked["data"] = Texts()
    trainer = make(Path(sys.argv[1]), kill=tuple(asked.pop("kill", ("", 0))), **asked)
    megaresume.attach(trainer, **attached)
    trainer.train(resume_from_checkpoint=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
