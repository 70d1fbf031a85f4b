"""The methods of a Trainer that carry its data, hooked on the instance.

train                            what to resume from; the end of the run
get_train_dataloader             our batches
set_initial_training_values      how many steps the run has
_init_training_state             at which epoch it goes on: the Trainer skips nothing, as our loader is there
_run_epoch                       how many batches this epoch has
on_step_end (a callback)         a step was made
_save_checkpoint                 saved by the session: commit, lock, ledger, retention
_evaluate                        draws nothing from the generators of the training
_load_callback_state             the data state is no state of a callback
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megaresume.checkpoint.paths import hugging_face_tag
from megaresume.hosts.hugging_face.host import KEY, Batches, TrainerHost
from megaresume.hosts.instances import hook, replaced
from megaresume.stream.errors import UsageError

#: without ``get_train_dataloader``, which is replaced.
HOOKED = (
    "train",
    "set_initial_training_values",
    "_init_training_state",
    "_run_epoch",
    "_save_checkpoint",
    "_evaluate",
    "_load_callback_state",
)


class Hooks:
    """See above. Made once for each Trainer.

    Args:
        host: of the Trainer.
        session: of this process.
    """

    def __init__(self, host: TrainerHost, session: Session) -> None:
        self.host, self.session = host, session
        self._ran = False
        trainer = self.trainer = host.trainer
        self._attached_with = self._settings()
        for name in HOOKED:
            hook(trainer, name, getattr(self, name.lstrip("_")))
        batches = Batches(host.steps)
        trainer.get_train_dataloader = lambda: batches if self._ran else host.loader
        trainer.callback_handler.callbacks.insert(0, _callback(host))  # before those that log the epoch

    def train(self, train: Any, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **more: Any) -> Any:
        """Choose what to resume from, train, and say that the run has come to its end.

        Raises, on every rank:
            UsageError: a search for hyperparameters, or a second training of one Trainer.
            CheckpointError, StateError: see `Session.choose` and `Session.resume`.
        """
        if trial is not None or self._ran:
            raise UsageError(
                "megaresume.attach is for one training",
                found="a trial of a hyperparameter search" if trial is not None else "a second trainer.train()",
                expected="one trainer.train() for each Trainer",
                action="to train on, make a new Trainer with more num_train_epochs or max_steps, attach to it, and "
                "call train(resume_from_checkpoint=True); for another training, give it an output_dir of its own",
            )
        self._ran = True
        on_all_ranks(self._check_settings)
        path = self._chosen(resume_from_checkpoint) if resume_from_checkpoint else None
        if not resume_from_checkpoint and self.trainer.args.save_strategy == "no" and self.session.stopper is None:
            self.session.save_dir = None  # what lies there is another run's, which this one does not save over
        # Retention is the session's: what the Trainer deletes, it deletes before the newer one is complete.
        with replaced(self.trainer.args, save_total_limit=None):
            result = train(path, trial, *args, **more)
        if self.host.steps.step >= self.trainer.state.max_steps:
            self.session.finish()
        self.session.close()
        return result

    def _settings(self) -> dict[str, Any]:
        """What the loader was made with."""
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

    def _chosen(self, asked: Any) -> str | None:
        """The checkpoint to resume from, its data restored; None: there is none yet."""
        root, pick = Path(self.trainer.args.output_dir), None
        if not isinstance(asked, bool):
            tag_dir = Path(os.path.abspath(asked))
            root, pick = tag_dir.parent, self.session.exactly(tag_dir)
        choice, beside = self.session.choose(root, pick)
        if choice is None:
            return None
        reading = on_all_ranks(lambda: self.host.read(choice, None if beside is None else beside.topology))
        self.session.accept(choice, beside, reading)
        self.host.steps.loaded(reading.iteration, reading.samples)
        self.session.resume()
        return str(choice.tag_dir)

    def set_initial_training_values(self, values: Any, *args: Any, **more: Any) -> Any:
        """How many epochs and steps the run has, counted from the sample where it goes on."""
        _, *between, _ = values(*args, **more)
        epochs, steps = self.host.end()
        return (epochs, *between, steps)

    def init_training_state(self, init: Any, *args: Any, **more: Any) -> tuple[int, int]:
        """Where it goes on: (epoch, batches to skip)."""
        init(*args, **more)
        return self.host.loader.epoch, 0

    def run_epoch(self, run: Any, **more: Any) -> Any:
        """With as many batches as this epoch has, from here on.

        Raises:
            UsageError: the epoch before it was ended early.
        """
        self.host.check_epoch(more["epoch"])
        batches, steps = self.host.batches_of_epoch()
        return run(**more | {"steps_in_epoch": batches, "num_update_steps_per_epoch": steps})

    def save_checkpoint(self, write: Any, model: Any, trial: Any) -> None:
        """Save and commit."""
        steps = self.host.steps
        if self.trainer.control.should_training_stop:  # perhaps in the middle of a step
            steps.leave()
        steps.check_save()
        steps.compare(int(self.trainer.state.global_step))
        self.session.save(
            self.trainer.args.output_dir,
            lambda save: self.host.write(save, lambda: write(model, trial)),
            tag=hugging_face_tag(steps.step),
            tracker=False,
        )

    def evaluate(self, evaluate: Any, *args: Any, **more: Any) -> Any:
        """Between a save and the next step too: a resume would not do it again."""
        with kept():
            return evaluate(*args, **more)

    def load_callback_state(self, load: Any) -> None:
        """Without the data state, which the Trainer would miss a callback for."""
        self.trainer.state.stateful_callbacks.pop(KEY, None)
        load()


def _callback(host: TrainerHost) -> Any:
    from transformers import TrainerCallback

    class StepEnd(TrainerCallback):
        """Counts the steps that were made."""

        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            host.stepped()

    return StepEnd()
