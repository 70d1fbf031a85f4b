"""Lightning's Trainer, as needed by its host.

check_trainer, check_fit, check_kind    refuse settings that would change the data, or are not known to work
saves_itself                            whether the program may save weights in a hook
CountedBatches                          what it reads from
callback_of                             reports its steps
exactly, make_room, link                the paths that it saves to: links to the file of a complete checkpoint, which
                                        they outlive
"""

from __future__ import annotations

import importlib
import inspect
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.chooser import Pick
from megaresume.checkpoint.file_errors import writing
from megaresume.checkpoint.load.search import Choice, ForeignCheckpoint
from megaresume.checkpoint.ranks import on_rank_0
from megaresume.checkpoint.session import Session
from megaresume.hosts.attach import check_new, kind_of, refuse
from megaresume.hosts.steps import Steps
from megaresume.stream.errors import CheckpointError, StateError, UsageError

#: in a tag directory: a file, or under DeepSpeed and with sharded checkpoints a directory.
FILE = "checkpoint.ckpt"
#: the tag under DeepSpeed, in the directory `FILE`, by Lightning's name.
DEEPSPEED = "checkpoint"
#: our key in what Lightning saves.
KEY = "megaresume"

#: packages of a Trainer: one library under two names.
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")

#: strategies that were tried.
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy")


def check_trainer(trainer: Any, *, stops: bool) -> str:
    """Refuse a Trainer with settings that are not known to work; returns its package.

    Args:
        stops: whether the run stops in time itself: then Lightning must not listen to signals.

    Raises:
        UsageError: names the setting, and what to do instead.
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
    """Refuse what would change the data, as far as it is only known when a fit begins.

    Raises:
        UsageError: names the setting, and what to do instead.
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


def check_kind(strategy: Any, choice: Choice, engine: Any, begin_anew: str) -> None:
    """Refuse a checkpoint that this strategy would not load, or not completely.

    Args:
        engine: DeepSpeed's; None: another strategy.
        begin_anew: how to start without the data state of that run.

    Raises:
        CheckpointError: such a checkpoint.
    """
    path = choice.tag_dir / FILE
    wrote = "DeepSpeed" if (path / DEEPSPEED).is_dir() else "sharded FSDP" if path.is_dir() else "one file"
    takes = ["DeepSpeed"] if engine is not None else ["one file"]
    if hasattr(strategy, "_state_dict_type") or hasattr(strategy, "_save_distributed_checkpoint"):
        takes.append("sharded FSDP")
    if wrote not in takes:
        raise CheckpointError(
            "this strategy of Lightning's does not load such a checkpoint",
            found=f"{path}, written as: {wrote}; {type(strategy).__qualname__} now",
            expected=" or ".join(takes),
            cause="Trainer(strategy=...) was changed between save and resume",
            action=f"train with the strategy that wrote it; or {begin_anew}",
        )


def saves_itself(trainer: Any) -> bool:
    """Whether an ``on_save_checkpoint`` that is not Lightning's own, and may put weights somewhere else, is called."""
    owners = [trainer.lightning_module, trainer.datamodule, *trainer.callbacks]
    hooks = [getattr(type(one), "on_save_checkpoint", None) for one in owners]
    own = ("lightning.", "pytorch_lightning.", "megaresume.")
    return any(hook is not None and not hook.__module__.startswith(own) for hook in hooks)


def _of_callbacks(trainer: Any, kinds: Any) -> dict[str, tuple[Any, str]]:
    """Callbacks that change what a step is, or save in the middle of one."""
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


def exactly(session: Session, root: Path, path: Path) -> Pick:
    """A pick of the checkpoint that a path belongs to, or is a link to."""

    def pick(shared: Any, damaged: Any) -> Choice | ForeignCheckpoint | None:
        of_path = (file.parent for file in root.glob(f"*/{FILE}") if _same(file, path) or _same(file.parent, path))
        if (tag_dir := next(of_path, None)) is None:
            raise UsageError(
                "this is not a complete checkpoint of the run",
                found=str(path),
                expected=f"a directory in {root}, or the file in it, or a link to it",
                cause="it was saved in the middle of a step, copied, or written without megaresume; or the "
                "checkpoint that it was a link to is deleted (keep_last)",
                action="ckpt_path='last'; or read its weights alone, with YourModule.load_from_checkpoint",
            )
        return session.exactly(tag_dir)(shared, damaged)

    return pick


def _same(file: Path, path: Path) -> bool:
    """Whether both are the same file or directory, or directories with the same first file."""
    try:
        if os.path.samefile(file, path):
            return True
        first, other = (next(iter(sorted(p for p in one.rglob("*") if p.is_file())), None) for one in (file, path))
        return first is not None and other is not None and os.path.samefile(first, other)
    except OSError:
        return False


def make_room(path: Any) -> None:
    """Remove a path: Lightning would write into an existing directory, whose files may be links to a checkpoint's."""
    on_rank_0(lambda: _remove(Path(path)) if os.path.isdir(path) else None)


def link(file: Path, paths: Sequence[Path]) -> None:
    """Link paths to the file of a checkpoint, so that it survives deletion of the checkpoint."""
    for path in paths:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            _remove(new)
            if file.is_dir():
                shutil.copytree(file, new, copy_function=_link_file)
                _remove(path)  # a directory cannot replace another
            else:
                _link_file(file, new)
            os.replace(new, path)


def _link_file(file: str | Path, new: str | Path) -> None:
    try:
        os.link(file, new)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, new)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


class CountedBatches:
    """The micro-batches of this rank, with the length of the current epoch.

    Lightning takes it for a loader that saves its own state, and so does not warn that it cannot be resumed. Its data
    state is elsewhere in the checkpoint, and is checked there.

    Args:
        steps: see `Steps`.
        length: number of micro-batches in an epoch.
    """

    def __init__(self, steps: Steps, length: int) -> None:
        self.steps, self.length = steps, length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def __len__(self) -> int:
        return self.length

    def state_dict(self) -> dict[str, Any]:
        """Empty: see `LightningHost.write`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: see `LightningHost.read`."""


def not_made(step: int) -> StateError:
    """The error for an optimizer step that the model or the strategy has skipped."""
    return StateError(
        "Lightning counted an optimizer step that was not made",
        found=f"no optimizer step after the micro-batches of step {step}",
        expected="one after each",
        cause="optimizer_step of the model or of the strategy left it out",
        action="call optimizer.step(closure=closure) each time; to leave the parameters as they are, "
        "optimizer.zero_grad() in on_before_optimizer_step",
    )


def in_the_middle(counted: int, accumulation: int) -> StateError:
    """The error for a data step that is longer than an optimizer step."""
    return StateError(
        "an optimizer made a step in the middle of a step of the data",
        found=f"global_step {counted}, with fewer micro-batches than the loader has in a step "
        f"(accumulation={accumulation})",
        expected="optimizer steps at the last micro-batch of each",
        action="megaresume.DataLoader(accumulation=...): the number of micro-batches that training_step takes for an "
        "optimizer step",
    )


def callback_of(host: Any) -> Any:
    """A callback that tells a `LightningHost` of steps."""
    base = importlib.import_module(f"{host.module}.callbacks").Callback

    class DataResume(base):  # type: ignore[misc, valid-type]
        """The callback by which the Trainer reports its steps."""

        # Lightning profiles each call of a hook, even an empty one, but skips what cannot be called.
        on_train_batch_start: Any = None
        on_after_backward: Any = None
        on_before_optimizer_step: Any = None
        on_before_zero_grad: Any = None

        def on_train_start(self, *args: Any, **kwargs: Any) -> None:
            if host.session.meter is None:
                self.__dict__["on_before_backward"] = None  # nobody needs the loss

        def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
            host.note_loss(loss, is_scaled=True)

        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            host.step_ends()

        def on_validation_end(self, *args: Any, **kwargs: Any) -> None:
            host.put_generators()

        def on_train_end(self, *args: Any, **kwargs: Any) -> None:
            host.save_if_due(is_over=True)

    return DataResume()
