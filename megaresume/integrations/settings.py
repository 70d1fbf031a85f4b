"""All settings, each declared once, in the groups in which `megaresume.attach` takes them.

    attach(engine, data, checkpoints=Checkpoints(...), loader=Loader(...), data_options=DataOptions(...), stop=...)

From here come the parameters of `attach`, the flags of Megatron's scripts, of `megaresume.training` and of ``megaresume
plan`` (`megaresume.integrations.flags`), and the table in docs/settings.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megaresume.checkpoint.retention import Retention
from megaresume.checkpoint.start import MAX_STARTS
from megaresume.integrations.flags import described, setting
from megaresume.integrations.stop_conditions import StopConditions
from megaresume.stream.config import OnChange

__all__ = ["GROUPS", "Checkpoints", "DataOptions", "LaunchOptions", "Loader", "Mode"]


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """What the data config leaves open, and what a launch may change in the order of the data."""

    seq_length: int | None = setting(None, "tokens in a sample, if the data config has none")
    seed: int | None = setting(None, "of the order, if the data config has none")
    split: str | None = setting(None, "shares of train, valid and test, for sources without a split of their own")
    objects: Mapping[str, object] | None = setting(None, "sources that are Python objects, by name")
    on_change: OnChange = setting(
        "refuse",
        "what to do if the data config differs from the checkpoint's. refuse: stop and name the differences. stage: "
        "begin a new stage there; every source goes on at its own position",
        hosts="megatron training plan",
    )
    skip: Any = setting(
        None,
        "leave out samples A to B-1 of the stream, counted from 0 and including what is left out: later samples move "
        "up. Kept in the checkpoint; the flag may stay in the launch script. In Python also "
        '{"samples": [...], "documents": {"web": [17]}}',
        hosts="megatron training plan",
        flag="skip-samples",
        type=str,
        nargs="+",
        metavar="A:B",
    )


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class Loader:
    """How batches are read ahead, and what they are."""

    num_workers: int = setting(0, "worker processes; 0: a thread, which is faster for corpora of tokens")
    prefetch: int = setting(2, "micro-batches read ahead (by each worker); 0: on demand", hosts="training")
    start_method: Literal["fork", "spawn", "forkserver"] | None = setting(
        None, "how worker processes start; default: Python's", hosts="training"
    )
    pin_memory: bool | None = setting(None, "page-locked batches; default: on a CUDA device")
    attention_mask: bool = setting(False, "add the document-diagonal mask, bool[m, 1, S, S], to every batch")
    pad_id: int = setting(0, "token written where there is no document")
    transform: Callable[[Any], Any] | None = setting(
        None,
        "turns a batch into what the model takes, for example ((tokens, position_ids), labels) for a pipeline engine",
    )


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Where a run saves, what it keeps, and what it may load."""

    save_dir: str | os.PathLike[str] | None = setting(
        None,
        "where the run saves its checkpoints. The ledger there then records every start, even of a process that dies "
        "before its first save. No other job may write there",
    )
    keep_last: int | None = setting(
        None,
        "delete old checkpoints when a newer one is complete: keep the newest K",
        hosts="megatron training",
        metavar="K",
    )
    keep_every: int | None = setting(
        None,
        "with keep-last, also keep every checkpoint whose step is a multiple of N; Megatron's --save-retain-interval "
        "does the same",
        hosts="megatron training",
        metavar="N",
    )
    stage_to: str | os.PathLike[str] | None = setting(
        None,
        "an existing directory on shared storage: what is saved on fast local storage that all ranks see is copied "
        "there in the background, and loaded from whichever is newer",
        hosts="training",
        metavar="DIR",
    )
    max_starts: int = setting(
        MAX_STARTS,
        "refuse to start more often than this from one step without a save between; 0: any number",
        hosts="megatron training",
        metavar="N",
    )
    elastic: bool = setting(
        False,
        "when loading a ZeRO checkpoint saved by a different number of data-parallel ranks, convert it; otherwise it "
        "is refused, with the command to run",
        hosts="megatron training plan",
    )
    adopt: bool = setting(
        False,
        "go on from a checkpoint that was written without megaresume, with its weights, optimizer and step: the "
        "samples that DeepSpeed counted are taken as trained. Says nothing about checkpoints that have a data state",
    )
    verify: bool = setting(
        False,
        "checksums of all files at every save and load, not only their sizes: a bit that the storage flipped is "
        "noticed, and the checkpoint before is loaded",
        hosts="megatron training",
        flag="verify-checkpoint",
    )

    @property
    def retention(self) -> Retention:
        """Which checkpoints stay. Raises UsageError for a number below 1."""
        return Retention(keep_last=self.keep_last, keep_every=self.keep_every)


#: stream: our samples. guard: Megatron's own datasets, recorded and pinned. off: the hooks do nothing.
Mode = Literal["stream", "guard", "off"]


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """What only a command line says, or `attach` takes by itself."""

    data: str | None = setting(
        None,
        "data.yaml with the sources, weights and packing: train on that stream instead of --data-path and its kin",
        hosts="megatron training",
        metavar="FILE",
    )
    mode: Mode | None = setting(
        None,
        "stream: train on our stream (of --megaresume-data, or of --data-path and its kin). guard: keep Megatron's own "
        "datasets, and make sure that a resume rebuilds their order. off: do nothing. Default: stream with "
        "--megaresume-data, otherwise guard",
        hosts="megatron",
    )
    accept: tuple[str, ...] | None = setting(
        None,
        "accept these differences from the recorded order of Megatron's own datasets, by the names in the refusal; the "
        "record keeps them",
        hosts="megatron",
        nargs="+",
        metavar="NAME",
    )
    log_samples: str | None = setting(
        None,
        "every process that reads data writes into DIR what it was handed in every step, for megaresume verify (stream "
        "mode)",
        hosts="megatron",
        metavar="DIR",
    )


#: of all settings, in the order in which help and docs show them.
GROUPS: Mapping[str, type[Any]] = {
    "launch": LaunchOptions,
    "data_options": DataOptions,
    "loader": Loader,
    "checkpoints": Checkpoints,
    "stop": StopConditions,
}
