"""Exact data resume for torchtitan's Trainer.

    megaresume.attach(Trainer)  # whose build_dataloader_fn makes a megaresume.DataLoader
    torchtitan.train.main(Trainer)

See docs/torchtitan.md.
"""

from __future__ import annotations

import atexit
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.checkpoint.session.stopping import StopConditions
from megaresume.hosts.instances import SLOT, check_new, refuse
from megaresume.hosts.torch.feeds import Feed, feed_of
from megaresume.hosts.torch.host import check_sizes, of_trainer
from megaresume.hosts.torch.loop import open_session
from megaresume.hosts.torch.steps import Steps, words_of
from megaresume.hosts.torchtitan.hooks import OF_MANAGER, OF_TRAINER, Hooks
from megaresume.hosts.torchtitan.host import DATALOADER, TitanHost

#: what is read or called of a CheckpointManager, besides what is hooked.
_OF_MANAGER = ("_should_save", "dcp_save", "folder", "interval", "keep_latest_k", "states", "save_future")


def attach(trainer: Any, *, checkpoints: Checkpoints = Checkpoints(), stop: StopConditions | None = None) -> None:
    """Give torchtitan's Trainer its data in an exact order, and its checkpoints the state of that data. See
    `megaresume.attach`.

    The data is the Trainer's own dataloader, which must be a `DataLoader` or a `StreamLoader`. torchtitan's config says
    where and when it saves; ``checkpoint.keep_latest_k`` keeps the newest so many complete checkpoints. ``train()``
    goes on from the newest complete one, on any number of ranks, or begins if there is none.

    Args:
        trainer: torchtitan's Trainer, or of a class made from it.
        checkpoints: what is kept besides the newest, how often a save is tried, and so on.
        stop: when to save and exit, with `megaresume.Stopped`.

    Raises on every rank:
        UsageError: another dataloader; or a setting under which the data would be other data, by name.
        CheckpointError: another job writes to the folder of the checkpoints.
    """
    on_all_ranks(lambda: _check_trainer(trainer))
    manager = trainer.checkpointer
    own = ("checkpoint.folder", manager.folder), ("checkpoint.keep_latest_k", manager.keep_latest_k)
    checkpoints = on_all_ranks(lambda: of_trainer(checkpoints, save_dir=own[0], keep_last=own[1]))
    feed = on_all_ranks(lambda: _feed(trainer))
    steps = Steps(feed, words_of(trainer="the Trainer", name="trainer.dataloader", clock="trainer.train_step()"))
    host = TitanHost(trainer, steps)
    steps.session = open_session(host, feed, checkpoints, trainer.device, stop, lambda: hooks.save_now())
    hooks = Hooks(host, steps.session)
    setattr(trainer, SLOT, hooks)
    atexit.register(host.background.look_at_exit)


def _feed(trainer: Any) -> Feed:
    """What the Trainer is to train.

    Raises:
        UsageError: it is no loader of megaresume's, or one for other ranks or steps than the Trainer's.
    """
    feed = feed_of(trainer.dataloader, whole_steps=True)
    loader: Any = trainer.dataloader
    mesh = trainer.parallel_dims.get_optional_mesh("batch")
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    batches = trainer.gradient_accumulation_steps
    for name in ("num_pipeline_parallel_microbatches", "num_pp_microbatches"):  # since 0.3; after it
        batches *= getattr(trainer, name, 1)
    sizes = feed.topology(0)
    expected_size = (sizes.micro_batch_size or 0) * ranks * batches
    step = f"accumulation={batches}" if isinstance(loader, DataLoader) else f"BatchSchedule.constant({expected_size})"
    check_sizes(
        feed,
        "dataloader",
        "Trainer",
        {
            "dp_rank": (loader.dp_rank, rank, "dp_rank=dp_rank, which build_dataloader_fn is given"),
            "dp_size": (loader.dp_size, ranks, "dp_size=dp_world_size, which build_dataloader_fn is given"),
            "samples of a step": (sizes.global_batch_size, expected_size, step),
        },
        layout=f"{ranks} data-parallel ranks, {batches} micro-batches a step",
        length="training.steps",
    )
    return feed


def _check_trainer(trainer: Any) -> None:
    """Refuse what would be other data, or is not known to work.

    Raises:
        UsageError: naming the setting, and the way out.
    """
    manager: Any = getattr(trainer, "checkpointer", None)
    missing = [f"Trainer.{name}" for name in (*OF_TRAINER, "dataloader", "parallel_dims") if not hasattr(trainer, name)]
    if getattr(manager, "enable", True):
        names = (*OF_MANAGER, *_OF_MANAGER)
        missing += [f"CheckpointManager.{name}" for name in names if not hasattr(manager, name)]
    check_new(
        trainer,
        "Trainer",
        missing=missing,
        headline="this is no Trainer of torchtitan, or of another version",
        expected="torchtitan's Trainer, made; 0.2.2 was tried, and 0.3.0",
        action="megaresume.attach(Trainer), of the class; or of its instance, once it is made",
    )
    excluded = {DATALOADER, "train_state"} & set(getattr(manager, "exclude_from_loading", ()))
    elsewhere = getattr(manager, "initial_load_path", None)
    refused: dict[str, tuple[Any, str]] = {
        "checkpoint.enable": (not manager.enable and "False", "set it: what is not saved cannot be resumed"),
        "checkpoint.load_only": (getattr(manager, "load_only", False), "leave it out"),
        "checkpoint.folder": (
            "://" in str(getattr(manager, "folder", "")) and manager.folder,
            "save to a filesystem that all nodes see, and set Checkpoints(stage_to=...) for copies",
        ),
        "checkpoint.exclude_from_loading": (", ".join(sorted(excluded)), "leave these out"),
        "checkpoint.initial_load_path": (
            elsewhere and not manager.initial_load_model_only and f"{elsewhere}, with initial_load_model_only=False",
            "copy its folder, with the directory megaresume in it, and set checkpoint.folder to the copy; or load the "
            "model only",
        ),
        "torchft": (getattr(manager, "ft_manager", None) is not None and "enabled", "train without fault_tolerance"),
    }
    refuse(refused)
