"""Megatron-Bridge's own ``pretrain`` with a tiny GPT on CPUs, and what it trains written down.

    torchrun ... program.py DIRECTORY JSON-OPTIONS

The recorder reads the number of an item from its tokens, and shares no code with megaresume.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import cpu  # noqa: F401  before Bridge
import torch
from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
from megatron.bridge.training import checkpointing
from megatron.bridge.training.callbacks import Callback
from megatron.bridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    DistributedDataParallelConfig,
    DistributedInitConfig,
    LoggerConfig,
    MockGPTDatasetConfig,
    OptimizerConfig,
    SchedulerConfig,
    TokenizerConfig,
    TrainingConfig,
    ValidationConfig,
)
from megatron.bridge.training.finetune import finetune
from megatron.bridge.training.gpt_step import forward_step
from megatron.bridge.training.pretrain import pretrain

import megaresume

ITEMS, BASE, LENGTH, VOCAB = 100, 32, 16, 64


class Numbers(torch.utils.data.Dataset[Any]):
    """Item i holds i, in its first two tokens."""

    def __init__(self, items: int, add: int = 0) -> None:
        self.items, self.add = items, add

    def __len__(self) -> int:
        return self.items

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        row = torch.tensor([i // BASE, i % BASE, *((i * k + self.add) % BASE for k in range(1, LENGTH))])
        ones = torch.ones(LENGTH)
        return {"tokens": row[:-1], "labels": row[1:], "loss_mask": ones, "position_ids": torch.arange(LENGTH)}


class Recorder(Callback):  # type: ignore[misc]
    """Writes down the micro-batches of every step that was made. What Bridge's forward step reads goes through it."""

    def __init__(self, directory: Path, attempt: int, *, numbers: bool) -> None:
        self.directory, self.attempt, self.numbers = directory, attempt, numbers
        self.rows: list[list[Any]] = []
        self.evaluated: list[list[Any]] = []
        self.evaluates = False

    def forward_step(self, state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
        """Bridge's own, of the same batch."""
        batch = next(data_iterator)
        tokens = batch["tokens"]
        items = tokens[:, 0] * BASE + tokens[:, 1] if self.numbers else tokens
        (self.evaluated if self.evaluates else self.rows).append(items.tolist())
        return forward_step(state, iter([batch]), model, return_schedule_plan)

    def on_train_step_end(self, context: Any) -> None:
        """A step was made."""
        losses = [float(loss.flatten()[0]) for loss in context.loss_dict.values()]  # of the last stage of a pipeline
        loss = losses[0] if losses else 0.0
        self._write("record", [(context.state.train_state.step + 1, row, loss) for row in self.rows])
        self.rows.clear()

    def on_eval_start(self, context: Any) -> None:
        """An evaluation begins."""
        self.evaluates = True

    def on_eval_end(self, context: Any) -> None:
        """An evaluation was made."""
        self.evaluates = False
        self._write("evaluated", [(context.state.train_state.step, row, 0.0) for row in self.evaluated])
        self.evaluated.clear()

    def _write(self, kind: str, found: list[tuple[int, list[Any], float]]) -> None:
        rank = torch.distributed.get_rank()
        with self.directory.with_name(f"{self.directory.name}.{kind}.{rank}").open("a") as file:
            for step, items, loss in found:
                line = {"rank": rank, "attempt": self.attempt, "step": step, "items": items, "loss": loss}
                file.write(json.dumps(line) + "\n")


def config_of(directory: Path, *, iters: int, step: int, batch: int, interval: int, evals: int) -> ConfigContainer:
    """A tiny GPT without Transformer Engine, in single precision."""
    model = GPTModelProvider(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        seq_length=LENGTH,
        vocab_size=VOCAB,
        transformer_layer_spec=local_layer_spec,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        cross_entropy_loss_fusion=False,
        attention_softmax_in_fp32=True,
    )
    return ConfigContainer(
        train=TrainingConfig(train_iters=iters, global_batch_size=step, micro_batch_size=batch),
        validation=ValidationConfig(eval_iters=evals, eval_interval=8 if evals else None),
        model=model,
        optimizer=OptimizerConfig(optimizer="adam", lr=1e-2, min_lr=1e-2, use_distributed_optimizer=False),
        scheduler=SchedulerConfig(
            lr_decay_style="constant",
            lr_decay_iters=1000,
            start_weight_decay=0.0,
            end_weight_decay=0.0,
            override_opt_param_scheduler=True,  # or Bridge refuses another batch size
        ),
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=False),
        dataset=MockGPTDatasetConfig(
            seq_length=LENGTH, random_seed=1, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False
        ),
        logger=LoggerConfig(log_interval=1),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=VOCAB),
        checkpoint=CheckpointConfig(save=str(directory), load=str(directory), save_interval=interval),
        dist=DistributedInitConfig(distributed_backend="gloo"),
    )


def dies_in_the_save_of(step: int) -> None:
    """By SIGKILL, with the processes that help it to write.

    The weights and ``train_state.pt`` are written then, a part of ``latest_train_state.pt``, and no config.
    """
    copy = shutil.copy

    def killed(source: Any, to: Any) -> None:
        if f"iter_{step:07d}" in str(source):
            Path(to).write_bytes(Path(source).read_bytes()[:100])
            os.killpg(os.getpgrp(), signal.SIGKILL)  # torchrun gives each rank a group of its own
        copy(source, to)

    checkpointing.shutil.copy = killed


def run(
    directory: Path,
    *,
    attempt: int = 1,
    iters: int = 37,
    step: int = 8,
    batch: int = 2,
    interval: int = 8,
    items: int = ITEMS,
    add: int = 0,
    workers: int = 0,
    kill: int = 0,
    evals: int = 0,
    stream: str | None = None,
    append: Any = None,
    tp: int = 1,
    pp: int = 1,
    pretrained: str | None = None,
    checkpoint: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    recorder_class: type[Recorder] = Recorder,
) -> None:
    """Train to the end, or to the death in the save of step ``kill``."""
    config = config_of(directory, iters=iters, step=step, batch=batch, interval=interval, evals=evals)
    config.model.tensor_model_parallel_size, config.model.pipeline_model_parallel_size = tp, pp
    if pp > 1:
        config.model.pipeline_dtype = torch.float32
    config.checkpoint.pretrained_checkpoint = pretrained
    for owner, found in ((config.checkpoint, checkpoint), (config.train, train)):
        for name, value in (found or {}).items():
            setattr(owner, name, value)

    def data(dp_rank: int, dp_size: int) -> Any:
        if stream is not None:
            schedule = megaresume.BatchSchedule.constant(step)
            opened = megaresume.open_stream(stream)
            return megaresume.StreamLoader(
                opened, schedule, micro_batch_size=batch, dp_rank=dp_rank, dp_size=dp_size, attention_mask=True
            )
        return megaresume.DataLoader(
            Numbers(items, add),
            batch,
            accumulation=step // (batch * dp_size),
            num_workers=workers,
            append=append,
            dp_rank=dp_rank,
            dp_size=dp_size,
        )

    def validation(dp_rank: int, dp_size: int) -> Any:
        return torch.utils.data.DataLoader(Numbers(50), batch, sampler=range(dp_rank, 50, dp_size))

    megaresume.attach(config, data, validation=validation if evals else None)
    if kill:
        dies_in_the_save_of(kill)
    recorder = recorder_class(directory, attempt, numbers=stream is None)
    begin = pretrain if pretrained is None else finetune
    begin(config, recorder.forward_step, callbacks=[recorder])


if __name__ == "__main__":
    run(Path(sys.argv[1]), **json.loads(sys.argv[2]))
