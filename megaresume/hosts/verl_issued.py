"""The prompts of VeRL's reinforcement learning, in place of torchdata's ``StatefulDataLoader``.

    uid_of              the name of a prompt in VeRL, instead of a random one: its ordinal and ticket
    `SavedPrompts`      what VeRL saves as ``data.pt``, with ``prompts.json`` beside it
    `IssuedPrompts`     the same, with the batches that are iterated over
    settle_batch        a step has trained a batch of issued prompts
    settle_groups       a step has trained groups, identified by their uid

Importing this does not import VeRL.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.records.names import TRACKER
from megaresume.hosts.prompts import Prompt, Prompts, write_state
from megaresume.hosts.trainer import Carried
from megaresume.stream.errors import StateError

#: our key in place of torchdata's state.
KEY = Carried.KEY


class SavedPrompts:
    """The account of prompts, which VeRL saves and loads as if it were its dataloader.

    Args:
        trainer: VeRL's.
        prompts: the account.
    """

    def __init__(self, trainer: Any, prompts: Prompts) -> None:
        self.trainer, self.prompts = trainer, prompts
        #: whether a state was loaded.
        self.is_loaded = False

    @property
    def step(self) -> int:
        """The step of the checkpoint that is saved or loaded."""
        return int(self.trainer.global_steps)

    def state_dict(self) -> dict[str, Any]:
        """The content of ``data.pt``, when the weights are saved."""
        step = self.step
        directory = Path(self.trainer.config.trainer.default_local_dir, f"global_step_{step}")
        return {KEY: write_state(self.prompts, directory, step), "step": step}

    def load_state_dict(self, state: Any) -> None:
        """Load what VeRL found there.

        Raises:
            StateError: it was not written by megaresume, or is from another step or other prompts.
        """
        step = self.step
        if not isinstance(state, Mapping) or KEY not in state:
            raise _unknown(
                step, "a data.pt that was written without megaresume", "it has the state of torchdata's loader"
            )
        if state.get("step") != step:
            raise StateError(
                "the weights and the data.pt are from different steps",
                found=f"weights of global_step_{step}, data.pt of step {state.get('step')}",
                expected="the same",
                cause="a data.pt was copied from another checkpoint",
                action=f"load another checkpoint: trainer.resume_mode=resume_path; global_step_{step} is mixed",
            )
        self.prompts.load_state_dict(state[KEY])
        self.is_loaded = True

    def check_loaded(self, step: int) -> None:
        """Check after VeRL has loaded the weights of this step (0: none), as it continues without a ``data.pt``.

        Raises:
            StateError: there was no state with them; or the ledger has prompts of a run that was not loaded.
        """
        if step and not self.is_loaded:
            raise _unknown(step, f"no data.pt in global_step_{step}", "it was not copied along, or was deleted")
        if not step:
            # Here, so that a refusal is raised before workers are sent prompts.
            tracker = Path(self.trainer.config.trainer.default_local_dir, TRACKER)
            self.prompts.begin(is_saved=tracker.exists())


class IssuedPrompts(SavedPrompts):
    """What a trainer iterates over, in place of torchdata's ``StatefulDataLoader``: batches without end.

    Args:
        trainer: VeRL's.
        prompts: the account.
        loader: that of ``prompts``.
        settles: whether a batch is trained completely before the next one is requested.
    """

    def __init__(self, trainer: Any, prompts: Prompts, loader: DataLoader, *, settles: bool) -> None:
        super().__init__(trainer, prompts)
        theirs = trainer.train_dataloader
        self.loader, self._settles = loader, settles
        self.batch_size, self._collate = theirs.batch_size, theirs.collate_fn
        #: the prompts of the last batch, and its step.
        self.batch: list[Prompt] = []
        self._step = 0
        #: number of the last step, counted since the start of the run.
        self.total = 0
        self.end(0)

    def end(self, step: int) -> None:
        """Count the steps of the run, from this step on."""
        config = self.trainer.config
        left = max(end_of_run(self.loader, config.trainer.total_epochs) - self.prompts.num_settled, 0)
        self.total = step + left // config.data.train_batch_size

    def __len__(self) -> int:
        return self.total + 1

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield self.collated(self.prompts.issue(self.batch_size))
            self.settle()

    def collated(self, batch: list[Prompt]) -> Any:
        """A batch of issued prompts, in the format of VeRL's dataloader."""
        self.batch, self._step = batch, self.trainer.global_steps
        return self._collate([prompt.content for prompt in batch])

    def settle(self) -> None:
        """Note that the last batch is trained, if this trainer trains batches completely."""
        if self._settles and self.batch:
            settle_batch(self.prompts, self._step, self.batch)
        self.batch = []

    def state_dict(self) -> dict[str, Any]:
        """See `SavedPrompts`."""
        self.settle()
        return super().state_dict()


def settle_batch(prompts: Prompts, step: int, batch: Sequence[Prompt]) -> None:
    """Note that a step has trained all rollouts of these prompts."""
    for prompt in batch:
        for rollout in prompt.rollouts:
            prompts.done(prompt.ordinal, prompt.ticket, rollout)
    prompts.trained(step, [prompt.ordinal for prompt in batch])


def settle_groups(prompts: Prompts, step: int, groups: Mapping[str, Mapping[int, int | None]]) -> None:
    """Note that a step has trained these groups: uid -> rollout -> version of its weights. Other rollouts have failed.

    Raises:
        StateError: a rollout was trained or dropped before.
    """
    for uid, versions in groups.items():
        ordinal, ticket = parsed_uid(uid)
        for rollout in range(prompts.rollouts):
            if rollout not in versions:
                prompts.drop(ordinal, "failed", rollout=rollout)
            elif not prompts.done(ordinal, ticket, rollout, version=versions[rollout]):
                raise _trained_twice(uid, rollout)
    prompts.trained(step, [parsed_uid(uid)[0] for uid in groups])


def end_of_run(loader: DataLoader, epochs: int) -> int:
    """The sample at the end of a run with this many epochs."""
    after_this = epochs - loader.epoch - 1
    return max(loader.epoch_end + math.ceil(after_this * loader.items), loader.samples)


def uid_of(prompt: Prompt) -> str:
    """The name of an issued prompt in TransferQueue, whose keys are this and numbers, joined by ``_``."""
    return f"{prompt.ordinal}-{prompt.ticket}"


def parsed_uid(uid: str) -> tuple[int, str]:
    """Ordinal and ticket of a prompt. For VeRL's own uids -1, which no prompt has."""
    ordinal, _, ticket = uid.partition("-")
    return int(ordinal) if ordinal.isdecimal() and ticket.count("-") == 1 else -1, ticket


def is_of(uid: str, prompt: Prompt | None) -> bool:
    """Whether a uid was made for this prompt's content, in any start."""
    return prompt is not None and parsed_uid(uid)[1].partition("-")[0] == prompt.ticket.partition("-")[0]


def _trained_twice(uid: str, rollout: int) -> StateError:
    return StateError(
        "a step has trained a rollout that was not wanted",
        found=f"rollout {rollout} of prompt {uid}, which was trained or dropped before",
        expected="each rollout of a prompt in one step",
        cause="the replay buffer sampled a group twice, or one that it had evicted",
        action="resume from the newest checkpoint; tell the project, with the config",
    )


def _unknown(step: int, found: str, cause: str) -> StateError:
    return StateError(
        "the checkpoint has no state of its prompts",
        found=found,
        expected="the data.pt that was saved with the weights",
        cause=cause,
        action=f"load another checkpoint (trainer.resume_mode=resume_path); or merge the weights of global_step_{step} "
        "(verl.model_merger) for actor_rollout_ref.model.path, and set another trainer.default_local_dir",
    )
