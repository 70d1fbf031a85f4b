"""How weights come to a rollout that is not in the process that trains: by a file, in the place of NCCL. Registered as
VeRL's ``checkpoint_engine.custom_backend_module``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import tiny_server  # noqa: F401  the recorder
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.workers.rollout.utils import ensure_async_iterator


@CheckpointEngineRegistry.register("tiny")
class SentByFile(CheckpointEngine):
    """See above."""

    def __init__(self, **_: Any) -> None:
        self._path = Path(os.environ["TINY_RAY"], "weights.pt")

    def prepare(self) -> dict[str, Any]:
        """Nothing to do, as for the rest."""
        return {}

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """There is none."""
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """There is none."""

    def finalize(self) -> None:
        """Nothing to do."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> None:
        """All of them, replaced at once."""
        named = {name: weight.detach().clone() async for name, weight in ensure_async_iterator(weights)}
        new = self._path.with_suffix(".new")
        torch.save(named, new)
        os.replace(new, self._path)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Those that were sent, once."""
        while not self._path.exists():
            await asyncio.sleep(0.02)
        named = torch.load(self._path)
        self._path.unlink()
        for name, weight in named.items():
            yield name, weight
