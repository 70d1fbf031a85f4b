"""megatron-core's parallel groups as DeepSpeed asks for them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

__all__ = ["ModelParallelUnit"]


class ModelParallelUnit:
    """What DeepSpeed calls an ``mpu``: `megatron.core.parallel_state`, and the names that it no longer has."""

    def __getattr__(self, name: str) -> Any:
        return getattr(parallel_state, name)

    def get_model_parallel_world_size(self) -> int:
        """Ranks that share one model: tensor times pipeline parallel."""
        return int(
            parallel_state.get_tensor_model_parallel_world_size()
            * parallel_state.get_pipeline_model_parallel_world_size()
        )

    def get_model_parallel_rank(self) -> int:
        """This rank among them."""
        return dist.get_rank(parallel_state.get_model_parallel_group())
