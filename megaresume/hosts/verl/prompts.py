"""Exact data resume for the prompts of VeRL's reinforcement learning.

    megaresume.attach(PPOTrainer)  # of verl.trainer.ppo.v1, in the driver

One driver hands out the prompts, and VeRL saves where it is as ``data.pt``. What it was handed for a step that has not
ended, and what is in flight in a rollout, is VeRL's own business. See docs/verl.md.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.hosts.instances import SLOT, check_new, hook
from megaresume.stream.data_yaml import Append
from megaresume.stream.errors import StateError, UsageError

#: of ours in ``data.pt``.
_KEY = "megaresume"


class Prompts:
    """What a trainer iterates over, in the place of torchdata's ``StatefulDataLoader``: to it, the whole run is one
    epoch, as it would compute its epochs from the number of steps and today's batch size.

    Args:
        trainer: VeRL's.
        loader: the prompts, for one rank.
    """

    def __init__(self, trainer: Any, loader: DataLoader) -> None:
        self._trainer, self.loader = trainer, loader
        #: steps at the end of the data, since the start of the run.
        self.total = 0
        #: whether a state was loaded.
        self.is_loaded = False
        self.end(0)

    def end(self, step: int) -> None:
        """Count how many steps the run has, which is at this one."""
        loader, config = self.loader, self._trainer.config
        after_this = config.trainer.total_epochs - loader.epoch - 1
        end = max(loader.epoch_end + math.ceil(after_this * loader.items), loader.samples)
        self.total = step + (end - loader.samples) // config.data.train_batch_size

    def __len__(self) -> int:
        return self.total + 1

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def state_dict(self) -> dict[str, Any]:
        """What VeRL saves as ``data.pt``."""
        return {_KEY: self.loader.state_dict(), "step": self._trainer.global_steps}

    def load_state_dict(self, state: Any) -> None:
        """What VeRL has found there.

        Raises:
            StateError: it is none of ours, or of another step or other prompts.
        """
        step = self._trainer.global_steps
        if not isinstance(state, Mapping) or _KEY not in state:
            raise _unknown(
                step, "a data.pt that was written without megaresume", "it has the state of torchdata's loader"
            )
        if state.get("step") != step:
            raise StateError(
                "the weights and the data.pt are of different steps",
                found=f"weights of global_step_{step}, data.pt of step {state.get('step')}",
                expected="the same",
                cause="a data.pt was copied from another checkpoint",
                action=f"load another checkpoint: trainer.resume_mode=resume_path; global_step_{step} is mixed",
            )
        self.loader.load_state_dict(state[_KEY])
        self.is_loaded = True


def attach(trainer: Any, *, append: Append | None = None) -> None:
    """Give a trainer of VeRL's reinforcement learning its prompts in an exact order. See
    `megaresume.attach`.

    Prompts, batch sizes, workers, shuffling and seed are those of VeRL's config. A resume goes on with the next prompt,
    also with other batch sizes; without the state of the prompts it is refused.

    Args:
        trainer: VeRL's ``PPOTrainer`` or ``RayPPOTrainer``, or of a class made from it.
        append: what a resume does if there are more prompts: see `megaresume.DataLoader`.

    Raises:
        UsageError: something else, or prompts that change while it trains; or attached already.
    """
    needed = ("train_dataloader", "train_dataset", "_load_checkpoint", "_save_checkpoint", "config")
    check_new(
        trainer,
        "trainer",
        missing=[name for name in needed if not hasattr(trainer, name)],
        headline="this is no trainer of VeRL's reinforcement learning, or it is not made so far",
        expected="a PPOTrainer or RayPPOTrainer with its train_dataloader; 0.9.1 was tried",
        action="megaresume.attach(PPOTrainer), of the class, before an instance is made",
    )
    if hasattr(trainer.train_dataset, "on_batch_end"):
        raise UsageError(
            "prompts that change while it trains cannot be used with megaresume.attach",
            found=f"{type(trainer.train_dataset).__qualname__}.on_batch_end",
            expected="a dataset that stays as it is",
            action="leave data.datagen out",
        )
    data, theirs = trainer.config.data, trainer.train_dataloader
    loader = DataLoader(
        trainer.train_dataset,
        theirs.batch_size,
        shuffle=data.shuffle,
        seed=data.get("seed") or 0,
        collate_fn=theirs.collate_fn,
        num_workers=theirs.num_workers,
        append=append,
        dp_rank=0,
        dp_size=1,
    ).made_by("megaresume.attach")
    trainer.train_dataloader = prompts = Prompts(trainer, loader)
    setattr(trainer, SLOT, prompts)
    _set_length(trainer, prompts)
    hook(trainer, "_load_checkpoint", lambda load: _load(trainer, prompts, load))


def _load(trainer: Any, prompts: Prompts, load: Any) -> Any:
    """VeRL's own, which goes on without a ``data.pt``."""
    # The older trainer passes over a data.pt at what it takes for the end of an epoch, by today's batch size.
    prompts.is_loaded, prompts.total = False, sys.maxsize - 1
    result = load()
    step = trainer.global_steps
    if step and not prompts.is_loaded:
        raise _unknown(step, f"no data.pt in global_step_{step}", "it was not copied along, or was deleted")
    prompts.end(step)
    _set_length(trainer, prompts)
    return result


def _set_length(trainer: Any, prompts: Prompts) -> None:
    if trainer.config.trainer.total_training_steps is None:
        trainer.total_training_steps = prompts.total
    if hasattr(trainer, "steps_per_epoch"):
        trainer.steps_per_epoch = len(prompts)


def _unknown(step: int, found: str, cause: str) -> StateError:
    return StateError(
        "the checkpoint has no state of its prompts",
        found=found,
        expected="the data.pt that was saved with the weights",
        cause=cause,
        action=f"load another checkpoint (trainer.resume_mode=resume_path); or merge the weights of global_step_{step} "
        "(verl.model_merger) for actor_rollout_ref.model.path, and set another trainer.default_local_dir",
    )
