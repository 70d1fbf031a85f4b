"""VeRL's experimental trainers that do rollouts in parallel with training, ``fully_async_policy`` and
``one_step_off_policy``: each prompt trained exactly once, whenever the run is killed.

    megaresume.attach(SeparateRayPPOTrainer)  # of verl.experimental.separation.ray_trainer: in each of its processes

Both are derived from this class. VeRL only saves how far its dataloader was read: whatever was in flight is lost, as it
says itself.

Fully asynchronous: two Ray actors. The rollouter has `Prompts`; a prompt's name is part of its sample's, and so of the
uid that its rollouts take through the message queue to the trainer:

    rollouter    `RollouterPrompts`, in place of the dataloader: what is in flight first, then the next ones. Its state
                 is in ``data.pt``, and in ``prompts.json``
    trainer      `StepReports`
                 _fit_update_actor: tells the rollouter which rollouts the step has trained, and waits for it
                 _save_checkpoint: tells it for which weights its state is requested
                 fit_step: before the first step, raises what the rollouter refuses

Ray calls the methods of an actor's class: only those that an actor itself calls can be hooked on the instance.

One step off: one process, which rolls out a batch while it trains the previous one: `BatchesAhead`.

See docs/verl.md. Importing this imports neither VeRL nor Ray.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.hosts.attach import SLOT, check_new, hook
from megaresume.hosts.prompts import Prompt, Prompts
from megaresume.hosts.verl_issued import (
    IssuedPrompts,
    SavedPrompts,
    end_of_run,
    settle_batch,
    settle_groups,
    uid_of,
)
from megaresume.hosts.verl_prompts import iterate_over, prompts_of
from megaresume.stream.data_yaml import Append

log = logging.getLogger(__name__)

#: VeRL's text before and after the name of a prompt in a uid: ``uid_sample_NAME_NUMBER``.
_BEFORE, _AFTER = "uid_sample_", "_"


def attach(trainer: Any, *, append: Append | None = None, ledger: str | Path | None = None) -> None:
    """Give VeRL's trainers with parallel rollouts each prompt exactly once. See `megaresume.attach`.

    Prompts, batch sizes, rollouts, shuffling and seed are those of VeRL's config.

    Args:
        trainer: VeRL's ``FullyAsyncRollouter``, ``FullyAsyncTrainer`` or ``OneStepOffRayTrainer``, or an instance of a
            derived class.
        append: what a resume does if there are more prompts: see `megaresume.DataLoader`.
        ledger: see `megaresume.Prompts`; None: ``prompts.jsonl`` in ``default_local_dir``.

    Raises:
        UsageError: another trainer, prompts that change during training; or already attached.
    """
    if hasattr(trainer, "_get_samples_from_queue"):
        check_new(trainer, "trainer")
        setattr(trainer, SLOT, StepReports(trainer))
        return
    is_rollouter, is_ahead = hasattr(trainer, "_feed_samples"), hasattr(trainer, "_async_gen_next_batch")
    needed = ("train_dataloader", "train_dataset", "_create_continuous_iterator", "config")
    check_new(
        trainer,
        "trainer",
        missing=[name for name in needed if not hasattr(trainer, name)]
        or ([] if is_rollouter or is_ahead else ["_feed_samples and _async_gen_next_batch"]),
        headline="this is not a trainer of VeRL's that rolls out beside the training, or it is not initialized yet",
        expected="fully_async_policy or one_step_off_policy of verl.experimental; those of 0.9.1 were tried",
        action="megaresume.attach(SeparateRayPPOTrainer), of the class, before an instance is made",
    )
    prompts, loader = prompts_of(trainer, append, ledger)
    if is_rollouter:
        RollouterPrompts(trainer, prompts, loader)
    else:
        BatchesAhead(trainer, prompts, loader)


class BatchesAhead(IssuedPrompts):
    """Batches that roll out while the previous one trains: they are trained in the order in which they are issued.

    Args:
        trainer: VeRL's ``OneStepOffRayTrainer``.
        prompts: the account.
        loader: that of ``prompts``.
    """

    def __init__(self, trainer: Any, prompts: Prompts, loader: DataLoader) -> None:
        super().__init__(trainer, prompts, loader, settles=False)
        self._out: deque[list[Prompt]] = deque()
        iterate_over(trainer, self)
        hook(trainer, "_fit_update_actor", self._train)

    def collated(self, batch: list[Prompt]) -> Any:
        """See `IssuedPrompts`."""
        self._out.append(batch)
        return super().collated(batch)

    def _train(self, train: Callable[[Any], Any], batch: Any) -> Any:
        result = train(batch)
        settle_batch(self.prompts, self.trainer.global_steps, self._out.popleft())
        return result


class RollouterPrompts(SavedPrompts):
    """The prompts of a rollouter, one at a time, in place of torchdata's ``StatefulDataLoader``.

    Args:
        rollouter: VeRL's ``FullyAsyncRollouter``.
        prompts: the account.
        loader: that of ``prompts``.
    """

    def __init__(self, rollouter: Any, prompts: Prompts, loader: DataLoader) -> None:
        super().__init__(rollouter, prompts)
        self._loader, self._collate = loader, rollouter.train_dataloader.collate_fn
        #: the step of the checkpoint that is saved next; None: that which VeRL has loaded.
        self.saves: int | None = None
        self._is_begun = False
        rollouter.train_dataloader = self
        setattr(rollouter, SLOT, self)
        hook(rollouter, "_create_continuous_iterator", lambda _: self._named())

    def __len__(self) -> int:
        """The number of prompts in an epoch, as VeRL counts batches of one prompt."""
        return math.ceil(self._loader.items)

    @property
    def step(self) -> int:
        """See `SavedPrompts`: VeRL names a checkpoint by the version of its weights."""
        if self.saves is not None:
            return self.saves
        rollouter = self.trainer
        a_version = rollouter.required_samples * rollouter.config.async_training.trigger_parameter_sync_step
        return int(rollouter.global_steps - 1) // int(a_version)

    def begin(self) -> None:
        """Begin at the checkpoint's position, once VeRL has loaded it.

        Raises:
            StateError: see `SavedPrompts.check_loaded`.
        """
        if self._is_begun:
            return
        self.check_loaded(self.step)
        self._is_begun = True
        # VeRL counts what it feeds: from the number of settled prompts, to the end of the current number of epochs.
        rollouter, most = self.trainer, self.trainer.config.rollout.total_rollout_steps
        end = end_of_run(self._loader, rollouter.config.trainer.total_epochs)
        rollouter.total_rollout_steps = end if most is None else min(end, most)
        rollouter.global_steps = self.prompts.num_settled + 1
        log.info("megaresume: %d prompts in flight are issued again", len(self.prompts.in_flight))

    def _named(self) -> Iterator[tuple[str, Any]]:
        """Pairs of an epoch, which VeRL only uses in the name of a sample, and a batch: the name of the prompt."""
        self.begin()
        prompts = self.prompts
        while prompts.num_settled < self.trainer.total_rollout_steps and (issued := prompts.issue(1)):
            yield uid_of(issued[0]), self._collate([issued[0].content])

    def settle(self, rows: Sequence[tuple[str, int | None]], version: int) -> None:
        """Note that a step has trained these rollouts.

        Args:
            rows: for each, the uid, and the version of the weights that began it.
            version: of the weights that now make rollouts.

        Raises:
            StateError: one was trained or dropped before.
        """
        prompts = self.prompts
        prompts.advance(max(version, prompts.version))
        groups: dict[str, dict[int, int | None]] = {}
        for uid, made in rows:
            group = groups.setdefault(uid.removeprefix(_BEFORE).partition(_AFTER)[0], {})
            group[len(group)] = made
        # After a resume, VeRL's own step number is one too high.
        settle_groups(prompts, prompts.step + 1, groups)


class StepReports:
    """In the trainer's process: reports to the rollouter.

    Args:
        trainer: VeRL's ``FullyAsyncTrainer``.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._is_begun = trainer, False
        hook(trainer, "fit_step", self._step)
        hook(trainer, "_fit_update_actor", self._train)
        hook(trainer, "_save_checkpoint", self._save)

    def _tell(self, what: Callable[..., None], *args: Any) -> None:
        """Call a function in the rollouter's process, with its `RollouterPrompts`."""
        import ray

        ray.get(self._trainer.rollouter.__ray_call__.remote(_with_prompts, what, *args))

    async def _step(self, step: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any) -> Any:
        if not self._is_begun:
            self._tell(RollouterPrompts.begin)
            self._is_begun = True
        return await step(*args, **kwargs)

    def _train(self, train: Callable[[Any], Any], batch: Any) -> Any:
        result = train(batch)
        fields = batch.non_tensor_batch
        uids = [str(uid) for uid in fields["uid"]]
        made = [None if one is None else int(one) for one in fields.get("min_global_steps", [None] * len(uids))]
        rows = list(zip(uids, made, strict=True))
        self._tell(RollouterPrompts.settle, rows, int(self._trainer.current_param_version))
        return result

    def _save(self, save: Callable[[], Any]) -> Any:
        self._tell(_saves, int(self._trainer.current_param_version))
        return save()


def _with_prompts(rollouter: Any, what: Callable[..., None], *args: Any) -> None:
    what(getattr(rollouter, SLOT), *args)


def _saves(prompts: RollouterPrompts, step: int) -> None:
    prompts.saves = step
