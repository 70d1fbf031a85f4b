"""Exact data resume for Hugging Face's Trainer.

    trainer = Trainer(model, args, train_dataset=dataset, ...)
    megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=True)

See docs/hugging-face.md.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Unpack

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.items.options import ItemOptions
from megaresume.checkpoint.paths import records_dir
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.checkpoint.session.stopping import StopConditions
from megaresume.hosts.hugging_face.backends import check_backend
from megaresume.hosts.hugging_face.collators import collator, packing_collator
from megaresume.hosts.hugging_face.families import check_methods, let_epochs_end
from megaresume.hosts.hugging_face.hooks import HOOKED, Hooks
from megaresume.hosts.hugging_face.host import TrainerHost
from megaresume.hosts.instances import SLOT, check_new, refuse
from megaresume.hosts.torch.host import of_trainer
from megaresume.hosts.torch.loop import open_session
from megaresume.stream.errors import UsageError
from megaresume.stream.schema import near

#: of `megaresume.DataLoader`, and the setting of TrainingArguments that says the same.
_OF_THE_TRAINER = {
    "batch_size": "per_device_train_batch_size",
    "accumulation": "gradient_accumulation_steps",
    "seed": "data_seed",
    "max_epochs": "num_train_epochs",
    "num_workers": "dataloader_num_workers",
    "pin_memory": "dataloader_pin_memory",
    "persistent_workers": "dataloader_persistent_workers",
    "prefetch_factor": "dataloader_prefetch_factor",
    "group_by_length": "train_sampling_strategy",
}


def attach(
    trainer: Any,
    data: Any = None,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    **options: Unpack[ItemOptions],
) -> DataLoader:
    """Give a Trainer its data in an exact order, and its checkpoints the state of that data. Call it on every rank,
    before ``trainer.train``.

    Batch size, workers and collator are the Trainer's; the seed of the order is its ``data_seed``, or ``seed``. With
    ``resume_from_checkpoint=True`` it goes on from the newest complete checkpoint of ``output_dir``, or begins if there
    is none. ``save_total_limit`` keeps the newest so many complete ones.

    Args:
        trainer: transformers' Trainer, or of a class made from it.
        data: a map-style dataset, or several: ``{name: (dataset, weight)}``; None: its ``train_dataset``.
        checkpoints: what is kept besides the newest, how often a save is tried, and so on. The Trainer's own settings
            say where it saves, and how many it keeps.
        stop: when to save and exit, with `megaresume.Stopped`.
        options: as of `megaresume.DataLoader`: append, on_change, stages, skip, keyed; and to pack items, seq_length,
            packing, lengths, lengths_dir (default: in ``output_dir``) and blend. Packed items come without padding, by
            the Trainer's ``data_collator`` only if it is one that does not pad. With
            ``train_sampling_strategy="group_by_length"``: lengths and lengths_dir.

    Returns:
        the loader, which the Trainer reads from.

    Raises on every rank:
        UsageError: a setting under which the order would be another one, by name; or attached already.
        CheckpointError: another job writes to ``output_dir``.
    """
    on_all_ranks(lambda: _check_trainer(trainer))
    let_epochs_end(trainer)
    args = trainer.args
    args.output_dir = os.path.abspath(args.output_dir)  # the program may change its working directory
    own = ("output_dir", args.output_dir), ("save_total_limit", args.save_total_limit)
    checkpoints = on_all_ranks(lambda: of_trainer(checkpoints, save_dir=own[0], keep_last=own[1]))
    data = trainer.train_dataset if data is None else data
    loader = on_all_ranks(lambda: _loader(trainer, data, options))
    host = TrainerHost(trainer, loader)
    host.steps.session = open_session(
        host, host.steps.feed, checkpoints, args.device, stop, lambda: trainer._save_checkpoint(trainer.model, None)
    )
    setattr(trainer, SLOT, Hooks(host, host.steps.session))
    return loader


def _check_trainer(trainer: Any) -> None:
    """Refuse what would be another order, or is not known to work.

    Raises:
        UsageError: naming the setting, and the way out.
    """
    if missing := [name for name in HOOKED if not hasattr(trainer, name)]:
        raise UsageError(
            "this version of transformers has another Trainer",
            found=f"transformers {importlib.metadata.version('transformers')}, without {', '.join(missing)}",
            expected="transformers 5.6 or later",
            action="pip install --upgrade 'megaresume[hugging-face]'",
        )
    check_new(trainer, "Trainer")
    args: Any = trainer.args
    accelerator = args.accelerator_config
    leave = "leave it out"
    refused = {
        "train_sampling_strategy": (
            args.train_sampling_strategy not in ("random", "group_by_length") and args.train_sampling_strategy,
            "the order is megaresume's: random, or group_by_length",
        ),
        "dataloader_drop_last": (args.dataloader_drop_last, f"{leave}: no batch is short before the end of the run"),
        "split_batches": (accelerator.split_batches, f"{leave}, and divide the batch size by the number of ranks"),
        "dispatch_batches": (accelerator.dispatch_batches, f"{leave}: every rank reads its own items"),
        "auto_find_batch_size": (args.auto_find_batch_size, f"{leave}, and set per_device_train_batch_size"),
        "dataloader_in_order=False": (not getattr(args, "dataloader_in_order", True), leave),
        "save_only_model": (
            args.save_only_model,
            f"{leave}: without the optimizer, no run can go on from a checkpoint",
        ),
        "load_best_model_at_end with save_total_limit": (
            args.load_best_model_at_end and args.save_total_limit is not None,
            "leave save_total_limit out: it could delete the best checkpoint",
        ),
        "tensor, context or sequence parallelism": (
            trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1,
            "train with DDP, DeepSpeed or FSDP",
        ),
        "fsdp with XLA": (getattr(trainer, "is_fsdp_xla_enabled", False), "train with DDP or FSDP2: it was not tried"),
    }
    refuse(refused, expected="not set")
    check_backend(trainer.accelerator)
    check_methods(trainer)


def _loader(trainer: Any, data: Any, options: ItemOptions) -> DataLoader:
    from transformers.trainer_utils import seed_worker

    _check_options(options)
    args = trainer.args
    grouped = args.train_sampling_strategy == "group_by_length"
    if grouped:
        options = {"group_by_length": True, "lengths": _lengths(trainer, data), **options}
    if (packed := options.get("seq_length") is not None) or grouped:
        options = {"lengths_dir": records_dir(Path(args.output_dir)) / "lengths", **options}
    return DataLoader(
        data,
        trainer._train_batch_size,
        seed=args.seed if args.data_seed is None else args.data_seed,
        collate_fn=packing_collator(trainer) if packed else collator(trainer),
        num_workers=args.dataloader_num_workers,
        pin_memory=args.dataloader_pin_memory and args.device.type != "cpu",
        persistent_workers=args.dataloader_persistent_workers,
        prefetch_factor=args.dataloader_prefetch_factor,
        worker_init_fn=functools.partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
        accumulation=args.gradient_accumulation_steps,
        # Items that wait for a place would never be trained.
        max_epochs=_whole_epochs(args) if packed and not (isinstance(data, Mapping) and len(data) > 1) else None,
        dp_rank=args.process_index,
        dp_size=args.world_size,
        **options,
    ).made_by("megaresume.attach")


def _lengths(trainer: Any, data: Any) -> Any:
    """Where the Trainer would find how long items are: a column, or the first input of its model."""
    column, processing = trainer.args.length_column_name, trainer.processing_class
    if column in (getattr(data, "column_names", None) or ()):
        return column
    return InputLength("input_ids" if processing is None else processing.model_input_names[0])


class InputLength:
    """The length of an item: that of one of its inputs.

    Args:
        key: of the input.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        #: a part of the name of the file that lengths are kept in.
        self.__qualname__ = f"InputLength({key})"

    def __call__(self, item: Mapping[str, Any]) -> int:
        return len(item[self._key])


def _whole_epochs(args: Any) -> int | None:
    """Epochs with which the run ends; None: it ends with a step, or in the middle of an epoch."""
    epochs = float(args.num_train_epochs)
    return int(epochs) if args.max_steps <= 0 and epochs.is_integer() and epochs > 0 else None


def _check_options(options: ItemOptions) -> None:
    known = [name for name in ItemOptions.__annotations__ if name not in _OF_THE_TRAINER]
    for name in options:
        if name in known:
            continue
        setting = _OF_THE_TRAINER.get(name)
        raise UsageError(
            f"{name} cannot be used with megaresume.attach",
            found=f"megaresume.attach(trainer, {name}=...)",
            expected="the Trainer's own setting" if setting else f"one of {', '.join(known)}",
            cause=near(name, known),
            action=f"set {setting} of TrainingArguments" if setting else "leave it out",
        )
