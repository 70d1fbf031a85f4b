"""Stand-ins for what bigscience's Megatron-DeepSpeed imports and current releases no longer have. Test-only.

    torchrun … cpu_cuda_shim.py bigscience_shim.py worker.py …

apex is on no registry; torch._six and np.float are gone since torch 2.0 and NumPy 1.24; its fused kernels need nvcc.
Nothing numerical of its own is replaced: the optimizer is torch's AdamW, as apex's FusedAdam is.
"""

from __future__ import annotations

import os
import runpy
import sys
from types import ModuleType
from typing import Any

import numpy as np
import torch


def stub(name: str, **names: Any) -> None:
    """A module that holds these names and nothing else."""
    module = ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, module)


def install() -> None:
    """Put the stand-ins in place."""
    stub("apex")
    stub("apex.optimizers", FusedAdam=torch.optim.AdamW, FusedSGD=torch.optim.SGD)
    stub("apex.multi_tensor_apply", multi_tensor_applier=None)
    stub("amp_C", multi_tensor_l2norm=None, multi_tensor_scale=None)
    stub("torch._six", inf=float("inf"))
    for name, kind in (("float", float), ("bool", bool), ("int", int), ("object", object)):
        if name not in np.__dict__:
            setattr(np, name, kind)
    stub("megatron.fused_kernels", load=lambda args: None)
    stub("megatron.model.fused_layer_norm", MixedFusedLayerNorm=torch.nn.LayerNorm)
    if not torch.cuda.is_available():
        for name in ("FloatTensor", "DoubleTensor", "LongTensor", "IntTensor", "HalfTensor", "ByteTensor"):
            setattr(torch.cuda, name, getattr(torch, name))


def initialize_with_one_config() -> None:
    """It gives ``deepspeed.initialize`` its config twice, which DeepSpeed refuses since 0.10."""
    import deepspeed

    plain = deepspeed.initialize

    def initialize(*more: Any, args: Any = None, **named: Any) -> Any:
        return plain(*more, args=None if named.get("config") else args, **named)

    deepspeed.initialize = initialize


if __name__ == "__main__":
    install()
    initialize_with_one_config()
    rank = os.environ["LOCAL_RANK"]
    sys.argv = [word for word in sys.argv[1:] if not word.startswith("--local_rank")] + [f"--local_rank={rank}"]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
