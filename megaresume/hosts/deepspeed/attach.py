"""Exact data resume for a DeepSpeed engine, in the user's own training loop.

    engine, *_ = deepspeed.initialize(...)
    data = megaresume.attach(engine, "data.yaml")
    engine.load_checkpoint("checkpoints")          # nothing there yet: starts at sample 0
    for batch in data:
        loss = ...
        engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()  # asked before the step: whether it ends one
        engine.step()
        if last and engine.global_steps % 100 == 0: engine.save_checkpoint("checkpoints")

See docs/deepspeed.md.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megaresume.batches.open import open_stream
from megaresume.checkpoint.session.rank_log import RankLog
from megaresume.checkpoint.session.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.checkpoint.session.settings import Checkpoints, DataOptions, Loader
from megaresume.checkpoint.session.stopping import StopConditions
from megaresume.data.data_config import Data
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.hooks import hook, session_of
from megaresume.hosts.deepspeed.host import EngineHost
from megaresume.hosts.deepspeed.loaders import AttachedLoader, attach_loader
from megaresume.hosts.deepspeed.training_data import TrainingData
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError
from megaresume.stream.skips import SkipConfig
from megaresume.stream.source import same_corpora
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream


def attach(
    engine: Any,
    data: Stream | Data | Any = None,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    on_stop: Callable[[], None] | None = None,
    loader: Loader = Loader(),
    data_options: DataOptions = DataOptions(),
    schedule: BatchSchedule | None = None,
    log_samples: str | os.PathLike[str] | None = None,
) -> TrainingData | AttachedLoader:
    """Give an engine its data, and its checkpoints the state of that data. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Micro-batch size, data-parallel rank and size, and gradient accumulation steps are the engine's. Attaching twice
    replaces the data; hooks are not stacked.

    Args:
        engine: what ``deepspeed.initialize`` returned first; ZeRO 0 to 3, or a pipeline engine.
        data: path of a data.yaml; the mapping in it; what follows ``--data-path``, as a list; or a `Stream`. Or a
            loader with a state of its own, which takes no further option than ``checkpoints``: see `attach_loader`.
        checkpoints: where the run saves, what it keeps, and what it may load.
        stop: at the end of the step in which one of these happens, save and raise `Stopped`, which ends the process
            with exit status 0 (or another of your choice). See docs/stopping.md.
        on_stop: how to save then, on every rank; None: ``engine.save_checkpoint(save_dir)``.
        loader: how batches are read ahead, and what they are.
        data_options: what the data config leaves open, and what is to be skipped.
        schedule: global batch sizes to come, for a ramp-up; the engine's batch size then follows it. None: the
            engine's own, read again at every step.
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
    if _gives_loaders(data):
        options = (("stop", stop), ("on_stop", on_stop), ("schedule", schedule), ("log_samples", log_samples))
        changed = (("loader", loader != Loader()), ("data_options", data_options != DataOptions()))
        on_all_ranks(lambda: _refuse_options([name for name, value in (*options, *changed) if value]))
        return attach_loader(engine, data, checkpoints=checkpoints)
    save_dir = checkpoints.save_dir
    if stop is not None and save_dir is None and on_stop is None:
        raise UsageError(
            "there is nowhere to save to when the run is asked to stop",
            found="stop= without Checkpoints(save_dir=...)",
            expected="the directory of the checkpoints",
            action="megaresume.attach(engine, data, checkpoints=Checkpoints(save_dir=...), stop=...)",
        )

    def adopt_state(samples: int, note: str) -> StreamState:
        return attached.stream.state_at(samples, batches=((0, int(engine.train_batch_size())),), overrides=(note,))

    host = EngineHost(
        engine,
        elastic=checkpoints.elastic,
        adopt=adopt_state if checkpoints.adopt else None,
    )
    # By name: the method is hooked later.
    save = on_stop or (lambda: engine.save_checkpoint(os.fspath(save_dir or "")))
    session = session_of(host, checkpoints, stop=stop, on_stop=save)
    session.start()  # before anything that takes long

    balance = on_all_ranks(lambda: loader.balanced)

    @functools.cache
    def open_data() -> Stream:
        stream = data if isinstance(data, Stream) else _open(data, data_options)
        stream.fingerprints  # noqa: B018  computed here, where an error reaches every rank
        return stream

    # Rank 0 first: it leaves the fingerprints beside the corpora, and the other ranks need not compute them again.
    on_rank_0(lambda: bool(open_data()))
    stream = on_all_ranks(open_data)
    asked = on_all_ranks(lambda: SkipConfig.from_dict(data_options.skip, where="skip="))
    same_on_all_ranks(
        repr((stream.config.to_dict(), sorted(stream.fingerprints.items()), asked, schedule, balance)),
        "the data",
        cause="the nodes have different copies of data.yaml or of a corpus, or other skips, schedules or balance",
        action="compare data.yaml, the sizes of the .idx files, and the arguments of attach on the nodes",
    )
    if is_rank_0():
        for line in same_corpora(stream.fingerprints):
            print(f"megaresume: WARNING: {line}", flush=True)
    log = None if log_samples is None else _open_log(log_samples)
    attached = TrainingData(engine, stream, session, loader, schedule=schedule, log=log)
    if asked:
        on_all_ranks(lambda: stream.skip(asked))
    if session.stopper is not None:
        session.stopper.install()
    hook(engine, attached)
    return attached


def _gives_loaders(data: Any) -> bool:
    """Whether the ranks, or those of them that read data, give loaders. Collective.

    Raises, on every rank:
        UsageError: there is no data.
    """
    is_config = isinstance(data, Stream | str | os.PathLike | Mapping | Sequence)
    kinds = gather("nothing" if data is None else "config" if is_config else "loader")
    if set(kinds) == {"nothing"} or {"nothing", "config"} <= set(kinds):
        raise UsageError(
            "the engine has no data",
            found=f"megaresume.attach(engine), with no data on rank {kinds.index('nothing')}",
            expected="path of a data.yaml, the mapping in it, a Stream, or a loader that saves its own state",
            action="megaresume.attach(engine, 'data.yaml')",
        )
    return "loader" in kinds


def _refuse_options(found: Sequence[str]) -> None:
    if found:
        raise UsageError(
            "this option is for megaresume's streams",
            found=f"{', '.join(f'{name}=' for name in found)}, and a loader",
            expected="checkpoints= alone, beside a loader",
            action="leave it out; or give the engine a data.yaml",
        )


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
