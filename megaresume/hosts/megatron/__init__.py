"""Exact data resume inside Megatron-LM and Megatron-DeepSpeed: what is wrapped, and what the wrappers do.

    project.py         which Megatron is this, by content
    hooks/             the functions that are wrapped, `install`
    data/              the stream as its data
    guard/             or its own datasets: recorded and pinned
    patching/          or a script edited instead, by a recipe of ``patches/``
    arguments.py       our flags
    host.py            `MegatronHost`: one training process as the host of a session; stopping in time
    checkpointing.py   around save_checkpoint and load_checkpoint
    engine.py          around those of DeepSpeed's engine, under Megatron-DeepSpeed
    tracker.py         is what Megatron will load complete?
    load_rules.py      rules on records and configs alone; `megaresume plan` asks them too
    schedule.py        the global batch size of every step, as Megatron will have it
    checks.py          loud where stock Megatron is silent

Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.hosts.megatron.hooks.install import install
    from megaresume.hosts.megatron.hooks.seams import check_installed

__all__ = ["check_installed", "install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.hooks.install"), name)
