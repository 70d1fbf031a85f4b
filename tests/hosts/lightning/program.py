"""A program with Lightning's Trainer, and what it trains written down: run by tests in their own process, or as

    torchrun ... program.py DIRECTORY JSON-OPTIONS

The recorder stands in the training step and reads the number of an item from its tokens; it shares no code with
megaresume.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.accelerators.cuda import CUDAAccelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import megaresume
from megaresume.checkpoint.load.choose import choose
from tests.hosts.torch.program import BASE, Model, Numbers, without_shared_memory, write_down

warnings.filterwarnings("ignore", module="lightning")


class Texts(Numbers):
    """The same, as texts to pack."""

    def __getitem__(self, i: int) -> Any:
        return {"input_ids": super().__getitem__(i).tolist()}


class Module(L.LightningModule):
    """It writes down the items of every training step, and may be killed: at (``step`` or ``save``, N)."""

    def __init__(self, directory: Path, attempt: int = 1, kill: tuple[str, int] = ("", 0)) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.model = Model()
        del self.model.unused  # DDP would wait for its gradients
        self.directory, self.attempt, self.kill = directory, attempt, kill
        #: called after each micro-batch.
        self.watch: Callable[[], None] | None = None
        #: steps after which it was evaluated.
        self.validated: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if isinstance(batch, dict):  # packed
            batch = batch["input_ids"].reshape(-1, 2)
        loss: torch.Tensor = self.model(batch)
        step, items = self.trainer.global_step + 1, (batch[:, 0] * BASE + batch[:, 1]).tolist()
        line = {"attempt": self.attempt, "step": step, "items": items, "loss": loss.item(), "batch": batch_idx}
        write_down(self.directory, self.global_rank, **line, epoch=self.current_epoch)
        if self.kill == ("save", step):
            die_in_the_next_save()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        if self.kill == ("step", self.trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.watch is not None:
            self.watch()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 0 and not self.trainer.sanity_checking:
            self.validated.append(self.trainer.global_step)
        self.log("loss", self.model(batch) + torch.rand(()), sync_dist=True)

    def configure_model(self) -> None:
        if self._trainer is not None and isinstance(self.trainer.strategy, ModelParallelStrategy):
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def die_in_the_next_save() -> None:
    """With a part of the file written."""

    def save(_state: Any, file: Any, **_: Any) -> None:
        if hasattr(file, "write"):  # else it is a path
            file.write(b"PK")
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save


class CPUs(CUDAAccelerator):
    """Lightning shards models over GPUs alone; FSDP and DeepSpeed run on CPUs."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        return devices

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        return [torch.device("cpu", number) for number in range(devices)]

    @staticmethod
    def auto_device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

    def setup_device(self, device: torch.device) -> None:
        pass

    def setup(self, trainer: L.Trainer) -> None:
        pass

    def teardown(self) -> None:
        pass


def sharded(kind: str) -> dict[str, Any]:
    """The options of a strategy: ``fsdp-sharded``, ``fsdp2-full``, ``fsdp2-sharded``, ``zero1`` to ``zero3``."""
    if kind.startswith("zero"):
        without_shared_memory()
        config = {"zero_optimization": {"stage": int(kind[4:])}, "zero_allow_untested_optimizer": True}
        strategy: Any = DeepSpeedStrategy(config=config, process_group_backend="gloo")
    elif kind.startswith("fsdp2"):
        strategy = ModelParallelStrategy(
            data_parallel_size=int(os.environ["WORLD_SIZE"]),
            tensor_parallel_size=1,
            save_distributed_checkpoint=kind == "fsdp2-sharded",
            process_group_backend="gloo",
        )
    else:
        begin = FullyShardedDataParallel.__init__

        def on_cpu(self: Any, *args: Any, **more: Any) -> None:
            begin(self, *args, **more | {"device_id": torch.device("cpu")})

        FullyShardedDataParallel.__init__ = on_cpu
        strategy = FSDPStrategy(state_dict_type=kind[5:], process_group_backend="gloo")
    return {"strategy": strategy, "accelerator": CPUs()}


def trainer_of(directory: Path, sharding: str | None = None, **options: Any) -> L.Trainer:
    """A quiet one, on as many CPUs as there are ranks."""
    options |= sharded(sharding) if sharding else {}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    layout = {"accelerator": "cpu", "devices": ranks, "strategy": "ddp" if ranks > 1 else "auto"}
    return L.Trainer(**quiet | layout | {"default_root_dir": directory.with_name("lightning")} | options)


def loader(**options: Any) -> Any:
    """Of batches of 4."""
    return megaresume.DataLoader(Numbers(), **{"batch_size": 4} | options)


def attached(directory: Path, *callbacks: Any, **options: Any) -> L.Trainer:
    """A Trainer of 6 steps, attached."""
    trainer = trainer_of(directory, **{"callbacks": list(callbacks), "max_steps": 6} | options)
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(save_dir=directory))
    return trainer


def newest(directory: Path) -> int | None:
    """The step of the newest complete checkpoint."""
    choice = choose(directory)
    return None if choice is None else choice.iteration


def run(
    directory: Path,
    *,
    attempt: int = 1,
    kill: tuple[str, int] = ("", 0),
    data: Any = Numbers(),  # noqa: B008
    batch: int = 4,
    accumulation: int = 2,
    epochs: int = 3,
    save_every: int = 5,
    saver: dict[str, Any] | None = None,
    ckpt: Any = "last",
    validate: bool = False,
    trainer: dict[str, Any] | None = None,
    checkpoints: dict[str, Any] | None = None,
    stop: Any = None,
    watch: Callable[[L.Trainer], None] | None = None,
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> L.Trainer:
    """Train to the end; the record lies beside the directory."""
    links = directory.with_name("links")
    callback = ModelCheckpoint(links, **{"every_n_train_steps": save_every, "save_top_k": -1} | (saver or {}))
    made = trainer_of(
        directory,
        callbacks=[callback, *callbacks],
        **{"max_epochs": epochs, "accumulate_grad_batches": accumulation} | (trainer or {}),
    )
    megaresume.attach(made, checkpoints=megaresume.Checkpoints(save_dir=directory, **checkpoints or {}), stop=stop)
    module = Module(directory, attempt, kill)
    if watch is not None:
        module.watch = lambda: watch(made)
    layout = {"dp_rank": made.global_rank, "dp_size": made.world_size}
    loader = megaresume.DataLoader(data, batch_size=batch, accumulation=accumulation, **layout | options)
    held_out = torch.utils.data.DataLoader(Numbers(8), batch_size=4) if validate else None
    made.fit(module, loader, held_out, ckpt_path=ckpt)
    return made


if __name__ == "__main__":
    torch.set_num_threads(1)
    asked = json.loads(sys.argv[2])
    # With torchrun --max-restarts the ranks start again, and only the first time they are killed.
    if restarts := int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        asked |= {"attempt": 1 + restarts, "kill": ("", 0)}
    run(Path(sys.argv[1]), kill=tuple(asked.pop("kill", ("", 0))), **asked)
