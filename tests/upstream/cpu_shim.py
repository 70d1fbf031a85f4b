"""Lets unmodified training scripts of Megatron-LM run without CUDA: "cuda" means the CPU. Test-only.

    torchrun … cpu_shim.py SCRIPT ARGUMENTS

No data is touched, and nothing numerical is replaced but one thing: attention without Transformer Engine knows no
context parallelism, so with it each rank attends to its own part of a sequence. The loss is then another one; which
samples are read, counted and saved is not.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.cuda
from torch.overrides import TorchFunctionMode


def _cpu(device: Any) -> Any:
    if isinstance(device, torch.device):
        return torch.device("cpu") if device.type == "cuda" else device
    return "cpu" if isinstance(device, str) and device.startswith("cuda") else device


class _CudaIsCpu(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.Tensor.cuda:
            return args[0]
        if function is torch.Tensor.type and len(args) == 1:  # compared with 'torch.cuda.FloatTensor'
            return function(*args).replace("torch.", "torch.cuda.", 1)
        if "device" in kwargs:
            kwargs = dict(kwargs, device=_cpu(kwargs["device"]))
        if function is torch.Tensor.to:
            args = tuple(_cpu(argument) for argument in args)
        return function(*args, **kwargs)


class _Properties:
    major = minor = 0
    total_memory, multi_processor_count, name = 1 << 34, 1, "cpu"


class _Stream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: Any) -> None:
        pass

    def wait_stream(self, *args: Any) -> None:
        pass

    wait_event = record_event = synchronize = wait_stream


def _always(value: Any) -> Callable[..., Any]:
    """A function of its own each time: torch's compiler wants every name in torch.cuda to be another object."""
    return lambda *args, **kwargs: value


def _asked_by_megatron() -> bool:
    """torch itself still sees the honest no."""
    return str(sys._getframe(1).f_globals.get("__name__", "")).startswith(("megatron", "flagscale"))


def install() -> None:
    """Put everything in place."""
    torch.cuda.is_available = _asked_by_megatron
    torch.cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[return-value,assignment]
    torch.cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    torch.cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.cuda.manual_seed = lambda seed: torch.manual_seed(seed)  # type: ignore[assignment,return-value]
    torch.cuda.get_device_properties = lambda *args: _Properties
    torch.cuda.get_device_capability = lambda *args: (0, 0)
    torch.cuda.memory_stats = _always({})
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"):
        setattr(torch.cuda, name, _always(0))
    for name in ("set_device", "synchronize", "empty_cache", "set_stream"):
        setattr(torch.cuda, name, _always(None))
    for name in ("stream", "default_stream", "current_stream"):
        setattr(torch.cuda, name, _always(_Stream()))
    torch.cuda.Stream = _Stream  # type: ignore[assignment,misc]
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    torch._C._cuda_setRNGState = torch.set_rng_state  # type: ignore[attr-defined]
    torch.cuda._lazy_call = lambda function, **kwargs: function()
    kernels = ModuleType("megatron.legacy.fused_kernels")  # runs `nvcc -V`, and builds nothing
    kernels.__dict__["load"] = _always(None)
    sys.modules["megatron.legacy.fused_kernels"] = kernels
    _CudaIsCpu().__enter__()


def local_attention_with_context_parallelism() -> None:
    """See the head of this file. Imported late: Megatron must not be imported before the script's adaptors."""
    import copy

    from megatron.core.transformer import dot_product_attention

    plain = dot_product_attention.DotProductAttention.__init__

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        config = copy.copy(config)
        config.context_parallel_size = 1
        plain(self, config, *args, **kwargs)

    dot_product_attention.DotProductAttention.__init__ = init


if __name__ == "__main__":
    install()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    if "--context-parallel-size" in sys.argv:
        local_attention_with_context_parallelism()
    runpy.run_path(sys.argv[0], run_name="__main__")
