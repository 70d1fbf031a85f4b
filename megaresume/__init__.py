"""Exact, elastic, provable data resume for every trainer.

    megaresume.attach(trainer, data)           any trainer or loop: its data in an exact order, saved with the model
    megaresume.Checkpoints(...), LoaderOptions(...), DataOptions(...)  settings of `attach`
    megaresume.StopConditions(...)             when an attached run saves and exits, raising megaresume.Stopped
    megaresume.provider(base_provider)         Megatron: the script's datasets provider, with exact resume
    megaresume.extra_args_provider(base)       Megatron: the script's flags, and ours
    megaresume.open_stream("data.yaml")        the stream itself: plan, state and digest of any sample
    megaresume.StreamLoader, StreamDataset     its samples as torch tensors
    megaresume.Balance(...)                    deals samples to ranks so that all have the same work
    megaresume.DataLoader(dataset, ...)        replaces torch's for any map-style dataset, in such an order
    megaresume.Prompts(dataset, rollouts=8)    prompts for reinforcement learning, each trained exactly once

Names are imported when first used, so that the command line stays fast. The rooms, each of which only imports from
those below it (``lint-imports`` checks that):

program.py     the command line: finds the command; completion.py
cluster/       launching, a cluster's resume test, the demo, and their small trainer
runs/          a run's directory, and every question about it, each with its command
run.py         launches scripts that do not know us: Megatron's, and those with Hugging Face's Trainer
hosts/         one file per trainer, and the count of what was trained
checkpoint/    the protocol: save, choose, lock, keep; the process that follows it, for any trainer; live figures
batches/       samples to batches
data/          documents and records; opens what a data config names
encoding/      records to training data: text to tokens, images to tokens and pixels
files.py, render.py, command_line.py, shipped.py, testing.py  atomic writes of files; tables and pages; flags of
               commands; files shipped with the package; a check for your own sources
stream/        the order of samples, from ids and lengths alone
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import os
from collections.abc import Iterator
from types import BuiltinFunctionType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaresume.batches.data_loader import DataLoader
    from megaresume.batches.loader import StreamDataset, StreamLoader
    from megaresume.batches.open import open_stream
    from megaresume.checkpoint.settings import Checkpoints, DataOptions, LoaderOptions
    from megaresume.checkpoint.stopping import StopConditions, Stopped
    from megaresume.hosts.attach import attach
    from megaresume.hosts.megatron.hooks import extra_args_provider, provider
    from megaresume.hosts.prompts import Prompts
    from megaresume.stream.batches import Balance, BatchSchedule
    from megaresume.stream.config import StreamConfig
    from megaresume.stream.errors import MegaresumeError
    from megaresume.stream.state import StreamState
    from megaresume.stream.stream import Stream

__version__ = "0.1.0"

__all__ = [
    "Balance",
    "BatchSchedule",
    "Checkpoints",
    "DataLoader",
    "DataOptions",
    "LoaderOptions",
    "MegaresumeError",
    "Prompts",
    "StopConditions",
    "Stopped",
    "Stream",
    "StreamConfig",
    "StreamDataset",
    "StreamLoader",
    "StreamState",
    "attach",
    "extra_args_provider",
    "open_stream",
    "provider",
]

_HOMES = {
    "Balance": "megaresume.stream.batches",
    "BatchSchedule": "megaresume.stream.batches",
    "Checkpoints": "megaresume.checkpoint.settings",
    "DataLoader": "megaresume.batches.data_loader",
    "DataOptions": "megaresume.checkpoint.settings",
    "LoaderOptions": "megaresume.checkpoint.settings",
    "MegaresumeError": "megaresume.stream.errors",
    "Prompts": "megaresume.hosts.prompts",
    "StopConditions": "megaresume.checkpoint.stopping",
    "Stopped": "megaresume.checkpoint.stopping",
    "Stream": "megaresume.stream.stream",
    "StreamConfig": "megaresume.stream.config",
    "StreamDataset": "megaresume.batches.loader",
    "StreamLoader": "megaresume.batches.loader",
    "StreamState": "megaresume.stream.state",
    "attach": "megaresume.hosts.attach",
    "extra_args_provider": "megaresume.hosts.megatron.hooks",
    "open_stream": "megaresume.batches.open",
    "provider": "megaresume.hosts.megatron.hooks",
}

#: what needs more than torch -> the extra that installs it.
_EXTRAS = {
    "provider": "megatron",
}


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """A context for importing our modules, and numba with them: see `_uncollected` and `_findable_print`."""
    with _uncollected(), _findable_print():
        yield


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the garbage collector: these objects all stay, and it would look through everything that torch has made,
    twice.

    Afterwards they are in the oldest generation, which only a full collection examines.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _findable_print() -> Iterator[None]:
    """Put a function that numba can find in place of a program's own ``print``, such as one that prints on rank 0 only.

    Numba cannot be imported unless it finds the function at ``print`` by its name in its module.
    """
    global _their_print
    if isinstance(builtins.print, BuiltinFunctionType) or builtins.print is _print:
        yield
        return
    _their_print, builtins.print = builtins.print, _print
    try:
        yield
    finally:
        builtins.print = _their_print


_their_print: Any = print


def _print(*args: Any, **kwargs: Any) -> None:
    """The ``print`` of other threads in the meantime."""
    _their_print(*args, **kwargs)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megaresume' has no attribute '{name}'")
    from megaresume.checkpoint.ending import show_refusals

    show_refusals()
    try:
        with importing():
            return getattr(importlib.import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from megaresume.stream.errors import missing_package

        explained = missing_package(error, f"megaresume.{name}", _EXTRAS.get(name))
        raise error if explained is None else explained from error


if os.environ.get("LOCAL_RANK") == "0":  # set by a launcher: DeepSpeed will compile what it needs, or wait for that
    from megaresume.checkpoint.system import warn_of_dead_locks

    warn_of_dead_locks()
