"""What of a Trainer would be another order, or is not known to work: refused by name."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from megaresume.hosts.hugging_face.backends import check_backend
from megaresume.hosts.hugging_face.families import check_methods
from megaresume.hosts.hugging_face.hooks import HOOKED
from megaresume.hosts.torch.host import refuse
from megaresume.stream.errors import UsageError

#: where a Trainer keeps what is attached to it.
SLOT = "_megaresume"


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
            expected="transformers 5.6 or later",
            action="pip install --upgrade 'megaresume[hugging-face]'",
        )
    if getattr(trainer, SLOT, None) is not None:
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
        "dataloader_in_order=False": (not getattr(args, "dataloader_in_order", True), leave),
        "load_best_model_at_end with save_total_limit": (
            args.load_best_model_at_end and args.save_total_limit is not None,
            "leave save_total_limit out: it could delete the best checkpoint",
        ),
        "tensor, context or sequence parallelism": (
            trainer.get_tp_size() * trainer.get_cp_size() * trainer.get_sp_size() > 1,
            "train with DDP, DeepSpeed or FSDP",
        ),
    }
    refuse("attach_trainer", refused, expected="not set")
    check_backend(trainer)
    check_methods(trainer)
