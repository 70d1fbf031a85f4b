"""Exact data resume for Hugging Face's Trainer.

    trainer = Trainer(model, args, train_dataset=dataset, ...)
    megaresume.attach(trainer)
    trainer.train(resume_from_checkpoint=True)

Hooked on the Trainer:

    train                            what to resume from; the end of the run
    get_train_dataloader             our batches
    set_initial_training_values      the number of steps of the run
    _init_training_state             the epoch at which it continues: the Trainer skips nothing, as our loader is there
    _run_epoch                       the number of batches in this epoch
    on_pre_optimizer_step, on_step_end (a callback)     the weights are about to change; a step was done
    _save_checkpoint                 saved by the session: commit, lock, ledger, retention
    _evaluate                        does not affect the generators of the training
    log                              adds figures to what it logs, if requested
    training_step, _get_grad_norm    the loss and the gradient norm of each step, for figures
    compute_loss                     the losses of labels, for ``metrics="losses"``
    _load_from_checkpoint, _issue_warnings_after_load     weights that have other names in a checkpoint
    _load_callback_state             the data state is not a callback's state; callbacks continue where they were
    _load_callback_state, _run_epoch                      frozen weights that no checkpoint holds

The data state is in a checkpoint's ``trainer_state.json``, next to the number of steps that trained the weights.
See docs/hugging-face.md. Importing this does not import transformers.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.item_options import ItemOptions
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.names import hugging_face_tag
from megaresume.checkpoint.replay import Replay
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.checkpoint.system import Topology
from megaresume.hosts.accelerate_backends import (
    Written,
    check_backend,
    check_loadable,
    engine_of,
    expected_files,
    zero_stage,
)
from megaresume.hosts.attach import check_new, hook, replaced
from megaresume.hosts.deepspeed.engine import raising_last
from megaresume.hosts.feeds import Feed, ItemFeed
from megaresume.hosts.frozen import FrozenWeights
from megaresume.hosts.hugging_face_data import CountedBatches, callback_of, check_processes, check_settings, loader_of
from megaresume.hosts.hugging_face_epochs import Epochs
from megaresume.hosts.hugging_face_families import (
    check_callbacks,
    check_methods,
    refuse_allocation,
    restore_callbacks,
    undo_settings,
)
from megaresume.hosts.hugging_face_weights import RenamedWeights, check_adapter, frozen_of, saved_or_trained
from megaresume.hosts.steps import loop_words
from megaresume.hosts.token_losses import LogitLosses
from megaresume.hosts.trainer import Hook, TrainerHost, merge_trainer_settings, undrawn, write_all
from megaresume.stream.errors import StateError, UsageError

#: the key in ``stateful_callbacks`` of trainer_state.json.
KEY = "megaresume"
STATE = "trainer_state.json"

#: see `frozen_of`.
GO_ON = (
    ". To go on with these, as if they are not used: megaresume.attach(trainer, checkpoints=megaresume.Checkpoints("
    "compare_frozen=False)), or with the launcher --no-megaresume-compare-frozen"
)

#: see `check_loadable`.
WRITTEN: Written = {
    "DeepSpeed": (("global_step*",), "TrainingArguments(deepspeed=...)"),
    "FSDP": (("pytorch_model_fsdp*", "optimizer.bin", "optimizer_[0-9]*"), "TrainingArguments(fsdp=...)"),
    "DDP": (("optimizer.pt",), "neither deepspeed nor fsdp"),
}


def attach(
    trainer: Any,
    data: Any = None,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    metrics: Any = None,
    **options: Unpack[ItemOptions],
) -> DataLoader:
    """Give a Trainer its data in an exact order, and add the state of that data to its checkpoints. Call it on every
    rank, before ``trainer.train``.

    Batch size, workers and collator are the Trainer's; the seed of the order is its ``data_seed``, or ``seed``. With
    ``resume_from_checkpoint=True`` it resumes from the newest complete checkpoint in ``output_dir``, or starts afresh
    if there is none. ``save_total_limit`` sets how many of the newest complete ones to keep.

    Args:
        trainer: transformers' Trainer, or an instance of a derived class.
        data: a map-style dataset, or several: ``{name: (dataset, weight)}``; None: its ``train_dataset``.
        checkpoints: what is kept besides the newest, how often a save is retried, and so on. The Trainer's own settings
            determine where it saves, and how many it keeps.
        stop: when to save and exit, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.
        options: those of `megaresume.DataLoader`: append, on_change, contents, stages, skip, keyed; and for packing,
            seq_length, packing, lengths, lengths_dir (default: in ``output_dir``) and blend. Packed items come without
            padding, and only through the Trainer's ``data_collator`` if that does not pad. With
            ``train_sampling_strategy="group_by_length"``: lengths and lengths_dir.

    Returns:
        the loader, which the Trainer reads from.

    Raises on every rank:
        UsageError: a setting that would change the order, by name; or already attached.
        CheckpointError: another job writes to ``output_dir``.
    """
    host = TransformersHost(trainer, data, options)
    host.attach(checkpoints, stop, metrics)
    return host.loader


class TransformersHost(TrainerHost):
    """Transformers' Trainer as a host, see `TrainerHost`.

    Args:
        trainer: transformers' Trainer, or an instance of a derived class.
        data, options: see `attach`.
    """

    package = "transformers"
    words = loop_words(
        trainer="the Trainer",
        name="trainer.get_train_dataloader()",
        clock="the optimizer step",
        untrained=(
            "a callback or a method took a batch of train_dataloader; or the first of the callbacks was removed",
            "to look at a batch: trainer.data_collator([dataset[0], dataset[1]])",
        ),
        early_save=(
            "trainer._save_checkpoint was called within a step; or after an exception that ended the training between "
            "the change of the weights and on_step_end, which counts it",
            "to save, set control.should_save in on_step_end; after such an exception resume from the checkpoint "
            "before it: trainer.train(resume_from_checkpoint=True) in a new process",
        ),
        other_count=(
            "the Trainer's state was changed by hand, or loaded from another checkpoint",
            "trainer.train(resume_from_checkpoint=True), and nothing else, loads checkpoints",
        ),
    )
    forgotten = "trainer.train() was called without resume_from_checkpoint, or output_dir was used before"
    load = "trainer.train(resume_from_checkpoint=True)"
    begin_anew = "load its weights with from_pretrained, and train with another output_dir"

    #: the batches of this rank.
    loader: DataLoader
    frozen: FrozenWeights

    def __init__(self, trainer: Any, data: Any, options: ItemOptions) -> None:
        super().__init__(trainer)
        self._data, self._options = data, options
        self._ran = False
        #: figures to be logged.
        self._figures: Mapping[str, float] = {}
        #: the optimizer whose steps are reported.
        self._watched: Any = None
        self.frozen = frozen_of(trainer, GO_ON)

    def check(self) -> None:
        """See `TrainerHost`."""
        trainer = self.trainer
        if missing := [name for owner, name, _ in self.hooks() if not hasattr(owner, name)]:
            raise UsageError(
                "this version of transformers has another Trainer",
                found=f"transformers {importlib.metadata.version('transformers')}, without {', '.join(missing)}",
                expected="transformers 5.6 or later",
                action="pip install --upgrade 'megaresume[hugging-face]'",
            )
        check_new(trainer, "Trainer")
        undo_settings(trainer)
        check_methods(trainer)  # before its settings: a class may need a setting that is refused
        check_settings(trainer)
        check_backend(trainer.accelerator)
        check_callbacks(trainer)

    def check_processes(self) -> None:
        """See `TrainerHost`."""
        check_processes(self.trainer)

    def settings(self, given: Checkpoints) -> Checkpoints:
        """See `TrainerHost`."""
        args = self.trainer.args
        replay = Replay.asked()  # a replay writes outside the run, and logs there
        args.output_dir = os.path.abspath(args.output_dir) if replay is None else replay.out  # os.chdir may follow
        limit = "save_total_limit", args.save_total_limit
        place = "output_dir", args.output_dir
        return merge_trainer_settings(given, trainer="Hugging Face's Trainer", save_dir=place, keep_last=limit)

    def feed(self) -> Feed:
        """See `TrainerHost`."""
        data = self.trainer.train_dataset if self._data is None else self._data
        self.loader = loader_of(self.trainer, data, self._options)
        return ItemFeed(self.loader)

    @property
    def device(self) -> Any:
        """See `TrainerHost`."""
        return self.trainer.args.device

    def begin(self) -> None:
        """See `TrainerHost`."""
        self._attached_with = self._settings()
        self._epochs = Epochs(self.loader, self.steps)
        batches = CountedBatches(self.steps)
        self.trainer.get_train_dataloader = lambda: batches if self._ran else self.loader
        self.trainer.callback_handler.callbacks.insert(0, callback_of(self))  # before callbacks that log the epoch

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        trainer = self.trainer
        hooks: list[Hook] = [
            (trainer, "train", self.train),
            (trainer, "set_initial_training_values", self._set_initial_training_values),
            (trainer, "_init_training_state", self._init_training_state),
            (trainer, "_run_epoch", self._run_epoch),
            (trainer, "_save_checkpoint", self._save_checkpoint),
            (trainer, "_evaluate", undrawn),
            *RenamedWeights(trainer).hooks(),
            *refuse_allocation(trainer),
            (trainer, "_load_callback_state", self._load_callback_state),
            (trainer, "log", self._with_figures),
            (trainer, "training_step", self._with_loss),
        ]
        if hasattr(trainer, "_get_grad_norm"):
            hooks.append((trainer, "_get_grad_norm", self._with_norm))
        return hooks

    def take_losses(self, every: int) -> None:
        """See `GivesLosses`."""

        def take(losses: Any, counts: Any) -> None:
            assert self.session.meter is not None
            self.session.meter.losses(self.steps.numbers(), losses, counts)

        losses = LogitLosses(every, take, instead="call loader.meter.losses in compute_loss")
        hook(self.trainer, "compute_loss", functools.partial(_with_outputs, losses))

    def _with_loss(self, train: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.steps.trains(inputs)
        loss = train(model, inputs, *args, **kwargs)
        self.note_loss(loss, is_scaled=True)
        return loss

    def _with_norm(self, norm_of: Any, *args: Any, **kwargs: Any) -> Any:
        norm = norm_of(*args, **kwargs)
        self.note_norm(norm)
        return norm

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See `HasLoggers`: added to what the Trainer logs next."""
        self._figures = figures

    def _with_figures(self, log: Any, logs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """The Trainer's ``log``, with figures that are not logged yet."""
        figures, self._figures = self._figures, {}
        return log({**logs, **figures}, *args, **kwargs)

    def save_now(self) -> None:
        """Save the last step, by the Trainer's own method."""
        self.trainer._save_checkpoint(self.trainer.model, None)

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(super().topology(), zero_stage=zero_stage(self.trainer.accelerator))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        return expected_files(
            self.trainer.accelerator, save_dir, tag, inner=lambda engine: f"global_step{engine.global_steps}"
        )

    def stepped(self) -> None:
        """Note that an optimizer step was done. Raises StateError: see `Count`."""
        self.steps.stepped()
        self.steps.compare(int(self.trainer.state.global_step))
        self.trainer.state.epoch = self._epochs.trained()

    def train(
        self, train: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Choose what to resume from, train, and record the end of the run.

        Raises, on every rank:
            UsageError: a hyperparameter search, or a second training with one Trainer.
            CheckpointError, StateError: see `Session.choose` and `Session.resume`.
        """
        if trial is not None or self._ran:
            raise UsageError(
                "megaresume.attach is for one training",
                found="a trial of a hyperparameter search" if trial is not None else "a second trainer.train()",
                expected="one trainer.train() for each Trainer",
                action="to train on, make a new Trainer with more num_train_epochs or max_steps, attach to it, and "
                "call train(resume_from_checkpoint=True); for another training, give it its own output_dir",
            )
        self._ran = True
        if self.session.replay is not None:
            resume_from_checkpoint = True
        on_all_ranks(self._check_settings)
        path = self._chosen(resume_from_checkpoint) if resume_from_checkpoint else None
        if not resume_from_checkpoint and self.trainer.args.save_strategy == "no" and self.session.stopper is None:
            self.session.roots.save_dir = None  # the files there belong to another run, and are kept
        # Retention is the session's: the Trainer would delete before the newer checkpoint is complete.
        with replaced(self.trainer.args, save_total_limit=None):
            result = train(path, trial, *args, **kwargs)
        if self.steps.step >= self.trainer.state.max_steps:
            self.session.finish()
        self.session.close()
        return result

    def _settings(self) -> dict[str, Any]:
        """The settings that the loader was made with."""
        trainer = self.trainer
        names = (
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "dataloader_num_workers",
            "data_seed",
            "seed",
            "output_dir",
        )
        return {name: getattr(trainer.args, name) for name in names} | {
            name: getattr(trainer, name) for name in ("train_dataset", "data_collator")
        }

    def _check_settings(self) -> None:
        check_callbacks(self.trainer)
        now = self._settings()
        for name, before in self._attached_with.items():
            if now[name] is not before and not (isinstance(before, int | str | None) and now[name] == before):
                raise UsageError(
                    f"{name} was changed after megaresume.attach",
                    found=f"{name}: {now[name]!r:.80}",
                    expected=f"{before!r:.80}",
                    cause="the loader is made, and output_dir locked, when megaresume.attach is called",
                    action="call megaresume.attach last, just before trainer.train",
                )

        parts = self.session.roots.parts_of(Path(self.trainer.args.output_dir))
        if parts is not None and self.trainer.args.save_on_each_node:
            raise UsageError(
                "save_on_each_node, and every node has a disk of its own",
                found=f"save_on_each_node=True, and {parts.nodes.number} nodes that copy their parts of a checkpoint "
                "to one place",
                expected="each file from one node: every node would write another trainer_state.json, and no "
                "checkpoint could be put together from the parts",
                action="TrainingArguments(save_on_each_node=False): each node still writes what its ranks hold, and a "
                "start brings it the rest",
            )

    def _chosen(self, asked: Any) -> str | None:
        """The checkpoint to resume from, with its data restored; None if there is none yet."""
        root, pick = Path(self.trainer.args.output_dir), None
        if not isinstance(asked, bool):
            tag_dir = Path(os.path.abspath(asked))
            root, pick = tag_dir.parent, self.session.exactly(tag_dir)
        choice, beside = self.session.choose(root, pick)
        if choice is None:
            return None
        reading = on_all_ranks(lambda: self.read(choice, None if beside is None else beside.topology))
        self.session.accept(choice, beside, reading)
        assert self.session.loaded is not None
        self.steps.loaded(reading.iteration, self.session.loaded.envelope.samples)
        self.session.resume()
        return str(choice.tag_dir)

    def _set_initial_training_values(self, values: Any, *args: Any, **kwargs: Any) -> Any:
        """The epochs and steps of the run, counted from the sample at which it continues."""
        on_all_ranks(self._check_settings)  # again: the `train` of a class, like TRL's A2PO, may filter the dataset
        _, *between, _ = values(*args, **kwargs)
        epochs, steps = self._epochs.of_run(self.trainer.args)
        return (epochs, *between, steps)

    def _init_training_state(self, init: Any, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """The position at which it continues: (epoch, batches to skip)."""
        init(*args, **kwargs)
        return self.loader.epoch, 0

    def _run_epoch(self, run: Any, **kwargs: Any) -> Any:
        """Run with the number of batches that are left in this epoch.

        Raises:
            UsageError: the previous epoch was ended early.
        """
        self._epochs.check(kwargs["epoch"])
        self._watch()
        batches, steps = self._epochs.left()
        return run(**kwargs | {"steps_in_epoch": batches, "num_update_steps_per_epoch": steps})

    def _watch(self) -> None:
        """Watch DeepSpeed's steps, which happen within `training_step`, before any callback is called."""
        optimizer = self.trainer.optimizer
        while (inner := getattr(optimizer, "optimizer", None)) is not None:
            optimizer = inner
        if optimizer is not self._watched:
            self._watched = optimizer
            self.watch([optimizer])

    def _save_checkpoint(self, write: Any, model: Any, trial: Any) -> None:
        """Save and commit."""
        steps = self.steps
        if self.trainer.control.should_training_stop:  # possibly in the middle of a step
            steps.leave()
        steps.compare(int(self.trainer.state.global_step))
        self.save_by(
            self.trainer.args.output_dir,
            lambda save: self.write(save, lambda: write(model, trial)),
            tag=hugging_face_tag(steps.step),
            tracker=False,
        )

    def _load_callback_state(self, load: Any) -> None:
        """Remove the data state, for which the Trainer would look for a callback; also if the Trainer restores none."""
        self.trainer.state.stateful_callbacks.pop(KEY, None)
        load()
        if not self.trainer.args.restore_callback_states_from_checkpoint:
            restore_callbacks(self.trainer)

    def write(self, save: Save, write: Any) -> None:
        """Write a checkpoint by the Trainer's own method ``write()``, with the data state in its trainer_state.json."""
        self.frozen.note(save, functools.partial(saved_or_trained, self.trainer))
        self.trainer.state.stateful_callbacks[KEY] = save.envelope.to_dict()

        def write_files() -> None:
            engine = engine_of(self.trainer.accelerator)
            with raising_last(engine, (self.trainer, "_save")), replaced(self, is_at_files=True):
                write()
            check_adapter(self.trainer, save.tag_dir)

        write_all(save, write_files)

    def read(self, choice: Choice, before: Topology | None) -> Restored:
        """Read our part of a checkpoint, before the Trainer reads the weights. On every rank; raises on one rank.

        Args:
            choice: the checkpoint.
            before: the layout of the run when it saved; None if unknown.

        Raises:
            StateError: trainer_state.json cannot be read, or our part of it is damaged.
            CheckpointError: see `check_loadable`.
        """
        path = choice.tag_dir / STATE
        try:
            state = json.loads(path.read_text())
            step, within = int(state["global_step"]), (state.get("stateful_callbacks") or {}).get(KEY)
        except FileNotFoundError as error:
            raise StateError(
                f"this is not a checkpoint of the Trainer's: it has no {STATE}",
                found=str(choice.tag_dir),
                expected=f"a checkpoint-N, in which the Trainer writes {STATE} last",
                cause="it holds a model alone, and the script passes it on as resume_from_checkpoint (as some do with "
                "a model_name_or_path that is a directory); or a save was killed",
                action="to begin with this model, leave resume_from_checkpoint out, or pass True: from_pretrained has "
                "read its weights already; to resume, pass the checkpoint that megaresume latest names",
            ) from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"{STATE} of the checkpoint cannot be read",
                found=f"{path}: {type(error).__name__}: {error}",
                expected="what the Trainer writes last",
                cause="the save was killed, and the checkpoint was written without megaresume",
                action=f"resume from the one that megaresume latest {choice.load_dir} names",
            ) from error
        envelope = None if within is None else Envelope.read(within)
        if envelope is not None:
            check_loadable(
                self.trainer.accelerator, choice.tag_dir, before, written=WRITTEN, begin_anew=self.begin_anew
            )
        return Restored(envelope=envelope, iteration=step, samples=None)


def _with_outputs(
    losses: LogitLosses, compute: Any, model: Any, inputs: Any, return_outputs: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """``Trainer.compute_loss``, with access to its outputs during training."""
    if not model.training or not losses.wants():
        return compute(model, inputs, return_outputs, *args, **kwargs)
    labels = {name: inputs[name] for name in ("labels", "shift_labels") if name in inputs}  # it may remove them
    loss, outputs = compute(model, inputs, True, *args, **kwargs)
    losses.look(labels, loss, outputs, items=kwargs.get("num_items_in_batch"))
    return (loss, outputs) if return_outputs else loss
