"""Megatron-Bridge on CPUs. Import it before Bridge.

"cuda" means the CPU, as in the runs of unmodified Megatrons (`tests.upstream.cpu_shim`). Bridge's LoRA imports
Transformer Engine, which needs a GPU: while Bridge is imported there is a package of that name whose classes nobody can
make. And Megatron-Core's wheel has its C++ helpers compiled, and no Makefile to compile them again with.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch

from tests.upstream.cpu_shim import install

torch.set_num_threads(1)
install()

import megatron.core.datasets.utils  # noqa: E402
import megatron.core.distributed  # noqa: E402
import megatron.core.extensions  # noqa: E402
import megatron.core.models.gpt  # noqa: E402
import megatron.core.optimizer  # noqa: E402

megatron.core.datasets.utils.compile_helpers = lambda: None


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


class _Absent(metaclass=_Kind):
    def __init__(self, *_: Any, **__: Any) -> None:
        raise ImportError("Transformer Engine is not here")


class _Package(ModuleType):
    __path__ = ()
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent


_NAMES = ("transformer_engine", "transformer_engine.pytorch")
sys.modules |= {name: _Package(name) for name in _NAMES}
sys.modules[_NAMES[0]].pytorch = sys.modules[_NAMES[1]]

import megatron.bridge.peft.lora_layers  # noqa: E402

for _name in _NAMES:
    del sys.modules[_name]
