"""`MegatronHost`: one training process of Megatron as the host of a `Session`, and what its hooks share.

Megatron keeps its state in module globals and passes none of it to the functions that we wrap, so the host is found
through ``get_args()``. An in-process restart builds a new namespace, and with it a new host and session.

Stopping in time under Megatron adds our reasons to what it asks at every step boundary:

    DistributedSignalHandler.signals_received()      asked by Megatron's loop after every step, on all ranks
        -> has this rank one of our reasons? then it answers as if its signal had come
        -> Megatron's own all-gather: any rank's yes is everybody's; it saves and exits with status 0

So ``--megaresume-stop-file`` and ``--megaresume-stop-before-end`` switch ``--exit-signal-handler`` on.

Under Megatron-DeepSpeed, hooks around ``DeepSpeedEngine.save_checkpoint`` and ``load_checkpoint``:

    save   Megatron's save_checkpoint -> client state with its args (which carry the data state)
           -> here: `Session.save`
    load   Megatron's load_checkpoint -> here: `Session.choose` by ``latest``, with which the tracker must agree
           -> DeepSpeed's load of exactly that tag -> back in Megatron's: `Session.accept`

Every other save or load of an engine passes through untouched. A save is Megatron's if the client state holds the
host's own ``args``; a load, if it comes from within ``load_checkpoint(load_arg="load")`` of Megatron's.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megaresume.checkpoint.file_errors import read_undamaged, reading
from megaresume.checkpoint.host import Data
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.ranks import on_all_ranks
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.names import LATEST, deepspeed_tag, megatron_tag
from megaresume.checkpoint.records.pointers import read_pointers
from megaresume.checkpoint.records.step_file import StepFile
from megaresume.checkpoint.replay import Replay
from megaresume.checkpoint.saver import Save
from megaresume.checkpoint.session import Session
from megaresume.checkpoint.system import Topology
from megaresume.hosts.deepspeed import decoupled
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.host import EngineHost, around_load, around_save
from megaresume.hosts.megatron import losses
from megaresume.hosts.megatron.arguments import Settings, data_parallel_size, schedule_from_args
from megaresume.hosts.megatron.calls import Proof
from megaresume.hosts.megatron.project import Project
from megaresume.stream.errors import CheckpointError, MegaresumeError, SetupError, UsageError

#: The attribute of Megatron's namespace for the state, as its envelope's text. The namespace is in every checkpoint
#: format. A string, because core 0.19 and later load it with ``weights_only=True``, where a NumPy scalar or a class of
#: ours would make the whole checkpoint unloadable.
KEY = "megaresume_state"


def envelope_on(args: Any) -> Envelope | None:
    """The state on a namespace or mapping; None if there is none.

    Raises:
        StateError: it is damaged, see `Envelope.read`.
    """
    text = args.get(KEY) if isinstance(args, Mapping) else getattr(args, KEY, None)
    return Envelope.read(text) if text else None


def can_be_written(save_dir: object) -> bool:
    """Whether this is a directory of this machine; with object storage (``msc://``) the state is only in ``args``."""
    return bool(save_dir) and "://" not in str(save_dir)


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """What a load to resume from has found."""

    #: The checkpoint we chose; None if Megatron chooses by itself.
    choice: Choice | None = None
    #: The record beside it.
    beside: StepFile | None = None
    #: The namespace in the checkpoint; None if none was seen.
    args: Any = None
    #: Whether the load is in progress.
    is_loading: bool = False


class MegatronHost:
    """See `megaresume.checkpoint.host.Host`.

    Args:
        project: which Megatron this is.
        args: its namespace.
        settings: the values of our flags.
        first_samples: samples trained before this process.
    """

    forgotten = "--load was forgotten, or --finetune left in"
    load = "--load {directory} without --finetune"
    begin_anew = "--finetune"

    def __init__(self, project: Project, args: Any, settings: Settings, first_samples: int = 0) -> None:
        self.project, self.args, self.settings = project, args, settings
        self.framework = f"{project.kind} {project.version or 'unknown'}"
        if settings.mode != "off" and (replay := Replay.asked()) is not None:
            _set_for_replay(args, replay)
        save_dir, is_off = getattr(args, "save", None), settings.mode == "off"
        checkpoints = dataclasses.replace(
            settings.checkpoints,
            save_dir=save_dir if can_be_written(save_dir) else None,
            stage_to=None if is_off else settings.checkpoints.stage_to,
        )
        #: Proof that training calls what is wrapped.
        self.proof = Proof(first_samples)
        #: Per-token losses of each micro-batch, if asked for.
        self.losses: losses.ScheduleLosses | None = None
        self.session = Session(
            self, **checkpoints.session_kwargs, stop=None if is_off else settings.stop, metrics=settings.metrics
        )
        self.session.step_now = lambda: max(int(getattr(args, "curr_iteration", 0) or 0), self.iteration())
        #: The engine of Megatron-DeepSpeed, once it has saved or loaded.
        self.engine: EngineHost | None = None
        #: What the last load to resume from has found.
        self.found = Found()
        #: A save that has begun, and whose writing Megatron has not scheduled yet.
        self.unscheduled: Save | None = None
        #: Whether `Session.start` was called.
        self.is_started = False

    @property
    def order(self) -> Data | None:
        """The order of the training data, from when the data is built."""
        return self.session.data

    @order.setter
    def order(self, order: Data) -> None:
        self.session.data = order

    @property
    def loaded(self) -> Envelope | None:
        """The data state of the loaded checkpoint; None if nothing was loaded, or it has none."""
        return None if self.session.loaded is None else self.session.loaded.envelope

    def start(self) -> None:
        """See `Session.start`; once."""
        if not self.is_started:
            self.is_started = True
            self.session.start()

    def tag(self, iteration: int) -> str:
        """Name of the tag directory of an iteration."""
        return megatron_tag(iteration) if self.project.kind == "megatron-lm" else deepspeed_tag(iteration)

    def iteration(self) -> int:
        """See `Host`. Used at a start only: Megatron passes it to its own ``save_checkpoint``."""
        return int(getattr(self.args, "iteration", 0) or 0)

    def samples(self) -> int:
        """See `Host`."""
        return int(self.args.consumed_train_samples)

    def is_over(self, iteration: int, samples: int) -> bool:
        """Whether nothing is left to train after these steps: a finished run may be launched any number of times."""
        iters, end = getattr(self.args, "train_iters", None), getattr(self.args, "train_samples", None)
        return (iters is not None and iteration >= iters) or (end is not None and samples >= end)

    def take_losses(self, every: int) -> None:
        """See `GivesLosses`."""
        losses.check(self.args, self.project, self.settings)

        def give(samples: Any, token_losses: Any, mask: Any) -> None:
            assert self.session.meter is not None
            self.session.meter.losses(samples, token_losses, mask)

        def stream() -> Any:
            return getattr(self.order, "stream", None)

        self.losses = losses.ScheduleLosses(
            every, give, project=self.project, settings=self.settings, stream=stream, read=self.proof.taken
        )

    def note_step(self, result: tuple[Any, ...]) -> None:
        """Record the losses and gradient norm that Megatron's ``train_step`` returned, for live figures.

        Args:
            result: (losses of all ranks by name, on the last pipeline stage; whether the step was skipped; gradient
                norm; zeros), up to megatron-core 0.9; since then with three more entries before the norm.
        """
        meter, samples = self.session.meter, self.samples()
        assert meter is not None
        if self.losses is not None:
            self.losses.step_made()
        named, norm = result[0], result[2 if len(result) == 4 else 5] if len(result) > 3 else None
        if isinstance(named, Mapping) and named:
            meter.steps.loss(next(iter(named.values())))
        meter.steps.norm(norm)
        schedule = getattr(getattr(self.order, "stream", None), "schedule", None)
        size = self.topology().global_batch_size if schedule is None else schedule.size_at(samples)
        meter.steps.stepped(
            int(getattr(self.args, "curr_iteration", None) or self.iteration()) + 1, samples + (size or 0)
        )

    def topology(self) -> Topology:
        """See `Host`. The engine's own facts take precedence: over how many ranks it partitions the optimizer."""
        now = topology_of(self.args, self.samples(), self.project)
        if self.engine is not None:
            now = self.engine.layout(num_workers=now.num_workers, global_batch_size=now.global_batch_size)
        return dataclasses.replace(now, balance=self.settings.balance)

    def expected_files(self, save_dir: Path, tag: str) -> Sequence[str] | None:
        """See `Host`: known for DeepSpeed's engine only."""
        return None if self.engine is None else self.engine.expected_files(save_dir, tag)

    def settle(self) -> None:
        """See `Host`. Megatron-LM waits for its asynchronous saves by itself."""
        if self.engine is not None:
            self.engine.settle()

    def is_saving(self) -> bool:
        """See `Host`."""
        return self.engine is not None and self.engine.is_saving()

    def committed(self, save_dir: Path) -> None:
        """See `Host`."""
        if self.engine is not None:
            self.engine.committed(save_dir)


def _set_for_replay(args: Any, replay: Replay) -> None:
    """Before Megatron loads, set where it loads from and saves to, and when it ends."""
    if getattr(args, "load", None):
        args.load = os.fspath(replay.source)
        args.ckpt_step = replay.step or None
        args.exit_on_missing_checkpoint = False
    if getattr(args, "save", None):
        args.save = replay.out
    args.exit_interval = replay.last


def topology_of(args: Any, samples: int, project: Any = None) -> Topology:
    """The layout of a run with these arguments, at ``samples`` trained samples."""

    def count(name: str, default: int = 1) -> int:
        return int(getattr(args, name, None) or default)

    try:
        size: int | None = schedule_from_args(args, project, samples).size_at(samples)
    except MegaresumeError:
        size = None  # only informational, so a namespace without it is no error
    return Topology(
        world_size=count("world_size"),
        dp=data_parallel_size(args),
        tp=count("tensor_model_parallel_size"),
        pp=count("pipeline_model_parallel_size"),
        cp=count("context_parallel_size"),
        num_workers=count("num_workers", 0),
        micro_batch_size=getattr(args, "micro_batch_size", None),
        global_batch_size=size,
    )


_host: MegatronHost | None = None


def megatron_host() -> MegatronHost:
    """The host of the current ``get_args()``.

    Raises:
        UsageError: our flags contradict each other.
        SetupError: the Megatron that is being imported is not one that we know.
    """
    global _host
    # Deferred: finding out which Megatron this is reads its files.
    from megaresume.hosts.megatron.project import current_project

    project = current_project()
    args = importlib.import_module(project.modules["global_vars"]).get_args()
    if _host is None or _host.args is not args:
        first = int(getattr(args, "consumed_train_samples", 0) or 0)
        if _host is not None:  # a copy of the arguments in mid-run begins where the run did
            first = min(first, _host.proof.first_samples)
        _host = MegatronHost(project, args, Settings.from_args(args), first)
    return _host


def latest_host() -> MegatronHost | None:
    """The host that was last asked for; None if none was."""
    return _host


def switch_on(args: Any, settings: Settings, project: Project) -> None:
    """Make Megatron check for signals if one of our flags needs it. Called before it sets up its signal handler.

    Raises:
        UsageError: this Megatron never checks.
    """
    if settings.mode == "off" or settings.stop is None:
        return
    if "signals" not in project.modules:
        raise UsageError(
            "this Megatron cannot be asked to stop",
            found=f"{project}, and --megaresume-stop-file or --megaresume-stop-before-end",
            expected="a Megatron with --exit-signal-handler",
            action="--exit-duration-in-mins MINUTES, or --exit-interval N",
        )
    args.exit_signal_handler = True


def around_signals_received(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on ``DistributedSignalHandler.signals_received() -> [bool of every rank]`` for our reasons. Collective."""

    def signals_received(self: Any, *args: Any, **kwargs: Any) -> Any:
        stopper = megatron_host().session.stopper
        if stopper is None:
            return original(self, *args, **kwargs)
        mine = stopper.look()
        if mine is not None:
            self._signal_received = True
        received = original(self, *args, **kwargs)
        if stopper.stops(any(received)) and mine is not None:
            print(f"megaresume: {mine}: all ranks save and exit", flush=True)
        return received

    return signals_received


def around_engine_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on ``DeepSpeedEngine.save_checkpoint`` that commits Megatron-DeepSpeed's saves, with the data state.

    Raises, on every rank:
        SetupError: Megatron's own save_checkpoint was not wrapped.
        Others: see `Session.save`.
    """

    def save_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return around_save(functools.partial(original, engine), functools.partial(_save, engine))(*args, **kwargs)

    return save_checkpoint


def _save(
    engine: Any,
    write: Callable[..., Any],
    save_dir: str,
    tag: str | None,
    client_state: Mapping[str, Any],
    latest: bool,
    excludes: bool,
) -> Any:
    host = _host_of(client_state)
    if host is None or host.order is None:
        return write(tag=tag, client_state=client_state, save_latest=latest)
    facts.check_engine(engine)
    check_micro_batches(engine, host.args)
    host.engine = EngineHost(engine, elastic=host.settings.elastic)
    envelope = on_all_ranks(lambda: _state_to_save(host, int(client_state["iteration"])))
    given = save_dir, tag, client_state, latest, excludes
    return host.engine.save_checkpoint(host.session, write, *given, envelope=envelope)


def check_micro_batches(engine: Any, args: Any) -> None:
    """Raise a SetupError if the engine takes fewer or more micro-batches for a step than Megatron counts as trained."""
    found, expected = int(engine.train_micro_batch_size_per_gpu()), int(args.micro_batch_size)
    if found != expected:
        raise SetupError(
            "a step of DeepSpeed's engine does not train the samples that Megatron counts",
            found=f"train_micro_batch_size_per_gpu {found} in the DeepSpeed config, --micro-batch-size {expected}",
            expected="the same number in both",
            cause="the data makes micro-batches of the one size, and the engine counts those of a step by the other",
            action="correct train_micro_batch_size_per_gpu, and resume from a checkpoint saved with equal sizes",
        )


def _host_of(client_state: Mapping[str, Any]) -> MegatronHost | None:
    """The host whose Megatron makes this save; None if something else does."""
    args = client_state.get("args")
    if args is None or "iteration" not in client_state or not hasattr(args, "consumed_train_samples"):
        return None
    host = megatron_host()
    return host if host.args is args and host.settings.mode != "off" else None


def _state_to_save(host: MegatronHost, iteration: int) -> Envelope:
    """The state that the hook around Megatron's ``save_checkpoint`` put on ``args``, if it belongs to this save."""
    saved = envelope_on(host.args)
    if saved is None or (saved.iteration, saved.samples) != (iteration, host.samples()):
        was = "none" if saved is None else f"one of iteration {saved.iteration}, sample {saved.samples}"
        raise SetupError(
            "the data state was not put on Megatron's args before the save",
            found=f"data state: {was}",
            expected=f"one of iteration {iteration}, sample {host.samples()}",
            cause="the engine's save_checkpoint was called without Megatron's save_checkpoint, or that was replaced",
            action="save through megatron.checkpointing.save_checkpoint",
        )
    return saved


def around_engine_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on ``DeepSpeedEngine.load_checkpoint`` that gives Megatron-DeepSpeed the newest complete checkpoint.

    Raises, on every rank:
        CheckpointError: what was asked for is not complete, or nothing is, or no pointer says which one; or the number
            of ZeRO partitions changed, and the checkpoint is not converted or cannot be.
    """

    def load_checkpoint(engine: Any, *args: Any, **kwargs: Any) -> Any:
        return around_load(functools.partial(original, engine), functools.partial(_load, engine))(*args, **kwargs)

    return load_checkpoint


def _load(
    engine: Any,
    read: Callable[..., Any],
    load_dir: str,
    tag: str | None,
    load_module_only: bool,
    load_optimizer_states: bool,
) -> Any:
    host = latest_host()
    if host is None or not host.found.is_loading or load_dir is None:
        return read(load_dir, tag=tag)
    decoupled.watch(engine)
    check_micro_batches(engine, host.args)
    engine_host = host.engine = EngineHost(engine, elastic=host.settings.elastic)
    root, is_universal = os.fspath(load_dir), facts.loads_universal(engine)

    def read_one(damaged: Mapping[Path, str]) -> tuple[StepFile | None, Choice, Any, Any] | None:
        choice, beside = host.session.choose(root, engine_host.pick(root, tag), damaged)
        if choice is None:
            return None
        on_all_ranks(lambda: _check_pointed(choice, explicit=tag is not None or is_universal))
        with reading(choice):
            optimizer = not load_module_only and load_optimizer_states
            return beside, *engine_host.read(read, choice, beside, optimizer=optimizer)

    found = read_undamaged(read_one)
    if found is None:
        return None, None  # no checkpoint there: returns what DeepSpeed would, without its warning on every rank
    beside, loaded, path, client_state = found
    if host.session.roots.copies_of(Path(os.path.abspath(root))) is not None:
        host.session.roots.mark_as_own(root)  # also if the checkpoint lies among the copies
    if not load_module_only and not getattr(host.args, "reset_iteration", False):
        # bigscience does not check the arguments in a universal checkpoint, so nothing else would see them.
        args = host.found.args or (client_state or {}).get("args")
        host.found = Found(loaded, beside, args, is_loading=True)
    return path, client_state


def _check_pointed(choice: Choice, *, explicit: bool) -> None:
    """Load a checkpoint without a commit of ours only if something names it, as Megatron-DeepSpeed itself would start
    over at iteration 0, with a warning.
    """
    if explicit or choice.manifest is not None:
        return
    latest, tracker = read_pointers(choice.load_dir)
    if latest.status == "ok" and tracker.status in ("ok", "absent"):
        return
    raise CheckpointError(
        "there are checkpoints, but nothing says which of them to load",
        found=f"{choice.load_dir}: {choice.tag} and perhaps others; "
        + (latest.problem or tracker.problem or f"no file {LATEST}"),
        expected=f"a file {LATEST} with the name of the tag directory",
        cause="a save was killed while it wrote the pointer, or the directory was copied without it",
        action=f"name one: --load-tag {choice.tag}; or write its name into {choice.load_dir / LATEST}; to start "
        "over, leave out --load",
    )
