"""Exact data resume for VeRL's supervised trainer. Its reinforcement learning: hosts/verl_prompts.py.

    megaresume.attach(sft_trainer.SFTTrainer)
    sft_trainer.main()

VeRL computes its epoch from the step number and the current batch size. So for VeRL the whole run is one epoch: a
``for`` goes from the current position to the run's end, and its length is that of the run.

`VerlHost`: the supervised trainer. The data state is in ``global_step_10``, in the file with the state of VeRL's
loader. Hooked on the instances:

    ckpt_handler.load_checkpoint    loads according to ``resume_mode``; starts afresh if there is nothing
    ckpt_handler.save_checkpoint    saved by the session: commit, lock, ledger, retention
    training_client.train_batch     a step is done
    trainer.fit                     the end of the run

See docs/verl.md. Importing this does not import VeRL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks, world_size
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.names import tag_iteration, verl_tag
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.hosts.attach import check_new, refuse, replaced
from megaresume.hosts.feeds import Feed, ItemFeed
from megaresume.hosts.steps import Steps, loop_words
from megaresume.hosts.trainer import Carried, Hook, TrainerHost, merge_trainer_settings, write_all
from megaresume.hosts.verl_issued import end_of_run
from megaresume.stream.data_yaml import Append
from megaresume.stream.errors import CheckpointError, UsageError

#: the file of the loader's state, and our key in place of torchdata's.
FILE, KEY = "data_0.pt", Carried.KEY

_SHARD = re.compile(r"model_world_size_([0-9]+)_rank_[0-9]+\.pt")


def attach(
    trainer: Any, *, append: Append | None = None, checkpoints: Checkpoints = Checkpoints(), metrics: Any = None
) -> None:
    """Give VeRL's supervised trainer its data in an exact order, and add the state of that data to its checkpoints. See
    `megaresume.attach`.

    Dataset, batch size, workers and seed are those of VeRL's config, which also determines where and when it saves, and
    how many checkpoints it keeps. With ``resume_mode=auto`` it resumes from the newest complete checkpoint.

    Args:
        trainer: VeRL's ``SFTTrainer``, or an instance of a derived class.
        append: what a resume does if the dataset has grown: see `megaresume.DataLoader`.
        checkpoints: what is kept besides the newest, how often a save is retried, and so on.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.

    Raises, on every rank:
        UsageError: a setting that would change the data, by name; or already attached.
        CheckpointError: another job writes to ``default_local_dir``.
    """
    VerlHost(trainer, append).attach(checkpoints, metrics=metrics)


class CountedBatches(Carried):
    """The batches of this rank, and our text about them in a checkpoint.

    Args:
        steps: the micro-batches, of `ItemFeed`.
        epochs: of the run.
    """

    def __init__(self, steps: Steps, epochs: int) -> None:
        super().__init__()
        self.steps, self._loader, self._epochs = steps, steps.feed.loader, epochs
        #: number of the last step, counted since the start of the run; set by `end`.
        self.total = 0
        self.end()

    def end(self) -> None:
        """Count the steps of the run's epochs, from the current position."""
        loader = self._loader
        loader.stop = end_of_run(loader, self._epochs)
        self.total = self.steps.step + (loader.stop - loader.samples) // loader.step_samples

    def __len__(self) -> int:
        return self.total + 1

    def __iter__(self) -> Iterator[Any]:
        return self.steps.to_the_end()


class VerlHost(TrainerHost):
    """VeRL's supervised trainer as a host, see `TrainerHost`.

    Args:
        trainer: VeRL's ``SFTTrainer``.
        append: see `attach`.
    """

    package = "verl"
    words = loop_words(name="trainer.train_dataloader", clock="training_client.train_batch()")
    forgotten = "trainer.resume_mode is disable"
    load = "trainer.resume_mode=auto"
    begin_anew = "merge its weights (verl.model_merger) for model.path, and set another trainer.default_local_dir"

    def __init__(self, trainer: Any, append: Append | None) -> None:
        super().__init__(trainer)
        self._append = append

    def check(self) -> None:
        """See `TrainerHost`."""
        trainer, needed = self.trainer, ("ckpt_handler", "training_client", "train_dataset", "fit")
        check_new(
            trainer,
            "trainer",
            missing=[name for name in needed if not hasattr(trainer, name)],
            headline="this is not a supervised trainer of VeRL's, or it is not initialized yet",
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

    def settings(self, given: Checkpoints) -> Checkpoints:
        """See `TrainerHost`."""
        handler = self.trainer.ckpt_handler
        return merge_trainer_settings(
            given,
            trainer="VeRL's SFTTrainer",
            save_dir=("trainer.default_local_dir", handler.default_local_dir),
            keep_last=("trainer.max_ckpt_to_keep", handler.max_ckpt_to_keep),
        )

    @property
    def device(self) -> Any:
        """See `TrainerHost`."""
        return torch.device(self.trainer.config.trainer.device if torch.cuda.is_available() else "cpu")

    def feed(self) -> Feed:
        """See `TrainerHost`."""
        trainer, data, engine = self.trainer, self.trainer.config.data, self.trainer.engine
        ranks = engine.get_data_parallel_size()
        if data.train_batch_size % ranks:
            raise UsageError(
                "data.train_batch_size cannot be divided by the data-parallel ranks",
                found=f"{data.train_batch_size} by {ranks}",
                expected=f"a multiple of {ranks}",
                action="change data.train_batch_size",
            )
        loader = DataLoader(
            trainer.train_dataset,
            data.train_batch_size // ranks,
            seed=trainer.config.trainer.seed,
            collate_fn=trainer.collate_fn,
            num_workers=data.num_workers,
            drop_last=True,
            append=self._append,
            dp_rank=engine.get_data_parallel_rank(),
            dp_size=ranks,
        )
        return ItemFeed(loader.made_by("megaresume.attach"))

    def begin(self) -> None:
        """See `TrainerHost`."""
        trainer = self.trainer
        # Retention is the session's: VeRL would delete before the newer checkpoint is complete.
        trainer.ckpt_handler.max_ckpt_to_keep = None
        self.batches = CountedBatches(self.steps, trainer.config.trainer.total_epochs)
        trainer.train_dataloader = trainer.ckpt_handler.train_dataloader = self.batches

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        handler = self.trainer.ckpt_handler
        return [
            (handler, "load_checkpoint", self._load),
            (handler, "save_checkpoint", self._save),
            (self.trainer.training_client, "train_batch", self._step),
            (self.trainer, "fit", self._fit),
        ]

    def _load(self, load: Any) -> Any:
        """Resume according to ``resume_mode``; start afresh if there is nothing.

        Raises, on every rank:
            CheckpointError, StateError: see `Session.load`.
        """
        trainer, asked = self.trainer, self.trainer.ckpt_handler
        found = None
        if asked.resume_mode != "disable":
            path = None if asked.resume_from_path is None else Path(os.path.abspath(asked.resume_from_path))
            found = self.load_by(lambda choice, _: self._read(choice, load), path)
        with replaced(asked, resume_mode="disable"):
            result = load() if found is None else found[0]
        on_all_ranks(self.batches.end)
        if trainer.config.trainer.total_training_steps is None:
            trainer.total_training_steps = self.batches.total
        trainer.steps_per_epoch = len(self.batches)
        return result

    def _read(self, choice: Choice, load: Any) -> Restored:
        on_all_ranks(lambda: _check_ranks(choice.tag_dir))
        with replaced(self.trainer.ckpt_handler, resume_mode="resume_path", resume_from_path=str(choice.tag_dir)):
            result = load()
        # VeRL's own way to read the loader's state continues without one, and uses the current rank in the name.
        state = torch.load(choice.tag_dir / FILE, map_location="cpu", weights_only=True)
        envelope, step = Envelope.read(state[KEY]), tag_iteration(choice.tag)
        assert step is not None
        return self.resumed_at(step, None, envelope, result=(result,))

    def _fit(self, fit: Any, *args: Any, **kwargs: Any) -> None:
        fit(*args, **kwargs)
        self.end()

    def _step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(*args, **kwargs)
        self.steps.stepped()
        return result

    def _save(self, save: Any, *args: Any, **kwargs: Any) -> None:
        def write(saving: Save) -> None:
            self.batches.text = saving.envelope.to_text()
            write_all(saving, lambda: save(*args, **kwargs))

        self.save_by(self.save_dir, write, tag=verl_tag(self.steps.step))


def _check_ranks(tag_dir: Path) -> None:
    """Raise a CheckpointError for weights that VeRL cannot read on these ranks: its FSDP saves one file per rank."""
    sizes = {int(match[1]) for path in tag_dir.iterdir() if (match := _SHARD.fullmatch(path.name))}
    if sizes and world_size() not in sizes:
        raise CheckpointError(
            f"the weights in {tag_dir.name} are from a different number of ranks",
            found=f"files of {' and '.join(map(str, sorted(sizes)))} ranks in {tag_dir}",
            expected=f"{world_size()}, as there are now",
            cause="VeRL's FSDP reads its files on as many ranks as have written them; the data would continue",
            action=f"start on {max(sizes)} ranks",
        )
