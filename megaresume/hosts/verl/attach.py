"""Exact data resume for VeRL's supervised trainer.

    megaresume.attach(sft_trainer.SFTTrainer)
    sft_trainer.main()

See docs/verl.md.
"""

from __future__ import annotations

from typing import Any

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.hosts.instances import SLOT, check_new, refuse
from megaresume.hosts.torch.feeds import Items
from megaresume.hosts.torch.host import of_trainer
from megaresume.hosts.torch.loop import open_session
from megaresume.hosts.torch.steps import Steps, words_of
from megaresume.hosts.verl.hooks import Hooks
from megaresume.hosts.verl.host import Batches, VerlHost
from megaresume.stream.data_yaml import Append
from megaresume.stream.errors import UsageError


def attach(trainer: Any, *, append: Append | None = None, checkpoints: Checkpoints = Checkpoints()) -> None:
    """Give VeRL's supervised trainer its data in an exact order, and its checkpoints the state of that data. See
    `megaresume.attach`.

    Dataset, batch size, workers and seed are those of VeRL's config, which also says where and when it saves, and how
    many checkpoints it keeps. With ``resume_mode=auto`` it goes on from the newest complete checkpoint.

    Args:
        trainer: VeRL's ``SFTTrainer``, or of a class made from it.
        append: what a resume does if the dataset has grown: see `megaresume.DataLoader`.
        checkpoints: what is kept besides the newest, how often a save is tried, and so on.

    Raises, on every rank:
        UsageError: a setting under which the data would be other data, by name; or attached already.
        CheckpointError: another job writes to ``default_local_dir``.
    """
    on_all_ranks(lambda: _check(trainer))
    checkpoints = on_all_ranks(lambda: _with_config(checkpoints, trainer))
    loader = on_all_ranks(lambda: _loader(trainer, append))
    feed = Items(loader)
    steps = Steps(feed, words_of(name="trainer.train_dataloader", clock="training_client.train_batch()"))
    batches = Batches(steps, feed, trainer.config.trainer.total_epochs)
    host = VerlHost(trainer, steps, batches)
    device = torch.device(trainer.config.trainer.device if torch.cuda.is_available() else "cpu")
    steps.session = open_session(host, feed, checkpoints, device, None, lambda: None)
    trainer.train_dataloader = trainer.ckpt_handler.train_dataloader = batches
    setattr(trainer, SLOT, Hooks(host, steps.session))


def _loader(trainer: Any, append: Append | None) -> DataLoader:
    data, engine = trainer.config.data, trainer.engine
    ranks = engine.get_data_parallel_size()
    if data.train_batch_size % ranks:
        raise UsageError(
            "data.train_batch_size cannot be divided by the data-parallel ranks",
            found=f"{data.train_batch_size} by {ranks}",
            expected=f"a multiple of {ranks}",
        )
    return DataLoader(
        trainer.train_dataset,
        data.train_batch_size // ranks,
        seed=trainer.config.trainer.seed,
        collate_fn=trainer.collate_fn,
        num_workers=data.num_workers,
        drop_last=True,
        append=append,
        dp_rank=engine.get_data_parallel_rank(),
        dp_size=ranks,
    ).made_by("megaresume.attach")


def _with_config(checkpoints: Checkpoints, trainer: Any) -> Checkpoints:
    """With what VeRL's config says of directory and retention."""
    handler = trainer.ckpt_handler
    own = (
        ("trainer.default_local_dir", handler.default_local_dir),
        ("trainer.max_ckpt_to_keep", handler.max_ckpt_to_keep),
    )
    checkpoints = of_trainer(checkpoints, save_dir=own[0], keep_last=own[1])
    # Retention is the session's: what VeRL deletes, it deletes before the newer one is complete.
    handler.max_ckpt_to_keep = None
    return checkpoints


def _check(trainer: Any) -> None:
    """Refuse what would be other data, or is not known to work.

    Raises:
        UsageError: naming it, and the way out.
    """
    needed = ("ckpt_handler", "training_client", "train_dataset", "fit")
    check_new(
        trainer,
        "trainer",
        missing=[name for name in needed if not hasattr(trainer, name)],
        headline="this is no supervised trainer of VeRL's, or it is not made so far",
        expected="an SFTTrainer with its ckpt_handler; 0.9.1 was tried",
        action="megaresume.attach(SFTTrainer), of the class, before an instance is made",
    )
    if hasattr(trainer, "resume_global_step"):
        raise UsageError(
            "this trainer has loaded its checkpoint already",
            found="an SFTTrainer that is made",
            expected="its class: an instance loads its checkpoint as it is made, and is attached just before that",
            action="megaresume.attach(SFTTrainer), before SFTTrainer(config)",
        )
    hdfs, copies = getattr(trainer.ckpt_handler, "default_hdfs_dir", None), "megaresume.Checkpoints(stage_to=...)"
    action = f"megaresume.attach(SFTTrainer, checkpoints={copies}) copies checkpoints"
    refuse({"trainer.default_hdfs_dir": (hdfs, action)})
