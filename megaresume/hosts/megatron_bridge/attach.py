"""Exact data resume for Megatron-Bridge's ``pretrain`` and ``finetune``.

    def data(dp_rank, dp_size):
        return megaresume.DataLoader(dataset, batch_size=4, dp_rank=dp_rank, dp_size=dp_size)

    megaresume.attach(config, data)
    pretrain(config, forward_step)

See docs/megatron-bridge.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.hosts.instances import SLOT, check_new, refuse
from megaresume.hosts.megatron_bridge.run import Run
from megaresume.hosts.torch.host import of_trainer

#: imports Bridge.
_MANAGER = "megaresume.hosts.megatron_bridge.manager"

#: given (data-parallel rank, data-parallel ranks): the loader of that rank.
LoaderOf = Callable[[int, int], DataLoader | StreamLoader]
ValidationOf = Callable[[int, int], Iterable[Any]]


def attach(
    config: Any,
    data: LoaderOf,
    *,
    validation: ValidationOf | None = None,
    checkpoints: Checkpoints = Checkpoints(),
) -> None:
    """Give a run of Megatron-Bridge its data in an exact order, and its checkpoints the state of that data. Call it on
    every rank, before ``pretrain(config, forward_step)`` or ``finetune(config, forward_step)``.

    It sets ``config.dataset`` and ``config.checkpoint.custom_manager_class``. With ``checkpoint.load`` the run goes on
    from the newest complete checkpoint, on any number of ranks; Bridge's config says where and when it saves, and
    ``checkpoint.most_recent_k`` keeps the newest so many complete ones.

    Args:
        config: Bridge's ``ConfigContainer``.
        data: given the data-parallel rank and the number of such ranks, makes the loader of that rank: a `DataLoader`
            of batches as Bridge's forward step takes them, or a `StreamLoader`.
        validation: likewise what each evaluation reads, from its beginning on: any iterable of micro-batches, such as a
            loader of torch's. None: nothing is evaluated.
        checkpoints: what is kept besides the newest, how often a save is tried, and so on.

    Raises:
        UsageError: a setting under which the data would be other data, or that is not known to work, by name; or
            attached already. Also at the start of the run, on every rank, for what is known only then.
    """
    _check(config, validates=validation is not None)
    own = config.checkpoint
    kept = own.most_recent_k if own.most_recent_k and own.most_recent_k > 0 else None
    checkpoints = of_trainer(
        checkpoints,
        save_dir=("checkpoint.save", own.save),
        keep_last=("checkpoint.most_recent_k", kept),
    )
    # Retention is the session's: what Bridge deletes, it deletes before the newer one is complete.
    own.most_recent_k, own.custom_manager_class = -1, f"{_MANAGER}.Manager"
    run = Run(config, data, validation, checkpoints)
    setattr(own, SLOT, run)
    config.dataset = importlib.import_module(_MANAGER).Provider.of(run)
    allowed = importlib.import_module("megatron.bridge.utils.instantiate_utils")
    if hasattr(allowed, "register_allowed_target_prefix"):
        allowed.register_allowed_target_prefix("megaresume.hosts.megatron_bridge.")


def _check(config: Any, *, validates: bool) -> None:
    """Refuse what would be other data, or is not known to work.

    Raises:
        UsageError: naming it, and the way out.
    """
    own: Any = getattr(config, "checkpoint", None)
    needed = dict.fromkeys(("train", "model", "dataset", "validation"), config)
    needed |= dict.fromkeys(("save", "load", "most_recent_k", "custom_manager_class"), own)
    check_new(
        config,
        "config",
        missing=[name for name, owner in needed.items() if not hasattr(owner, name)],
        headline="this is no config of Megatron-Bridge, or of another version",
        expected="a megatron.bridge ConfigContainer with its checkpoint; 0.6.2 was tried",
    )
    check_new(own, "config")
    restart, model = getattr(config, "inprocess_restart", None), config.model
    leave = "leave it out"
    refused: dict[str, tuple[Any, str]] = {
        "checkpoint.save": (not own.save and "not set", "set it: what is not saved cannot be resumed"),
        "a remote checkpoint.save": (
            "://" in str(own.save) and own.save,
            "a directory that all nodes see, and Checkpoints(stage_to=...) for copies",
        ),
        "checkpoint.custom_manager_class": (own.custom_manager_class, leave),
        "checkpoint.ckpt_format": (own.ckpt_format != "torch_dist" and own.ckpt_format, "torch_dist"),
        "checkpoint.async_save": (own.async_save, f"{leave}: a save counts when all of its files are there"),
        "checkpoint.non_persistent_save_interval": (own.non_persistent_save_interval, "checkpoint.save_interval"),
        "checkpoint.save_optim=False": (not own.save_optim, "set it: nobody can go on without the optimizer"),
        "checkpoint.load_optim=False": (not own.load_optim, "checkpoint.pretrained_checkpoint loads weights alone"),
        "train.num_epochs": (getattr(config.train, "num_epochs", None), "train.train_iters"),
        "a virtual pipeline": (
            getattr(model, "virtual_pipeline_model_parallel_size", None),
            "leave virtual_pipeline_model_parallel_size out: its chunks would read one loader",
        ),
        "inprocess_restart": (getattr(restart, "enabled", False), "restart the job"),
        "a model of several modules (MegatronMIMO)": (hasattr(model, "megatron_mimo_parallelism_config"), leave),
        "validation.eval_iters": (
            not validates and config.validation.eval_iters and f"{config.validation.eval_iters}, and no validation",
            "megaresume.attach(config, data, validation=...), or validation.eval_iters=0",
        ),
    }
    refuse(refused)
