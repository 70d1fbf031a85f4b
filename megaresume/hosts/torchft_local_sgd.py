"""Exact data for torchft's LocalSGD and DiLoCo, whose replicas synchronise after a number of steps.

    with torchft.local_sgd.DiLoCo(manager, [model], inner, outer, sync_every=20) as diloco:
        loop = megaresume.attach(diloco, loader, global_batch_size=32, checkpoints="checkpoints")
        loop.load()
        while loop.step < 1000:               # outer steps: of 20 * 32 samples, however many replicas there are
            for batch in loop:                # the samples of this replica in all inner steps of an outer step
                loss = model(batch).mean()
                (loss * loop.weight).backward()
                if loop.ends_step:
                    inner.step()              # after the last one, torchft synchronises
                    inner.zero_grad()
            if loop.step % 10 == 0:
                loop.save()
        loop.finish()

As under torchft's Manager (`megaresume.hosts.torchft`), except for the steps: `LaneSteps`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.loader import StreamLoader
from megaresume.checkpoint.ranks import world_size
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.hosts.attach import check_new, refuse
from megaresume.hosts.torchft import ReplicaLoop, TorchftHost
from megaresume.hosts.torchft_dealt import DealtSteps
from megaresume.hosts.torchft_lanes import Boundary, LaneSteps

#: attributes used of torchft's LocalSGD and DiLoCo; only of DiLoCo, and of its fragments.
OF_BOTH = ("_hooks", "_local_optimizer", "_local_step", "_manager", "_step_post_hook", "_sync_every")
OF_DILOCO = ("_fragment_sync_delay", "_fragments")
OF_FRAGMENT = ("_fragment_update_alpha", "original_parameters")


class LocalSGDHost(TorchftHost):
    """torchft's LocalSGD or DiLoCo as a host, see `TorchftHost`.

    Args:
        outer: torchft's LocalSGD or DiLoCo.
        data: the loader.
        global_batch_size: samples per inner step, over all replicas.
        log_samples: see there.
    """

    def __init__(self, outer: Any, data: Any, global_batch_size: int, log_samples: Any) -> None:
        super().__init__(getattr(outer, "_manager", None), data, global_batch_size, log_samples)
        self.outer = outer

    @property
    def step_samples(self) -> int:
        """Samples of an outer step."""
        return int(self.outer._sync_every) * self.global_batch_size

    def check(self) -> None:
        """See `TrainerHost`."""
        outer, name = self.outer, type(self.outer).__name__
        fragments = getattr(outer, "_fragments", None)
        missing = [one for one in OF_BOTH if not hasattr(outer, one)]
        if fragments is not None:
            missing += [one for one in OF_DILOCO if not hasattr(outer, one)]
            missing += [one for one in OF_FRAGMENT if not hasattr(fragments[0], one)]
        check_new(outer, name, missing=missing, headline=f"this is not torchft's {name}", expected="one")
        super().check()
        refused: dict[str, tuple[Any, str]] = {
            "use_async_quorum=True": (
                self.trainer._use_async_quorum,
                "Manager(use_async_quorum=False): the quorum is waited for at once",
            ),
            "init_sync=True": (
                getattr(self.trainer, "_init_sync", True),
                "Manager(init_sync=False), and the same weights on every replica by torch.manual_seed before the model "
                "is made: torchft would replace what replicas have trained in the first outer step",
            ),
            "a replica of several processes": (world_size() > 1, "one process for each replica"),
        }
        if fragments is not None:
            refused |= {
                "model_fragments": (
                    len(fragments) > 1 and f"{len(fragments)} fragments",
                    "DiLoCo(manager, [model], ...): fragments are committed at different steps, so the weights are "
                    "those of no one position in the data",
                ),
                "fragment_sync_delay": (
                    outer._fragment_sync_delay,
                    "fragment_sync_delay=0: inner steps after the quorum would be in weights of a step that is decided "
                    "already",
                ),
                "fragment_update_alpha": (
                    fragments[0]._fragment_update_alpha,
                    "fragment_update_alpha=0: each replica would keep a part of its own weights, which is lost with it",
                ),
            }
        refuse(refused)

    def make_steps(self, **kwargs: Any) -> DealtSteps:
        """See `TorchftHost`."""
        outer = self.outer
        parameters = [] if hasattr(outer, "_fragments") else list(outer._model.parameters())
        self.boundary = Boundary(parameters, outer._local_optimizer)
        size = self.global_batch_size
        return LaneSteps(
            outer, self.boundary, self.trainer, self.steps, samples=self.step_samples, inner_samples=size, **kwargs
        )

    def state_to_send(self) -> dict[str, Any]:
        """See `TorchftHost`. With the values before any inner steps since the last outer one."""
        return {**super().state_to_send(), "boundary": self.boundary.kept}

    def take_state(self, given: Mapping[str, Any]) -> None:
        """See `TorchftHost`."""
        super().take_state(given)
        self.boundary.kept = given["boundary"]


def attach(
    outer: Any,
    data: DataLoader | StreamLoader,
    *,
    global_batch_size: int,
    checkpoints: Checkpoints,
    stop: StopConditions | None = None,
    metrics: Any = None,
    log_samples: str | os.PathLike[str] | None = None,
) -> ReplicaLoop:
    """As `megaresume.hosts.torchft.attach`, with the same arguments, for replicas that synchronise after a number of
    steps. `ReplicaLoop.step` counts outer steps.

    Args:
        outer: torchft's LocalSGD or DiLoCo.
        data, checkpoints, stop, metrics, log_samples: see there.
        global_batch_size: samples per inner step, over all replicas.

    Raises:
        UsageError: another loader, or settings that do not fit.
        SetupError: ``log_samples`` cannot be written.
    """
    host = LocalSGDHost(outer, data, global_batch_size, log_samples)
    host.attach(checkpoints, stop, metrics)
    return ReplicaLoop(host)
