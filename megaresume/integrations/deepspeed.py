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
from collections.abc import Callable
from typing import Any

from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations.deepspeed_data import TrainingData
from megaresume.integrations.deepspeed_hooks import hook
from megaresume.integrations.deepspeed_host import EngineHost
from megaresume.integrations.ranks import is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.integrations.session import Session
from megaresume.integrations.settings import Checkpoints, DataOptions, Loader
from megaresume.integrations.stop_conditions import StopConditions
from megaresume.loading.open import open_stream
from megaresume.runs.rank_log import RankLog
from megaresume.sources.data_config import Data
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError
from megaresume.stream.fingerprints import same_corpora
from megaresume.stream.skips import SkipConfig
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

__all__ = ["attach"]


def attach(
    engine: Any,
    data: Stream | Data,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    on_stop: Callable[[], None] | None = None,
    loader: Loader = Loader(),
    data_options: DataOptions = DataOptions(),
    schedule: BatchSchedule | None = None,
    log_samples: str | os.PathLike[str] | None = None,
) -> TrainingData:
    """Give an engine its data, and its checkpoints the state of that data. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Micro-batch size, data-parallel rank and size, and gradient accumulation steps are the engine's. Attaching twice
    replaces the data; hooks are not stacked.

    Args:
        engine: what ``deepspeed.initialize`` returned first; ZeRO 0 to 3, or a pipeline engine.
        data: path of a data.yaml; the mapping in it; what follows ``--data-path``, as a list; or a `Stream`.
        checkpoints: where the run saves, what it keeps, and what it may load.
        stop: at the end of the step in which one of these happens, save and raise `Stopped`, which ends the process
            with exit status 0 (or another of your choice). See docs/stopping.md.
        on_stop: how to save then, on every rank; None: ``engine.save_checkpoint(save_dir)``.
        loader: how batches are read ahead, and what they are.
        data_options: what the data config leaves open, and what is to be skipped.
        schedule: global batch sizes to come, for a ramp-up; the engine's batch size then follows it. None: the
            engine's own, read anew at every step.
        log_samples: directory: every rank writes there what it was handed in every step, for `megaresume verify`.

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
    save_dir, stage_to, retention = checkpoints.save_dir, checkpoints.stage_to, checkpoints.retention
    if stop is not None and save_dir is None and on_stop is None:
        raise UsageError(
            "there is nowhere to save to when the run is asked to stop",
            found="stop= without Checkpoints(save_dir=...)",
            expected="the directory of the checkpoints",
            action="megaresume.attach(engine, data, checkpoints=Checkpoints(save_dir=...), stop=...)",
        )

    if stage_to is not None and save_dir is None:
        raise UsageError(
            "`stage_to` needs `save_dir`",
            found="stage_to= without save_dir=",
            expected="the local directory of the checkpoints",
            action="megaresume.attach(engine, data, checkpoints=Checkpoints(save_dir=..., stage_to=...))",
        )

    def adopt_state(samples: int, note: str) -> StreamState:
        return attached.stream.state_at(samples, batches=((0, int(engine.train_batch_size())),), overrides=(note,))

    host = EngineHost(
        engine,
        elastic=checkpoints.elastic,
        adopt=adopt_state if checkpoints.adopt else None,
    )
    session = Session(
        host,
        save_dir=save_dir,
        stage_to=stage_to,
        retention=retention,
        max_starts=checkpoints.max_starts,
        verify_checkpoint=checkpoints.verify,
        random=host.random_state(),
        stop=stop,
        # By name: the method is hooked later.
        on_stop=on_stop or (lambda: engine.save_checkpoint(os.fspath(save_dir or ""))),
    )
    session.start()  # before anything that takes long

    opened: list[Stream] = []

    def open_data() -> Stream:
        if not opened:
            stream = data if isinstance(data, Stream) else _open(data, data_options)
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
        num_workers=loader.num_workers,
        prefetch=loader.prefetch,
        start_method=loader.start_method,
        pin_memory=engine.device.type == "cuda" if loader.pin_memory is None else loader.pin_memory,
        attention_mask=loader.attention_mask,
        pad_id=loader.pad_id,
        transform=loader.transform,
        log=None if log_samples is None else _open_log(log_samples),
    )
    if asked := SkipConfig.from_dict(data_options.skip, where="skip="):
        on_all_ranks(lambda: stream.skip(asked))
    if session.stopper is not None:
        session.stopper.install()
    hook(engine, attached)
    return attached


def _open(data: Data, options: DataOptions) -> Stream:
    return open_stream(
        data,
        seq_length=options.seq_length,
        seed=options.seed,
        split=options.split,
        objects=options.objects,
        on_change=options.on_change,
    )


def _open_log(directory: str | os.PathLike[str]) -> RankLog:
    import torch.distributed as dist

    launch = on_rank_0(time.time_ns)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return on_all_ranks(lambda: RankLog(directory, rank=rank, launch=launch))
