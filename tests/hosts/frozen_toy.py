"""Trains a layer below which another one is frozen, or trained too, and in no checkpoint. See test_frozen.py.

frozen_toy.py HOST ROOT          for each of its ways: a life, one with another lower layer, one as before
frozen_toy.py HOST ROOT again    the last two of them alone, perhaps on other ranks

Each prints what became of it: the losses of its steps, or the headline of the refusal.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import megaresume
from megaresume import Checkpoints, DataLoader
from megaresume.hosts import frozen
from megaresume.stream.errors import CheckpointError, StateError

BEFORE, AFTER = 3, 5


class Net(nn.Module):
    """Holds all its weights; ``seed`` makes the lower ones, which are frozen unless the way is "trained"."""

    def __init__(self, seed: int, way: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.base = nn.Linear(4, 4).requires_grad_(way.startswith("trained"))
        torch.manual_seed(0)
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.base(x)).float().square().mean()  # type: ignore[no-any-return]


class Light(Net):
    """Leaves the lower ones out of its state, and does not miss them in another one."""

    def state_dict(self, *args: Any, **more: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **more)
        for name in [name for name in state if "base." in name]:
            del state[name]  # of this one, as a module around it shares it
        return state

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        return super().load_state_dict(state_dict, strict=False, assign=assign)


def optimizer_of(model: nn.Module, way: str) -> torch.optim.Optimizer:
    """SGD has no state that would show what it trains."""
    trained = [one for one in model.parameters() if one.requires_grad]
    return torch.optim.Adam(trained, 1e-3) if way == "trained" else torch.optim.SGD(trained, 1e-3)


def loader() -> DataLoader:
    return DataLoader([torch.arange(4.0).roll(i) + i / 64 for i in range(64)], batch_size=4)


def trains(batches: Iterable[Any], steps: int, step: Callable[[Any], torch.Tensor], count: Callable[[], int]) -> Any:
    losses = []
    for batch in batches:
        losses.append(float(step(batch)))
        if count() >= steps:
            break
    return losses


def loop(root: Path, way: str, seed: int, steps: int, checkpoints: Checkpoints) -> Any:
    model: Any = (Net if way == "whole" else Light)(seed, way)
    if way in ("whole", "ddp"):
        model = nn.parallel.DistributedDataParallel(model)
    elif dist.get_world_size() > 1:
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    optimizer = optimizer_of(model, way)
    objects = {"model": model, "optimizer": optimizer}
    loop = megaresume.attach(objects, loader(), checkpoints=checkpoints)

    def step(batch: Any) -> torch.Tensor:
        loss = model(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.stepped()
        if way == "teacher":  # as of a teacher that follows its pupil
            with torch.no_grad():
                model.base.weight.mul_(1.01)
            loop.save()
        return loss  # type: ignore[no-any-return]

    try:
        loop.load()
        losses = trains(loop, steps, step, lambda: loop.step)
        loop.save()
    finally:
        loop.close()
    return losses


def deepspeed(root: Path, way: str, seed: int, steps: int, checkpoints: Checkpoints) -> Any:
    import deepspeed

    model = (Net if way.isdecimal() or way == "whole" else Light)(seed, way)
    stage = int(way) if way.isdecimal() else {"whole": 2, "light": 1, "trained": 0, "trained-unseen": 2}[way]
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": stage > 0 or way == "0"},
    }
    trained = [one for one in model.parameters() if one.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    data = megaresume.attach(engine, loader(), checkpoints=checkpoints)

    def step(batch: Any) -> torch.Tensor:
        loss = engine(batch.to(next(model.parameters()).dtype))
        engine.backward(loss)
        engine.step()
        return loss  # type: ignore[no-any-return]

    try:
        engine.load_checkpoint(str(root), load_module_strict=False)
        losses = trains(data, steps, step, lambda: engine.global_steps)
        engine.save_checkpoint(str(root), exclude_frozen_parameters=way.isdecimal())
    finally:
        data.close()
    return losses


def accelerate(root: Path, way: str, seed: int, steps: int, checkpoints: Checkpoints) -> Any:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = (Light if way == "trained" else Net)(seed, way)
    optimizer: Any = optimizer_of(model, way)
    model, optimizer = accelerator.prepare(model, optimizer)

    def save(models: list[Any], weights: list[Any], directory: str) -> None:
        """As scripts of diffusers write an adapter by themselves."""
        while weights:
            weights.pop()
        if accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(models[0]).head.state_dict(), Path(directory, "head.pt"))

    def load(models: list[Any], directory: str) -> None:
        accelerator.unwrap_model(models.pop()).head.load_state_dict(torch.load(Path(directory, "head.pt")))

    if way not in ("whole", "trained"):
        accelerator.register_save_state_pre_hook(save)
        accelerator.register_load_state_pre_hook(load)
    loop = megaresume.attach(accelerator, loader(), checkpoints=checkpoints)

    def step(batch: Any) -> torch.Tensor:
        loss = model(batch)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss  # type: ignore[no-any-return]

    try:
        accelerator.load_state(strict=False)
        losses = trains(loop, steps, step, lambda: loop.step)
        accelerator.save_state()
    finally:
        loop.close()
    return losses


def lightning(root: Path, way: str, seed: int, steps: int, checkpoints: Checkpoints) -> Any:
    import lightning as L

    losses = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = (Light if way in ("light", "trained") else Net)(seed, way)
            self.strict_loading = False

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss = self.net(batch)
            losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return optimizer_of(self.net, way)

    class Hooked(Module):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            state = checkpoint["state_dict"]
            checkpoint["state_dict"] = {name: one for name, one in state.items() if "base." not in name}

    saves = L.pytorch.callbacks.ModelCheckpoint(every_n_train_steps=steps, dirpath=root / "own")
    trainer = L.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy="ddp",
        logger=False,
        callbacks=[saves],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    megaresume.attach(trainer, checkpoints=checkpoints)
    trainer.fit((Hooked if way in ("hook", "trained-unseen") else Module)(), loader(), ckpt_path="last")
    return losses


WAYS = {
    loop: ("fsdp2", "ddp", "off", "teacher", "whole", "trained", "trained-unseen"),
    deepspeed: ("0", "2", "3", "light", "whole", "trained", "trained-unseen"),
    accelerate: ("hooks", "whole", "trained", "trained-unseen"),
    lightning: ("light", "hook", "whole", "trained", "trained-unseen"),
}


def main(name: str, root: Path, *again: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train = globals()[name]
    count, summarize = 0, frozen.summarize

    def counted(*args: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        return summarize(*args, **more)

    frozen.summarize = counted
    for way in WAYS[train]:
        directory, found = root / way, []
        checkpoints = Checkpoints(save_dir=directory, compare_frozen=way != "off")
        for seed, steps in [(2, AFTER), (1, AFTER)] if again else [(1, BEFORE), (2, AFTER), (1, AFTER)]:
            count = 0
            try:
                found.append([train(directory, way, seed, steps, checkpoints), count])
            except (CheckpointError, StateError) as error:
                found.append([error.headline, count])
        if dist.get_rank() == 0:
            print(f"RESULT {way} {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
