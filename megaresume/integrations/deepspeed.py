"""`attach`: exact data resume for a DeepSpeed engine, in the user's own training loop.

    engine, *_ = deepspeed.initialize(...)
    data = megaresume.attach(engine, "data.yaml")
    engine.load_checkpoint("checkpoints")          # nothing there yet: starts at sample 0
    for batch in data:
        loss = ...
        engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()  # asked before the step: whether it ends one
        engine.step()
        if last and engine.global_steps % 100 == 0: engine.save_checkpoint("checkpoints")

See `deepspeed_hooks`, `session` and docs/deepspeed.md.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megaresume.checkpoint.retention import Retention
from megaresume.checkpoint.start import MAX_STARTS
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations.deepspeed_data import TrainingData
from megaresume.integrations.deepspeed_hooks import hook
from megaresume.integrations.deepspeed_host import EngineHost
from megaresume.integrations.ranks import is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.integrations.session import Session
from megaresume.integrations.stop_conditions import StopConditions
from megaresume.loading.batch import Batch
from megaresume.loading.loader import StartMethod
from megaresume.loading.open import open_stream
from megaresume.runs.rank_log import RankLog
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.config import OnChange
from megaresume.stream.errors import UsageError
from megaresume.stream.fingerprints import same_corpora
from megaresume.stream.skips import SkipConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

__all__ = ["attach"]


def attach(
    engine: Any,
    data: Stream | str | os.PathLike[str] | Mapping[str, Any] | Sequence[str],
    *,
    num_workers: int = 0,
    prefetch: int = 2,
    start_method: StartMethod | None = None,
    pin_memory: bool | None = None,
    attention_mask: bool = False,
    pad_id: int = 0,
    transform: Callable[[Batch], Any] | None = None,
    schedule: BatchSchedule | None = None,
    save_dir: str | os.PathLike[str] | None = None,
    log_samples: str | os.PathLike[str] | None = None,
    seq_length: int | None = None,
    seed: int | None = None,
    split: str | None = None,
    objects: Mapping[str, object] | None = None,
    on_change: OnChange = "refuse",
    skip: SkipConfig | Mapping[str, Any] | Sequence[str] | None = None,
    keep_last: int | None = None,
    keep_every: int | None = None,
    stop: StopConditions | None = None,
    on_stop: Callable[[], None] | None = None,
    max_starts: int = MAX_STARTS,
    elastic: bool = False,
    adopt: bool = False,
    verify_checkpoint: bool = False,
    stage_to: str | os.PathLike[str] | None = None,
) -> TrainingData:
    """Give an engine its data, and its checkpoints the state of that data. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Micro-batch size, data-parallel rank and size, and gradient accumulation steps are the engine's. Attaching twice
    replaces the data; hooks are not stacked.

    Args:
        engine: what ``deepspeed.initialize`` returned first; ZeRO 0 to 3, or a pipeline engine.
        data: path of a data.yaml; the mapping in it; what follows ``--data-path``, as a list; or a `Stream`.
        num_workers: worker processes; 0: a thread, which is faster for corpora of tokens.
        prefetch: micro-batches read ahead (by each worker); 0: on demand.
        start_method: of worker processes.
        pin_memory: page-locked batches; None: on a CUDA device.
        attention_mask: add the document-diagonal mask, bool[m, 1, S, S], to every batch.
        pad_id: token written where there is no document.
        transform: makes of a batch what the model wants, for example ``((tokens, position_ids), labels)`` for a
            pipeline engine.
        schedule: global batch sizes to come, for a ramp-up; the engine's batch size then follows it. None: the
            engine's own, read anew at every step.
        save_dir: where the run saves its checkpoints: with it the ledger there records every start, also of a
            process that dies before its first save. No other job may write there meanwhile.
        log_samples: directory: every rank writes there what it was handed in every step, for `megaresume verify`.
        skip: what is not to be trained, in addition to what the data config says: ``["1000:1200"]``, or ``{"samples":
            [...], "documents": {"web": [17]}}``. See docs/skips.md.
        adopt: go on from a checkpoint that was written without megaresume, with its weights, optimizer and step: the
            samples that DeepSpeed counted are taken as trained, and the stream begins behind them. Otherwise it is
            refused. May stay for good: it says nothing about checkpoints that have a data state.
        elastic: convert a ZeRO checkpoint that another number of ranks saved, when it is loaded. Otherwise that is
            refused, with the command to run. See docs/checkpoints.md.
        verify_checkpoint: take checksums of all files at every save, and compare them at every load: a bit that the
            storage flipped is noticed, and the checkpoint before is loaded. Otherwise sizes are compared.
        stage_to: an existing directory on shared storage: what is saved to ``save_dir``, fast local storage that all
            ranks see, is copied there in the background, and loaded from whichever is newer. See docs/checkpoints.md.
        keep_last: after every save, delete the weights of complete checkpoints but the newest so many; None: keep all.
        keep_every: keep those besides whose step this divides. See docs/checkpoints.md.
        stop: at the end of the step in which one of these happens, save to ``save_dir`` and raise `Stopped`, which
            ends the process with exit status 0 (or another of your choice). See docs/checkpoints.md.
        on_stop: how to save then, on every rank; None: ``engine.save_checkpoint(save_dir)``.
        max_starts: refuse to start from one place more often than that without a save in between; 0: never refuse.
        seq_length, seed, split, objects, on_change: see `megaresume.loading.open.open_stream`.

    Returns:
        the data: iterate over it, or pass it to ``engine.train_batch(data_iter=...)``.

    Raises on every rank:
        UsageError: no DeepSpeed engine, settings that cannot be committed, sizes that do not divide, or ``stop``
            or ``stage_to`` without a place to save to.
        CheckpointError: another job writes to ``save_dir``.
        ConfigError, CorpusError: the data cannot be opened.
        SetupError: data, ``save_dir`` or clocks differ between nodes.
    """
    facts.check_engine(engine)
    retention = Retention(keep_last=keep_last, keep_every=keep_every)
    if stop is not None and save_dir is None and on_stop is None:
        raise UsageError(
            "there is nowhere to save to when the run is asked to stop",
            found="stop= without save_dir=",
            expected="the directory of the checkpoints",
            action="megaresume.attach(engine, data, save_dir=..., stop=...)",
        )

    if stage_to is not None and save_dir is None:
        raise UsageError(
            "what is to be copied is not said",
            found="stage_to= without save_dir=",
            expected="the local directory of the checkpoints",
            action="megaresume.attach(engine, data, save_dir=..., stage_to=...)",
        )

    def adopt_state(samples: int, note: str) -> StreamState:
        return attached.stream.state_at(samples, batches=((0, int(engine.train_batch_size())),), overrides=(note,))

    host = EngineHost(
        engine,
        elastic=elastic,
        adopt=adopt_state if adopt else None,
    )
    session = Session(
        host,
        save_dir=save_dir,
        stage_to=stage_to,
        retention=retention,
        max_starts=max_starts,
        verify_checkpoint=verify_checkpoint,
        random=host.random_state(),
        stop=stop,
        # By name: the method is hooked later.
        on_stop=on_stop or (lambda: engine.save_checkpoint(os.fspath(save_dir or ""))),
    )
    session.start()  # before anything that takes long

    opened: list[Stream] = []

    def open_data() -> Stream:
        if not opened:
            ours = {"seq_length": seq_length, "seed": seed, "split": split, "objects": objects, "on_change": on_change}
            stream = data if isinstance(data, Stream) else open_stream(data, **ours)  # type: ignore[arg-type]
            stream.fingerprints  # noqa: B018  computed here, where an error reaches every rank
            opened.append(stream)
        return opened[0]

    # Rank 0 first: it leaves the fingerprints beside the corpora, and the other ranks need not compute them again.
    on_rank_0(lambda: bool(open_data()))
    stream = on_all_ranks(open_data)
    order = repr((stream.config.to_dict(), sorted(stream.fingerprints.items())))
    same_on_all_ranks(
        hashlib.sha256(order.encode()).hexdigest()[:16],
        "the data",
        cause="the nodes have different copies of data.yaml or of a corpus",
        action="compare data.yaml and the sizes of the .idx files on the nodes",
    )
    if is_rank_0():
        for line in same_corpora(stream.fingerprints):
            print(f"megaresume: WARNING: {line}", flush=True)
    attached = TrainingData(
        engine,
        stream,
        session,
        schedule=schedule,
        num_workers=num_workers,
        prefetch=prefetch,
        start_method=start_method,
        pin_memory=engine.device.type == "cuda" if pin_memory is None else pin_memory,
        attention_mask=attention_mask,
        pad_id=pad_id,
        transform=transform,
        log=None if log_samples is None else _open_log(log_samples),
    )
    if asked := SkipConfig.from_dict(skip, where="skip="):
        on_all_ranks(lambda: stream.skip(asked))
    if session.stopper is not None:
        session.stopper.install()
    hook(engine, attached)
    return attached


def _open_log(directory: str | os.PathLike[str]) -> RankLog:
    import torch.distributed as dist

    launch = on_rank_0(time.time_ns)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return on_all_ranks(lambda: RankLog(directory, rank=rank, launch=launch))
