"""Trainers derived from Hugging Face's (LLaMA-Factory, ms-swift, Axolotl, TRL, Sentence Transformers, GLiNER),
callbacks, PEFT.

A class with its own sampler or train loader is refused, except for those that only create one with certain settings. A
callback's own state is in no checkpoint, unless it is transformers' ``ExportableState``; nor is what PEFT's models know
of the worth of their ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from megaresume.hosts.attach import refuse
from megaresume.hosts.trainer import Hook
from megaresume.stream.errors import UsageError

SENTENCE_TRANSFORMERS = "sentence_transformers.base.trainer.BaseTrainer"
#: the same before 6.0.
SENTENCE_TRANSFORMERS_5 = "sentence_transformers.trainer.SentenceTransformerTrainer"
GLINER = "gliner.training.trainer.Trainer"

#: for a Trainer, the settings with which the method makes another order: name -> value.
Settings = Callable[[Any], Mapping[str, Any]]


def _llama_factory(trainer: Any) -> Mapping[str, Any]:
    return {"disable_shuffling": trainer.finetuning_args.disable_shuffling}


def _dpo(trainer: Any) -> Mapping[str, Any]:
    return {"precompute_ref_log_probs": trainer.precompute_ref_log_probs}


def _kto(trainer: Any) -> Mapping[str, Any]:
    return {_ESTIMATES_KL: trainer.calculate_KL and trainer.args.loss_type}


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
    """How a dataset of ms-swift randomly replaces items that it cannot encode; None if it does not.

    Items of known length were all encoded before, and those that cannot be are left out.
    """
    while dataset is not None:
        inner = getattr(dataset, "dataset", None)  # also in a dataset that packs
        if type(dataset).__name__ == "LazyLLMDataset" and dataset.n_try_fetch > 1:
            known = "lengths" in (getattr(inner, "column_names", None) or ())
            return None if known else "an item that is too long, or cannot be encoded, is replaced by another one"
        dataset = inner
    return None


def _axolotl(trainer: Any) -> Mapping[str, Any]:
    args = trainer.args
    return {name: getattr(args, name, False) for name in ("sample_packing", "curriculum_sampling")}


_SEVERAL, _OWN_PARAMETERS = "a train_dataset of several datasets", "a loss with parameters of its own"
_ESTIMATES_KL = "a loss_type of KTO that estimates the KL term"
#: what to do about a setting, other than leaving it out.
_WAYS_OUT = {
    _SEVERAL: "datasets.concatenate_datasets, if they have the same columns and one loss",
    _ESTIMATES_KL: "it wants the items in the order of the dataset; loss_type='apo_zero_unpaired' with "
    "train_sampling_strategy='random' does not",
    _OWN_PARAMETERS: "take a loss whose parameters are all the model's: Sentence Transformers saves no others",
}


def is_of_sentence_transformers(trainer: Any) -> bool:
    """Whether it is a trainer of Sentence Transformers, for embeddings or a cross-encoder."""
    return _is_of(trainer, SENTENCE_TRANSFORMERS, SENTENCE_TRANSFORMERS_5)


def gives_all_columns(trainer: Any) -> bool:
    """Whether its loader gives ``data_collator`` all columns, also those that are no argument of the model."""
    return _is_of(trainer, SENTENCE_TRANSFORMERS, SENTENCE_TRANSFORMERS_5, GLINER)


def _is_of(trainer: Any, *classes: str) -> bool:
    return any(_name_of(cls) in classes for cls in type(trainer).__mro__)


def _gliner(trainer: Any) -> Mapping[str, Any]:
    """A loader like the Trainer's, but for the columns: see `gives_all_columns`."""
    return {}


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


#: (module and class, method) -> when it differs from Trainer's own.
KNOWN: dict[tuple[str, str], Settings] = {
    ("llamafactory.train.pt.trainer.CustomTrainer", "_get_train_sampler"): _llama_factory,
    ("llamafactory.train.sft.trainer.CustomSeq2SeqTrainer", "_get_train_sampler"): _llama_factory,
    ("llamafactory.train.dpo.trainer.CustomDPOTrainer", "_get_train_sampler"): _llama_factory,
    ("trl.trainer.dpo_trainer.DPOTrainer", "get_train_dataloader"): _dpo,
    ("trl.trainer.kto_trainer.KTOTrainer", "_get_train_sampler"): _kto,
    ("axolotl.core.trainers.base.AxolotlTrainer", "_get_train_sampler"): _axolotl,
    ("swift.trainers.mixin.DataLoaderMixin", "get_train_dataloader"): _swift_loader,
    ("swift.trainers.mixin.SwiftMixin", "_save_checkpoint"): _swift_save,
    (GLINER, "get_train_dataloader"): _gliner,
    (SENTENCE_TRANSFORMERS, "get_train_dataloader"): _sentence_transformers_loader,
    (SENTENCE_TRANSFORMERS, "_save"): _sentence_transformers_save,
    (SENTENCE_TRANSFORMERS_5, "get_train_dataloader"): _sentence_transformers_loader,
    (SENTENCE_TRANSFORMERS_5, "_save"): _sentence_transformers_save,
}
#: methods that other classes must not override, and what they make.
_GUARDED = {"get_train_dataloader": "loader", "_get_train_sampler": "sampler"}


def undo_settings(trainer: Any) -> None:
    """Undo settings made by a program without being asked, if `check_settings` or a resume would fail."""
    config = getattr(trainer, "axolotl_cfg", None)
    if config is not None and not config.max_steps:
        trainer.args.max_steps = -1  # computed from num_train_epochs, by the current batch size
    if is_of_sentence_transformers(trainer) and trainer.args.world_size > 1:
        trainer.args.dataloader_drop_last = False  # it always sets it under DDP


def check_methods(trainer: Any) -> None:
    """Refuse a Trainer with methods that change the order of the data, or the kind of checkpoint.

    Raises:
        UsageError: names the method, or the setting with which it does.
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


#: module and class -> (what to leave out, why).
_LOSING = {
    "trl.trainer.callbacks.SyncRefModelCallback": ("sync_ref_model", "the reference model changes"),
    "trl.trainer.callbacks.BEMACallback": ("BEMACallback", "it averages the weights of all steps"),
}


def check_callbacks(trainer: Any) -> None:
    """Refuse callbacks that change a model without being in a checkpoint.

    Raises:
        UsageError: names the callback, or the setting that adds it.
    """
    for callback in trainer.callback_handler.callbacks:
        for cls in type(callback).__mro__:
            if found := _LOSING.get(_name_of(cls)):
                refuse({found[0]: (f"{found[1]}, and no checkpoint holds that", "leave it out")}, expected="not set")


def refuse_allocation(trainer: Any) -> list[Hook]:
    """What is hooked on a model of PEFT's that can move its ranks between layers, as AdaLoRA and AdaMSS do.

    One that is never asked to is trained like any other.
    """
    tuner = getattr(trainer.model, "base_model", None)
    hooked = hasattr(tuner, "update_and_allocate")
    return [(tuner, "update_and_allocate", functools.partial(_update_and_allocate, tuner))] if hooked else []


def _update_and_allocate(tuner: Any, update: Any, *args: Any, **kwargs: Any) -> Any:
    configs = getattr(tuner, "peft_config", {}).values()
    if all(getattr(config, "use_asa", True) is False for config in configs):  # AdaMSS, which then does nothing
        return update(*args, **kwargs)
    raise UsageError(
        "update_and_allocate cannot be used with megaresume.attach",
        found=f"a call of update_and_allocate of {type(tuner).__name__}",
        expected="adapters whose ranks stay as they are",
        cause="it moves ranks by scores that it collects over the steps, and no checkpoint holds them: after a resume, "
        "other ranks would be taken away",
        action="leave the call out (with AdaMSS, use_asa=False and no AdamssAsaCallback); or use LoRA",
    )


def restore_callbacks(trainer: Any) -> None:
    """Restore callbacks from the checkpoint, such as the patience of EarlyStoppingCallback.

    Their arguments are not restored, as they would be by ``restore_callback_states_from_checkpoint``.
    """
    from transformers.trainer_callback import ExportableState

    saved = trainer.state.stateful_callbacks  # class name -> a state, or a list of states for several callbacks
    states = {name: iter(of if isinstance(of, list) else [of]) for name, of in saved.items()}
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, ExportableState):
            state: dict[str, Any] = next(states.get(type(callback).__name__, iter(())), {})
            for name, value in state.get("attributes", {}).items():
                setattr(callback, name, value)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _refused(cls: type, method: str, what: str) -> UsageError:
    cause = "a class that changes the order of the data, or a method that was replaced"
    action = f"remove {method}; weigh datasets by data={{name: (dataset, weight)}}"
    if cls.__module__.startswith("trl."):
        cause = "it generates, and trains what it generated for one batch of prompts in several steps, or several times"
        action = "AsyncGRPOTrainer, which can be attached; in a loop of your own, megaresume.Prompts(dataset)"
    return UsageError(
        f"this Trainer has its own {what}",
        found=f"{cls.__qualname__}.{method}",
        expected=f"transformers.Trainer.{method}",
        cause=cause,
        action=action,
    )
