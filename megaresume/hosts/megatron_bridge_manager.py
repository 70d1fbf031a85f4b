"""`Manager`: checkpoints by Megatron-Bridge's own protocol, ``megatron.bridge``'s ``CheckpointManager``.

    load                  the newest complete checkpoint, instead of the one that the tracker names
    save                  by the session: commit, lock, ledger, retention
    finalize_async_saves  called before every step, and when training has ended

Anything other than continuing a run and saving it is left to Bridge's own manager.

`Provider`: what a run iterates over, by Bridge's own contract for custom data.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from megatron.bridge.data.base import DatasetProvider
from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.bridge.training.utils.pg_utils import get_pg_collection

from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.records.names import is_usual_tag, megatron_tag, tag_iteration
from megaresume.hosts.attach import SLOT, replaced
from megaresume.hosts.megatron_bridge import BridgeHost


class Manager:
    """Bridge's checkpoint manager. Created by Bridge, once for each process.

    Args:
        checkpoint_config: Bridge's, from a config that was passed to `megaresume.attach`.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        self._config, self._bridge = checkpoint_config, DefaultCheckpointManager(checkpoint_config)
        self._run: BridgeHost = getattr(checkpoint_config, SLOT)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """The context that Bridge passes from one save to the next."""
        context: dict[str, Any] = self._bridge.checkpointing_context
        return context

    def load(self, ctx: Any) -> tuple[int, int]:
        """Resume from the newest complete checkpoint, or from that of ``ckpt_step``; or only read weights.

        Raises, on every rank:
            CheckpointError, StateError: see `Session.load`.
        """
        run, own, bridge = self._run, self._config, self._bridge
        if own.finetune or not checkpoint_exists(own.load):
            return tuple(bridge.load(ctx))
        run.open_once(ctx.pg_collection or get_pg_collection(ctx.model))
        root, asked = Path(os.path.abspath(own.load)), None
        if (step := tag_iteration(root.name)) is not None and is_usual_tag(root.name, step):
            asked = root
        elif own.ckpt_step is not None:
            asked = root / megatron_tag(own.ckpt_step)

        def read(choice: Choice, _before: object) -> Restored:
            return run.read(
                choice,
                ctx.state,
                ctx.opt_param_scheduler,
                lambda carrying: bridge.load(replace(ctx, opt_param_scheduler=carrying)),
            )

        found = run.load_by(read, asked, root=root)
        run.step = ctx.state.train_state.step
        return self._begin(ctx) if found is None else tuple(found)

    def _begin(self, ctx: Any) -> tuple[int, int]:
        """Start again from the weights that the run started from, after its first save was interrupted."""
        own = self._config
        if own.pretrained_checkpoint is None or ctx.state.cfg.peft is not None:  # which has already loaded them
            return 0, 0
        with replaced(own, load=None):
            return tuple(self._bridge.load(ctx))

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save and commit the last step.

        Raises, on every rank:
            See `Session.save`.
        """
        run, bridge = self._run, self._bridge
        run.stepped(ctx.state.train_state)
        if run.steps.step == run.session.settled_step:
            return  # a finished run that was started again

        def write(schedule: Any) -> None:
            bridge.save(replace(ctx, opt_param_scheduler=schedule), callback_manager)

        run.session.save(
            self._config.save,
            lambda save: run.write(save, ctx.opt_param_scheduler, write),
            tag=megatron_tag(run.steps.step),
            latest=False,
        )

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """Note that a step begins; or, with ``terminate``, that none will.

        Raises:
            StateError: see `BridgeHost.stepped`; on every rank: see `Session.begin`.
        """
        self._bridge.finalize_async_saves(state, blocking=blocking, terminate=terminate)
        run = self._run
        if not run.is_open or run.is_closed:
            return
        run.stepped(state.train_state)
        is_over = state.train_state.step >= state.cfg.train.train_iters
        if terminate:
            run.close(is_over=is_over)
        elif not blocking:
            run.step_begins(is_over=is_over)


@dataclass
class Provider(DatasetProvider):  # type: ignore[misc]
    """Bridge's dataset provider, created by `megaresume.attach`. Its fields are written to ``run_config.yaml``."""

    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "external"
    #: read by Bridge's forward step: False if the batches have a mask.
    skip_getting_attention_mask_from_dataset: bool = True

    @classmethod
    def of(cls, run: BridgeHost) -> Provider:
        """The provider of a run's data."""
        provider = cls()
        provider._run = run  # not a field: it cannot be written to a file
        return provider

    def build_datasets(self, context: Any) -> tuple[Iterator[Any], Iterator[Any] | None, None]:
        """The micro-batches of this rank for training, and for evaluation. Collective."""
        run: BridgeHost = self._run
        run.open_once(context.pg_collection)
        loader = run.steps.feed.loader
        masks = isinstance(loader, StreamLoader) and loader.dataset.attention_mask
        self.skip_getting_attention_mask_from_dataset = not masks
        return run.batches(), run.validation(context.pg_collection), None
