"""VeRL's reinforcement learning: each prompt trained exactly once, whenever the run is killed.

    megaresume.attach(PPOTrainer)  # of verl.trainer.ppo.v1, in the driver; or RayPPOTrainer, the older one

VeRL names a prompt by a random ``uid``, and saves the position of torchdata's loader. Here `Prompts` issues each, and
its ordinal and ticket are the ``uid``, which TransferQueue and the replay buffer pass on:

    `IssuedPrompts`, in place of the dataloader   what is in flight first, then the next ones
    _fetch_one_gen_batch                          their uid
    _step_once                                    the rollouts of a batch that an optimizer step has trained
    replay_buffer._evict_terminal_groups          stale groups: issued again, or dropped; filtered, failed ones: dropped
    replay_buffer._clear_groups                   surplus groups: issued again
    replay_buffer._materialize_batch              sampled groups without rollouts: dropped
    _save_checkpoint                              the state in ``data.pt``; also in ``prompts.json``, for `verify`
    _reissue_inflight_prompts                     what was in flight is submitted again, except for groups that
                                                  TransferQueue has kept completely

The older trainer trains a batch completely before it saves and before it takes the next one; there `IssuedPrompts`
settles a batch itself. For both trainers, the whole run is one epoch.

See docs/verl.md. Importing this does not import VeRL.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.batches.data_loader import DataLoader
from megaresume.checkpoint.records.prompt_ledger import PROMPTS
from megaresume.hosts.attach import SLOT, check_new, hook
from megaresume.hosts.prompts import Prompts
from megaresume.hosts.verl_issued import IssuedPrompts, is_of, parsed_uid, settle_groups, uid_of
from megaresume.stream.data_yaml import Append
from megaresume.stream.errors import UsageError
from megaresume.stream.in_flight import STALE, OnStale

log = logging.getLogger(__name__)

#: methods of VeRL's replay buffer that are hooked.
_OF_BUFFER = ("_evict_terminal_groups", "_clear_groups", "_materialize_batch")


def attach(
    trainer: Any, *, append: Append | None = None, on_stale: OnStale = "requeue", ledger: str | Path | None = None
) -> None:
    """Give a trainer of VeRL's reinforcement learning each prompt exactly once. See `megaresume.attach`.

    Prompts, batch sizes, rollouts, staleness, shuffling and seed are those of VeRL's config.

    Args:
        trainer: VeRL's ``PPOTrainer`` or ``RayPPOTrainer``, or an instance of a derived class.
        append: what a resume does if there are more prompts: see `megaresume.DataLoader`.
        on_stale: for a group too old for ``max_off_policy_threshold``: ``requeue`` it, or ``drop`` it, as VeRL does.
        ledger: see `megaresume.Prompts`; None: ``prompts.jsonl`` in ``default_local_dir``.

    Raises:
        UsageError: another trainer, prompts that change during training, a custom sampler that is not derived from
            VeRL's, a ``fit`` other than RayPPOTrainer's, an unknown ``on_stale``; or already attached.
    """
    needed = ("train_dataloader", "train_dataset", "_load_checkpoint", "_save_checkpoint", "config")
    check_new(
        trainer,
        "trainer",
        missing=[name for name in needed if not hasattr(trainer, name)],
        headline="this is not a reinforcement-learning trainer of VeRL's, or it is not initialized yet",
        expected="a PPOTrainer or RayPPOTrainer with its train_dataloader; 0.9.1 was tried",
        action="megaresume.attach(PPOTrainer), of the class, before an instance is made",
    )
    has_queue = hasattr(trainer, "_fetch_one_gen_batch")
    if not has_queue:
        _check_fit(trainer)
    prompts, loader = prompts_of(trainer, append, ledger, on_stale)
    issued = IssuedPrompts(trainer, prompts, loader, settles=not has_queue)
    if has_queue:
        QueuedGroups(trainer, issued, requeues=on_stale == "requeue")
    iterate_over(trainer, issued)


def prompts_of(
    trainer: Any, append: Append | None, ledger: str | Path | None, on_stale: OnStale = "requeue"
) -> tuple[Prompts, DataLoader]:
    """The account of a trainer's prompts, in the order of its config, and the loader that it uses.

    Raises:
        UsageError: a dataset that changes during training, or an unknown ``on_stale``.
    """
    if hasattr(trainer.train_dataset, "on_batch_end"):
        raise UsageError(
            "prompts that change during training cannot be used with megaresume.attach",
            found=f"{type(trainer.train_dataset).__qualname__}.on_batch_end",
            expected="a dataset that stays as it is",
            action="leave data.datagen out",
        )
    config = trainer.config
    loader = DataLoader(
        trainer.train_dataset,
        1,
        shuffle=config.data.shuffle,
        seed=config.data.get("seed") or 0,
        append=append,
        dp_rank=0,
        dp_size=1,
    ).made_by("megaresume.attach")
    if ledger is None:
        ledger = Path(config.trainer.default_local_dir, PROMPTS)
    return Prompts(loader, rollouts=config.actor_rollout_ref.rollout.n, on_stale=on_stale, ledger=ledger), loader


def iterate_over(trainer: Any, issued: IssuedPrompts) -> None:
    """Make a trainer that loads its own checkpoints iterate over these prompts."""
    trainer.train_dataloader = issued
    setattr(trainer, SLOT, issued.prompts)
    _set_length(trainer, issued)
    hook(trainer, "_load_checkpoint", lambda before: _load(trainer, issued, before))


def _check_fit(trainer: Any) -> None:
    """Raise a UsageError for a loop that may take a batch before it has trained the previous one."""
    owner = next((cls for cls in type(trainer).__mro__ if "fit" in vars(cls)), None)
    if owner is not None and owner.__qualname__ != "RayPPOTrainer":
        raise UsageError(
            "a trainer with its own loop cannot be used with megaresume.attach",
            found=f"{owner.__module__}.{owner.__qualname__}.fit",
            expected="the fit of RayPPOTrainer, or a PPOTrainer of verl.trainer.ppo.v1",
            cause="prompts that it takes ahead, filters or rolls out in another process would count as trained",
            action="for fully_async_policy and one_step_off_policy: megaresume.attach(SeparateRayPPOTrainer), of "
            "verl.experimental.separation.ray_trainer; for another: call megaresume.Prompts in that loop: issue(), "
            "done(), drop(), trained()",
        )


class QueuedGroups:
    """Prompts whose rollouts are in TransferQueue until a step trains them.

    Args:
        trainer: VeRL's ``PPOTrainer``.
        issued: its prompts.
        requeues: whether a stale group is issued again.
    """

    def __init__(self, trainer: Any, issued: IssuedPrompts, *, requeues: bool) -> None:
        self._trainer, self._issued, self._prompts = trainer, issued, issued.prompts
        self._requeues = requeues
        #: reasons for evicting the groups that are cleared next: requeued, or dropped; None: they were surplus.
        self._reasons: dict[str, tuple[str, bool]] | None = None
        buffer = trainer.replay_buffer
        if missing := [name for name in _OF_BUFFER if not hasattr(buffer, name)]:
            raise UsageError(
                "a sampler of your own cannot be used with megaresume.attach",
                found=f"trainer.v1.sampler.custom_sampler: {type(buffer).__qualname__}, without {', '.join(missing)}",
                expected="VeRL's ReplayBuffer, or a class made from it",
                action="call megaresume.Prompts in your sampler: issue(), done(), drop(), trained()",
            )
        hook(trainer, "_fetch_one_gen_batch", self._fetch)
        hook(trainer, "_step_once", self._step)
        hook(trainer, "_reissue_inflight_prompts", self._reissue)
        hook(buffer, "_evict_terminal_groups", self._evict)
        hook(buffer, "_clear_groups", self._clear)
        hook(buffer, "_materialize_batch", self._materialize)

    def _fetch(self, fetch: Callable[[], Any]) -> Any:
        return self._named(fetch())

    def _named(self, batch: Any) -> Any:
        """A batch, with the uids of its prompts."""
        from verl.utils import tensordict_utils

        uids = np.array([uid_of(prompt) for prompt in self._issued.batch], dtype=object)
        batch["uid"] = tensordict_utils.get_tensordict({"uid": uids})["uid"]
        return batch

    def _step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        batch = step(*args, **kwargs)
        number, prompts = self._trainer.global_steps, self._prompts
        prompts.advance(max(number - 1, prompts.version))
        groups: dict[str, dict[int, int | None]] = {}
        for key, tag in zip(batch.keys, batch.tags, strict=True):
            if not tag.get("is_padding", False):
                uid, session, _ = key.rsplit("_", 2)
                groups.setdefault(uid, {})[int(session)] = tag.get("min_global_steps")
        settle_groups(prompts, number, groups)
        return batch

    def _evict(self, evict: Callable[..., Any], step: int, partition: str, reasons: Any) -> Any:
        stale, filtered, failed = reasons[:3]
        named = [(failed, ("failed", False)), (filtered, ("filtered", False)), (stale, (STALE, self._requeues))]
        self._reasons = {uid: why for uids, why in named for uid in uids}
        try:
            return evict(step, partition, reasons)
        finally:
            self._reasons = None

    def _clear(self, clear: Callable[..., Any], partition: str, uids: Sequence[str]) -> Any:
        result = clear(partition, uids)
        if partition == "train":
            for uid in uids:
                reason, requeue = ("surplus", True) if self._reasons is None else self._reasons[uid]
                self._prompts.drop(parsed_uid(uid)[0], reason, requeue)
        return result

    def _materialize(self, materialize: Callable[..., Any], partition: str, uids: Sequence[str], *args: Any) -> Any:
        batch = materialize(partition, uids, *args)
        if partition == "train":
            for uid in set(uids) - {key.partition("_")[0] for key in batch.keys}:
                self._prompts.drop(parsed_uid(uid)[0], "failed")
        return batch

    def _reissue(self, reissue: Callable[..., int], partition: str = "train") -> int:
        """Submit what was in flight, except for groups that TransferQueue has kept completely.

        The weights that now make rollouts differ from those with the same number before the crash. So what VeRL would
        start again gets a new name, as issued by this start.
        """
        trainer, prompts = self._trainer, self._prompts
        if trainer.trainer_mode == "sync":
            return int(reissue(partition))
        import transfer_queue
        from verl.utils import tensordict_utils

        tags = (transfer_queue.kv_list(partition) or {}).get(partition, {})
        issued = {prompt.ordinal: prompt for prompt in prompts.issue(len(prompts.in_flight))}
        kept = {
            key
            for key, tag in tags.items()
            if tag.get("is_prompt", False)
            and tag["status"] in ("finished", "failure")
            and is_of(key, issued.get(parsed_uid(key)[0]))
        }
        # Unfinished; trained in the step that was saved; or from another checkpoint.
        if others := [key for key in tags if key.partition("_")[0] not in kept]:
            transfer_queue.kv_clear(keys=others, partition_id=partition)
        there = {parsed_uid(key)[0] for key in kept}
        begun = [prompt for ordinal, prompt in issued.items() if ordinal not in there]
        if begun:
            batch = self._named(tensordict_utils.get_tensordict(self._issued.collated(begun)))
            tensordict_utils.assign_non_tensor_data(batch, "global_steps", trainer.global_steps)
            trainer._submit_batch_to_rollout(batch)
        log.info("megaresume: %d prompts in flight, %d of them rolled out already", len(issued), len(kept))
        trainer._restored_tq_prompt_count = len(issued)
        return len(begun)


def _load(trainer: Any, issued: IssuedPrompts, before: Callable[[], Any]) -> Any:
    """VeRL's own ``_load_checkpoint``, which continues without a ``data.pt``."""
    # By the current batch size, the older trainer might skip a data.pt, at what it takes for the end of an epoch.
    issued.is_loaded, issued.total = False, sys.maxsize - 1
    result = before()
    step = trainer.global_steps
    issued.check_loaded(step)
    issued.end(step)
    _set_length(trainer, issued)
    return result


def _set_length(trainer: Any, issued: IssuedPrompts) -> None:
    if trainer.config.trainer.total_training_steps is None:
        trainer.total_training_steps = issued.total
    if hasattr(trainer, "steps_per_epoch"):
        trainer.steps_per_epoch = len(issued)
