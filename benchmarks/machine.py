"""What the figures were measured on, in general terms."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path


def machine(cores: set[int]) -> dict[str, str]:
    """Processor, cores that may be used, versions."""
    return {
        "processor": f"{_processor()} ({len(cores)} cores, one used)",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("numpy", "numba", "torch", "megatron-core")},
    }


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
