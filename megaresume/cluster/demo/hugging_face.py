"""The demo of Hugging Face's Trainer: functions, docstrings and articles of this machine's Python, and a small Llama.

Each source is a map-style dataset, as users have them: texts by number, without any conversion.

This module is also the program that the demo starts and kills: a Trainer, attached by one call. A Trainer subclass
records what the model was given, from the tensors of each training step, in the format of
`megaresume.cluster.training.logging`.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.data
import xxhash
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import megaresume
from megaresume.checkpoint.records.names import data_path
from megaresume.checkpoint.system import Topology
from megaresume.cluster.demo.demo import GLOBAL_BATCH_SIZE, SOURCES, Demo, DemoStart, as_words, write_texts
from megaresume.cluster.scenario import Say
from megaresume.cluster.training.logging import SampleLog, StepRecord

#: bytes of a text that are trained; the padding token.
LENGTH, PADDING = 128, 256


class Texts(torch.utils.data.Dataset[dict[str, Any]]):
    """The texts in a JSON lines file, one token per byte.

    Args:
        path: of the file.
    """

    def __init__(self, path: Path) -> None:
        self._lines = path.read_text(encoding="utf-8").splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, i: int) -> dict[str, Any]:
        """``input_ids``: a list of 1 to `LENGTH` numbers below 256."""
        return {"input_ids": list(json.loads(self._lines[i])["text"].encode()[:LENGTH])}


def datasets_in(directory: Path) -> dict[str, tuple[Texts, str]]:
    """The data for ``megaresume.attach``: {name: (dataset, weight)}."""
    return {name: (Texts(directory / f"{name}.jsonl"), weight) for name, (_, weight) in SOURCES.items()}


def collate(items: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Items padded to `LENGTH`: ``input_ids``, ``attention_mask`` and ``labels``, int64[n, LENGTH]."""
    rows = [torch.tensor(item["input_ids"]) for item in items]
    tokens = torch.stack([torch.nn.functional.pad(row, (0, LENGTH - len(row)), value=PADDING) for row in rows])
    there = tokens != PADDING
    return {"input_ids": tokens, "attention_mask": there.long(), "labels": tokens.where(there, -100)}


def _prepare(out: Path, say: Say) -> Path:
    for name, path in write_texts(out / "texts").items():
        say(f"   {name}: {len(Texts(path)):,} items, weight {SOURCES[name][1]}")
    return out / "texts"


def _flags(out: Path, steps: int) -> list[str]:
    return as_words({"global-batch-size": GLOBAL_BATCH_SIZE, "train-iters": steps, "save-interval": max(steps // 8, 3)})


TRAINER = Demo(
    title="megaresume demo --trainer",
    program="megaresume.cluster.demo.hugging_face",
    packages=("torch", "transformers", "accelerate"),
    steps=60,
    attempts=(
        DemoStart(processes=2, workers=0, micro_batch_size=4, killed_after=0.29),
        DemoStart(processes=1, workers=2, micro_batch_size=8, killed_after=0.63),
        DemoStart(processes=2, workers=1, micro_batch_size=2),
    ),
    data="three datasets from the texts of this machine's Python",
    content="tokens, as the model was given them",
    unit="items",
    prepare=_prepare,
    flags=_flags,
    # Written beside the first checkpoint; describes the datasets by item numbers.
    config=lambda out, _: data_path(out / "run"),
)


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
    """A Trainer that records the rows of every training step."""

    #: the rows of this rank, by micro-batch: a hash of each, without its padding.
    rows: list[list[int]]
    #: the loss of each micro-batch.
    losses: list[float]

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Train a micro-batch."""
        tokens = inputs["input_ids"].cpu().numpy()
        self.rows.append([xxhash.xxh3_64_intdigest(row[row != PADDING].tobytes()) for row in tokens])
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.append(loss.item())
        return loss


class Writer(TrainerCallback):
    """Writes one line per step, covering all ranks.

    Args:
        trainer: the trainer.
        loader: the loader that it reads from.
        path: of the records.
    """

    def __init__(self, trainer: Recorder, loader: Any, path: Path) -> None:
        self._trainer, self._loader = trainer, loader
        self._path = path
        self._trained = 0
        self._began = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record where this start begins."""
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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record a step."""
        trainer, stream = self._trainer, self._loader.stream
        of_ranks: list[Any] = [None] * args.world_size
        if args.world_size > 1:
            dist.all_gather_object(of_ranks, (trainer.rows, sum(trainer.losses)))
        else:
            of_ranks = [(trainer.rows, sum(trainer.losses))]
        # By micro-batch, then by rank: the order of the stream.
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
            lr=float(kwargs["lr_scheduler"].get_last_lr()[0]),
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
