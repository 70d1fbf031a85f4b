"""What of a Lightning Trainer's settings would be other data, or is not known to work."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.hosts.instances import check_new, kind_of, refuse
from megaresume.stream.errors import UsageError

#: of which a Trainer may be: one library under two names.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: that were tried.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def check_trainer(trainer: Any, *, stops: bool) -> str:
    """Refuse a Trainer whose settings are not known to work; returns the package that it is of.

    Args:
        stops: whether the run stops in time by itself: then Lightning listens to no signal.

    Raises:
        UsageError: naming the setting, and the way out.
    """
    modules = [base.__module__ for base in type(trainer).__mro__]
    package = next(name for name in _PACKAGES if f"{name}.trainer.trainer" in modules)
    version = importlib.import_module(package).__version__
    if tuple(int(number) for number in version.split(".")[:2]) < (2, 6):
        raise UsageError(
            "this version of Lightning has other loops",
            found=f"lightning {version}",
            expected="lightning 2.6 or later; 2.6.6 was tried",
            action="pip install --upgrade 'megaresume[lightning]'",
        )
    check_new(trainer, "Trainer")
    strategies = importlib.import_module(f"{package}.strategies")
    strategy, io = trainer.strategy, trainer.strategy.checkpoint_io
    environment = trainer._accelerator_connector.cluster_environment
    leave = "leave it out"
    refused = {
        "overfit_batches": (trainer.overfit_batches, "torch.utils.data.Subset of the dataset"),
        "limit_train_batches": (
            trainer.limit_train_batches not in (None, 1.0) and trainer.limit_train_batches,
            "max_steps for the length of the run; val_check_interval=N, check_val_every_n_epoch=None to validate after "
            "every N batches; torch.utils.data.Subset to train fewer items",
        ),
        "reload_dataloaders_every_n_epochs": (
            trainer.reload_dataloaders_every_n_epochs,
            f"{leave}; a dataset that grows between two starts: DataLoader(append=...)",
        ),
        "this strategy": (
            type(strategy) not in [getattr(strategies, name) for name in _STRATEGIES] and type(strategy).__qualname__,
            f"one of {', '.join(_STRATEGIES)}",
        ),
        "FSDPStrategy(state_dict_type='full')": (
            getattr(strategy, "_state_dict_type", None) == "full",
            "state_dict_type='sharded', or ModelParallelStrategy (FSDP2): it was not tried, as torch 2.13 crashes with "
            "it on CPUs",
        ),
        "load_full_weights of DeepSpeed": (
            getattr(strategy, "load_full_weights", False),
            f"{leave}: it leaves the optimizer's state out",
        ),
        "DDP without a process for each script": (
            getattr(strategy, "_start_method", "popen") != "popen" and strategy._start_method,
            "strategy='ddp'",
        ),
        "AsyncCheckpointIO": (type(io).__name__ == "AsyncCheckpointIO", f"{leave}: checksums are made in background"),
        "Slurm's automatic requeue of Lightning's": (
            not stops and getattr(environment, "auto_requeue", False) and "SLURMEnvironment(auto_requeue=True)",
            "megaresume.attach(trainer, stop=megaresume.StopConditions()), which saves at the end of a step; the "
            "launch script requeues. Or Trainer(plugins=[SLURMEnvironment(auto_requeue=False)])",
        ),
    }
    refuse(refused)
    return package


def check_fit(trainer: Any, package: str, loader: Any) -> None:
    """Refuse what would be other data, as far as it is known only when a fit begins.

    Raises:
        UsageError: naming the setting, and the way out.
    """
    if not isinstance(loader, DataLoader):
        raise UsageError(
            "megaresume.attach needs a loader of megaresume's",
            found=f"{kind_of(loader)}, given to fit or made by train_dataloader",
            expected="one megaresume.DataLoader",
            cause="a loader of torch's, several loaders, or a stream",
            action="megaresume.DataLoader(dataset, batch_size) around a map-style dataset, or around several: "
            "{name: (dataset, weight)}; a StreamLoader in a loop of your own",
        )
    refuse(_of_callbacks(trainer, importlib.import_module(f"{package}.callbacks")))
    module = trainer.lightning_module
    accumulation = trainer.accumulate_grad_batches
    ranks, own = f"rank {trainer.global_rank} of {trainer.world_size}", f"rank {loader.dp_rank} of {loader.dp_size}"
    ends = [s.max_epochs for s in loader.stream.config.sources if s.max_epochs is not None]
    epochs = trainer.fit_loop.max_epochs
    refused: dict[str, tuple[Any, str]] = {
        "a loader of other ranks": (
            own != ranks and f"{own}; the Trainer's is {ranks}",
            "megaresume.DataLoader(dp_rank=trainer.global_rank, dp_size=trainer.world_size); or make it in "
            "train_dataloader(), where they are known",
        ),
        "accumulate_grad_batches other than the loader's": (
            module.automatic_optimization
            and accumulation != loader.accumulation
            and f"{accumulation}, and accumulation={loader.accumulation}",
            "give Trainer(accumulate_grad_batches=...) and DataLoader(accumulation=...) the same number",
        ),
        "max_epochs other than the loader's": (
            epochs != -1 and ends and min(ends) < epochs and f"{epochs}, and DataLoader(max_epochs={min(ends)})",
            "leave DataLoader(max_epochs=...) out: the Trainer ends the run",
        ),
        "max_steps beyond the loader's max_epochs": (
            module.automatic_optimization
            and ends
            and (trainer.max_steps - 1) * loader.step_samples >= min(ends) * loader.items
            and f"{trainer.max_steps} of {loader.step_samples} samples, and DataLoader(max_epochs={min(ends)})",
            "leave DataLoader(max_epochs=...) out, or train fewer steps",
        ),
        "tensor parallelism": (
            getattr(trainer.strategy, "_tensor_parallel_size", 1) > 1,
            "ModelParallelStrategy(data_parallel_size=..., tensor_parallel_size=1): these ranks need the same "
            "batches, and each would get its own",
        ),
        "a last step that may be short, under DeepSpeed,": (
            getattr(trainer.strategy, "handles_gradient_accumulation", False)
            and loader.accumulation > 1
            and trainer.max_steps == -1
            and not loader.drop_last
            and loader.items % loader.step_samples
            and f"{loader.items} items, {loader.step_samples} in a step",
            "DataLoader(drop_last=True), or Trainer(max_steps=...): Lightning leaves it to DeepSpeed, which does not "
            "make it",
        ),
        "dataloader_iter": (
            "dataloader_iter" in inspect.signature(module.training_step).parameters and "an argument of training_step",
            "training_step(self, batch, batch_idx)",
        ),
    }
    refuse(refused)


def _of_callbacks(trainer: Any, kinds: Any) -> dict[str, tuple[Any, str]]:
    """Those that change what a step is, or save in the middle of one."""
    elsewhere = "in a Trainer of its own, without megaresume.attach"
    refused = {
        "GradientAccumulationScheduler": "Trainer(accumulate_grad_batches=...), one number",
        "StochasticWeightAveraging": "WeightAveraging or EMAWeightAveraging, which add no epoch",
        "LearningRateFinder": elsewhere,
        "BatchSizeFinder": elsewhere,
        "OnExceptionCheckpoint": "leave it out: an exception may come in the middle of a step; save more often",
    }
    found: dict[str, tuple[Any, str]] = {
        name: (any(isinstance(one, getattr(kinds, name)) for one in trainer.callbacks) and "a callback", action)
        for name, action in refused.items()
        if hasattr(kinds, name)
    }
    savers = trainer.checkpoint_callbacks
    found["save_on_exception"] = (
        any(getattr(one, "save_on_exception", False) for one in savers) and "of a ModelCheckpoint",
        refused["OnExceptionCheckpoint"],
    )
    found["a remote dirpath"] = (
        next((str(one.dirpath) for one in savers if "://" in str(getattr(one, "dirpath", ""))), None),
        "a local one; megaresume.Checkpoints(stage_to=...) copies complete checkpoints",
    )
    return found
