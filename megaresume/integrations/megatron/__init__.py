"""Exact data resume inside Megatron-LM and Megatron-DeepSpeed: what is wrapped, and what the wrappers do.

    getting in     project.py        which Megatron is this, by content
                   seams.py          the names that are wrapped, and why
                   importing.py      wrap a function as soon as its module is imported
                   hooks.py          `install`
                   routes.py         `provider`, `extra_args_provider`: for scripts that are edited
                   children/         the same in child processes
    the run        arguments.py      our flags
                   host.py           `MegatronHost`: one training process as the host of a session
                   launch.py         rules on records and configs alone, which `megaresume plan` asks too
                   schedule.py       the global batch size of every step, as Megatron will have it
                   stopping.py       stopping in time
                   checks.py         loud where stock Megatron is silent
                   calls.py          proof that training calls what is wrapped (call_errors.py: what it says)
    checkpoints    checkpointing.py  around save_checkpoint and load_checkpoint
                   tracker.py        is what Megatron will load whole?
                   engine.py         around DeepSpeed's, under Megatron-DeepSpeed
    the data       iterators.py      around build_train_valid_test_data_iterators
                   data.py           flags -> streams
                   provider.py       streams -> datasets
                   samples.py        the keys that get_batch expects (sample_kernels.py: a batch at a time)
                   sample_log.py     what every process was handed
                   order.py          the stream as what a checkpoint saves
                   guard/            Megatron's own datasets: recorded and pinned

Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.integrations.megatron.hooks import check_installed, install

__all__ = ["check_installed", "install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.hooks"), name)
