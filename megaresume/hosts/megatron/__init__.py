"""Exact data resume inside Megatron-LM and Megatron-DeepSpeed: what is wrapped, and what the wrappers do.

Getting into a Megatron program:

    project.py         which Megatron is this, by content
    seams.py           the names that are wrapped, and why; are they still? Which ones training calls instead
    hooks.py           `install`; `provider` and `extra_args_provider`, for scripts that are edited
    calls.py           proof that training calls what is wrapped
    patching/          or a script edited instead, by a recipe of ``patches/``

One training process, as the host of a session:

    arguments.py       our flags; the global batch size of every step, as Megatron will have it
    host.py            `MegatronHost`; stopping in time; under Megatron-DeepSpeed, around the methods of its engine
    checkpointing.py   around save_checkpoint and load_checkpoint
    load_rules.py      is what Megatron will load complete, and may it be loaded? `megaresume plan` asks too
    losses.py          the losses of tokens, as its schedules give them to the loss function
    checks.py          loud where stock Megatron is silent

The stream as its data:

    streams.py         flags -> streams; the stream as what a checkpoint saves
    iterators.py       around build_train_valid_test_data_iterators: a stream, the guard, or the script's own loaders;
                       a log of what every process was handed
    loaders.py         those loaders: a megaresume.DataLoader, or one with a state of its own
    provider.py        streams -> datasets; which form of a sample get_batch expects
    samples.py         samples of that form; `RankDeal`: balanced ranks, which sample lies at a place of the sampler

or its own datasets, recorded and pinned: guard/.

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
