"""The data of a Hugging Face Trainer: the loader that its settings describe, how its items become a batch, and which
Trainers of others leave the order of the data alone (LLaMA-Factory's, ms-swift's, Axolotl's, TRL's, Sentence
Transformers'); `CountedBatches`,
which it reads from, and the callback that reports its steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.item_options import ItemOptions
from megaresume.batches.items import flatten
from megaresume.checkpoint.records.names import records_dir
from megaresume.hosts.attach import kind_of, refuse
from megaresume.hosts.options import unknown_option
from megaresume.hosts.steps import Steps
from megaresume.hosts.trainer import check_together
from megaresume.stream.errors import UsageError

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
    "save_dir": "output_dir",
    "keep_last": "save_total_limit",
}


def loader_of(trainer: Any, data: Any, options: ItemOptions) -> DataLoader:
    """The loader that the Trainer's settings describe, with further options of `DataLoader`."""
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
    """The place where the Trainer would look up the length of an item: a column, or the first input of its model."""
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
    """Epochs with which the run ends; None if it ends with a step, or in the middle of an epoch."""
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


# What is refused


def check_settings(trainer: Any) -> None:
    """Refuse settings under which the order would be another one, or that are not known to work.

    Raises:
        UsageError: naming the first, and the way out.
    """
    args: Any = trainer.args
    accelerator = args.accelerator_config
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
    """See `check_together`, of processes that transformers counts."""
    check_together(
        trainer.args.world_size,
        "TrainingArguments.world_size",
        cause="no GPU is visible, and the Trainer was not told to use the CPU",
        action="TrainingArguments(use_cpu=True), or ACCELERATE_USE_CPU=1; on a GPU machine check nvidia-smi",
    )


# How items become a batch

Collate = Callable[[list[Any]], Any]


def collator(trainer: Any) -> Collate:
    """The Trainer's own, without the columns that its model does not take."""
    if is_of_sentence_transformers(trainer):
        return trainer.data_collator  # type: ignore[no-any-return]  # makes the model's inputs of all columns
    collate: Collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
    return collate


def packing_collator(trainer: Any) -> Collate:
    """The function that makes one row of packed items: `flatten`, or the Trainer's own collator if it was given one.

    Raises:
        UsageError: it pads: items that were packed would be laid side by side.
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
    """A collator of somebody else's, of which nothing else shows whether it pads.

    Args:
        collate: the items of a batch to one row.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        """Raises UsageError: more rows than one."""
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


# Trainers of others: a class with a sampler or a train loader of its own is refused, but for those that make one under
# certain settings alone.

SENTENCE_TRANSFORMERS = "sentence_transformers.base.trainer.BaseTrainer"

#: given a Trainer, what it says of the settings under which the method makes another order: name -> what is set.
Settings = Callable[[Any], Mapping[str, Any]]


def _llama_factory(trainer: Any) -> Mapping[str, Any]:
    return {"disable_shuffling": trainer.finetuning_args.disable_shuffling}


def _dpo(trainer: Any) -> Mapping[str, Any]:
    return {"precompute_ref_log_probs": trainer.precompute_ref_log_probs}


def _swift_loader(trainer: Any) -> Mapping[str, Any]:
    args = trainer.args
    return {
        "sequence_parallel_size": trainer.template.sequence_parallel_size > 1
        and trainer.template.sequence_parallel_size,
        "group_by_length": getattr(args, "group_by_length", False),
        "train_dataloader_shuffle=False": not args.train_dataloader_shuffle,
    }


def _swift_save(trainer: Any) -> Mapping[str, Any]:
    args = trainer.args
    return {
        "use_flash_ckpt": args.use_flash_ckpt,
        "resume_only_model": getattr(args, "resume_only_model", False),
        "lazy_tokenize without strict": _replaces_bad_items(trainer.train_dataset),
    }


def _replaces_bad_items(dataset: Any) -> str | None:
    """How a dataset of ms-swift replaces items that it cannot encode by others, at random; None if it does not.

    Items of known lengths were all encoded before, and those that cannot be are left out.
    """
    while dataset is not None:
        inner = getattr(dataset, "dataset", None)  # also of a dataset that packs
        if type(dataset).__name__ == "LazyLLMDataset" and dataset.n_try_fetch > 1:
            known = "lengths" in (getattr(inner, "column_names", None) or ())
            return None if known else "an item that is too long, or cannot be encoded, is replaced by another one"
        dataset = inner
    return None


def _axolotl(trainer: Any) -> Mapping[str, Any]:
    args = trainer.args
    return {name: getattr(args, name, False) for name in ("sample_packing", "curriculum_sampling")}


_SEVERAL, _OWN_PARAMETERS = "a train_dataset of several datasets", "a loss with parameters of its own"
#: what to do about a setting, if it is not to leave it out.
_WAYS_OUT = {
    _SEVERAL: "datasets.concatenate_datasets, if they have the same columns and one loss",
    _OWN_PARAMETERS: "take a loss whose parameters are all the model's: Sentence Transformers saves no others",
}


def is_of_sentence_transformers(trainer: Any) -> bool:
    """Whether it is a trainer of Sentence Transformers, for embeddings or a cross-encoder."""
    return any(_name_of(cls) == SENTENCE_TRANSFORMERS for cls in type(trainer).__mro__)


def _sentence_transformers_loader(trainer: Any) -> Mapping[str, Any]:
    named = f"{', '.join(data)}" if isinstance(data := trainer.train_dataset, Mapping) else None
    return {
        "batch_sampler": trainer.args.batch_sampler != "batch_sampler" and trainer.args.batch_sampler,
        _SEVERAL: named,
    }


def _sentence_transformers_save(trainer: Any) -> Mapping[str, Any]:
    saved = {id(parameter) for parameter in trainer.model.parameters()}
    losses = trainer.loss.values() if isinstance(trainer.loss, Mapping) else [trainer.loss]
    lost = [
        f"{type(loss).__name__}.{name}"
        for loss in losses
        for name, parameter in loss.named_parameters()
        if parameter.requires_grad and id(parameter) not in saved
    ]
    return {_OWN_PARAMETERS: ", ".join(lost)}


#: (module and class, method) -> when it is not as Trainer's own.
KNOWN: dict[tuple[str, str], Settings] = {
    ("llamafactory.train.pt.trainer.CustomTrainer", "_get_train_sampler"): _llama_factory,
    ("llamafactory.train.sft.trainer.CustomSeq2SeqTrainer", "_get_train_sampler"): _llama_factory,
    ("llamafactory.train.dpo.trainer.CustomDPOTrainer", "_get_train_sampler"): _llama_factory,
    ("trl.trainer.dpo_trainer.DPOTrainer", "get_train_dataloader"): _dpo,
    ("axolotl.core.trainers.base.AxolotlTrainer", "_get_train_sampler"): _axolotl,
    ("swift.trainers.mixin.DataLoaderMixin", "get_train_dataloader"): _swift_loader,
    ("swift.trainers.mixin.SwiftMixin", "_save_checkpoint"): _swift_save,
    (SENTENCE_TRANSFORMERS, "get_train_dataloader"): _sentence_transformers_loader,
    (SENTENCE_TRANSFORMERS, "_save"): _sentence_transformers_save,
}
#: methods that no other class may have, and what they make.
_GUARDED = {"get_train_dataloader": "loader", "_get_train_sampler": "sampler"}


def undo_settings(trainer: Any) -> None:
    """Undo what a program has set without being asked, and `check_settings` would refuse or a resume contradict."""
    config = getattr(trainer, "axolotl_cfg", None)
    if config is not None and not config.max_steps:
        trainer.args.max_steps = -1  # of num_train_epochs, by the batch size of today
    if is_of_sentence_transformers(trainer) and trainer.args.world_size > 1:
        trainer.args.dataloader_drop_last = False  # it always sets it under DDP


def check_methods(trainer: Any) -> None:
    """Refuse a Trainer with methods that make another order of the data, or another kind of checkpoint.

    Raises:
        UsageError: naming the method, or the setting under which it does.
    """
    from transformers import Trainer

    for method, what in _GUARDED.items():
        if method in vars(trainer):
            raise _refused(type(trainer), method, what)
    for cls in type(trainer).__mro__[: type(trainer).__mro__.index(Trainer)]:
        for method in vars(cls):
            known = KNOWN.get((_name_of(cls), method))
            if known is None and method in _GUARDED:
                raise _refused(cls, method, _GUARDED[method])
            for setting, found in (known(trainer) if known else {}).items():
                if found:
                    raise UsageError(
                        f"{setting} cannot be used with megaresume.attach",
                        found=f"{setting}: {found}",
                        expected="not set",
                        cause=f"{cls.__qualname__}.{method} then makes its own order, or its own checkpoint",
                        action=_WAYS_OUT.get(
                            setting, "leave it out; to pack items, megaresume.attach(trainer, seq_length=...)"
                        ),
                    )


# Callbacks: what one keeps to itself is in no checkpoint, unless it is transformers' ExportableState.

#: module and class -> (what to leave out, why).
_LOSING = {
    "trl.trainer.callbacks.SyncRefModelCallback": ("sync_ref_model", "the reference model changes"),
    "trl.trainer.callbacks.BEMACallback": ("BEMACallback", "it averages the weights of all steps"),
}


def check_callbacks(trainer: Any) -> None:
    """Refuse callbacks that change a model of which no checkpoint knows.

    Raises:
        UsageError: naming the callback, or the setting that adds it.
    """
    for callback in trainer.callback_handler.callbacks:
        for cls in type(callback).__mro__:
            if found := _LOSING.get(_name_of(cls)):
                refuse({found[0]: (f"{found[1]}, and no checkpoint holds that", "leave it out")}, expected="not set")


def restore_callbacks(trainer: Any) -> None:
    """Let callbacks continue with what the checkpoint says of them, such as the patience of EarlyStoppingCallback.

    Their arguments stay today's. ``restore_callback_states_from_checkpoint`` would restore these as well.
    """
    from transformers.trainer_callback import ExportableState

    saved = trainer.state.stateful_callbacks  # by the name of a class: a state, or a list of those of several
    states = {name: iter(of if isinstance(of, list) else [of]) for name, of in saved.items()}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            state: dict[str, Any] = next(states.get(type(callback).__name__, iter(())), {})
            for name, value in state.get("attributes", {}).items():
                setattr(callback, name, value)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refused(cls: type, method: str, what: str) -> UsageError:
    return UsageError(
        f"this Trainer has its own {what}",
        found=f"{cls.__qualname__}.{method}",
        expected=f"transformers.Trainer.{method}",
        cause="a class that changes the order of the data, or a method that was replaced",
        action=f"remove {method}; weigh datasets by data={{name: (dataset, weight)}}",
    )


class CountedBatches:
    """The batches that the Trainer iterates over in place of the loader."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps.feed.loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["steps"].feed.loader, name)


def callback_of(host: Any) -> Any:
    """One that tells a `TransformersHost` of the steps that were made."""
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):
        """Counts the steps that were made."""

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.steps.changed()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            host.stepped()

    return StepEnd()
