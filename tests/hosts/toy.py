"""A plain torch model under DeepSpeed, and the usual loop: what the scenarios share. Run by them, in many processes."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

warnings.simplefilter("ignore")
torch.set_num_threads(1)

import deepspeed  # noqa: E402
from deepspeed.pipe import PipelineModule  # noqa: E402

import megaresume  # noqa: E402

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
deepspeed.utils.logger.setLevel("ERROR")

VOCAB, WIDTH = 64, 16
DATA, ROOT = Path(sys.argv[1]), Path(sys.argv[2])


def start() -> None:
    deepspeed.init_distributed("gloo", verbose=False)


def finish() -> None:
    dist.barrier()
    dist.destroy_process_group()


def result(scenario: str, value: Any) -> None:
    """Tell the test; rank 0 only, with what every rank found."""
    everything = gather(value)
    if dist.get_rank() == 0:
        print(f"\nRESULT {scenario} {json.dumps(everything)}", flush=True)


def gather(value: Any) -> list[Any]:
    everything: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everything, value)
    return everything


def layers() -> list[torch.nn.Module]:
    torch.manual_seed(3)
    return [
        torch.nn.Embedding(VOCAB, WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.GELU(),
        torch.nn.Linear(WIDTH, VOCAB),
    ]


def config(*, stage: int = 0, micro: int = 2, batch: int = 8, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": micro,
        "train_batch_size": batch,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
        # DeepSpeed's own bucket is 2 GB, for models of some other size.
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
        "steps_per_print": 1 << 40,
        **more,
    }


def engine_of(**options: Any) -> Any:
    model = torch.nn.Sequential(*layers())
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(**options))
    return engine


def loss_of(logits: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.numel()


def pipeline_engine(**options: Any) -> Any:
    model = PipelineModule(layers=layers(), num_stages=2, loss_fn=lambda y, label: loss_of(y, *label))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(**options))
    return engine


def as_pair(batch: megaresume.batches.batch.Batch) -> Any:
    """What a pipeline engine wants."""
    return batch["tokens"], (batch["labels"], batch["loss_mask"])


def train(engine: Any, data: Any, steps: int, save: Path | None = None, every: int = 2) -> list[Any]:
    """The usual loop; for each micro-batch [step, sample numbers, loss in hexadecimal]."""
    seen: list[Any] = []
    while engine.global_steps < steps:
        step = engine.global_steps
        batch = next(data)
        loss = loss_of(engine(batch["tokens"]), batch["labels"], batch["loss_mask"])
        engine.backward(loss)
        engine.step()
        seen.append([step + 1, batch["samples"].tolist(), loss.item().hex()])
        if save is not None and engine.global_steps > step and engine.global_steps % every == 0:
            engine.save_checkpoint(str(save))
    return seen


def step_of(engine: Any, data: Any) -> float:
    """A step: its loss, the mean of all micro-batches of all ranks."""
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        batch = next(data)
        loss = loss_of(engine(batch["tokens"]).float(), batch["labels"], batch["loss_mask"])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    everywhere = [one for rank in gather(losses) for one in rank]
    return float(sum(everywhere) / len(everywhere))


def error_of(function: Any) -> list[str]:
    """Kind, headline and next action of the error that a call raises."""
    try:
        function()
    except megaresume.MegaresumeError as error:
        return [type(error).__name__, error.headline, str(error.action), str(error.found)]
    return ["no error", "", "", ""]
