"""The data of a Hugging Face Trainer: the loader described by its settings, how its items become a batch,
`CountedBatches`, which it reads from, and the callback that reports its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.item_options import ItemOptions
from megaresume.batches.items import flatten
from megaresume.batches.map_style import check_map_style
from megaresume.checkpoint.records.names import records_dir
from megaresume.hosts.attach import kind_of, refuse
from megaresume.hosts.hugging_face_families import gives_all_columns
from megaresume.hosts.options import unknown_option
from megaresume.hosts.steps import Steps
from megaresume.hosts.trainer import check_together
from megaresume.stream.errors import UsageError

#: options of `megaresume.DataLoader`, with the equivalent TrainingArguments.
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
    "save_dir": "output_dir",
    "keep_last": "save_total_limit",
}


def loader_of(trainer: Any, data: Any, options: ItemOptions) -> DataLoader:
    """The loader described by the Trainer's settings, with further options of `DataLoader`."""
    from transformers.trainer_utils import seed_worker

    _check_options(options)
    _check_datasets(trainer, data)
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
        # Items that wait for space would never be trained.
        max_epochs=_whole_epochs(args) if packed and not (isinstance(data, Mapping) and len(data) > 1) else None,
        dp_rank=args.process_index,
        dp_size=args.world_size,
        **options,
    ).made_by("megaresume.attach", takes_contents=True)


def _lengths(trainer: Any, data: Any) -> Any:
    """Where the Trainer would look up the length of an item: a column, or the first input of its model."""
    column, processing = trainer.args.length_column_name, trainer.processing_class
    if column in (getattr(data, "column_names", None) or ()):
        return column
    return InputLength("input_ids" if processing is None else processing.model_input_names[0])


class InputLength:
    """The length of an item, as the length of one of its inputs.

    Args:
        key: of the input.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        #: part of the name of the file in which lengths are saved.
        self.__qualname__ = f"InputLength({key})"

    def __call__(self, item: Mapping[str, Any]) -> int:
        return len(item[self._key])


def _whole_epochs(args: Any) -> int | None:
    """The number of epochs of the run; None if it ends with a step, or in the middle of an epoch."""
    epochs = float(args.num_train_epochs)
    return int(epochs) if args.max_steps <= 0 and epochs.is_integer() and epochs > 0 else None


def _check_options(options: ItemOptions) -> None:
    known = [name for name in ItemOptions.__annotations__ if name not in _OF_THE_TRAINER]
    for name, value in options.items():
        if name not in known:
            setting = _OF_THE_TRAINER.get(name)
            action = None if setting is None else f"set {setting} of TrainingArguments"
            raise unknown_option(
                "attach(trainer", name, value, ["data", "checkpoints", "stop", "metrics", *known], action=action
            )


def _check_datasets(trainer: Any, data: Any) -> None:
    """Refuse a dataset without items by number, in the Trainer's words."""
    if isinstance(data, Mapping):
        pairs = [(name, value) for name, value in data.items() if isinstance(value, tuple) and value]
        datasets = {f"dataset '{name}'": value[0] for name, value in pairs}
    else:
        datasets = {"train_dataset" if data is trainer.train_dataset else "data=": data}
    for what, one in datasets.items():
        check_map_style(one, what, takes_others=False)


# What is refused


def check_settings(trainer: Any) -> None:
    """Refuse settings that would change the order, or that are not known to work.

    Raises:
        UsageError: names the first one, and what to do instead.
    """
    args: Any = trainer.args
    accelerator = args.accelerator_config
    optim = str(getattr(args.optim, "value", args.optim))  # those that step in the backward pass have no state_dict
    leave = "leave it out"
    refused = {
        "train_sampling_strategy": (
            args.train_sampling_strategy not in ("random", "group_by_length") and args.train_sampling_strategy,
            "the order is megaresume's: random, or group_by_length",
        ),
        "dataloader_drop_last": (
            args.dataloader_drop_last,
            f"{leave}: no batch is short before the end of the run",
        ),
        "split_batches": (accelerator.split_batches, f"{leave}, and divide the batch size by the number of ranks"),
        "dispatch_batches": (accelerator.dispatch_batches, f"{leave}: every rank reads its own items"),
        "auto_find_batch_size": (args.auto_find_batch_size, f"{leave}, and set per_device_train_batch_size"),
        "dataloader_in_order=False": (not getattr(args, "dataloader_in_order", True), leave),
        "save_only_model": (
            args.save_only_model,
            f"{leave}: without the optimizer, no run can resume from the checkpoint",
        ),
        "optim": (
            (optim.endswith("layerwise") or optim == "adalomo") and optim,
            "another optimizer: what this one keeps is in no checkpoint, so a resume would start it afresh",
        ),
        "load_best_model_at_end with save_total_limit": (
            args.load_best_model_at_end and args.save_total_limit is not None,
            "leave save_total_limit out: it could delete the best checkpoint",
        ),
        "tensor, context or sequence parallelism": (
            trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1,
            "train with DDP, DeepSpeed or FSDP",
        ),
        "fsdp with XLA": (
            getattr(trainer, "is_fsdp_xla_enabled", False),
            "train with DDP or FSDP2: it was not tried",
        ),
    }
    refuse(refused, expected="not set")


def check_processes(trainer: Any) -> None:
    """See `check_together`, for processes as counted by transformers."""
    check_together(
        trainer.args.world_size,
        "TrainingArguments.world_size",
        cause="no GPU is visible, and the Trainer was not told to use the CPU",
        action="TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=1; on a GPU machine check nvidia-smi",
    )


# How items become a batch

Collate = Callable[[list[Any]], Any]


def collator(trainer: Any) -> Collate:
    """The Trainer's own collator, without the columns that its model does not accept."""
    if gives_all_columns(trainer):
        return trainer.data_collator  # type: ignore[no-any-return]  # makes the model's inputs of all columns
    collate: Collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
    return collate


def packing_collator(trainer: Any) -> Collate:
    """The function that makes one row of packed items: `flatten`, or the user's collator for the Trainer.

    Raises:
        UsageError: it pads: packed items would be put side by side.
    """
    from transformers import default_data_collator
    from transformers.data import data_collator as theirs

    given = trainer.data_collator
    if given is default_data_collator or type(given) is theirs.DataCollatorWithPadding:
        return flatten
    pads = isinstance(given, theirs.DataCollatorMixin | theirs.DataCollatorForSeq2Seq | theirs.DataCollatorWithPadding)
    if isinstance(given, theirs.DataCollatorWithFlattening) or getattr(given, "padding_free", not pads):
        return OneRow(collator(trainer))
    if any(base.__module__ == "trl.trainer.sft_trainer" for base in type(trainer).__mro__):
        raise _pads(kind_of(given), "SFTConfig(padding_free=True, max_length=None): TRL's collator then makes one row")
    raise _pads(kind_of(given))


class OneRow:
    """A user's collator, of which it is unknown whether it pads.

    Args:
        collate: turns the items of a batch into one row.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        """Raises UsageError: there is more than one row."""
        batch = self._collate(items)
        rows = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if rows is not None and len(rows) > 1 and getattr(rows, "ndim", 2) > 1:
            raise _pads(f"{len(rows)} rows of {len(items)} items")
        return batch


_LEAVE_OUT = "leave data_collator out: labels are then those of the items, or their input_ids"


def _pads(found: str, action: str = _LEAVE_OUT) -> UsageError:
    return UsageError(
        "this data_collator pads, and seq_length packs",
        found=f"data_collator: {found}",
        expected="none; DataCollatorWithFlattening; or a function that makes one row of the items of a batch",
        cause="the items of a packed sample would be laid side by side, each padded to the longest",
        action=action,
    )


class CountedBatches:
    """The batches that the Trainer iterates over instead of the loader."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps.feed.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["steps"].feed.loader, name)


def callback_of(host: Any) -> Any:
    """A callback that tells a `TransformersHost` when a step was done."""
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):
        """Reports every step that was done."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.steps.changed()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.stepped()

    return StepEnd()
