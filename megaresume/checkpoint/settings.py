"""All settings, each declared once, in groups that are parameters of `megaresume.attach`.

    attach(engine, data, checkpoints=Checkpoints(...), stop=StopConditions(...),
           loader_options=LoaderOptions(...), data_options=DataOptions(...))

They become the parameters of `attach`, the flags of Megatron's scripts, of `megaresume.cluster.training` and of
``megaresume plan`` (`megaresume.checkpoint.flags`), and the table in docs/settings.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megaresume.checkpoint.flags import described, setting
from megaresume.checkpoint.metrics.words import HELP as METRICS_HELP
from megaresume.checkpoint.save.retention import Retention
from megaresume.checkpoint.save.retries import OnSaveFailure, Retries
from megaresume.checkpoint.starts import MAX_STARTS
from megaresume.checkpoint.stopping import StopConditions
from megaresume.stream.batches import TOKEN_COST, Balance, Objective
from megaresume.stream.config import OnChange
from megaresume.stream.data_yaml import Append


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class DataOptions:
    """What the data config leaves open, and what a launch may change in the order of the data."""

    seq_length: int | None = setting(None, "tokens in a sample, if the data config has none")
    seed: int | None = setting(None, "seed of the order, if the data config has none")
    split: str | None = setting(None, "shares of train, valid and test, for sources without a split of their own")
    objects: Mapping[str, object] | None = setting(None, "sources that are Python objects, by name")
    on_change: OnChange = setting(
        "refuse",
        "what to do if the data config differs from the checkpoint's. refuse: stop and name the differences. stage: "
        "begin a new stage there; every source continues from its own position",
        hosts="megatron trainer training plan",
    )
    skip: Any = setting(
        None,
        "leave out samples A to B-1; later samples move up. A and B count from 0, and count left-out samples too. "
        "Kept in the checkpoint; the flag may stay in the launch script. In Python also "
        '{"samples": [...], "documents": {"web": [17]}}',
        hosts="megatron trainer training plan",
        flag="skip-samples",
        type=str,
        nargs="+",
        metavar="A:B",
    )


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class LoaderOptions:
    """How batches are read ahead, and what they are."""

    num_workers: int = setting(0, "worker processes; 0: a thread, which is faster for text")
    prefetch: int = setting(2, "micro-batches read ahead (by each worker); 0: on demand", hosts="training")
    read_ahead: int = setting(
        64,
        "MiB of records of tar shards that each process that reads (each worker) holds before they are needed; 0: none",
        hosts="training",
        metavar="MIB",
    )
    requests: int = setting(
        32, "requests to an object store at a time, of each process that reads", hosts="training", metavar="N"
    )
    cache_dir: str | os.PathLike[str] | None = setting(
        None,
        "a directory on a local disk that keeps records of tar shards on an object store for later epochs and starts; "
        "shared by the processes of a node",
        hosts="training",
        metavar="DIR",
    )
    cache_gib: float = setting(100.0, "GiB that it may take", hosts="training", metavar="GIB")
    start_method: Literal["fork", "spawn", "forkserver"] | None = setting(
        None, "how worker processes start; default: Python's", hosts="training"
    )
    pin_memory: bool | None = setting(None, "page-locked batches; default: on a CUDA device")
    fields: Sequence[Literal["labels", "loss_mask", "position_ids"]] = setting(
        ("labels", "loss_mask", "position_ids"),
        "which of these a batch has besides its tokens and boundaries; a loop that makes them by itself saves time",
    )
    attention_mask: bool = setting(False, "add the document-diagonal mask, bool[m, 1, S, S], to every batch")
    pad_id: int = setting(0, "token id of padding")
    transform: Callable[[Any], Any] | None = setting(
        None,
        "turns a batch into what the model takes, for example ((tokens, position_ids), labels) for a pipeline engine",
    )
    balance: Objective | None = setting(
        None,
        "deal the samples of each global batch to the ranks so that all have equal work, by the lengths of their "
        "documents. step: over a step. micro-step: in every micro-batch, for ZeRO 3, FSDP and pipelines. Default: in "
        "the order of the stream. megaresume plan DIR --balance step shows what it would gain",
        hosts="megatron training plan",
    )
    balance_token_cost: int = setting(
        TOKEN_COST,
        "cost of a token apart from attention, in units of one token's attention to another one: 6 x hidden size, or "
        "measured",
        hosts="megatron training plan",
    )

    @property
    def batch_kwargs(self) -> dict[str, Any]:
        """The settings for the content of batches, as parameters of `StreamDataset`."""
        return {"fields": self.fields, "attention_mask": self.attention_mask, "pad_id": self.pad_id}

    @property
    def reader_kwargs(self) -> dict[str, Any]:
        """The settings for reading ahead, as parameters of `StreamLoader`; page-locked memory depends on the device."""
        names = ("num_workers", "prefetch", "read_ahead", "requests", "cache_dir", "cache_gib", "start_method")
        return {name: getattr(self, name) for name in names}

    @property
    def balanced(self) -> Balance | None:
        """The rule for balancing ranks. Raises UsageError for an unknown objective, or a bad cost."""
        return None if self.balance is None else Balance(objective=self.balance, token_cost=self.balance_token_cost)


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoints:
    """Where a run saves, what it keeps, and how."""

    save_dir: str | os.PathLike[str] | None = setting(
        None,
        "where the run saves its checkpoints; no other job may write there. The ledger then records every start, even "
        "one that dies before its first save",
    )
    keep_last: int | None = setting(
        None,
        "delete old checkpoints when a newer one is complete: keep the newest K",
        hosts="megatron training",
        refused={"trainer": "set save_total_limit of the Trainer"},
        metavar="K",
    )
    keep_every: int | None = setting(
        None,
        "with keep-last, also keep every checkpoint whose step is a multiple of N; Megatron's --save-retain-interval "
        "does the same",
        hosts="megatron trainer training",
        metavar="N",
    )
    stage_to: str | os.PathLike[str] | None = setting(
        None,
        "an existing directory on slower shared storage, or a URL of an object store (s3://bucket/run), to which "
        "checkpoints are copied in the background. A load takes the newer of the two. For copies to a directory, all "
        "ranks must see save_dir too",
        hosts="megatron trainer training",
        metavar="PLACE",
    )
    position_every: int | None = setting(
        None,
        "between saves, note step, samples and digest of the data every N steps, in the background, beside the "
        "checkpoints and their copies: after the loss of a machine, top, report and goodput tell what it had done",
        hosts="trainer training",
        metavar="N",
    )
    save_retries: int = setting(
        3,
        "retry a failed save this many times if the cause may be temporary: a full disk or quota, an I/O error, a "
        "server that is down",
        hosts="megatron trainer training",
        metavar="N",
    )
    save_retry_wait: float = setting(
        15.0,
        "seconds before the first retry; twice as long before each later one",
        hosts="megatron trainer training",
    )
    on_save_failure: OnSaveFailure = setting(
        "end",
        "what to do if the retries fail too. end: raise the error. continue: carry on to the next save without this "
        "checkpoint",
        hosts="megatron trainer training",
    )
    max_starts: int = setting(
        MAX_STARTS,
        "refuse to start more often than this from the same step without a save in between; 0: no limit",
        hosts="megatron trainer training",
        metavar="N",
    )
    checksums: bool = setting(
        True,
        "compute checksums of all files after every save, in the background, and compare them at every load (otherwise "
        "only sizes): a checkpoint that the storage damaged is skipped",
        hosts="megatron trainer training",
    )
    compare_frozen: bool = setting(
        True,
        "at a resume: refuse other weights than those of the run, where checkpoints do not hold them: below adapters, "
        "of reference models and teachers, and those that a program leaves out of what is saved; at a save: refuse to "
        "leave out weights that are trained",
        hosts="trainer",
    )

    def __post_init__(self) -> None:
        # A program may change its working directory later.
        for name in ("save_dir", "stage_to"):
            if (given := getattr(self, name)) is not None and "://" not in os.fspath(given):
                object.__setattr__(self, name, os.path.abspath(given))

    @property
    def retention(self) -> Retention:
        """Which checkpoints are kept. Raises UsageError for a number below 1."""
        return Retention(keep_last=self.keep_last, keep_every=self.keep_every)

    @property
    def session_kwargs(self) -> dict[str, Any]:
        """These settings as parameters of `Session`. Raises UsageError for an impossible number."""
        return {name: getattr(self, name) for name in _OF_SESSION}

    @property
    def retries(self) -> Retries:
        """How failed saves are retried. Raises UsageError for a negative number."""
        return Retries(tries=self.save_retries, wait=self.save_retry_wait, on_failure=self.on_save_failure)


#: the fields of `Checkpoints` that are passed to a `Session`.
_OF_SESSION = (
    "save_dir",
    "stage_to",
    "retention",
    "position_every",
    "max_starts",
    "checksums",
    "compare_frozen",
    "retries",
)

#: stream: our samples. guard: Megatron's own datasets, recorded and pinned. off: the hooks do nothing.
Mode = Literal["stream", "guard", "off"]


@described
@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchOptions:
    """Settings that only a command line has, or that are separate parameters of `attach`."""

    data: str | None = setting(
        None,
        "data.yaml with sources, weights and packing: train on this stream, not on Megatron's datasets",
        hosts="megatron training",
        metavar="FILE",
    )
    mode: Mode | None = setting(
        None,
        "stream: train on a stream, of --megaresume-data or of Megatron's data flags (--data-path and others). guard: "
        "keep Megatron's own datasets, and make sure that a resume rebuilds their order. off: do nothing. Default: "
        "stream with --megaresume-data, otherwise guard. A Trainer's script takes off alone",
        hosts="megatron trainer",
    )
    accept: tuple[str, ...] | None = setting(
        None,
        "accept these changes of the order of Megatron's own datasets, named as in the refusal: NAME@SAMPLES. The "
        "checkpoints record them",
        hosts="megatron",
        nargs="+",
        metavar="NAME",
    )
    metrics: Any = setting(
        None,
        METRICS_HELP,
        hosts="megatron trainer training",
        type=str,
        nargs="+",
        metavar="SINK",
    )
    elastic: bool = setting(
        False,
        "when loading a ZeRO checkpoint saved by a different number of data-parallel ranks, convert it; otherwise it "
        "is refused, with the command to run",
        hosts="megatron training plan",
    )
    adopt: bool = setting(
        False,
        "continue from a checkpoint that was written without megaresume: with its weights, optimizer and step, and "
        "after the samples that DeepSpeed counted. Changes nothing for checkpoints that have a data state",
    )
    append: Append | None = setting(
        None,
        "train_dataset has more items at its end than the checkpoint knows: take them from the next epoch on, or now",
        hosts="trainer",
    )
    log_samples: str | None = setting(
        None,
        "write a line per step and process to DIR: the samples that it was handed, for megaresume verify (only with "
        "a stream)",
        hosts="megatron",
        metavar="DIR",
    )


#: all settings, in the order of help and docs.
GROUPS: Mapping[str, type[Any]] = {
    "launch": LaunchOptions,
    "data_options": DataOptions,
    "loader_options": LoaderOptions,
    "checkpoints": Checkpoints,
    "stop": StopConditions,
}
