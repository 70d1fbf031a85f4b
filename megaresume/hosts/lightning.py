"""Exact data resume for Lightning's Trainer.

    trainer = L.Trainer(max_epochs=3, callbacks=[ModelCheckpoint(every_n_train_steps=100)])
    megaresume.attach(trainer, checkpoints=megaresume.Checkpoints(save_dir="run", keep_last=3))
    trainer.fit(model, megaresume.DataLoader(dataset, batch_size=8), ckpt_path="last")

Hooked on the Trainer and on its loops:

    fit                       once; the end of the run
    _select_ckpt_path         what was requested to resume from
    resume_start              the session begins; what to resume from is chosen and read
    _data_source.dataloader   our batches
    _auto_select_batch_size   of DeepSpeed's strategy: that of our loader
    register_signal_handlers  without Lightning's if the run stops in time: they raise between two saves
    fit_loop.run              the epoch at which it continues
    epoch_loop.on_run_start   the number of micro-batches in this epoch, and how many of them are trained
    val_loop.run              does not affect the generators of the training
    precision_plugin.backward, optimizer_step
                              what was done with a micro-batch. Callbacks are told of both as well, but take ten times
                              as long: Lightning profiles each call
    save_checkpoint           saved by the session: commit, lock, ledger, retention; the requested file is a link to it

and a callback, before all others: a step was done; the generators after a validation.

    <save_dir>/global_step10/checkpoint.ckpt    what Lightning writes, and within it, under ``megaresume``, the data
                                                state: a file, or under DeepSpeed and with sharded checkpoints a
                                                directory

See docs/lightning.md. Importing this imports neither lightning nor pytorch_lightning.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint import generators
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.records.names import deepspeed_tag
from megaresume.checkpoint.replay import Replay
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.checkpoint.system import Topology
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.feeds import ItemFeed, micro_batches_to, warn_of_left_over
from megaresume.hosts.frozen import FrozenWeights, entries, weights_of
from megaresume.hosts.lightning_trainer import (
    DEEPSPEED,
    FILE,
    KEY,
    CountedBatches,
    callback_of,
    check_fit,
    check_kind,
    check_trainer,
    exactly,
    in_the_middle,
    link,
    make_room,
    not_made,
    saves_itself,
)
from megaresume.hosts.steps import loop_words
from megaresume.hosts.trainer import Hook, TrainerHost, check_checkpoints, check_together, write_all
from megaresume.stream.errors import UsageError

FITTING = "fit"


def attach(trainer: Any, *, checkpoints: Checkpoints, stop: StopConditions | None = None, metrics: Any = None) -> None:
    """Give the fit of a Lightning Trainer its data in an exact order, and complete checkpoints. Call it on every rank,
    before ``trainer.fit``.

    The training data is a `DataLoader`: passed to ``fit``, or returned by ``train_dataloader`` of the model or the data
    module. ``fit(ckpt_path="last")`` resumes from the newest complete checkpoint in ``save_dir``, or starts afresh if
    there is none. Whenever a ModelCheckpoint saves, a complete checkpoint is made, and its own file is a link into it.
    A Trainer with ``fast_dev_run``, which saves nothing, is left unchanged.

    Args:
        trainer: ``lightning.Trainer`` or ``pytorch_lightning.Trainer``, on one device, or with DDP, FSDP, FSDP2
            or DeepSpeed.
        checkpoints: where the run saves, ``save_dir``, what it keeps, and so on.
        stop: when to save and exit, with `megaresume.Stopped`. Lightning then listens to no signal.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.

    Raises:
        UsageError: a setting that would change the data, by name; or already attached. Also raised by ``fit``, on every
            rank, for what is only known then.
    """
    host = LightningHost(trainer, check_checkpoints(checkpoints), stop, metrics)
    host.check()
    if trainer.fast_dev_run:
        if is_rank_0():
            print("megaresume: fast_dev_run saves nothing: megaresume.attach leaves this Trainer as it is", flush=True)
        return
    if stop is not None:
        trainer._signal_connector.register_signal_handlers = lambda: None
    host.put_hooks()
    trainer.callbacks.insert(0, callback_of(host))


class LightningHost(TrainerHost):
    """Lightning's Trainer as a host, see `TrainerHost`. Its session is open during a fit, when the loader is known.

    Args:
        trainer: Lightning's.
        checkpoints, stop, metrics: see `attach`.
    """

    words = loop_words(name="trainer.train_dataloader", clock="the optimizer step")
    frozen: FrozenWeights
    forgotten = "trainer.fit was called without ckpt_path='last', or save_dir was used before"
    load = "trainer.fit(model, ckpt_path='last')"
    begin_anew = "read its weights with YourModule.load_from_checkpoint, and save to another directory"

    def __init__(
        self, trainer: Any, checkpoints: Checkpoints, stop: StopConditions | None = None, metrics: Any = None
    ) -> None:
        super().__init__(trainer)
        self.checkpoints, self.stop, self.metrics = checkpoints, stop, metrics
        #: the Trainer's package: ``lightning.pytorch`` or ``pytorch_lightning``.
        self.module = ""
        self.is_open = False
        #: what the Trainer reads from, once a fit has begun.
        self.batches: CountedBatches | None = None
        self.frozen = FrozenWeights(lambda: weights_of({"0": trainer.model}))
        self._asked: Any = None
        #: optimizer steps counted by Lightning when the last step of the data was done.
        self._counted = 0
        #: what was done with the current micro-batch. A step that a gradient scaler skips counts as done.
        self._has_backward = self._has_step = False
        #: whether a checkpoint is to follow the step; whether no more will.
        self._is_due, self._is_over = False, False
        #: the last saved step, and the links to it.
        self._linked: tuple[int, list[Path]] = 0, []
        #: whether the loaded checkpoint was saved during its step, so before that step's validation.
        self._lacks_validation = False
        #: the generators before the current validation.
        self._before: generators.Snapshot | None = None

    def check(self) -> None:
        """See `TrainerHost`: checks what is known before a fit."""
        self.module = check_trainer(self.trainer, stops=self.stop is not None)
        # Its distributions have these names, and one of them has the library under both.
        self.package = self.module.partition(".")[0]

    @property
    def loader(self) -> DataLoader:
        """The loader that a fit was given."""
        loader: DataLoader = self.steps.feed.loader
        return loader

    def check_processes(self) -> None:
        """See `TrainerHost`."""
        check_together(
            self.trainer.world_size,
            "Trainer.world_size",
            cause="devices or num_nodes of the Trainer are left out, or count one process",
            action="Trainer(devices=..., num_nodes=...) as many as the launcher starts",
        )

    @property
    def device(self) -> Any:
        """See `TrainerHost`."""
        return self.trainer.strategy.root_device

    def hooks(self) -> list[Hook]:
        """See `TrainerHost`."""
        trainer, fit, connector = self.trainer, self.trainer.fit_loop, self.trainer._checkpoint_connector
        precision = trainer.strategy.precision_plugin
        self._request = fit._data_source.dataloader
        # A ModelCheckpoint knows from the checkpoint which of its files exist, and deletes surplus ones.
        more: list[Hook] = [] if Replay.asked() is None else [(trainer.strategy, "remove_checkpoint", lambda *_: None)]
        if hasattr(trainer.strategy, "_auto_select_batch_size"):
            more.append((trainer.strategy, "_auto_select_batch_size", self._batch_size))
        return [
            *more,
            (trainer, "fit", self._fit),
            (trainer, "save_checkpoint", self._save_checkpoint),
            (connector, "_select_ckpt_path", self._select),
            (connector, "resume_start", self._resume),
            (fit._data_source, "dataloader", self._dataloader),
            (fit, "run", self._run),
            (fit.epoch_loop, "on_run_start", self._begin_epoch),
            (fit.epoch_loop.val_loop, "run", self._validate),
            (precision, "backward", self._backward),
            (precision, "optimizer_step", self._optimizer_step),
        ]

    def _fit(self, fit: Any, *args: Any, **kwargs: Any) -> None:
        """Train, and record the end of the run.

        Raises, on every rank:
            UsageError: a second fit with one Trainer.
            CheckpointError, StateError: see `Session.load`.
        """
        if self.batches is not None:
            raise UsageError(
                "megaresume.attach is for one fit",
                found="a second trainer.fit()",
                expected="one trainer.fit() for each Trainer",
                action="make a new Trainer, and attach to it; with ckpt_path='last' it continues where this one ended",
            )
        fit(*args, **kwargs)
        if self.is_open:
            self.is_open = False
            self.end()

    # Load

    def _select(self, select: Any, state_fn: Any, ckpt_path: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The checkpoint that a fit should resume from: None, ``last``, or a path."""
        if state_fn != FITTING:
            return select(state_fn, ckpt_path, *args, **kwargs)
        connector = self.trainer._checkpoint_connector
        asked = connector._ckpt_path if connector._user_managed and not ckpt_path else ckpt_path
        if asked not in (None, "", "last"):
            asked = Path(os.path.abspath(os.path.expanduser(select(state_fn, ckpt_path, *args, **kwargs))))
        self._asked = asked
        return None

    def _resume(self, read: Any, checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        """Open the session, choose what to resume from, and read it; Lightning restores it later."""
        if self.trainer.state.fn != FITTING:
            read(checkpoint_path, *args, **kwargs)
            return
        loader = on_all_ranks(self._request)
        on_all_ranks(lambda: check_fit(self.trainer, self.module, loader))
        self.open(ItemFeed(loader), self.checkpoints, self.stop, self.metrics)
        self.is_open, self.batches = True, CountedBatches(self.steps, len(loader))
        if self._asked:
            pick = None if self._asked == "last" else exactly(self.session, self.save_dir, self._asked)

            def read_files(choice: Choice, before: Topology | None) -> Restored:
                return self.read(choice, before, lambda file: read(file, *args, **kwargs))

            self.load_by(read_files, pick=pick)
        if self.session.resumed is None:
            read(None, *args, **kwargs)

    # The loops

    def _dataloader(self, request: Any) -> Any:
        """Our batches, in place of their loader."""
        return request() if self.batches is None else self.batches

    def _batch_size(self, select: Any) -> int:
        """The size of a micro-batch: DeepSpeed's strategy would ask the batch sampler, and our loader has none."""
        loader = self._request() if self.trainer.fit_loop._data_source.is_defined() else None
        return int(loader.batch_size if isinstance(loader, DataLoader) else select())

    def _run(self, run: Any) -> None:
        """Continue from the data's position, whatever Lightning's counters say: batches may have another size now."""
        trainer, loader = self.trainer, self.loader
        fit = trainer.fit_loop
        done, _ = self.batches_of_epoch()
        for epochs in (fit.epoch_progress.total, fit.epoch_progress.current):
            epochs.ready = epochs.started = loader.epoch + bool(done)
            epochs.processed = epochs.completed = loader.epoch
        loop = fit.epoch_loop
        batches = loop.batch_progress.total
        # A ModelCheckpoint with every_n_train_steps saves before Lightning completes the step, and validates.
        self._lacks_validation = batches.completed < batches.processed
        if self.steps.step and not done:
            self._warn_of_lost()
        batches.started = batches.processed = batches.completed = batches.ready
        loop._batches_that_stepped, self._counted = self.iteration(), trainer.global_step
        # In the middle of an epoch, the hooks for its beginning are not called again.
        fit._restarting, loop._restarting, loop.val_loop._restarting = bool(done), False, False
        fit._loaded_from_state_dict = False
        for optimizer in trainer.optimizers:  # steps that LightningModule.optimizer_step does itself
            if isinstance(optimizer, torch.optim.Optimizer):
                optimizer.register_step_post_hook(self._step_made)
        run()

    def _warn_of_lost(self) -> None:
        """Warn after a checkpoint of an epoch's end: a resume leaves out what Lightning does there after the save."""
        trainer = self.trainer
        lost = ["update of ReduceLROnPlateau"] * any(one.reduce_on_plateau for one in trainer.lr_scheduler_configs)
        if self._lacks_validation and trainer.early_stopping_callbacks and trainer.enable_validation:
            lost.append("validation for EarlyStopping")
        if lost and self.session.resumed is not None and is_rank_0():
            print(
                "megaresume: warning: the checkpoint was saved at the end of an epoch, before Lightning's "
                f"{' and '.join(lost)}, which a resume does not repeat. Save within epochs, with every_n_train_steps",
                flush=True,
            )

    def _begin_epoch(self, begin: Any, fetcher: Any) -> None:
        """Set the number of micro-batches in this epoch; those that are trained count as fetched."""
        trainer, batches = self.trainer, self.batches
        assert batches is not None
        fit = trainer.fit_loop
        done, left = self.batches_of_epoch()
        batches.length = fit.max_batches = done + left
        fit._combined_loader.limits = [float("inf")]
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(batches.length * trainer.val_check_interval))
        progress = fit.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = done
        fit._restarting = fit._resuming_from_checkpoint = False
        iter(fetcher)  # requests the length
        begin(fetcher)
        if self._lacks_validation and done and fit.epoch_loop._should_check_val_fx(fetcher):
            self._validate_first()
        self._lacks_validation = False

    def _validate_first(self) -> None:
        """Let the loop begin with the last step's validation, which is not in the checkpoint.

        Otherwise EarlyStopping would have counted one fewer. Lightning does this if a validation was interrupted.
        """
        loop = self.trainer.fit_loop.epoch_loop
        stages = importlib.import_module(f"{self.module}.loops.evaluation_loop").RestartStage
        loop._restarting, loop.val_loop._restart_stage = True, stages.RESTARTED_MID_EVALUATION
        loop._batches_that_stepped -= 1  # it is counted after the validation

    def _backward(self, backward: Any, *args: Any, **kwargs: Any) -> None:
        """Do a backward pass."""
        backward(*args, **kwargs)
        self._has_backward = True

    def _optimizer_step(self, step: Any, *args: Any, **kwargs: Any) -> Any:
        """Do an optimizer step, which a gradient scaler may skip."""
        result = step(*args, **kwargs)
        self._step_made()
        return result

    def _step_made(self, *_: Any) -> None:
        self._has_step = True

    def step_ends(self) -> None:
        """Note that a micro-batch was trained; it ends a step if the optimizer stepped.

        Raises:
            StateError: Lightning counted something that was not done.
        """
        counted, steps = self.trainer.global_step, self.steps
        had_backward, had_step = self._has_backward, self._has_step
        self._has_backward = self._has_step = False
        is_automatic, is_step = self.trainer.lightning_module.automatic_optimization, counted != self._counted
        if is_automatic and not had_backward:
            why = (
                "training_step returned None",
                "return the loss times 0 for what is not to be trained, or remove it from the dataset",
            )
            raise steps.fail(steps.untrained("no backward pass was made for the last of them", why=why))
        if not is_step:
            return
        if is_automatic and not had_step:
            raise steps.fail(not_made(steps.step + 1))
        if not steps.is_whole and not is_automatic:
            raise steps.fail(in_the_middle(counted, self.loader.accumulation))
        self._counted = counted
        steps.stepped()
        self.save_if_due()

    def _validate(self, run: Any) -> Any:
        """Restore the generators after a validation, which a resume would not repeat."""
        device = self.trainer.strategy.root_device
        self._before = generators.take(device)
        try:
            return run()
        finally:
            self.put_generators()
            self._before = None

    def put_generators(self) -> None:
        """Restore the generators before a validation saves, and after it."""
        if self._before is not None:
            generators.put(self._before, self.trainer.strategy.root_device)

    # Save

    def _save_checkpoint(
        self, write: Any, filepath: Any, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save and commit; the requested file is then a link to the file of the checkpoint.

        In the middle of a step, the file is written as usual, without a data state, and a checkpoint follows when it
        ends.
        """
        if Replay.asked() is not None:
            return  # fast_dev_run saves nothing
        if not self.is_open or weights_only:
            make_room(filepath)
            write(filepath, weights_only, storage_options)
            return
        if storage_options is not None:
            raise UsageError(
                "storage_options cannot be used with megaresume.attach",
                found=f"save_checkpoint({os.fspath(filepath)!r}, storage_options=...)",
                expected="not set",
                action="leave it out; megaresume.Checkpoints(stage_to=...) copies checkpoints elsewhere",
            )
        if not self._is_over and not self.steps.is_idle:
            self._is_due = True
            make_room(filepath)
            write(filepath, weights_only)
            return
        if (file := self.save_now()) is None:
            return
        step, paths = self._linked
        # Links from an earlier save of this step would lead to a replaced file.
        paths = [path for path in paths if path.exists()] if step == self.iteration() else []
        paths.append(Path(os.path.abspath(filepath)))
        self._linked = self.iteration(), paths
        on_rank_0(lambda: link(file, paths))

    def save_now(self) -> Path | None:
        """Save a complete checkpoint of the last step; returns its file; None if it failed and the run continues."""
        self._is_due = False
        tag = deepspeed_tag(self.iteration())
        file: Path | None = self.save_by(self.save_dir, self.write, tag=tag, tracker=False)
        return file

    def save_if_due(self, *, is_over: bool = False) -> None:
        """Save what was requested in the middle of a step. ``is_over``: the rest of a step will never be trained."""
        self._is_over = is_over
        if is_over:
            self.steps.leave()
        if self._is_due:
            self.save_now()

    @property
    def engine(self) -> Any:
        """DeepSpeed's engine; None: another strategy."""
        return getattr(self.trainer.strategy, "deepspeed_engine", None)

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See `HasLoggers`."""
        for logger in self.trainer.loggers:
            logger.log_metrics(dict(figures), step)

    def topology(self) -> Topology:
        """See `Host`."""
        return replace(super().topology(), zero_stage=None if self.engine is None else facts.zero_stage(self.engine))

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`."""
        if self.engine is not None:
            names = facts.expected_files(self.engine, str(save_dir / tag / FILE), DEEPSPEED)
            return [f"{FILE}/{DEEPSPEED}/{name}" for name in names]
        if self._is_sharded():
            return None
        return [FILE] if is_rank_0() else []

    def _is_sharded(self) -> bool:
        """Whether every rank writes a part, as under FSDP."""
        strategy = self.trainer.strategy
        return (
            getattr(strategy, "_state_dict_type", "full") == "sharded"
            or getattr(strategy, "_save_distributed_checkpoint", False) is True
        )

    def write(self, save: Save) -> Path:
        """Write the file that Lightning would write, including the data state: for `Session.save`."""
        file, trainer = save.tag_dir / FILE, self.trainer

        def saved(weights: Mapping[str, Any]) -> Iterable[str]:
            if self.engine is not None:
                excludes = getattr(trainer.strategy, "exclude_frozen_parameters", False)
                return facts.saved_names(self.engine, weights, excludes=excludes)
            return entries({"0": state["state_dict"]})

        def write_file() -> None:
            with facts.raising_last(self.engine):
                trainer.strategy.save_checkpoint(state, str(file))

        # Not `trainer.save_checkpoint`: if rank 0 cannot write, the others would wait for it at a barrier.
        state = on_all_ranks(lambda: trainer._checkpoint_connector.dump_checkpoint(False))
        self.frozen.note(save, saved, trainer.optimizers, may_be_elsewhere=lambda: saves_itself(trainer))
        state[KEY] = self.carried(save)
        write_all(save, write_file)
        return file

    def read(self, choice: Choice, before: Topology | None, read: Callable[[str], Any]) -> Restored:
        """Read a checkpoint by Lightning's own method ``read(file)``, which keeps it until the model exists.

        Args:
            choice: the checkpoint.
            before: the layout of the run when it saved; None if unknown.
        """

        def check_and_read() -> None:
            check_kind(self.trainer.strategy, choice, self.engine, self.begin_anew)
            stage, ranks = self.topology().zero_stage, self.trainer.world_size
            facts.check_ranks(stage, before, ranks, choice.tag, begin_anew=self.begin_anew)
            read(str(choice.tag_dir / FILE))

        on_all_ranks(check_and_read)
        held = self.trainer._checkpoint_connector._loaded_checkpoint.get(KEY)
        return Restored(envelope=None, iteration=0, samples=0) if held is None else self.resumed(held)

    def batches_of_epoch(self) -> tuple[int, int]:
        """Micro-batches of this epoch: (trained, in whole steps of the current size; still to come)."""
        loader, at, end = self.loader, self.steps.samples, self.loader.epoch_end
        if loader.epoch + 1 == self.epochs() and loader.stop != end:
            loader.stop = end
            if not loader.drop_last:
                warn_of_left_over(loader, end - at)
        within = max(at - (end - loader.items), 0)
        return within // loader.step_samples * loader.accumulation, micro_batches_to(loader, end, at)

    def epochs(self) -> int | None:
        """The number of epochs of the run, from the Trainer or the loader; None: no end."""
        limits = [self.trainer.fit_loop.max_epochs, *(one.max_epochs for one in self.loader.stream.config.sources)]
        return min((limit for limit in limits if limit not in (None, -1)), default=None)
