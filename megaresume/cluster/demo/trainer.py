"""The program that ``megaresume demo --trainer`` starts and kills: a Trainer, attached by one call.

What the model was given is written down by a Trainer of its own class, from the tensors of each training step, as the
records of `megaresume.cluster.training.logging`.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import megaresume
from megaresume.checkpoint.topology import Topology
from megaresume.cluster.demo.items import LENGTH, PADDING, collate, datasets_in
from megaresume.cluster.training.logging import SampleLog, StepRecord


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megaresume-data", type=Path, required=True, help="directory of JSON lines")
    parser.add_argument("--save", type=Path, required=True)
    parser.add_argument("--load", type=Path, help="the same directory")
    parser.add_argument("--megaresume-log-samples", type=Path, required=True)
    parser.add_argument("--micro-batch-size", type=int, required=True)
    parser.add_argument("--global-batch-size", type=int, required=True)
    parser.add_argument("--num-workers", type=int, default=0)
    parser.add_argument("--train-iters", type=int, required=True)
    parser.add_argument("--save-interval", type=int, required=True)
    return parser.parse_args()


class Recorder(Trainer):
    """A Trainer that notes the rows of every training step."""

    #: of this rank, by micro-batch: a hash of each row without its padding.
    rows: list[list[int]]
    #: the loss of each micro-batch.
    losses: list[float]

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **more: Any) -> torch.Tensor:
        """Train a micro-batch."""
        tokens = inputs["input_ids"].cpu().numpy()
        self.rows.append([xxhash.xxh3_64_intdigest(row[row != PADDING].tobytes()) for row in tokens])
        loss = super().training_step(model, inputs, *args, **more)
        self.losses.append(loss.item())
        return loss


class Writer(TrainerCallback):
    """Writes a line of each step, of all ranks together.

    Args:
        trainer: whose steps.
        loader: what it reads from.
        path: of the records.
    """

    def __init__(self, trainer: Recorder, loader: Any, path: Path) -> None:
        self._trainer, self._loader = trainer, loader
        self._path = path
        self._trained = 0
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note where this start begins."""
        topology = Topology(
            world_size=args.world_size,
            dp=args.world_size,
            num_workers=args.dataloader_num_workers,
            micro_batch_size=args.per_device_train_batch_size,
            global_batch_size=self._loader.step_samples,
        )
        lines = self._path.read_bytes().split(b"\n") if self._path.exists() else []
        attempt = 1 + sum(b'"event": "start"' in line for line in lines)
        self._log = SampleLog(str(self._path), attempt=attempt, topology=topology, writes=args.process_index == 0)
        self._trained = self._loader.samples
        digest = self._loader.stream.digest_at(self._trained)
        self._log.start(step=state.global_step, samples=self._trained, digest=digest, data_seconds=0.0)
        self._begin()

    def _begin(self) -> None:
        self._trainer.rows, self._trainer.losses, self._began = [], [], time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Note a step."""
        trainer, stream = self._trainer, self._loader.stream
        of_ranks: list[Any] = [None] * args.world_size
        if args.world_size > 1:
            dist.all_gather_object(of_ranks, (trainer.rows, sum(trainer.losses)))
        else:
            of_ranks = [(trainer.rows, sum(trainer.losses))]
        # Micro-batch by micro-batch, rank by rank: the order of the stream.
        by_rank = [rows for rows, _ in of_ranks]
        rows = [row for micro_batch in zip(*by_rank, strict=True) for of_rank in micro_batch for row in of_rank]
        first, stop = self._trained, self._trained + len(rows)
        seconds = time.monotonic() - self._began
        record = StepRecord(
            step=state.global_step,
            samples=(first, stop),
            order=xxhash.xxh3_64_hexdigest(stream.plan(first, stop).hashes.tobytes()),
            content=xxhash.xxh3_64_hexdigest(np.array(rows, np.uint64).tobytes()),
            ranks=None,
            digest=stream.digest_at(stop),
            loss=sum(loss for _, loss in of_ranks) / args.world_size,
            lr=float(more["lr_scheduler"].get_last_lr()[0]),
            grad_norm=None,
            tokens=len(rows) * LENGTH,
            global_batch_size=len(rows),
            seconds=seconds,
            data_seconds=0.0,
            tokens_per_second=len(rows) * LENGTH / max(seconds, 1e-9),
        )
        self._log.step(record)
        self._trained = stop
        self._begin()


def main() -> None:
    """Train to the end, from the newest complete checkpoint."""
    args = _arguments()
    model: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    settings = TrainingArguments(
        output_dir=str(args.save),
        max_steps=args.train_iters,
        per_device_train_batch_size=args.micro_batch_size,
        dataloader_num_workers=args.num_workers,
        save_strategy="steps",
        save_steps=args.save_interval,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        warmup_steps=max(args.train_iters // 20, 1),
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        seed=1234,
    )
    settings.gradient_accumulation_steps = args.global_batch_size // (args.micro_batch_size * settings.world_size)
    torch.manual_seed(1234)
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=PADDING + 1, max_position_embeddings=LENGTH, **model))
    trainer = Recorder(llama, settings, data_collator=collate)
    loader = megaresume.attach(trainer, datasets_in(args.megaresume_data))
    trainer.add_callback(Writer(trainer, loader, args.megaresume_log_samples))
    trainer.train(resume_from_checkpoint=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
