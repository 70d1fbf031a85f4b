"""The methods of a Trainer and of its loops that carry its data, hooked on the instance.

fit                       once; the end of the run
_select_ckpt_path         what is to be resumed from, as it was asked for
resume_start              the session begins; what to resume from is chosen and read
_data_source.dataloader   our batches
register_signal_handlers  not Lightning's where the run is to stop in time: they raise between two saves
fit_loop.run              at which epoch it goes on
epoch_loop.on_run_start   how many micro-batches this epoch has, and how many of them are trained
val_loop.run              draws nothing from the generators of the training
save_checkpoint           saved by the session: commit, lock, ledger, retention; the file asked for is a link to it

and a callback, before all others: a step was made; a data state for what is saved; the generators after a validation.
"""

from __future__ import annotations

import importlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.search import Choice, Theirs
from megaresume.checkpoint.paths import deepspeed_tag
from megaresume.checkpoint.session import random_state
from megaresume.checkpoint.session.file_errors import writing
from megaresume.checkpoint.session.host import Reading
from megaresume.checkpoint.session.ranks import is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.session.session import Pick, Session
from megaresume.checkpoint.step_file import StepFile
from megaresume.hosts.instances import hook
from megaresume.hosts.lightning.host import FILE, KEY, Batches, LightningHost, Witness
from megaresume.stream.errors import StateError, UsageError

FITTING = "fit"


class Hooks:
    """See above. Made once for each Trainer.

    Args:
        trainer: Lightning's.
        package: that it is of: ``lightning.pytorch`` or ``pytorch_lightning``.
        open_run: checks a loader, and opens the session of a run that trains from it and saves by the function given.
        listens: whether the run is to stop in time.
    """

    def __init__(
        self,
        trainer: Any,
        package: str,
        open_run: Callable[[Any, Callable[[], Any]], tuple[LightningHost, Session]],
        *,
        listens: bool,
    ) -> None:
        self.trainer, self._open = trainer, open_run
        self.host: LightningHost
        #: while a fit runs.
        self.session: Session | None = None
        self.batches: Batches | None = None
        self._asked: Any = None
        #: optimizer steps that Lightning counted when the last step of the data was made.
        self._counted = 0
        self.witness = Witness()
        #: whether a checkpoint is to follow when the step is made; whether no more will be.
        self._is_due, self._is_over = False, False
        #: the last step that was saved, and the links to it.
        self._linked: tuple[int, list[Path]] = 0, []
        #: the generators before the validation that runs.
        self._before: random_state.Snapshot | None = None
        self._request = trainer.fit_loop._data_source.dataloader
        for owner, name, function in self._hooks(trainer):
            hook(owner, name, function)
        if listens:
            trainer._signal_connector.register_signal_handlers = lambda: None
        trainer.callbacks.insert(0, _callback(package, self))

    def _hooks(self, trainer: Any) -> list[tuple[Any, str, Callable[..., Any]]]:
        fit, connector = trainer.fit_loop, trainer._checkpoint_connector
        return [
            (trainer, "fit", self.fit),
            (trainer, "save_checkpoint", self.save_checkpoint),
            (connector, "_select_ckpt_path", self.select),
            (connector, "resume_start", self.resume),
            (fit._data_source, "dataloader", self.dataloader),
            (fit, "run", self.run),
            (fit.epoch_loop, "on_run_start", self.begin_epoch),
            (fit.epoch_loop.val_loop, "run", self.validate),
        ]

    def fit(self, fit: Any, *args: Any, **more: Any) -> None:
        """Train, and say that the run has come to its end.

        Raises, on every rank:
            UsageError: a second fit of one Trainer.
            CheckpointError, StateError: see `Session.load`.
        """
        if self.batches is not None:
            raise UsageError(
                "megaresume.attach is for one fit",
                found="a second trainer.fit()",
                expected="one trainer.fit() for each Trainer",
                action="make a new Trainer, and attach to it; with ckpt_path='last' it goes on where this one ended",
            )
        fit(*args, **more)
        session, self.session = self.session, None
        if session is not None:
            session.finish()
            session.close()

    # Load

    def select(self, select: Any, state_fn: Any, ckpt_path: Any = None, *args: Any, **more: Any) -> Any:
        """What a fit is to resume from: None, ``last``, or a path."""
        if state_fn != FITTING:
            return select(state_fn, ckpt_path, *args, **more)
        connector = self.trainer._checkpoint_connector
        asked = connector._ckpt_path if connector._user_managed and not ckpt_path else ckpt_path
        if asked not in (None, "", "last"):
            asked = Path(os.path.abspath(os.path.expanduser(select(state_fn, ckpt_path, *args, **more))))
        self._asked = asked
        return None

    def resume(self, read: Any, checkpoint_path: Any = None, *args: Any, **more: Any) -> None:
        """Open the session, choose what to resume from, and read it; Lightning puts it back later."""
        if self.trainer.state.fn != FITTING:
            read(checkpoint_path, *args, **more)
            return
        self.host, session = self._open(on_all_ranks(self._request), self.save)
        self.session = session
        self.batches = Batches(self.host.steps, len(self.host.loader))
        root = self.host.save_dir
        if self._asked:
            pick = None if self._asked == "last" else _exactly(session, root, self._asked)

            def read_files(choice: Choice, beside: StepFile | None) -> Reading:
                before = None if beside is None else beside.topology
                return self.host.read(choice, before, lambda file: read(file, *args, **more))

            session.load(root, read_files, pick=pick)
        if session.resumed is None:
            read(None, *args, **more)

    # The loops

    def dataloader(self, request: Any) -> Any:
        """Our batches, in the place of the loader that they are of."""
        return request() if self.batches is None else self.batches

    def run(self, run: Any) -> None:
        """Go on where the data does, whatever Lightning's counters say: batches may be of another size now."""
        host, trainer = self.host, self.trainer
        fit, loader = trainer.fit_loop, host.loader
        done, _ = host.batches_of_epoch()
        if host.steps.step and not done:
            self._warn_of_plateaus()
        for epochs in (fit.epoch_progress.total, fit.epoch_progress.current):
            epochs.ready = epochs.started = loader.epoch + bool(done)
            epochs.processed = epochs.completed = loader.epoch
        loop = fit.epoch_loop
        batches = loop.batch_progress.total
        batches.started = batches.processed = batches.completed = batches.ready
        loop._batches_that_stepped, self._counted = host.iteration(), trainer.global_step
        # In the middle of an epoch, the hooks of its beginning are not called again.
        fit._restarting, loop._restarting, loop.val_loop._restarting = bool(done), False, False
        fit._loaded_from_state_dict = False
        self.witness.watch(trainer.optimizers)
        run()

    def _warn_of_plateaus(self) -> None:
        """After a checkpoint of the end of an epoch: Lightning updates such a scheduler only after the save."""
        plateaus = any(one.reduce_on_plateau for one in self.trainer.lr_scheduler_configs)
        if plateaus and self.session is not None and self.session.resumed is not None and is_rank_0():
            print(
                "megaresume: warning: the checkpoint was saved at the end of an epoch, before Lightning's update of "
                "ReduceLROnPlateau, which a resume does not make up for. Save within epochs, with every_n_train_steps",
                flush=True,
            )

    def begin_epoch(self, begin: Any, fetcher: Any) -> None:
        """With as many micro-batches as this epoch has; those that are trained are counted as fetched."""
        trainer, batches = self.trainer, self.batches
        assert batches is not None
        fit = trainer.fit_loop
        done, left = self.host.batches_of_epoch()
        batches.length = fit.max_batches = done + left
        fit._combined_loader.limits = [float("inf")]
        if isinstance(trainer.val_check_interval, float) and trainer.val_check_batch is not None:
            trainer.val_check_batch = max(1, int(batches.length * trainer.val_check_interval))
        progress = fit.epoch_loop.batch_progress.current
        progress.ready = progress.started = progress.processed = progress.completed = done
        fit._restarting = fit._resuming_from_checkpoint = False
        iter(fetcher)  # which asks for the length
        begin(fetcher)

    def step_ends(self) -> None:
        """A micro-batch was trained: of a step, if the optimizer made one."""
        counted, steps = self.trainer.global_step, self.host.steps
        is_automatic = self.trainer.lightning_module.automatic_optimization
        if is_automatic:
            self.witness.check(steps, ends_step=counted != self._counted)
        if counted == self._counted:
            return
        if not steps.is_whole and not is_automatic:
            raise steps.fail(
                StateError(
                    "an optimizer made a step in the middle of a step of the data",
                    found=f"global_step {counted}, with fewer micro-batches than the loader has in a step "
                    f"(accumulation={self.host.loader.accumulation})",
                    expected="optimizer steps at the last micro-batch of each",
                    action="megaresume.DataLoader(accumulation=...): the number of micro-batches that training_step "
                    "takes for an optimizer step",
                )
            )
        self._counted = counted
        steps.stepped()
        self.save_if_due()

    def validate(self, run: Any) -> Any:
        """A resume would not do it again: what it draws, the training does not miss."""
        device = self.trainer.strategy.root_device
        self._before = random_state.take(device)
        try:
            return run()
        finally:
            self.put_generators()
            self._before = None

    def put_generators(self) -> None:
        """Before what a validation saves, and after it."""
        if self._before is not None:
            random_state.put(self._before, self.trainer.strategy.root_device)

    # Save

    def save_checkpoint(
        self, write: Any, filepath: Any, weights_only: bool | None = None, storage_options: Any = None
    ) -> None:
        """Save and commit; what was asked for is then a link to the file of the checkpoint.

        In the middle of a step the file is written as ever, without a data state, and a checkpoint follows at its end.
        """
        if self.session is None or weights_only:
            _make_room(filepath)
            write(filepath, weights_only, storage_options)
            return
        if storage_options is not None:
            raise UsageError(
                "storage_options cannot be used with megaresume.attach",
                found=f"save_checkpoint({os.fspath(filepath)!r}, storage_options=...)",
                expected="not set",
                action="leave it out; megaresume.Checkpoints(stage_to=...) copies checkpoints elsewhere",
            )
        if not self._is_over and not self.host.steps.is_idle:
            self._is_due = True
            _make_room(filepath)
            write(filepath, weights_only)
            return
        if (file := self.save()) is None:
            return
        step, paths = self._linked
        # Those of an earlier save of this step would be links to a file that is replaced.
        paths = [path for path in paths if path.exists()] if step == self.host.iteration() else []
        paths.append(Path(os.path.abspath(filepath)))
        self._linked = self.host.iteration(), paths
        on_rank_0(lambda: _link(file, paths))

    def save(self) -> Path | None:
        """A complete checkpoint of the last step; its file, or None if that failed and the run is to go on."""
        session, self._is_due = self.session, False
        assert session is not None
        on_all_ranks(self.host.steps.check_save)
        tag = deepspeed_tag(self.host.iteration())
        file: Path | None = session.save(self.host.save_dir, self.host.write, tag=tag, tracker=False)
        return file

    def save_if_due(self, *, is_over: bool = False) -> None:
        """That which was asked for in the middle of a step. ``is_over``: the rest of a step will never be trained."""
        self._is_over = is_over
        if is_over:
            self.host.steps.leave()
        if self._is_due:
            self.save()


def _exactly(session: Session, root: Path, path: Path) -> Pick:
    """The checkpoint that a path is of, or is a link to."""

    def pick(shared: Any, damaged: Any) -> Choice | Theirs | None:
        of_path = (file.parent for file in root.glob(f"*/{FILE}") if _same(file, path) or _same(file.parent, path))
        if (tag_dir := next(of_path, None)) is None:
            raise UsageError(
                "this is not a complete checkpoint of the run",
                found=str(path),
                expected=f"a directory in {root}, or the file in it, or a link to it",
                cause="it was saved in the middle of a step, copied, or written without megaresume; or the "
                "checkpoint that it was a link to is deleted (keep_last)",
                action="ckpt_path='last'; or read its weights alone, with YourModule.load_from_checkpoint",
            )
        return session.exactly(tag_dir)(shared, damaged)

    return pick


def _same(file: Path, path: Path) -> bool:
    """Whether the two are one file or directory, or directories whose first files are one."""
    try:
        if os.path.samefile(file, path):
            return True
        first, other = (next(iter(sorted(p for p in one.rglob("*") if p.is_file())), None) for one in (file, path))
        return first is not None and other is not None and os.path.samefile(first, other)
    except OSError:
        return False


def _make_room(path: Any) -> None:
    """Lightning writes into a directory that is there, whose files may be links to those of a checkpoint."""
    on_rank_0(lambda: _remove(Path(path)) if os.path.isdir(path) else None)


def _link(file: Path, paths: Sequence[Path]) -> None:
    """Let paths name the file of a checkpoint, so that it stays when the checkpoint is deleted."""
    for path in paths:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_name(f".{path.name}.new")
            _remove(new)
            if file.is_dir():
                shutil.copytree(file, new, copy_function=_link_file)
                _remove(path)  # a directory does not replace another
            else:
                _link_file(file, new)
            os.replace(new, path)


def _link_file(file: str | Path, new: str | Path) -> None:
    try:
        os.link(file, new)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, new)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _callback(package: str, hooks: Hooks) -> Any:
    base = importlib.import_module(f"{package}.callbacks").Callback

    class DataResume(base):  # type: ignore[misc, valid-type]
        """What the Trainer tells of its steps."""

        def on_after_backward(self, *args: Any, **more: Any) -> None:
            hooks.witness.backward_made()

        def on_before_optimizer_step(self, *args: Any, **more: Any) -> None:
            hooks.witness.step_made()

        def on_train_batch_end(self, *args: Any, **more: Any) -> None:
            hooks.step_ends()

        def on_validation_end(self, *args: Any, **more: Any) -> None:
            hooks.put_generators()

        def on_train_end(self, *args: Any, **more: Any) -> None:
            hooks.save_if_due(is_over=True)

        def on_save_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
            if hooks.session is not None and hooks.host.carried is not None:
                checkpoint[KEY] = hooks.host.carried

    return DataResume()
