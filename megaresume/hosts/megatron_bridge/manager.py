"""`Manager`: checkpoints by Megatron-Bridge's own protocol, ``megatron.bridge``'s ``CheckpointManager``.

    load                  the newest complete checkpoint, in place of the one that the tracker names
    save                  by the session: commit, lock, ledger, retention
    finalize_async_saves  called before every step, and when training has ended

What is neither a run to go on with nor a save of one is left to Bridge's own manager.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.bridge.training.checkpointing import DefaultCheckpointManager
from megatron.bridge.training.utils.checkpoint_utils import checkpoint_exists
from megatron.bridge.training.utils.pg_utils import get_pg_collection

from megaresume.checkpoint.paths import is_usual_tag, megatron_tag, tag_iteration
from megaresume.hosts.megatron_bridge.run import RUN, Run


class Manager:
    """See above. Made by Bridge, once for each process.

    Args:
        checkpoint_config: Bridge's, of a config that `attach_bridge` was called with.
    """

    def __init__(self, checkpoint_config: Any) -> None:
        self._config, self._bridge = checkpoint_config, DefaultCheckpointManager(checkpoint_config)
        self._run: Run = getattr(checkpoint_config, RUN)

    @property
    def checkpointing_context(self) -> dict[str, Any]:
        """What Bridge keeps from one save to the next."""
        context: dict[str, Any] = self._bridge.checkpointing_context
        return context

    def load(self, ctx: Any) -> tuple[int, int]:
        """Go on from the newest complete checkpoint, or from that of ``ckpt_step``; or read weights alone.

        Raises, on every rank:
            CheckpointError, StateError: see `Session.load`.
        """
        run, own, bridge = self._run, self._config, self._bridge
        if own.finetune or not checkpoint_exists(own.load):
            return tuple(bridge.load(ctx))
        run.open(ctx.pg_collection or get_pg_collection(ctx.model))
        root, pick = Path(os.path.abspath(own.load)), None
        if (step := tag_iteration(root.name)) is not None and is_usual_tag(root.name, step):
            root, pick = root.parent, run.session.exactly(root)
        elif own.ckpt_step is not None:
            pick = run.session.exactly(root / megatron_tag(own.ckpt_step))
        schedule, state = ctx.opt_param_scheduler, ctx.state
        with run.steps.loading():
            found = run.session.load(
                root,
                lambda choice, _beside: run.host.read(
                    choice, state, schedule, lambda carrying: bridge.load(replace(ctx, opt_param_scheduler=carrying))
                ),
                pick=pick,
            )
        run.step = state.train_state.step
        return self._begin(ctx) if found is None else tuple(found)

    def _begin(self, ctx: Any) -> tuple[int, int]:
        """What there was is the first save of a run, cut short: begin from the weights that it began from."""
        own = self._config
        if own.pretrained_checkpoint is None or ctx.state.cfg.peft is not None:  # which has loaded them already
            return 0, 0
        own.load, before = None, own.load
        try:
            return tuple(self._bridge.load(ctx))
        finally:
            own.load = before

    def save(self, ctx: Any, callback_manager: Any = None) -> None:
        """Save and commit the step that was made last.

        Raises, on every rank:
            See `Session.save`.
        """
        run, bridge = self._run, self._bridge
        run.stepped(ctx.state.train_state)
        if run.steps.step == run.session.settled_step:
            return  # a run that was finished, and is started again

        def write(schedule: Any) -> None:
            bridge.save(replace(ctx, opt_param_scheduler=schedule), callback_manager)

        run.session.save(
            self._config.save,
            lambda save: run.host.write(save, ctx.opt_param_scheduler, write),
            tag=megatron_tag(run.steps.step),
            latest=False,
        )

    def finalize_async_saves(self, state: Any, blocking: bool = False, terminate: bool = False) -> None:
        """A step begins; or, with ``terminate``, no more will.

        Raises:
            StateError: see `Run.stepped`; on every rank: see `Session.begin`.
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
            run.goes_on(is_over=is_over)
