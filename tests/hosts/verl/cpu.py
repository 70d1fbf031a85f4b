"""VeRL on CPUs: a platform of its own kind, registered as its plugins are. Import it before VeRL."""

from __future__ import annotations

import os
from typing import Any

import torch

os.environ |= {"VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda"}
torch.set_num_threads(1)
for name in ("max_memory_allocated", "max_memory_reserved", "memory_allocated", "memory_reserved"):
    setattr(torch.cpu, name, lambda *_, **__: 0)
for name in ("empty_cache", "reset_peak_memory_stats", "ipc_collect"):
    setattr(torch.cpu, name, lambda *_, **__: None)
torch.cpu.get_rng_state, torch.cpu.set_rng_state = torch.get_rng_state, torch.set_rng_state  # type: ignore[attr-defined]
torch.cpu.mem_get_info = lambda *_: (1, 1)  # type: ignore[attr-defined]

from verl.plugin.platform.platform_base import PlatformBase  # noqa: E402
from verl.plugin.platform.platform_manager import PlatformRegistry  # noqa: E402


def _nothing(self: Any, *_: Any, **__: Any) -> None:
    """What a CPU has no need of."""


_members: dict[str, Any] = dict.fromkeys(PlatformBase.__abstractmethods__, _nothing) | {
    "device_name": "cpu",
    "vendor_name": "cpu",
    "device_module": torch.cpu,
    "is_available": lambda self: True,
    "current_device": lambda self: "cpu",
    "device_count": lambda self: 1,
    "communication_backend_name": lambda self: "gloo",
    "ray_noset_envvars": lambda self: [],
    "get_device_capability": lambda self, index=0: (None, None),
    "ray_resource_name": lambda self: "GPU",  # Ray is told that it has some
    "ray_resource_options": lambda self, num_gpus: {"num_gpus": num_gpus},
    "rollout_env_vars": lambda self: {},
    "visible_devices_envvar": lambda self: "CUDA_VISIBLE_DEVICES",
}
PlatformRegistry.register(platform="cpu")(type("PlatformCPU", (PlatformBase,), _members))

_init = torch.distributed.init_process_group


def _with_one_backend(backend: str | None = None, *args: Any, **more: Any) -> Any:
    """VeRL names one for CPUs, and one for the device."""
    return _init("gloo" if backend == "cpu:gloo,cpu:gloo" else backend, *args, **more)


torch.distributed.init_process_group = _with_one_backend

# VeRL patches a class of TRL's wherever TRL is installed; 1.16, which this environment has for other tests, has none of
# that name.
import verl.utils.import_utils  # noqa: E402

verl.utils.import_utils.is_trl_available = lambda: False
