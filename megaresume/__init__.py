"""Exact, elastic, provable data resume for Megatron-LM and DeepSpeed training.

    megaresume.attach(engine, "data.yaml")     DeepSpeed: micro-batches, saved and restored with the model
    megaresume.attach_loader(engine, loader)   DeepSpeed: Energon's or torchdata's loader in the place of our stream
    megaresume.Checkpoints(...), Loader(...), DataOptions(...)  settings of `attach`
    megaresume.StopConditions(...)             when an attached run saves and exits; it raises megaresume.Stopped
    megaresume.provider(base_provider)         Megatron: the script's datasets provider, with exact resume
    megaresume.loader_provider(base_provider)  Megatron: loaders with a state, for --dataloader-type external
    megaresume.extra_args_provider(base)       Megatron: the script's flags, and ours
    megaresume.open_stream("data.yaml")        the stream itself: plan, state and digest of any sample
    megaresume.StreamLoader, StreamDataset     its samples as torch tensors

Names are imported when they are first used, so that the command line stays fast. The rooms, each importing only from
those below it (``lint-imports`` checks that):

cli/           the program
smoke/         the resume test on a cluster
dryrun/, doctor/  what would a launch do, what is wrong
training/      the reference pretraining program, and the demo
run.py         the launcher of Megatron's scripts
integrations/  DeepSpeed, Megatron, other people's loaders
trace/         the stream of a run planned again
loading/       samples to batches
patching/      scripts adapted by a codemod
sources/       what a data config names, opened
shards/        image-text records in tar shards
images/        records to tokens and pixels
corpora/       documents of text
runs/          a run, as its checkpoint directory tells it
checkpoint/    the protocol on a directory: save, choose, lock, keep
render.py, shipped.py, testing.py  tables and pages; files of a checkout; a check for your own sources
stream/        the order of samples: ids and lengths alone
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.integrations.deepspeed import attach
    from megaresume.integrations.loaders.deepspeed import attach_loader
    from megaresume.integrations.loaders.megatron import loader_provider
    from megaresume.integrations.megatron.routes import extra_args_provider, provider
    from megaresume.integrations.settings import Checkpoints, DataOptions, Loader
    from megaresume.integrations.stop_conditions import StopConditions, Stopped
    from megaresume.loading.dataset import StreamDataset
    from megaresume.loading.loader import StreamLoader
    from megaresume.loading.open import open_stream
    from megaresume.stream.batches import BatchSchedule
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.errors import MegaresumeError
    from megaresume.stream.state import StreamState
    from megaresume.stream.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "BatchSchedule",
    "Checkpoints",
    "DataOptions",
    "Loader",
    "MegaresumeError",
    "StopConditions",
    "Stopped",
    "Stream",
    "StreamConfig",
    "StreamDataset",
    "StreamLoader",
    "StreamState",
    "attach",
    "attach_loader",
    "extra_args_provider",
    "loader_provider",
    "open_stream",
    "provider",
]

_HOMES = {
    "BatchSchedule": "megaresume.stream.batches",
    "Checkpoints": "megaresume.integrations.settings",
    "DataOptions": "megaresume.integrations.settings",
    "Loader": "megaresume.integrations.settings",
    "MegaresumeError": "megaresume.stream.errors",
    "StopConditions": "megaresume.integrations.stop_conditions",
    "Stopped": "megaresume.integrations.stop_conditions",
    "Stream": "megaresume.stream.stream",
    "StreamConfig": "megaresume.stream.config",
    "StreamDataset": "megaresume.loading.dataset",
    "StreamLoader": "megaresume.loading.loader",
    "StreamState": "megaresume.stream.state",
    "attach": "megaresume.integrations.deepspeed",
    "attach_loader": "megaresume.integrations.loaders.deepspeed",
    "extra_args_provider": "megaresume.integrations.megatron.routes",
    "loader_provider": "megaresume.integrations.loaders.megatron",
    "open_stream": "megaresume.loading.open",
    "provider": "megaresume.integrations.megatron.routes",
}

#: what needs more than torch -> the extra that installs all of it.
_EXTRAS = {"attach": "deepspeed", "attach_loader": "deepspeed", "loader_provider": "megatron", "provider": "megatron"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megaresume' has no attribute '{name}'")
    try:
        return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from megaresume.stream.errors import missing_package

        explained = missing_package(error, f"megaresume.{name}", _EXTRAS.get(name))
        raise error if explained is None else explained from error
