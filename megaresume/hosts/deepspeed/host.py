"""`EngineHost`: a DeepSpeed engine as the host of a `Session`.

DeepSpeed's own ``latest`` is not a commit marker: its rank 0 writes it, in place, while other ranks may still be
writing their files. So DeepSpeed is told not to write it, and the commit does.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol, cast

from megaresume.checkpoint.chooser import Pick
from megaresume.checkpoint.file_errors import read_on_all_ranks, writing
from megaresume.checkpoint.host import Data, Restored, StreamData
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.meetings import Meeting
from megaresume.checkpoint.random_state import RandomState, SeedCount
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks
from megaresume.checkpoint.records.envelope import FORMAT, Envelope
from megaresume.checkpoint.records.names import deepspeed_tag
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.system import Topology
from megaresume.hosts.deepspeed import decoupled
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.elastic import check_restorable, conversion, restore_rest
from megaresume.hosts.deepspeed.load_rules import (
    BEGIN_ANEW,
    Partitions,
    choose_to_load,
    is_zero_file,
    remove_converted,
)
from megaresume.hosts.frozen import FrozenWeights, weights_of
from megaresume.hosts.token_losses import LogitLosses
from megaresume.hosts.unsaved import warn_of_scheduler
from megaresume.stream.batches import Balance, BatchSchedule
from megaresume.stream.errors import CheckpointError, MegaresumeError, UsageError

#: our only key in DeepSpeed's client state, which shares a namespace with DeepSpeed's own.
KEY = "megaresume"


class Batches(Data, Protocol):
    """The data of an engine, and what it knows about the run that the engine does not."""

    #: how the samples of a step are dealt to the ranks; None: in order.
    balance: Balance | None

    @property
    @abstractmethod
    def num_workers(self) -> int:
        """The number of worker processes per rank."""

    @property
    @abstractmethod
    def schedule(self) -> BatchSchedule:
        """Global batch sizes of the whole run, past and planned."""

    @property
    @abstractmethod
    def samples_trained(self) -> int:
        """Samples trained by optimizer steps since the start of the run, over all ranks."""

    @abstractmethod
    def take_losses(self, losses: Any, counts: Any) -> None:
        """Pass the losses of the last micro-batch handed out to the meter."""

    @abstractmethod
    def not_restored(self, error: MegaresumeError) -> None:
        """Note that the weights of a checkpoint are loaded without its data: train nothing before another load."""


class EngineHost:
    """See `megaresume.checkpoint.host.Host`.

    Args:
        engine: the first result of ``deepspeed.initialize``.
        elastic: convert a ZeRO checkpoint from another number of ranks automatically.
        adopts: whether to accept a checkpoint that was written without megaresume: its data, from a stream, begins
            after the samples that DeepSpeed has trained.
    """

    forgotten = "engine.load_checkpoint was forgotten, was given another directory, or load_module_only=True"
    load = "engine.load_checkpoint({directory!r}) before the first step"
    begin_anew = BEGIN_ANEW

    def __init__(self, engine: Any, *, elastic: bool = False, adopts: bool = False) -> None:
        self.engine = engine
        self.framework = f"deepspeed {importlib.metadata.version('deepspeed')}"
        self.elastic = elastic
        #: set by the data.
        self.batches: Batches | None = None
        #: collects the losses of micro-batches, if requested.
        self.losses: LogitLosses | None = None
        self._adopts = adopts
        self._frozen = FrozenWeights(lambda: weights_of({"0": engine.module}))
        #: whether schedulers were checked, at the first save.
        self._is_looked_at = False

    def iteration(self) -> int:
        """See `Host`."""
        return int(self.engine.global_steps)

    def samples(self) -> int:
        """See `Host`."""
        assert self.batches is not None
        return self.batches.samples_trained

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """See `HasLoggers`: logs to the engine's monitor, which counts samples."""
        monitor, samples = self.engine.monitor, self.engine.global_samples
        if monitor.enabled:
            monitor.write_events([(name, value, samples) for name, value in figures.items()])

    def take_losses(self, every: int) -> None:
        """See `GivesLosses`: for a model of transformers that gets its labels."""
        if facts.is_pipeline(self.engine):
            raise UsageError(
                "metrics: a pipeline engine shows nobody its losses by token",
                found="metrics: losses, and a pipeline engine",
                expected="an engine whose forward returns the logits of the model",
                action="leave losses out, and call data.meter.losses(samples, token_loss) in loss_fn: docs/metrics.md",
            )
        layout = facts.topology(self.engine)
        if (layout.tp or 1, layout.cp or 1) != (1, 1):
            raise UsageError(
                "metrics: losses are not taken where several ranks share a micro-batch",
                found=f"metrics: losses, tensor parallelism {layout.tp}, sequence parallelism {layout.cp}",
                expected="one rank for each micro-batch",
                action="leave losses out, and call data.meter.losses(batch, token_loss) on one of them: "
                "docs/metrics.md",
            )

        def take(losses: Any, counts: Any) -> None:
            assert self.batches is not None
            self.batches.take_losses(losses, counts)

        self.losses = LogitLosses(every, take, instead="call data.meter.losses(batch, token_loss)")

    def topology(self) -> Topology:
        """See `Host`."""
        batches = self.batches
        assert batches is not None
        # In a ramp-up, the engine's batch size is only set when the next step begins.
        size = batches.schedule.size_at(batches.samples_trained)
        now = self.layout(num_workers=batches.num_workers, global_batch_size=size)
        return dataclasses.replace(now, balance=batches.balance)

    def layout(self, *, num_workers: int, global_batch_size: int | None) -> Topology:
        """The layout of the run: the engine's, with workers and batch size, which it does not know."""
        now = facts.topology(self.engine)
        return dataclasses.replace(now, num_workers=num_workers, global_batch_size=global_batch_size)

    def random_state(self) -> RandomState:
        """The generators of this rank. Tensor-parallel ranks are replicas of each other."""
        replica = f"data-parallel rank {facts.data_rank(self.engine)}, stage {int(getattr(self.engine, 'stage_id', 0))}"
        module = self.engine.module
        count = SeedCount(module, "micro_offset") if facts.is_pipeline(self.engine) and module.seed_layers else None
        return RandomState(self.iteration, self.engine.device, lambda: replica, count=count)

    def expected_files(self, save_dir: Path, tag: str) -> list[str]:
        """See `Host`."""
        return facts.expected_files(self.engine, os.fspath(save_dir), tag)

    def needed_files(self, choice: Choice) -> Collection[str] | None:
        """See `ReadsSome`: without other ranks' ZeRO state, if the number of ranks is that which saved it."""
        record, manifest = choice.record, choice.manifest
        if record is None or manifest is None or not facts.loads_own_zero_files(self.engine, record.topology):
            return None
        own = set(self.expected_files(choice.load_dir, choice.tag))
        names = [entry.path for entry in manifest.files]
        if not own.issubset(names):  # saved in another precision, under other names
            return None
        return [name for name in names if name in own or not is_zero_file(name)]

    def settle(self) -> None:
        """See `Host`: the decoupled writer."""
        decoupled.settle(self.engine)

    def is_saving(self) -> bool:
        """See `Host`."""
        return decoupled.is_pending(self.engine)

    def check_frozen(self, recorded: Mapping[str, Any]) -> None:
        """See `LeavesOut`."""
        self._frozen.check(recorded)

    def committed(self, save_dir: Path) -> None:
        """See `Host`: removes conversions of older checkpoints."""
        remove_converted(save_dir)

    # Around the engine's methods

    def save_checkpoint(
        self,
        session: Session,
        write: Callable[..., Any],
        save_dir: str,
        tag: str | None,
        client_state: Mapping[str, Any],
        latest: bool,
        excludes: bool,
        *,
        envelope: Envelope | None = None,
        is_untouched: bool = False,
    ) -> Any:
        """``engine.save_checkpoint``: see `around_save`.

        Returns:
            DeepSpeed's result, True, also in a replay; False: the save failed, and the run is to continue.
        """
        if session.passes_over_saves():
            return True
        decoupled.check_nodes(self.engine, session.roots.parts_of(Path(save_dir)))
        decoupled.watch(self.engine)
        self.settle()
        on_all_ranks(lambda: decoupled.check_writer(self.engine))
        on_all_ranks(lambda: _check_key(client_state))
        if not self._is_looked_at:
            self._is_looked_at = True
            if is_rank_0():
                warn_of_scheduler(self.engine, {name: one for name, one in client_state.items() if name != KEY})

        def write_files(save: Save) -> Any:
            saved = functools.partial(facts.saved_names, self.engine, excludes=excludes)
            self._frozen.note(save, saved, [self.engine.optimizer], may_be_elsewhere=lambda: bool(client_state))
            state = {**client_state, KEY: save.envelope.to_dict()}
            with facts.stamped(self.engine, save.save_id), facts.failing_late(self.engine) as errors:
                result = write(tag=save.tag, client_state=state, save_latest=False)
            on_all_ranks(lambda: _check_written(errors, save))
            if facts.is_decoupled(self.engine):
                save.defer()
                decoupled.defer(self.engine, save.pending, save.commit)
            return result

        result = session.save(
            os.fspath(save_dir),
            write_files,
            tag=deepspeed_tag(self.iteration()) if tag is None else str(tag),
            envelope=envelope,
            is_untouched=is_untouched,
            latest=latest,
            tracker=latest,
        )
        return False if result is None else result

    def load_checkpoint(
        self,
        session: Session,
        read: Callable[..., tuple[Any, Any]],
        load_dir: str,
        tag: str | None,
        module_only: bool,
        optimizer: bool,
    ) -> tuple[Any, Any]:
        """``engine.load_checkpoint``: ``read`` is DeepSpeed's method, with its other arguments bound."""
        # ZeRO's files also contain the weights in float32, and are always read.
        optimizer = not module_only and (optimizer or facts.zero_stage(self.engine) > 0)

        is_read = False

        def read_files(choice: Choice, beside: StepFile | None) -> Restored:
            nonlocal is_read
            facts.forget_gradients(self.engine)
            choice, path, client_state = self.read(read, choice, beside, optimizer=optimizer)
            is_read = not module_only
            samples, within = int(self.engine.global_samples), (client_state or {}).get(KEY)
            envelope = None if within is None or module_only else on_all_ranks(lambda: Envelope.read(within))
            if envelope is None and self._adopts and not module_only:
                envelope = self._adopted(choice, samples)
            return Restored(
                envelope=envelope,
                iteration=self.iteration(),
                samples=samples,
                counter="global_samples",
                choice=choice,
                result=(path, client_state),
            )

        universal = facts.loads_universal(self.engine)
        try:
            found = session.load(
                load_dir,
                read_files,
                pick=self.pick(load_dir, tag),
                weights_only=module_only,
                adopts=self._adopts or universal,
            )
        except MegaresumeError as error:
            if is_read and self.batches is not None:
                self.batches.not_restored(error)
            raise
        return (None, None) if found is None else found  # as DeepSpeed, without its warning on every rank

    def pick(self, load_dir: str, tag: str | None) -> Pick:
        """The pick for `Session.choose`."""
        universal = facts.loads_universal(self.engine)
        return lambda shared, damaged: choose_to_load(load_dir, tag, universal, shared=shared, damaged=damaged)

    def read(
        self,
        read: Callable[..., tuple[Any, Any]],
        choice: Choice,
        beside: StepFile | None,
        *,
        optimizer: bool,
    ) -> tuple[Choice, Any, Any]:
        """Read the choice with DeepSpeed's method, or its universal form if another number of ranks, or of stages,
        saved it.

        ``optimizer``: whether the optimizer's state is requested; weights alone load on any number of ranks.

        Returns:
            what was read, DeepSpeed's path and client state.

        Raises, on every rank:
            CheckpointError: see `elastic.conversion`; or DeepSpeed did not load it.
            UsageError: see `engine.check_random_ltd`.
        """
        engine, tag, meeting = self.engine, None, Meeting("load_checkpoint()")
        facts.check_random_ltd(engine)

        def read_tag(tag: str) -> Any:
            save_id = None if beside is None else beside.save_id
            with facts.loading(engine, meeting.gate), facts.checked(engine, save_id):
                return read(choice.load_dir, tag=tag)

        if optimizer and not facts.loads_universal(engine):
            now = Partitions(
                ranks=facts.partitions(engine),
                zero_stage=facts.zero_stage(engine),
                stages=facts.pipeline_stages(engine),
            )
            tag = conversion(choice, beside, now, elastic=self.elastic)
        if tag is None:
            path, client_state = read_on_all_ranks(lambda: read_tag(choice.tag), choice, meeting)
            on_all_ranks(lambda: _check_loaded(path, choice))
            return choice, path, client_state
        on_all_ranks(lambda: check_restorable(engine))
        with facts.as_universal(engine):
            path, client_state = read_on_all_ranks(lambda: read_tag(tag), choice, meeting)
        choice = dataclasses.replace(choice, tag=tag)
        on_all_ranks(lambda: _check_loaded(path, choice))
        on_all_ranks(lambda: restore_rest(engine, choice.tag_dir))
        return choice, path, client_state

    def _adopted(self, choice: Choice, samples: int) -> Envelope:
        """The state after the samples counted by DeepSpeed, which were trained, but are not known."""
        note = f"{samples} samples up to {choice.tag} were trained without megaresume, in another order"
        if is_rank_0():
            print(f"megaresume: {note}; the stream begins after them", flush=True)
        sizes = ((0, int(self.engine.train_batch_size())),)
        state = cast(StreamData, self.batches).stream.state_at(samples, batches=sizes, overrides=(note,))
        return Envelope(state=state, iteration=self.iteration(), framework=self.framework)


def _check_written(errors: list[Exception], save: Save) -> None:
    """Raise a CheckpointError if this rank could not write its files."""
    if errors:
        with writing(save.pending.tag_dir):
            raise errors[0]


def _check_loaded(path: object, choice: Choice) -> None:
    """Raise a CheckpointError if DeepSpeed did not load the choice, which it shows by returning None."""
    if path is None:
        raise CheckpointError(
            "DeepSpeed did not load the checkpoint",
            found=f"load_checkpoint returned None for {choice.tag_dir}",
            expected="the path of the checkpoint",
            cause="files that DeepSpeed needs are missing, or of another parallel layout",
            action=f"megaresume inspect {choice.load_dir}",
        )


def around_save(save: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """An engine's ``save_checkpoint``, replaced by ``instead(write, save_dir, tag, client_state, latest, excludes)``.

    Args:
        save: DeepSpeed's method.
        instead: gets ``write(tag=..., client_state=..., save_latest=...)``, which is that method with all other
            arguments bound; and whether frozen parameters are left out.
    """

    @functools.wraps(save)
    def save_checkpoint(
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **kwargs: Any,
    ) -> Any:
        if exclude_frozen_parameters:
            kwargs["exclude_frozen_parameters"] = True
        write = functools.partial(save, save_dir, **kwargs)
        return instead(write, save_dir, tag, client_state or {}, save_latest, exclude_frozen_parameters)

    return save_checkpoint


def around_load(load: Callable[..., Any], instead: Callable[..., Any]) -> Callable[..., Any]:
    """An engine's ``load_checkpoint``, replaced by ``instead(read, load_dir, tag, module_only, optimizer_states)``.

    Args:
        load: DeepSpeed's method.
        instead: gets ``read(load_dir, tag=...)``, which is that method with all other arguments bound.
    """

    @functools.wraps(load)
    def load_checkpoint(
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        read = functools.partial(
            load,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
            **kwargs,
        )
        return instead(read, load_dir, tag, load_module_only, load_optimizer_states)

    return load_checkpoint


def _check_key(client_state: Mapping[str, Any]) -> None:
    # A program may pass on what a load returned: its data state is replaced by that of this save.
    value = client_state.get(KEY)
    if value is not None and (not isinstance(value, Mapping) or value.get("format") != FORMAT):
        raise UsageError(
            f"client_state already has a key {KEY!r}",
            found=f"{KEY}: {value!r:.60}",
            expected="that key unused: megaresume stores the data state there",
            action="rename yours",
        )
