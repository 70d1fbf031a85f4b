"""Run by two processes: loops that draw random numbers wherever loops do, whole, cut off by SIGKILL, and resumed.

``python dropout.py DATA ROOT (whole|resumed)``. What is computed is written down by the models themselves, in their
forward: one line for each micro-step, with the loss to the last bit.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import toy
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.activation_checkpointing import checkpointing as deepspeed_checkpointing
from torch.utils.checkpoint import checkpoint

import megaresume

STEPS, CUT = 7, 4
STAGES = {"zero0": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fp16": 1, "seeded": 0, "pipeline": 0}
#: "seeded": one that seeds each layer by a count of micro-batches. Pipelines come last: DeepSpeed makes no other engine
#: after one.
PIPELINES = ("seeded", "pipeline")
#: what is attached: how batches are read must not matter, so a resume reads in another way.
CASES: dict[str, dict[str, Any]] = {
    "zero0": {"prefetch": 0},
    "zero1": {"prefetch": 3},
    "zero2": {"num_workers": 2, "prefetch": 2},
    "zero3": {"num_workers": 1},
    "fp16": {},
    "seeded": {},
    "pipeline": {},
}
OTHER: dict[str, dict[str, Any]] = {
    "zero0": {"num_workers": 2},
    "zero1": {"prefetch": 0},
    "zero2": {"prefetch": 1},
    "zero3": {"prefetch": 2},
    "fp16": {"num_workers": 1},
    "seeded": {"prefetch": 1},
    "pipeline": {"num_workers": 1},
}


class Recorder:
    """A file that a kill takes nothing from."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", buffering=1)
        self.engine: Any = None

    def add(self, value: torch.Tensor) -> None:
        self._file.write(f"{self.engine.global_steps + 1} {value.detach().float().sum().item().hex()}\n")


class Block(torch.nn.Module):
    """Dropout under torch's activation checkpointing, and by DeepSpeed's tracker of generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(toy.WIDTH, toy.WIDTH)
        self.dropout = torch.nn.Dropout(0.3)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(torch.nn.functional.gelu(self.layer(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(self._inner, x, use_reentrant=False)
        with deepspeed_checkpointing.get_cuda_rng_tracker().fork("mine"):
            return self.dropout(x)


class Model(torch.nn.Module):
    """Its loss, written down."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = torch.nn.Embedding(toy.VOCAB, toy.WIDTH)
        self.block = Block()
        self.head = torch.nn.Linear(toy.WIDTH, toy.VOCAB)
        self.recorder = recorder

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        loss = toy.loss_of(self.head(self.block(self.embedding(tokens))).float(), labels, mask)
        self.recorder.add(loss)
        return loss


class First(torch.nn.Embedding):
    """The first layer of a pipeline, on the rank that has no loss."""

    recorder: Recorder

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out = torch.nn.functional.dropout(super().forward(tokens), 0.2, self.training)
        self.recorder.add(out)
        return out


def shifted(batch: Any) -> Any:
    """A transform that draws: for the loops."""
    batch["tokens"] = (batch["tokens"] + int(torch.randint(0, 3, ()))) % toy.VOCAB
    return batch


def engine_of(case: str, recorder: Recorder) -> Any:
    config = toy.config(
        stage=STAGES[case],
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 20, "warmup_max_lr": 1e-2}},
    )
    if case == "zero2":
        config["bf16"] = {"enabled": True}
    if case == "fp16":
        # Torch computes it on any CPU; DeepSpeed asks for one that is fast at it.
        toy.deepspeed.get_accelerator().is_fp16_supported = lambda: True
        config["fp16"] = {"enabled": True, "initial_scale_power": 24, "loss_scale_window": 2, "hysteresis": 1}
    if case in PIPELINES:
        first = First(toy.VOCAB, toy.WIDTH)
        first.recorder = recorder
        torch.manual_seed(3)
        layers = [first, Block(), torch.nn.Linear(toy.WIDTH, toy.VOCAB)]

        def loss_of(y: torch.Tensor, label: Any) -> torch.Tensor:
            loss = toy.loss_of(y, *label)
            recorder.add(loss)
            return loss

        model: torch.nn.Module = PipelineModule(
            layers=layers,
            num_stages=2,
            loss_fn=loss_of,
            seed_layers=case == "seeded",
            partition_method="uniform",  # of others, the numbers of layers are numpy's, which random.seed() refuses
        )
    else:
        model = Model(recorder)
    engine, *_ = toy.deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    recorder.engine = engine
    return engine


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tracker = deepspeed_checkpointing.get_cuda_rng_tracker()
    tracker.reset()
    tracker.add("mine", seed + 1)


def micro_step(engine: Any, data: Any, own: np.random.Generator) -> None:
    batch = next(data)
    tokens = batch["tokens"].clone()
    tokens[:, np.random.randint(0, 32)] = random.randrange(toy.VOCAB)  # augmented in the loop
    tokens[:, 0] = int(own.integers(toy.VOCAB))
    loss = engine(tokens, batch["labels"], batch["loss_mask"])
    engine.backward(loss)
    engine.step()


def train(engine: Any, data: Any, stop: int, save: Path | None, own: np.random.Generator) -> None:
    while engine.global_steps < stop:
        if hasattr(engine, "train_batch"):
            engine.train_batch(data_iter=data)
            done = True
        else:
            before = engine.global_steps
            micro_step(engine, data, own)
            done = engine.global_steps > before
        if save is not None and done and engine.global_steps % 2 == 0:
            # DeepSpeed keeps the client state of one data-parallel rank, so all of them are in it.
            engine.save_checkpoint(str(save), client_state={"own": toy.gather(own.bit_generator.state)})


def attach(case: str, how: dict[str, Any], recorder: Recorder) -> tuple[Any, Any]:
    engine = engine_of(case, recorder)
    transform = toy.as_pair if case in PIPELINES else shifted
    return engine, megaresume.attach(
        engine, toy.DATA, loader_options=megaresume.LoaderOptions(transform=transform, **how)
    )


def facts_of(engine: Any) -> dict[str, Any]:
    """What DeepSpeed is to restore by itself."""
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "lr": [group["lr"] for group in engine.optimizer.param_groups],
        "scale": None if engine.optimizer is None else getattr(engine.optimizer, "cur_scale", None),
        "scaler": {} if scaler is None else {k: v for k, v in vars(scaler).items() if isinstance(v, int | float)},
        "skipped": engine.skipped_steps,
    }


def whole(rank: int) -> None:
    for case, how in CASES.items():
        for kind in ("whole", "cut"):
            recorder = Recorder(toy.ROOT / kind / case / f"{rank}.txt")
            seed_all(100 + rank)
            own = np.random.default_rng(rank)
            engine, data = attach(case, how, recorder)
            save = toy.ROOT / kind / case / "save"
            train(engine, data, STEPS if kind == "whole" else CUT, save, own)
            if kind == "whole":
                toy.result(case, facts_of(engine))
            elif case not in PIPELINES:
                micro_step(engine, data, own)  # half of a step
            if (kind, case) != ("cut", "pipeline"):
                data.close()
    dist.barrier()
    print("\nKILL ME", flush=True)
    train(engine, data, 1 << 40, None, own)


def resumed(rank: int) -> None:
    for case, how in OTHER.items():
        recorder = Recorder(toy.ROOT / "resumed" / case / f"{rank}.txt")
        seed_all(900 - rank)
        engine, data = attach(case, how, recorder)
        _, client = engine.load_checkpoint(str(toy.ROOT / "cut" / case / "save"))
        own = np.random.default_rng()
        own.bit_generator.state = client["own"][rank]
        # Whatever a program does between the load and the loop.
        torch.rand(5), np.random.rand(), random.random(), iter(torch.utils.data.DataLoader(range(3)))
        if case not in PIPELINES:
            next(data), torch.rand(3), iter(data)  # a look at the first batch
        train(engine, data, STEPS, None, own)
        toy.result(case, facts_of(engine) | {"line": data.resume.line()})
        data.close()
        if case == "zero1":
            damage(rank)


def damage(rank: int) -> None:
    """A file of one rank is lost: of an old checkpoint, and within a save."""
    save = toy.ROOT / "cut" / "zero1" / "save"
    lost = save / "megaresume" / "step_0000004.random" / "rank_00001.json"
    if rank == 0:
        lost.unlink()
    dist.barrier()
    engine, data = attach("zero1", {}, Recorder(toy.ROOT / "damage" / f"{rank}.txt"))
    asked = toy.error_of(lambda: engine.load_checkpoint(str(save), tag="global_step4"))
    path, _ = engine.load_checkpoint(str(save))
    twice = torch.get_rng_state().sum().item()
    torch.rand(7)
    engine.load_checkpoint(str(save), tag="global_step2")
    assert torch.get_rng_state().sum().item() == twice
    train(engine, data, 3, None, np.random.default_rng(5))
    from megaresume.checkpoint import random_state

    write = random_state.write_rank_file
    if rank == 1:
        random_state.write_rank_file = lambda root, path, data: (
            write(root, path, data),
            (root / "megaresume" / path).unlink(),
        )[0]
    unsaved = toy.error_of(lambda: engine.save_checkpoint(str(toy.ROOT / "unsaved")))
    random_state.write_rank_file = write
    engine.save_checkpoint(str(toy.ROOT / "unsaved"))
    engine.save_checkpoint(str(toy.ROOT / "unsaved"))  # twice at one step
    data.close()
    toy.result("damage", {"asked": asked, "path": Path(path).parent.name, "unsaved": unsaved})


toy.start()
{"whole": whole, "resumed": resumed}[sys.argv[3]](dist.get_rank())
toy.finish()
