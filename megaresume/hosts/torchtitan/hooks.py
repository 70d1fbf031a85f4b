"""The methods that carry a Trainer's data, hooked on its instance and on that of its CheckpointManager.

trainer.train        says that the run has come to its end
trainer.dataloader   the batches, epoch after epoch
checkpointer.load    the newest complete checkpoint, in place of the one with the highest number
checkpointer.save    called after every step, so a step was made; saved by the session: commit, lock, ledger
validator.validate   draws nothing from the generators of the training
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megaresume.checkpoint.paths import records_dir, torchtitan_tag
from megaresume.checkpoint.session.random_state import kept
from megaresume.checkpoint.session.session import Session
from megaresume.hosts.instances import hook, replaced
from megaresume.hosts.torch.feeds import Samples
from megaresume.hosts.torch.steps import Steps
from megaresume.hosts.torchtitan.host import TitanHost

#: torchtitan's IGNORE_INDEX.
IGNORE = -100
#: what is hooked, besides a validator's ``validate``.
OF_TRAINER, OF_MANAGER = ("train",), ("load", "save")


class Batches:
    """Those of this rank, to the end of the data: what torchtitan iterates over.

    Args:
        steps: the micro-batches.
        convert: makes of each what torchtitan trains: ``({"input": int64[m, S], ...}, labels)``.
    """

    def __init__(self, steps: Steps, convert: Callable[[Any], Any]) -> None:
        self.steps, self.convert = steps, convert

    def __iter__(self) -> Iterator[Any]:
        return map(self.convert, self.steps.to_the_end())

    def close(self) -> None:
        """Nothing of it is open."""


class Hooks:
    """See above. Made once for each Trainer.

    Args:
        host: of the Trainer.
        session: of this process.
    """

    def __init__(self, host: TitanHost, session: Session) -> None:
        self.host, self.session, self.steps = host, session, host.steps
        trainer, manager = host.trainer, host.manager
        # What the manager decides by itself is the session's: when to save, what to keep.
        manager.keep_latest_k = 0
        #: torchtitan's own ways to save and load.
        self._save, self._load = manager.save, manager.load
        for owner, names in ((trainer, OF_TRAINER), (manager, OF_MANAGER)):
            for name in names:
                hook(owner, name, getattr(self, name))
        of_stream = functools.partial(_of_stream, positions=not hasattr(trainer, "job_config"))  # since 0.3
        trainer.dataloader = Batches(self.steps, of_stream if isinstance(self.steps.feed, Samples) else _as_it_is)
        if (validator := getattr(trainer, "validator", None)) is not None:
            hook(validator, "validate", _keeping)

    def train(self, train: Any) -> None:
        """Train, save what the end of the data has left unsaved, and say that the run has come to its end."""
        train()
        if self.host.trainer.step > self.steps.step:  # the data has ended before a step that was begun
            self.host.trainer.step = self.steps.step
            if self.steps.step != self.session.settled_step:
                self.save_now()
        self.session.finish()
        self.session.close()

    def load(self, load: Any, step: int = -1) -> bool:
        """Go on from the newest complete checkpoint, or from that of ``step``; begin if there is none.

        Raises, on every rank:
            CheckpointError, StateError: see `Session.load`.
        """
        folder = self.host.folder
        asked = None if step == -1 else folder / torchtitan_tag(step)
        if self.host.load_by(lambda choice, _: self.host.read(choice, load), asked, root=folder):
            return True
        # Our records lie in the folder already, and torchtitan takes initial_load_path only if there is none.
        with replaced(self.host.manager, folder=str(records_dir(folder) / "none")):
            return bool(load(-1))

    def save(self, save: Any, curr_step: int, last_step: bool = False) -> bool:
        """A step was made. Save and commit, if it is time."""
        if not curr_step:  # a seed checkpoint
            return bool(save(curr_step, last_step))
        self.steps.stepped()
        self.steps.compare(curr_step)
        self.host.background.look()
        manager = self.host.manager
        if not manager._should_save(curr_step, last_step):
            return False
        if last_step and manager.last_save_model_only:  # no checkpoint to go on from
            self.host.settle()
            save(curr_step, last_step)
        else:
            self.save_now(last_step=last_step)
        return True

    def save_now(self, *, last_step: bool = False) -> None:
        """Save and commit the step that was made last."""
        step = self.steps.step

        def write() -> None:
            with replaced(self.host.manager, interval=1):  # it saves
                self._save(step, last_step)

        self.session.save(
            self.host.folder, lambda save: self.host.write(save, write), tag=torchtitan_tag(step), tracker=False
        )


def _as_it_is(batch: Any) -> Any:
    """A `DataLoader` gives what its ``collate_fn`` has made."""
    return batch


def _of_stream(batch: Any, *, positions: bool) -> tuple[dict[str, Any], Any]:
    """A batch of a `StreamLoader`: labels that are not to be trained are torchtitan's IGNORE_INDEX."""
    inputs = {"input": batch["tokens"]} | ({"positions": batch["position_ids"]} if positions else {})
    return inputs, batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORE)


def _keeping(validate: Any, *args: Any, **more: Any) -> Any:
    """Between a save and the next step: a resume would not do it again."""
    with kept():
        return validate(*args, **more)
