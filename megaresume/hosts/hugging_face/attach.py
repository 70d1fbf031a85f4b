"""`attach_trainer`: exact data resume for Hugging Face's Trainer.

    trainer = Trainer(model, args, train_dataset=dataset, ...)
    megaresume.attach_trainer(trainer)
    trainer.train(resume_from_checkpoint=True)

See docs/hugging-face.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
from dataclasses import replace
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.hosts.hugging_face.hooks import HOOKED, Hooks
from megaresume.hosts.hugging_face.host import TrainerHost
from megaresume.hosts.torch.feeds import Items
from megaresume.hosts.torch.loop import open_session
from megaresume.session.ranks import on_all_ranks
from megaresume.session.settings import Checkpoints
from megaresume.session.stopping import StopConditions
from megaresume.stream.config import Append, OnChange
from megaresume.stream.errors import UsageError

#: where a Trainer keeps what is attached to it.
_SLOT = "_megaresume"


def attach_trainer(
    trainer: Any,
    data: Any = None,
    *,
    append: Append | None = None,
    on_change: OnChange = "refuse",
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
) -> DataLoader:
    """Give a Trainer its data in an exact order, and its checkpoints the state of that data. Call it on every rank,
    before ``trainer.train``.

    Batch size, workers and collator are the Trainer's; the seed of the order is its ``data_seed``, or ``seed``. With
    ``resume_from_checkpoint=True`` it goes on from the newest complete checkpoint of ``output_dir``, or begins if there
    is none. ``save_total_limit`` keeps the newest so many complete ones.

    Args:
        trainer: transformers' Trainer, or of a class made from it.
        data: a map-style dataset, or several: ``{name: (dataset, weight)}``; None: its ``train_dataset``.
        append: what a resume does if a dataset has grown: see `megaresume.DataLoader`.
        on_change: what a resume does if weights or datasets changed: ``refuse`` it, or begin a ``stage`` there.
        checkpoints: what is kept besides the newest, how often a save is tried, and so on. The Trainer's own settings
            say where it saves, and how many it keeps.
        stop: when to save and exit, with `megaresume.Stopped`.

    Returns:
        the loader, which the Trainer reads from.

    Raises on every rank:
        UsageError: a setting under which the order would be another one, by name; or attached already.
        CheckpointError: another job writes to ``output_dir``.
    """
    on_all_ranks(lambda: check_trainer(trainer))
    args = trainer.args
    checkpoints = on_all_ranks(lambda: _of_trainer(checkpoints, args))
    data = trainer.train_dataset if data is None else data
    loader = on_all_ranks(lambda: _loader(trainer, data, append=append, on_change=on_change))
    host = TrainerHost(trainer, loader)
    session = open_session(
        host, Items(loader), checkpoints, args.device, stop, lambda: trainer._save_checkpoint(trainer.model, None)
    )
    setattr(trainer, _SLOT, Hooks(host, session))
    return loader


def _of_trainer(checkpoints: Checkpoints, args: Any) -> Checkpoints:
    """With what the Trainer's own settings say of directory and retention."""
    own = {
        "save_dir": ("output_dir", checkpoints.save_dir),
        "keep_last": ("save_total_limit", checkpoints.keep_last),
        "elastic": (None, checkpoints.elastic),
        "adopt": (None, checkpoints.adopt),
    }
    for name, (setting, found) in own.items():
        if found:
            raise UsageError(
                f"{name} cannot be used with attach_trainer",
                found=f"Checkpoints({name}={found!r})",
                expected="not set",
                action=f"set {setting} of TrainingArguments"
                if setting
                else "leave it out: it is for DeepSpeed engines",
            )
    return replace(checkpoints, save_dir=args.output_dir, keep_last=args.save_total_limit or None)


def _loader(trainer: Any, data: Any, *, append: Append | None, on_change: OnChange) -> DataLoader:
    from transformers.trainer_utils import seed_worker

    args = trainer.args
    return DataLoader(
        data,
        trainer._train_batch_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        collate_fn=trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training"),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=functools.partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        accumulation=args.gradient_accumulation_steps,
        append=append,
        on_change=on_change,
        dp_rank=args.process_index,
        dp_size=args.world_size,
    )


def check_trainer(trainer: Any) -> None:
    """Refuse what would be another order, or is not known to work.

    Raises:
        UsageError: naming the setting, and the way out.
    """
    from transformers import Trainer

    if not isinstance(trainer, Trainer):
        raise UsageError(
            "this is no Trainer",
            found=f"{type(trainer).__module__}.{type(trainer).__qualname__}",
            expected="a transformers.Trainer",
            action="megaresume.attach for a DeepSpeed engine; megaresume.DataLoader for a loop of your own",
        )
    if missing := [name for name in HOOKED if not hasattr(trainer, name)]:
        raise UsageError(
            "this version of transformers has another Trainer",
            found=f"transformers {importlib.metadata.version('transformers')}, without {', '.join(missing)}",
            expected="transformers 5.16 or later; 5.23 was tried",
            action="pip install --upgrade 'megaresume[hugging-face]'",
        )
    if getattr(trainer, _SLOT, None) is not None:
        raise UsageError("this Trainer has its data already", action="call attach_trainer once for each Trainer")
    args: Any = trainer.args
    accelerator = args.accelerator_config
    leave = "leave it out"
    refused = {
        "train_sampling_strategy": (
            args.train_sampling_strategy != "random" and args.train_sampling_strategy,
            "the order is megaresume's, and random; to make batches of like lengths, sort within collate_fn",
        ),
        "dataloader_drop_last": (args.dataloader_drop_last, f"{leave}: no batch is short before the end of the run"),
        "split_batches": (accelerator.split_batches, f"{leave}, and divide the batch size by the number of ranks"),
        "dispatch_batches": (accelerator.dispatch_batches, f"{leave}: every rank reads its own items"),
        "auto_find_batch_size": (args.auto_find_batch_size, f"{leave}, and set per_device_train_batch_size"),
        "dataloader_in_order=False": (not args.dataloader_in_order, leave),
        "load_best_model_at_end with save_total_limit": (
            args.load_best_model_at_end and args.save_total_limit is not None,
            "leave save_total_limit out: it could delete the best checkpoint",
        ),
        "deepspeed": (args.deepspeed, "megaresume.attach(engine, ...) in a loop of your own"),
        "fsdp": (args.fsdp, "train with DDP"),
        "tensor, context or sequence parallelism": (
            trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1,
            "train with DDP",
        ),
    }
    for name, (found, action) in refused.items():
        if found:
            raise UsageError(
                f"{name} cannot be used with attach_trainer",
                found=f"{name}: {found}",
                expected="not set",
                action=action,
            )
    for method, what in (("get_train_dataloader", "loader"), ("_get_train_sampler", "sampler")):
        if getattr(type(trainer), method) is not getattr(Trainer, method) or method in vars(trainer):
            raise UsageError(
                f"this Trainer has a {what} of its own",
                found=f"{type(trainer).__qualname__}.{method}",
                expected=f"transformers.Trainer.{method}",
                cause="a class that changes the order of the data, or a method that was replaced",
                action=f"remove {method}; weigh datasets by data={{name: (dataset, weight)}}",
            )
