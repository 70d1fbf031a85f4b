"""Exact data resume for torchtitan's Trainer.

    megaresume.attach(Trainer)  # whose build_dataloader_fn makes a megaresume.DataLoader
    torchtitan.train.main(Trainer)

Hooked on the Trainer, and on its CheckpointManager:

    trainer.train        records the end of the run
    trainer.dataloader   the batches, epoch after epoch
    checkpointer.load    the newest complete checkpoint, instead of the one with the highest number
    checkpointer.save    called after every step, so a step was done; saved by the session: commit, lock, ledger
    validator.validate   does not affect the generators of the training

The data state is in torchtitan's own checkpoint, ``step-10``, in place of its dataloader's: one text, the same on
every rank, so that it loads on any number of ranks. See docs/torchtitan.md. Importing this does not import torchtitan.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import is_rank_0
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.names import records_dir, torchtitan_tag
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.hosts import files
from megaresume.hosts.attach import check_new, refuse, replaced, require
from megaresume.hosts.feeds import Feed, StreamFeed, feed_of
from megaresume.hosts.files import Background
from megaresume.hosts.steps import Steps, loop_words
from megaresume.hosts.trainer import Carried, Hook, TrainerHost, check_sizes, merge_trainer_settings, undrawn, write_all

#: torchtitan's key for the dataloader's state in a checkpoint, and its IGNORE_INDEX.
DATALOADER, IGNORE = "dataloader", -100

#: attributes that are hooked, read or called on a Trainer and its CheckpointManager.
_OF_TRAINER = ("train", "dataloader", "parallel_dims")
_OF_MANAGER = (
    *("load", "save", "_should_save", "dcp_save", "folder", "interval", "keep_latest_k", "states", "save_future"),
)


def attach(
    trainer: Any,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    metrics: Any = None,
) -> None:
    """Give torchtitan's Trainer its data in an exact order, and add the state of that data to its checkpoints. See
    `megaresume.attach`.

    The data is the Trainer's own dataloader, which must be a `DataLoader` or a `StreamLoader`. torchtitan's config
    determines where and when it saves; ``checkpoint.keep_latest_k`` sets how many of the newest complete checkpoints to
    keep. ``train()`` resumes from the newest complete one, on any number of ranks, or starts afresh if there is none.

    Args:
        trainer: torchtitan's Trainer, or an instance of a derived class.
        checkpoints: what is kept besides the newest, how often a save is retried, and so on.
        stop: when to save and exit, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.

    Raises on every rank:
        UsageError: another dataloader; or a setting that would change the data, by name.
        CheckpointError: another job writes to the folder of the checkpoints.
    """
    TitanHost(trainer).attach(checkpoints, stop, metrics)


class CountedBatches:
    """The dataloader that torchtitan iterates over: the micro-batches of this rank, to the end of the data.

    Args:
        steps: the micro-batches.
        convert: turns each into torchtitan's format: ``({"input": int64[m, S], ...}, labels)``.
    """

    def __init__(self, steps: Steps, convert: Callable[[Any], Any]) -> None:
        self.steps, self.convert = steps, convert

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.steps.to_the_end())

    def close(self) -> None:
        """Do nothing: there is no open file or worker."""


class TitanHost(TrainerHost):
    """torchtitan's Trainer as a host, see `TrainerHost`."""

    package = "torchtitan"
    words = loop_words(trainer="the Trainer", name="trainer.dataloader", clock="trainer.train_step()")
    forgotten = "checkpoint.folder was used before, and trainer.train() did not load from it"
    load = "trainer.train(), which loads the newest complete checkpoint"
    begin_anew = "checkpoint.initial_load_path with its step directory, and another checkpoint.folder"
    background: Background

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer)
        self.manager: Any = getattr(trainer, "checkpointer", None)
        self.background = Background(lambda save: self.session.commit(save))
        self._carried = Carried()

    @property
    def folder(self) -> Path:
        """The checkpoint root."""
        return Path(self.manager.folder)

    def check(self) -> None:
        """See `TrainerHost`."""
        manager = self.manager
        missing = [f"Trainer.{name}" for name in _OF_TRAINER if not hasattr(self.trainer, name)]
        if getattr(manager, "enable", True):
            missing += [f"CheckpointManager.{name}" for name in _OF_MANAGER if not hasattr(manager, name)]
        check_new(
            self.trainer,
            "Trainer",
            missing=missing,
            headline="this is not a torchtitan Trainer, or it is from another version",
            expected="torchtitan's Trainer, made; 0.2.2 was tried, and 0.3.0",
            action="megaresume.attach(Trainer), of the class; or of its instance, once it is made",
        )
        excluded = {DATALOADER, "train_state"} & set(getattr(manager, "exclude_from_loading", ()))
        elsewhere = getattr(manager, "initial_load_path", None)
        whole = elsewhere and not manager.initial_load_model_only
        require({"checkpoint.enable": (manager.enable, "set it: what is not saved cannot be resumed")})
        refused: dict[str, tuple[Any, str]] = {
            "checkpoint.load_only": (getattr(manager, "load_only", False), "leave it out"),
            "checkpoint.folder": (
                "://" in str(getattr(manager, "folder", "")) and manager.folder,
                "save to a filesystem that all nodes see, and set Checkpoints(stage_to=...) for copies",
            ),
            "checkpoint.exclude_from_loading": (", ".join(sorted(excluded)), "leave these out"),
            "checkpoint.initial_load_path": (
                whole and f"{elsewhere}, with initial_load_model_only=False",
                "copy its folder, with the directory megaresume in it, and set checkpoint.folder to the copy; or load "
                "the model only",
            ),
            "torchft": (
                getattr(manager, "ft_manager", None) is not None and "enabled",
                "train without fault_tolerance",
            ),
        }
        refuse(refused)

    def settings(self, given: Checkpoints) -> Checkpoints:
        """See `TrainerHost`."""
        kept = "checkpoint.keep_latest_k", self.manager.keep_latest_k
        place = "checkpoint.folder", self.manager.folder
        return merge_trainer_settings(given, trainer="torchtitan's Trainer", save_dir=place, keep_last=kept)

    def feed(self) -> Feed:
        """See `TrainerHost`: the Trainer's own dataloader.

        Raises:
            UsageError: it is not a loader of megaresume's, or one for other ranks or steps than the Trainer's.
        """
        trainer, loader = self.trainer, self.trainer.dataloader
        feed = feed_of(loader, whole_steps=True)
        mesh = trainer.parallel_dims.get_optional_mesh("batch")
        rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
        batches = trainer.gradient_accumulation_steps
        for name in ("num_pipeline_parallel_microbatches", "num_pp_microbatches"):  # since 0.3; later
            batches *= getattr(trainer, name, 1)
        sizes = feed.topology(0)
        size = (sizes.micro_batch_size or 0) * ranks * batches
        step = f"accumulation={batches}" if isinstance(loader, DataLoader) else f"BatchSchedule.constant({size})"
        check_sizes(
            feed,
            "dataloader",
            "Trainer",
            {
                "dp_rank": (loader.dp_rank, rank, "dp_rank=dp_rank, which build_dataloader_fn is given"),
                "dp_size": (loader.dp_size, ranks, "dp_size=dp_world_size, which build_dataloader_fn is given"),
                "samples of a step": (sizes.global_batch_size, size, step),
            },
            layout=f"{ranks} data-parallel ranks, {batches} micro-batches a step",
            length="training.steps",
        )
        return feed

    def begin(self) -> None:
        """See `TrainerHost`."""
        trainer, manager = self.trainer, self.manager
        # The session decides when to save and what to keep, not the manager.
        manager.keep_latest_k = 0
        manager.states[DATALOADER] = self._carried
        self._titans_save = manager.save
        of_stream = functools.partial(_of_stream, positions=not hasattr(trainer, "job_config"))  # since 0.3
        trainer.dataloader = CountedBatches(
            self.steps, of_stream if isinstance(self.steps.feed, StreamFeed) else _as_it_is
        )

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        manager, validator = self.manager, getattr(self.trainer, "validator", None)
        found: list[Hook] = [(self.trainer, "train", self._train), (manager, "load", self._load)]
        found.append((manager, "save", self._save))
        return found if validator is None else [*found, (validator, "validate", undrawn)]

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str]:
        """See `Host`: what rank 0 writes last, after it has heard from all ranks that their files are written."""
        return [files.METADATA] if is_rank_0() else []

    def _train(self, train: Any) -> None:
        """Train, save what the end of the data left unsaved, and record the end of the run."""
        train()
        if self.trainer.step > self.steps.step:  # the data ended before a step that was begun
            self.trainer.step = self.steps.step
            if self.steps.step != self.session.settled_step:
                self.save_now()
        self.end()

    def _load(self, load: Any, step: int = -1) -> bool:
        """Resume from the newest complete checkpoint, or from that of ``step``; start afresh if there is none.

        Raises, on every rank:
            CheckpointError, StateError: see `Session.load`.
        """

        def read(choice: Choice, _before: object) -> Restored:
            assert choice.iteration is not None
            with replaced(self.manager, folder=str(choice.load_dir)), files.dcp_errors():
                load(choice.iteration)
            return self.resumed_at(int(self.trainer.step), None, Envelope.read(self._carried.text), result=True)

        folder = self.folder
        if self.load_by(read, None if step == -1 else folder / torchtitan_tag(step), root=folder):
            return True
        # Our records are already in the folder, and torchtitan uses initial_load_path only if it does not exist.
        with replaced(self.manager, folder=str(records_dir(folder) / "none")):
            return bool(load(-1))

    def _save(self, save: Any, curr_step: int, last_step: bool = False) -> bool:
        """Note that a step was done. Save and commit, if it is time."""
        if not curr_step:  # a seed checkpoint
            return bool(save(curr_step, last_step))
        self.steps.stepped()
        self.steps.compare(curr_step)
        self.background.look()
        if not self.manager._should_save(curr_step, last_step):
            return False
        if last_step and self.manager.last_save_model_only:  # not a checkpoint to resume from
            self.settle()
            save(curr_step, last_step)
        else:
            self.save_now(last_step=last_step)
        return True

    def save_now(self, *, last_step: bool = False) -> None:
        """Save and commit the last step."""
        step, manager = self.steps.step, self.manager

        def write(save: Save) -> None:
            self._carried.text = save.envelope.to_text()
            # Force the save, for the step that was done: one stopped before its first batch has already been counted.
            with replaced(manager, interval=1), replaced(self.trainer, step=step):
                write_all(save, files.dcp_errors()(lambda: self._titans_save(step, last_step)))
            future, manager.save_future = manager.save_future, None  # `settle` waits for it
            if future is not None:
                self.background.begin(future, save)

        self.save_by(self.folder, write, tag=torchtitan_tag(step), tracker=False)


def _as_it_is(batch: Any) -> Any:
    """A `DataLoader`'s batch unchanged, as its ``collate_fn`` made it."""
    return batch


def _of_stream(batch: Any, *, positions: bool) -> tuple[dict[str, Any], Any]:
    """A batch of a `StreamLoader`, with torchtitan's IGNORE_INDEX as untrained labels."""
    inputs = {"input": batch["tokens"]} | ({"positions": batch["position_ids"]} if positions else {})
    return inputs, batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORE)
