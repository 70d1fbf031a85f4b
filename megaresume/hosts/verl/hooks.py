"""The methods that carry a trainer's data, hooked on the instances: those that load, save and make a step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from megaresume.checkpoint.paths import verl_tag
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.session.session import Session
from megaresume.hosts.instances import hook, replaced
from megaresume.hosts.verl.host import VerlHost


class Hooks:
    """See above. Made once for each trainer.

    Args:
        host: of the trainer.
        session: of this process.
    """

    def __init__(self, host: VerlHost, session: Session) -> None:
        self.host, self.session, self.trainer = host, session, host.trainer
        for owner, name, function in (
            (self.trainer.ckpt_handler, "load_checkpoint", self.load),
            (self.trainer.ckpt_handler, "save_checkpoint", self.save),
            (self.trainer.training_client, "train_batch", self.step),
            (self.trainer, "fit", self.fit),
        ):
            hook(owner, name, function)

    def load(self, load: Any) -> Any:
        """Go on from what ``resume_mode`` says; begin if there is nothing.

        Raises, on every rank:
            CheckpointError, StateError: see `Session.load`.
        """
        result = self._load(load)
        trainer, batches = self.trainer, self.host.batches
        on_all_ranks(batches.end)
        if trainer.config.trainer.total_training_steps is None:
            trainer.total_training_steps = batches.total
        trainer.steps_per_epoch = len(batches)
        return result

    def _load(self, load: Any) -> Any:
        asked = self.trainer.ckpt_handler
        if asked.resume_mode == "disable":
            return load()
        path = None if asked.resume_from_path is None else Path(os.path.abspath(asked.resume_from_path))
        found = self.host.load_by(lambda choice, _: self.host.read(choice, load), path)
        if found is not None:
            return found[0]
        with replaced(asked, resume_mode="disable"):
            return load()

    def fit(self, fit: Any, *args: Any, **more: Any) -> None:
        """Train, and say that the run has come to its end."""
        fit(*args, **more)
        self.session.finish()
        self.session.close()

    def step(self, step: Any, *args: Any, **more: Any) -> Any:
        """An optimizer step is made."""
        result = step(*args, **more)
        self.host.steps.stepped()
        return result

    def save(self, save: Any, *args: Any, **more: Any) -> None:
        """Save and commit the step that was made last."""
        self.session.save(
            self.host.save_dir,
            lambda written: self.host.write(written, lambda: save(*args, **more)),
            tag=verl_tag(self.host.steps.step),
        )
