"""torchtitan on CPUs: ``cpu.py PROGRAM ARGUMENTS``, or imported before it.

torchtitan takes an accelerator for granted. This names the CPU as one, and stands in for what torch does not report of
it. All else is torchtitan's own.
"""

from __future__ import annotations

import runpy
import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

torch.set_num_threads(1)
torch._utils._get_available_device_type = lambda: "cpu"  # type: ignore[attr-defined]
for name, value in {
    "get_device_name": "cpu",
    "get_device_properties": SimpleNamespace(total_memory=1 << 30),
    "reset_peak_memory_stats": None,
    "empty_cache": None,
    "current_device": 0,
    "memory_stats": {},
}.items():
    setattr(torch.cpu, name, lambda *_, value=value: value)


def _sum(module: FSDPModule, factor: float, divide: Any = FSDPModule.set_gradient_divide_factor) -> None:
    module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    divide(module, factor)


FSDPModule.set_gradient_divide_factor = _sum  # type: ignore[method-assign, assignment]

if __name__ == "__main__":
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
