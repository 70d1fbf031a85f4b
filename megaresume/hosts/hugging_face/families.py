"""Other people's Trainers: which methods of their classes are known to leave the order of the data alone.

A class with a sampler or a train loader of its own is refused, but for these, which do so under certain settings alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megaresume.stream.errors import UsageError

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
        "lazy_tokenize without strict": _takes_others(trainer.train_dataset),
    }


def _takes_others(dataset: Any) -> str | None:
    """How a dataset of ms-swift puts another item, at random, in the place of one that it cannot encode.

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


#: (module and class, method) -> when it is not as Trainer's own.
KNOWN: dict[tuple[str, str], Settings] = {
    ("llamafactory.train.pt.trainer.CustomTrainer", "_get_train_sampler"): _llama_factory,
    ("llamafactory.train.sft.trainer.CustomSeq2SeqTrainer", "_get_train_sampler"): _llama_factory,
    ("llamafactory.train.dpo.trainer.CustomDPOTrainer", "_get_train_sampler"): _llama_factory,
    ("trl.trainer.dpo_trainer.DPOTrainer", "get_train_dataloader"): _dpo,
    ("axolotl.core.trainers.base.AxolotlTrainer", "_get_train_sampler"): _axolotl,
    ("swift.trainers.mixin.DataLoaderMixin", "get_train_dataloader"): _swift_loader,
    ("swift.trainers.mixin.SwiftMixin", "_save_checkpoint"): _swift_save,
}
#: methods that no other class may have, and what they make.
_GUARDED = {"get_train_dataloader": "loader", "_get_train_sampler": "sampler"}


def let_epochs_end(trainer: Any) -> None:
    """Leave the end of the run to ``num_train_epochs`` if a program has made ``max_steps`` of it, which it would do
    again at a resume, by another batch size."""
    config = getattr(trainer, "axolotl_cfg", None)
    if config is not None and not config.max_steps:
        trainer.args.max_steps = -1


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
            known = KNOWN.get((f"{cls.__module__}.{cls.__qualname__}", method))
            if known is None and method in _GUARDED:
                raise _refused(cls, method, _GUARDED[method])
            for setting, found in (known(trainer) if known else {}).items():
                if found:
                    raise UsageError(
                        f"{setting} cannot be used with megaresume.attach",
                        found=f"{setting}: {found}",
                        expected="not set",
                        cause=f"{cls.__qualname__}.{method} then makes an order, or a checkpoint, of its own",
                        action="leave it out; to pack items, megaresume.attach(trainer, seq_length=...)",
                    )


def _refused(cls: type, method: str, what: str) -> UsageError:
    return UsageError(
        f"this Trainer has a {what} of its own",
        found=f"{cls.__qualname__}.{method}",
        expected=f"transformers.Trainer.{method}",
        cause="a class that changes the order of the data, or a method that was replaced",
        action=f"remove {method}; weigh datasets by data={{name: (dataset, weight)}}",
    )
