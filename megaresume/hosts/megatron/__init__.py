"""Exact data resume inside Megatron-LM and Megatron-DeepSpeed: what is wrapped, and what the wrappers do.

Getting into a Megatron program:

    project.py         which Megatron this is, told from the contents of its files
    seams.py           the names that are wrapped, and why; whether they still are; what training calls instead
    hooks.py           `install`; `provider` and `extra_args_provider`, for edited scripts
    calls.py           proof that training calls what is wrapped
    patching/          or an edited script instead, by a recipe in ``patches/``

One training process, as the host of a session:

    arguments.py       our flags; Megatron's global batch size at every step
    host.py            `MegatronHost`; stopping in time; under Megatron-DeepSpeed, hooks on the methods of its engine
    checkpointing.py   hooks around save_checkpoint and load_checkpoint
    load_rules.py      whether what Megatron will load is complete and may be loaded; also asked by `megaresume plan`
    losses.py          per-token losses, as Megatron's schedules pass them to the loss function
    checks.py          errors where stock Megatron is silent

The stream as its data:

    streams.py         flags -> streams; the stream as what a checkpoint saves
    iterators.py       around build_train_valid_test_data_iterators: a stream, the guard, or the script's own loaders;
                       a log of what every process was handed
    loaders.py         those loaders: a megaresume.DataLoader, or one with its own state
    provider.py        streams -> datasets; which form of sample get_batch expects
    samples.py         samples in that form; `RankDeal`: balanced ranks, mapping sampler places to samples

or Megatron's own datasets, recorded and pinned: guard/.

Importing this package imports neither torch nor Megatron.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.hosts.megatron.hooks import install
    from megaresume.hosts.megatron.seams import check_installed

__all__ = ["check_installed", "install"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    return getattr(importlib.import_module(f"{__name__}.hooks"), name)
