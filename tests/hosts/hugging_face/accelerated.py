"""A training loop with Accelerate, and what it trains written down: run by tests in their own process, or as

torchrun ... accelerated.py DIRECTORY JSON-OPTIONS
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration

import megaresume
from tests.hosts.torch.program import (
    BASE,
    ITEMS,
    Model,
    Numbers,
    die_in_the_next_save,
    loader_of,
    without_shared_memory,
    write_down,
)


def accelerator_of(
    directory: Path, accumulation: int, limit: int | None = None, backend: str = "", **options: Any
) -> Accelerator:
    """A new one, as in a new process. Back-ends: ``zero1`` to ``zero3``, ``fsdp-full``, ``fsdp-sharded``; else DDP."""
    if not torch.distributed.is_initialized():
        for state in (AcceleratorState, PartialState):
            state._reset_state()
    GradientState._reset_state()
    naming = ProjectConfiguration(str(directory), automatic_checkpoint_naming=True, total_limit=limit)
    # Accelerate shards models over GPUs alone, and would train these with DDP; FSDP and DeepSpeed run on CPUs.
    kind, _, detail = backend.partition("-")
    if kind == "fsdp":
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2, state_dict_type=f"{detail.upper()}_STATE_DICT"
        )
    if kind.startswith("zero"):
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"  # as `accelerate launch` does
        PartialState(backend="gloo")
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": int(kind[4:])}}
        config |= {"gradient_accumulation_steps": accumulation, "zero_allow_untested_optimizer": True}
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=config)
    return Accelerator(cpu=not kind, gradient_accumulation_steps=accumulation, project_config=naming, **options)


class Held:
    """Something with a state, a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]


def run(
    directory: Path,
    *,
    attempt: int = 1,
    kill: tuple[str, int] = ("", 0),
    data: Any = None,
    batch: int = 4,
    accumulation: int = 2,
    epochs: int = 3,
    steps: int | None = None,
    save_every: int = 5,
    limit: int | None = None,
    load: str | None = None,
    mistake: str = "",
    checkpoints: dict[str, Any] | None = None,
    stop: Any = None,
    backend: str = "",
    watch: Callable[[Any], None] | None = None,
    **options: Any,
) -> Any:
    """Train to the end; the record lies beside the directory."""
    accelerator = accelerator_of(directory, accumulation, limit, backend)
    torch.manual_seed(1)
    model = Model()
    del model.unused  # DDP would wait for its gradients
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    if mistake == "differs":
        accelerator.register_for_checkpointing(Held(7), Held(accelerator.process_index))
    if not isinstance(data, str):
        options = {"max_epochs": epochs} | options
    loader = loader_of(Numbers() if data is None else data, batch, accumulation, **options)
    loop = megaresume.attach(accelerator, loader, checkpoints=megaresume.Checkpoints(**checkpoints or {}), stop=stop)
    if mistake != "load":
        accelerator.load_state(load)
    if mistake == "look":
        next(iter(loop))
    while loop.samples < epochs * ITEMS if steps is None else loop.step < steps:
        for micro in loop:
            is_text, step = isinstance(data, str), loop.step + 1
            with accelerator.accumulate(model):
                loss = model(micro["tokens"] if is_text else micro)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            numbers = micro["samples"].tolist() if is_text else (micro[:, 0] * BASE + micro[:, 1]).tolist()
            write_down(
                directory, accelerator.process_index, attempt=attempt, step=step, items=numbers, loss=loss.item()
            )
            if not accelerator.sync_gradients:
                continue
            assert loop.step == step
            if kill == ("step", loop.step):
                os.kill(os.getpid(), signal.SIGKILL)
            if watch is not None:
                watch(loop)
            if loop.step % save_every == 0:
                if kill == ("save", loop.step) and accelerator.is_main_process:
                    die_in_the_next_save()
                accelerator.save_state()
            if loop.step == steps:
                break
    accelerator.save_state()
    loop.finish()
    return loop


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[2])
    # With torchrun --max-restarts the ranks start again, and only the first time they are killed.
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        asked |= {"attempt": 1 + restarts, "kill": ("", 0)}
    if asked.get("backend", "").startswith("zero"):
        without_shared_memory()
    run(Path(sys.argv[1]), kill=tuple(asked.pop("kill", ("", 0))), **asked)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
