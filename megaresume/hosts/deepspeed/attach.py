"""Exact data resume for a DeepSpeed engine, in the user's own training loop.

    engine, *_ = deepspeed.initialize(...)
    data = megaresume.attach(engine, "data.yaml")
    engine.load_checkpoint("checkpoints")          # without a checkpoint: starts at sample 0
    for batch in data:
        loss = ...
        engine.backward(loss)
        last = engine.is_gradient_accumulation_boundary()  # asked before the step: whether it ends one
        engine.step()
        if last and engine.global_steps % 100 == 0: engine.save_checkpoint("checkpoints")

See docs/deepspeed.md, also for a `megaresume.DataLoader` instead of ``data.yaml``; for third-party loaders with their
own state: docs/data-loader.md.

Hooked on the instance; other wrappers stay in the chain:

    save_checkpoint, load_checkpoint   the data state is stored with the weights: `EngineHost`
    step, forward, backward            a step trains exactly its micro-batches: `EngineData`
    train_batch                        for a pipeline engine: the same
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.open import open_stream
from megaresume.checkpoint.ranks import gather, is_rank_0, on_all_ranks, on_rank_0, rank, same_on_all_ranks
from megaresume.checkpoint.records.rank_log import RankLog
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.settings import Checkpoints, DataOptions, LoaderOptions
from megaresume.checkpoint.stopping import StopConditions
from megaresume.data.data_config import DataConfigLike
from megaresume.hosts.attach import hook
from megaresume.hosts.deepspeed import decoupled
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.engine_data import EngineData
from megaresume.hosts.deepspeed.host import EngineHost, around_load, around_save
from megaresume.hosts.deepspeed.item_data import ItemData, check_loader
from megaresume.hosts.deepspeed.training_data import AttachedLoader, TrainingData
from megaresume.hosts.feeds import ItemFeed, check_same_data, check_shares
from megaresume.stream.batches import BatchSchedule
from megaresume.stream.errors import UsageError
from megaresume.stream.skips import SkipConfig
from megaresume.stream.source import same_corpora
from megaresume.stream.stream import Stream


def attach(
    engine: Any,
    data: Stream | DataConfigLike | Any = None,
    *,
    checkpoints: Checkpoints = Checkpoints(),
    stop: StopConditions | None = None,
    on_stop: Callable[[], None] | None = None,
    metrics: Any = None,
    elastic: bool = False,
    adopt: bool = False,
    loader_options: LoaderOptions = LoaderOptions(),
    data_options: DataOptions = DataOptions(),
    schedule: BatchSchedule | None = None,
    log_samples: str | os.PathLike[str] | None = None,
) -> TrainingData | ItemData | AttachedLoader:
    """Give an engine its data, and add the state of that data to its checkpoints. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Micro-batch size, data-parallel rank and size, and gradient accumulation steps are the engine's. Attaching twice
    replaces the data; hooks are not stacked.

    Args:
        engine: the first result of ``deepspeed.initialize``; ZeRO 0 to 3, or a pipeline engine.
        data: path of a data.yaml; its mapping; the words after ``--data-path``, as a list; or a `Stream`. Or a
            `megaresume.DataLoader`, the same on every rank, with all options up to ``adopt``. Or a loader with its own
            state, with ``checkpoints`` and ``metrics`` only: see `attach_loader`.
        checkpoints: where the run saves, and what it keeps.
        stop: at the end of the step in which one of these happens, save and raise `Stopped`, which ends the process
            with exit status 0 (or another of your choice). See docs/stopping.md.
        on_stop: how to save then, on every rank; None: ``engine.save_checkpoint(save_dir)``.
        metrics: live figures, and their sinks: see docs/metrics.md. None: no figures.
        elastic: convert a ZeRO checkpoint from another number of data-parallel ranks.
        adopt: continue from a checkpoint that was written without megaresume.
        loader_options: how batches are read ahead, and their content.
        data_options: what the data config leaves open, and what to skip.
        schedule: planned global batch sizes, for a ramp-up, which the engine's batch size then follows. None: the
            engine's own, read again at every step.
        log_samples: directory in which every rank records what it was handed in every step, for `megaresume verify`.

    Returns:
        the data: iterate over it, or pass it to ``engine.train_batch(data_iter=...)``.

    Raises on every rank:
        UsageError: not a DeepSpeed engine, settings that cannot be committed, sizes that do not divide, or ``stop``
            or ``stage_to`` without a place to save to.
        CheckpointError: another job writes to ``save_dir``.
        ConfigError, CorpusError: the data cannot be opened.
        SetupError: ``save_dir`` or clocks differ between nodes.
        StateError: the data or its batch sizes differ between ranks.
    """
    facts.check_engine(engine)
    _check_curriculum(engine)
    if (kind := _kind_of(data)) != "config":
        refused: dict[str, Any] = {
            "schedule": schedule,
            "log_samples": log_samples,
            "loader_options": loader_options != LoaderOptions(),
            "data_options": data_options != DataOptions(),
        }
        if kind == "loader":
            refused |= {"stop": stop, "on_stop": on_stop, "elastic": elastic, "adopt": adopt}
        on_all_ranks(lambda: _refuse_options(kind, [name for name, value in refused.items() if value]))
    if kind == "loader":
        return attach_loader(engine, data, checkpoints=checkpoints, metrics=metrics)
    started = functools.partial(
        _started, engine, checkpoints, stop=stop, on_stop=on_stop, metrics=metrics, elastic=elastic, adopt=adopt
    )
    if kind == "items":
        return _attach_items(engine, data, started)
    session = started()
    balance = on_all_ranks(lambda: loader_options.balanced)

    @functools.cache
    def open_data() -> Stream:
        stream = data if isinstance(data, Stream) else _open(data, data_options)
        stream.fingerprints  # noqa: B018  computed here, where an error reaches every rank
        return stream

    # Rank 0 first: it saves the fingerprints beside the corpora, so that other ranks need not compute them again.
    on_rank_0(lambda: bool(open_data()))
    stream = on_all_ranks(open_data)
    asked = on_all_ranks(lambda: SkipConfig.from_dict(data_options.skip, where="skip="))
    same_on_all_ranks(
        repr((stream.config.to_dict(), sorted(stream.fingerprints.items()), asked, schedule, balance)),
        "the data",
        cause="the nodes have different copies of data.yaml or of a corpus, or other skips, schedules or balance",
        action="compare data.yaml, the sizes of the .idx files, and the arguments of attach on the nodes",
    )
    _check_same_sizes(engine)
    if is_rank_0():
        for line in same_corpora(stream.fingerprints):
            print(f"megaresume: WARNING: {line}", flush=True)
    log = None
    if log_samples is not None:
        launch = on_rank_0(time.time_ns)
        log = on_all_ranks(lambda: RankLog(log_samples, rank=rank(), launch=launch))
    attached = TrainingData(engine, stream, session, loader_options, schedule=schedule, log=log)
    if asked:
        on_all_ranks(lambda: stream.skip(asked))
    _put_hooks(engine, attached)
    return attached


def _started(
    engine: Any,
    checkpoints: Checkpoints,
    *,
    stop: StopConditions | None,
    on_stop: Callable[[], None] | None,
    metrics: Any,
    elastic: bool,
    adopt: bool,
) -> Session:
    """The session of an engine that trains on a stream, or on the items of a `DataLoader`."""
    save_dir = checkpoints.save_dir
    if stop is not None and save_dir is None and on_stop is None:
        raise UsageError(
            "there is nowhere to save to when the run is asked to stop",
            found="stop= without Checkpoints(save_dir=...)",
            expected="the directory of the checkpoints",
            action="megaresume.attach(engine, data, checkpoints=Checkpoints(save_dir=...), stop=...)",
        )

    host = EngineHost(engine, elastic=elastic, adopts=adopt)
    # By name, as the method is hooked later.
    save = on_stop or (lambda: engine.save_checkpoint(os.fspath(save_dir or "")))
    session = _session_of(host, checkpoints, stop=stop, on_stop=save, metrics=metrics)
    _start(session, engine)  # before anything that takes long
    return session


def _start(session: Session, engine: Any) -> None:
    """See `Session.start`."""
    session.start()
    if (root := session.roots.save_dir) is not None:
        decoupled.check_nodes(engine, session.roots.parts_of(root))


def _kind_of(data: Any) -> Literal["config", "items", "loader"]:
    """The kind of data of all ranks, or of those that read data. Collective.

    Raises, on every rank:
        UsageError: there is no data.
    """
    is_config = isinstance(data, Stream | str | os.PathLike | Mapping | Sequence)
    is_ours = isinstance(data, DataLoader)
    kinds = gather("nothing" if data is None else "config" if is_config else "items" if is_ours else "loader")
    if set(kinds) == {"nothing"} or {"nothing", "config"} <= set(kinds):
        raise UsageError(
            "the engine has no data",
            found=f"megaresume.attach(engine), with no data on rank {kinds.index('nothing')}",
            expected="path of a data.yaml, the mapping in it, a Stream, or a loader that saves its own state",
            action="megaresume.attach(engine, 'data.yaml')",
        )
    return "items" if "items" in kinds else "loader" if "loader" in kinds else "config"


def _check_curriculum(engine: Any) -> None:
    """Refuse a curriculum of DeepSpeed's, which is the order of a loader that DeepSpeed makes."""
    settings = ("data_efficiency_enabled", "data_sampling_enabled", "curriculum_learning_enabled")
    if all(getattr(engine, name, lambda: False)() for name in settings):
        raise UsageError(
            "DeepSpeed's curriculum cannot be used with megaresume.attach",
            found="data_efficiency.data_sampling.curriculum_learning.enabled: true in the DeepSpeed config",
            expected="not set",
            cause="it orders the samples of deepspeed.initialize(training_data=...) alone, and would have no effect",
            action="set it to false; stages change the data during a run, in a data.yaml or DataLoader(stages=...)",
        )


def _refuse_options(kind: Literal["items", "loader"], found: Sequence[str]) -> None:
    if found:
        raise UsageError(
            "this option is for megaresume's streams",
            found=f"{', '.join(f'{name}=' for name in found)}, and a loader",
            expected="a data.yaml, the mapping in it, or a Stream"
            + ("; for stop, on_stop, elastic and adopt also a megaresume.DataLoader" if kind == "loader" else ""),
            action="leave it out; or give the engine a data.yaml",
        )


def _open(data: DataConfigLike, options: DataOptions) -> Stream:
    return open_stream(
        data,
        seq_length=options.seq_length,
        seed=options.seed,
        split=options.split,
        objects=options.objects,
        on_change=options.on_change,
    )


def attach_loader(
    engine: Any, loader: Any, *, checkpoints: Checkpoints = Checkpoints(), metrics: Any = None
) -> AttachedLoader:
    """Make the state of a loader part of an engine's checkpoints. Call it on every rank, right after
    ``deepspeed.initialize`` and before ``engine.load_checkpoint``.

    Args:
        engine: the first result of ``deepspeed.initialize``; ZeRO 0 to 3, or a pipeline engine.
        loader: Energon's ``get_savable_loader(...)``, torchdata's ``StatefulDataLoader(...)``, or any iterable with
            ``state_dict`` and ``load_state_dict``. Its batches are this rank's micro-batches; it deals samples out to
            data-parallel ranks itself. None on a rank that receives its batches from another one.
        checkpoints: where the run saves, and what it keeps.
        metrics: live figures, but without losses by source.

    Returns:
        the batches: iterate over it, or pass it to ``engine.train_batch(data_iter=...)``. It never ends: a loader that
        ends is restarted, with ``set_epoch`` of its sampler.

    Raises, on every rank:
        UsageError: not a DeepSpeed engine, a loader without a state or for another rank, or settings that do not apply.
        CheckpointError: another job writes to ``save_dir``.
        SetupError: a node does not see it.
        StateError: the ranks have engines of different batch sizes.
    """
    facts.check_engine(engine)
    host = EngineHost(engine)
    session = _session_of(host, checkpoints, metrics=metrics)
    _refuse_losses(host, loader)
    _start(session, engine)
    _check_same_sizes(engine)
    attached = on_all_ranks(lambda: AttachedLoader(engine, loader, session))
    _put_hooks(engine, attached)
    return attached


def _attach_items(engine: Any, loader: Any, started: Callable[[], Session]) -> ItemData:
    """Give an engine the items of a `DataLoader`."""
    on_all_ranks(lambda: check_loader(engine, loader))
    feed = ItemFeed(loader)
    check_shares(feed)
    loader.ends_elsewhere = True
    session = started()
    assert isinstance(session.host, EngineHost)
    _refuse_losses(session.host, loader)
    check_same_data(feed)
    attached = ItemData(engine, feed, session)
    _put_hooks(engine, attached)
    return attached


def _check_same_sizes(engine: Any) -> None:
    """Raise a StateError on every rank unless the steps of all consist of the same micro-batches. Collective.

    Each rank computes the shares of the others from its own sizes; if theirs differed, it would train some of their
    samples.
    """
    micro, accumulation = engine.train_micro_batch_size_per_gpu(), engine.gradient_accumulation_steps()
    same_on_all_ranks(
        f"train_micro_batch_size_per_gpu {micro}, gradient_accumulation_steps {accumulation}",
        "the batches",
        cause="the nodes have different DeepSpeed configs",
        action="give deepspeed.initialize the same sizes on every rank",
    )


def _refuse_losses(host: EngineHost, loader: Any) -> None:
    if host.losses is not None:
        raise UsageError(
            "metrics: losses by source need the order of a data config",
            found=f"metrics: losses, and a {type(loader).__name__}",
            expected="a data.yaml, the mapping in it, or a Stream",
            action="leave losses out, or megaresume.attach(engine, 'data.yaml', metrics=...)",
        )


#: the attribute in which an engine keeps what is attached to it.
_SLOT = "_megaresume_attached"


@dataclass(slots=True)
class _Slot:
    """The data currently attached to an engine; the hooks look here at every call."""

    data: EngineData


def _put_hooks(engine: Any, attached: EngineData) -> None:
    """Let the engine's methods handle this data from now on, instead of what was attached before."""
    if attached.session.stopper is not None:
        attached.session.stopper.install()
    slot: _Slot | None = engine.__dict__.get(_SLOT)
    if slot is not None:
        slot.data.detach(
            "megaresume.attach was called again on the same engine", "train on what the last call returned"
        )
        slot.data = attached
        return
    slot = _Slot(attached)
    setattr(engine, _SLOT, slot)
    decoupled.watch(engine)
    hooks: dict[str, Callable[..., Any]] = {"step": _step, "forward": _forward, "backward": _backward}
    if facts.is_pipeline(engine):
        hooks = {"train_batch": _train_batch}
    for name, function in hooks.items():
        hook(engine, name, functools.partial(function, slot))
    engine.save_checkpoint = around_save(engine.save_checkpoint, functools.partial(_save, slot))
    engine.load_checkpoint = around_load(engine.load_checkpoint, functools.partial(_load, slot))


def _save(slot: _Slot, *given: Any) -> Any:
    data = slot.data
    return data.host.save_checkpoint(data.session, *given, is_untouched=data.is_untouched)


def _load(
    slot: _Slot, read: Callable[..., Any], load_dir: str, tag: str | None, module_only: bool, optimizer: bool
) -> Any:
    data = slot.data
    return data.host.load_checkpoint(data.session, read, os.fspath(load_dir), tag, module_only, optimizer)


def _train_batch(
    slot: _Slot, train: Callable[..., Any], /, data_iter: Iterator[Any] | None = None, *args: Any, **kwargs: Any
) -> Any:
    decoupled.settle(slot.data.engine)  # a pipeline changes its weights without waiting for its writer
    slot.data.before_train_batch()
    train = functools.partial(train, slot.data if data_iter is None else data_iter, *args, **kwargs)
    result = slot.data.broken_by_errors_of("engine.train_batch()", train, weights=True)
    if slot.data.meter is not None:
        slot.data.meter.steps.loss(result)
    slot.data.after_train_batch()
    return result


def _step(slot: _Slot, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    slot.data.before_step()
    result = slot.data.broken_by_errors_of("engine.step()", functools.partial(step, *args, **kwargs), weights=True)
    slot.data.after_step()
    return result


def _forward(slot: _Slot, forward: Callable[..., Any], /, *inputs: Any, **kwargs: Any) -> Any:
    seen = slot.data.saw((*inputs, *kwargs.values()))
    outputs = forward(*inputs, **kwargs)
    slot.data.gave(seen, kwargs, outputs)
    return outputs


def _backward(slot: _Slot, backward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    if slot.data.meter is not None:
        slot.data.meter.steps.loss(args[0] if args else kwargs.get("loss"))
    return slot.data.backward(functools.partial(backward, *args, **kwargs))


def _session_of(host: EngineHost, checkpoints: Checkpoints, **kwargs: Any) -> Session:
    """The session of an engine.

    Args:
        host: for the engine.
        checkpoints: where the run saves, and what it keeps.
        kwargs: further arguments of `Session`.

    Raises:
        UsageError: settings that do not fit together.
    """
    if checkpoints.stage_to is not None and checkpoints.save_dir is None:
        raise UsageError(
            "`stage_to` needs `save_dir`",
            found="stage_to= without save_dir=",
            expected="the local directory of the checkpoints",
            action="megaresume.attach(engine, data, checkpoints=Checkpoints(save_dir=..., stage_to=...))",
        )
    return Session(host, **checkpoints.session_kwargs, random=host.random_state(), **kwargs)
