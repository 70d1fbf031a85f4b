"""`megaresume.attach`: exact data resume for any trainer, recognised by what is passed.

`TRAINERS` has a row for each, in any order: how to recognise it without importing it, and the module whose function
``attach`` does the work; `OWN_LOOP` is the row for a user's own loop. The signature of that function defines the
options, which are checked here by name.

These functions work on one trainer instance, not on its class: they `check_new`, `refuse` settings that would change
the data, `hook` its methods, or have an attribute `replaced` for a while. An object keeps what is attached to it in its
`SLOT`.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any, overload

from megaresume import importing
from megaresume.checkpoint.replay import Replay
from megaresume.checkpoint.settings import Checkpoints
from megaresume.checkpoint.stopping import StopConditions
from megaresume.hosts.options import check_groups, check_options
from megaresume.stream.errors import UsageError, missing_package

if TYPE_CHECKING:
    from megaresume.batches.data_loader import DataLoader
    from megaresume.batches.loader import StreamLoader
    from megaresume.hosts.files import Writer
    from megaresume.hosts.loop import Loop


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownTrainer:
    """A trainer that `attach` supports."""

    #: its name in messages.
    name: str
    #: the beginning of the call of `attach` for it.
    call: str
    #: package and name of its class. A subclass counts too, and belongs to the nearest class in the table.
    classes: tuple[tuple[str, str], ...] = ()
    #: the module with its function ``attach``.
    module: str
    #: our extra that installs the trainer; None: there is none, and users follow its own instructions.
    extra: str | None = None
    #: whether `megaresume replay` was tried with it.
    replays: bool = False
    #: an instance is attached right after it calls the first of these methods; empty: as soon as it is created.
    made_by: tuple[str, ...] = ()


TRAINERS = (
    KnownTrainer(
        name="a DeepSpeed engine",
        call="attach(engine, data",
        classes=(("deepspeed", "DeepSpeedEngine"),),
        module="megaresume.hosts.deepspeed.attach",
        extra="deepspeed",
        replays=True,
    ),
    KnownTrainer(
        name="TRL's AsyncGRPOTrainer",
        call="attach(trainer",
        classes=(("trl", "AsyncGRPOTrainer"),),
        module="megaresume.hosts.trl",
        extra="hugging-face",
    ),
    KnownTrainer(
        name="Hugging Face's Trainer",
        call="attach(trainer",
        classes=(("transformers", "Trainer"),),
        module="megaresume.hosts.hugging_face",
        extra="hugging-face",
        replays=True,
    ),
    KnownTrainer(
        name="an Accelerator",
        call="attach(accelerator, loader",
        classes=(("accelerate", "Accelerator"),),
        module="megaresume.hosts.accelerate",
        extra="hugging-face",
        replays=True,
    ),
    KnownTrainer(
        name="Lightning's Trainer",
        call="attach(trainer",
        classes=(("lightning", "Trainer"), ("pytorch_lightning", "Trainer")),
        module="megaresume.hosts.lightning",
        extra="lightning",
        replays=True,
    ),
    KnownTrainer(
        name="torchtitan's Trainer, or its class",
        call="attach(Trainer",
        classes=(("torchtitan", "Trainer"),),
        module="megaresume.hosts.torchtitan",
        made_by=("__init__",),
    ),
    KnownTrainer(
        name="the class of VeRL's SFTTrainer",
        call="attach(SFTTrainer",
        classes=(("verl", "SFTTrainer"),),
        module="megaresume.hosts.verl",
        made_by=("_build_ckpt_handler",),
    ),
    KnownTrainer(
        name="the class of VeRL's PPOTrainer or RayPPOTrainer",
        call="attach(PPOTrainer",
        classes=(("verl", "PPOTrainer"), ("verl", "RayPPOTrainer")),
        module="megaresume.hosts.verl_prompts",
        made_by=("_init_dataloader", "_create_dataloader"),
    ),
    KnownTrainer(
        name="the class of VeRL's SeparateRayPPOTrainer",
        call="attach(SeparateRayPPOTrainer",
        classes=(("verl", "SeparateRayPPOTrainer"),),
        module="megaresume.hosts.verl_separate",
        made_by=("_create_dataloader", "_init_worker_groups"),
    ),
    KnownTrainer(
        name="a ConfigContainer of Megatron-Bridge",
        call="attach(config, loader_of",
        classes=(("megatron", "ConfigContainer"),),
        module="megaresume.hosts.megatron_bridge",
    ),
    KnownTrainer(
        name="a Manager of torchft",
        call="attach(manager, loader",
        classes=(("torchft", "Manager"),),
        module="megaresume.hosts.torchft",
    ),
    KnownTrainer(
        name="torchft's LocalSGD or DiLoCo",
        call="attach(outer, loader",
        classes=(("torchft", "LocalSGD"), ("torchft", "DiLoCo")),
        module="megaresume.hosts.torchft_local_sgd",
    ),
)
#: A user's own loop has no class: it is passed as a mapping of what it saves. The only one not in `TRAINERS`.
OWN_LOOP = KnownTrainer(
    name="what a loop of your own saves, by name: {'model': model, 'optimizer': optimizer}",
    call="attach({...}, loader",
    module="megaresume.hosts.loop",
    extra="torch",
    replays=True,
)


# For type checkers. The packages of most trainers have no types: the class of any of them would be `Any`, and its
# overload would match every call.
@overload
def attach(
    trainer: Mapping[str, Any],
    data: DataLoader | StreamLoader,
    *,
    checkpoints: Checkpoints | str | os.PathLike[str],
    stop: StopConditions | None = None,
    metrics: Any = None,
    writer: Writer = "dcp",
    context_parallel: int = 1,
) -> Loop: ...


@overload
def attach(
    trainer: Any,
    data: Any = None,
    *,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    stop: StopConditions | None = None,
    metrics: Any = None,
    **options: Any,
) -> Any: ...


def attach(
    trainer: Any,
    data: Any = None,
    *,
    checkpoints: Checkpoints | str | os.PathLike[str] | None = None,
    stop: StopConditions | None = None,
    metrics: Any = None,
    **options: Any,
) -> Any:
    """Give a trainer its data in an exact order, and add the state of that data to its checkpoints. Call it on every
    rank, before training; docs/attach.md has a section for each trainer.

    Args:
        trainer: a DeepSpeed engine, Hugging Face's Trainer, an Accelerator, Lightning's Trainer, a config of
            Megatron-Bridge, torchft's Manager; the *class* of torchtitan's or VeRL's trainer, whose instances are then
            attached when they are created; or, for your own loop, what it saves, by name: ``{"model": model,
            "optimizer": optimizer}``.
        data: DeepSpeed: path of a data.yaml, its mapping, the words after ``--data-path``, a `Stream`, a
            `DataLoader`, or a loader with a state (Energon's, torchdata's). Hugging Face's Trainer: a dataset, or
            several, ``{name: (dataset, weight)}``; None: its ``train_dataset``. Accelerator, torchft, own loop: a
            `DataLoader` or `StreamLoader`. Megatron-Bridge: a function of data-parallel rank and size that returns such
            a loader. The others already have their data.
        checkpoints: where the run saves, and what it keeps; a directory means ``Checkpoints(save_dir=directory)``.
        stop: when it saves and exits, with `megaresume.Stopped`.
        metrics: live figures, and their sinks: ``"jsonl tensorboard"``; see docs/metrics.md. None: no figures.
        options: options of this trainer only: see its section.

    Returns:
        described in the trainer's section: micro-batches to iterate over, a loop, the loader; or the class.

    Raises on every rank:
        UsageError: an unknown trainer, an option that it does not have, or a setting that would change the data, by
            name; or it is already attached.
        CheckpointError: another job writes to the directory of the checkpoints.
        ConfigError, CorpusError: the data cannot be opened.
        SetupError: a package is missing; or data, directories or clocks differ between nodes.
    """
    known = _trainer_of(trainer)
    if Replay.asked() is not None and not known.replays:
        raise UsageError(
            "megaresume replay does not know this trainer yet",
            found=known.name,
            expected=f"{', '.join(one.name for one in (*TRAINERS, OWN_LOOP) if one.replays)}; or Megatron",
            action="to look at the data of these steps without training them: megaresume trace",
        )
    if isinstance(checkpoints, str | os.PathLike):
        checkpoints = Checkpoints(save_dir=checkpoints)
    check_groups({"checkpoints": checkpoints, "stop": stop, **options})
    given = {"data": data, "checkpoints": checkpoints, "stop": stop, "metrics": metrics}
    options = {name: value for name, value in given.items() if value is not None} | options
    function = _function_of(known)
    check_options(known.call, function, options)
    if isinstance(trainer, type):
        return _attach_class(known, trainer, functools.partial(function, **options))
    return function(trainer, **options)


def _trainer_of(thing: Any) -> KnownTrainer:
    if isinstance(thing, Mapping):
        return OWN_LOOP
    kind = thing if isinstance(thing, type) else type(thing)
    names = [(base.__module__.partition(".")[0], base.__qualname__) for base in kind.__mro__]
    for name in names:
        trainer = next((trainer for trainer in TRAINERS if name in trainer.classes), None)
        if trainer is not None:
            if kind is not thing or trainer.made_by:
                return trainer
            raise UsageError(
                "a class is attached, and its instance is wanted",
                found=f"{kind.__module__}.{kind.__qualname__}",
                expected=trainer.name,
                action=f"megaresume.{trainer.call}), once it is made",
            )
    raise _unknown(thing, names)


def _unknown(thing: Any, names: Sequence[tuple[str, str]]) -> UsageError:
    own = "a loop of your own: megaresume.attach({'model': model, 'optimizer': optimizer}, loader, checkpoints=...)"
    if not {("megaresume", "DataLoader"), ("megaresume", "StreamLoader")}.isdisjoint(names):
        action = f"the loader is the second argument, after what trains. For {own}"
    elif ("torch", "DataLoader") in names:
        action = f"megaresume.DataLoader(dataset, batch_size) replaces torch's, and is the second argument. For {own}"
    else:
        action = f"for {own}; for another trainer: docs/hosts.md"
    return UsageError(
        "megaresume.attach does not recognise this trainer",
        found=f"the class {thing.__qualname__}" if isinstance(thing, type) else kind_of(thing),
        expected="; ".join(trainer.name for trainer in (*TRAINERS, OWN_LOOP)),
        action=action,
    )


def _function_of(trainer: KnownTrainer) -> Callable[..., Any]:
    try:
        with importing():
            function: Callable[..., Any] = importlib.import_module(trainer.module).attach
    except ModuleNotFoundError as error:
        explained = missing_package(error, "megaresume.attach", trainer.extra)
        raise error if explained is None else explained from error
    return function


#: on a class: that it is attached; on an instance: the method after which it was.
_ATTACHED, _MADE_BY = "_megaresume_attached_class", "_megaresume_made_by"


def _attach_class(trainer: KnownTrainer, cls: type, attach_one: Callable[[Any], Any]) -> type:
    """Attach every instance as soon as possible: the trainer's own program may create it."""
    names = [name for name in trainer.made_by if hasattr(cls, name)]
    if not names:
        raise UsageError(
            "this class makes no trainer that could be attached",
            found=f"{cls.__module__}.{cls.__qualname__}, without {' or '.join(trainer.made_by)}",
            expected=trainer.name,
            cause="another version of it",
            action="docs/tried.md says which versions were tried",
        )
    if hasattr(cls, _ATTACHED):
        raise UsageError(
            "this class is attached already",
            found=f"{cls.__module__}.{cls.__qualname__}",
            action="call megaresume.attach once, with the class that your program makes its trainer from",
        )
    setattr(cls, _ATTACHED, True)
    for name in names:
        setattr(cls, name, _then_attached(getattr(cls, name), name, attach_one))
    return cls


def _then_attached(before: Callable[..., Any], name: str, attach_one: Callable[[Any], Any]) -> Callable[..., Any]:
    @functools.wraps(before)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = before(self, *args, **kwargs)
        if getattr(self, _MADE_BY, name) == name:
            setattr(self, _MADE_BY, name)
            attach_one(self)
        return result

    return made


#: the attribute in which an object keeps what is attached to it.
SLOT = "_megaresume"

_MISSING: Any = object()


def hook(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a method of one instance by ``function``, which gets the method before its arguments."""
    before = getattr(owner, name)

    @functools.wraps(before)
    def hooked(_: Any, *args: Any, **kwargs: Any) -> Any:
        return function(before, *args, **kwargs)

    setattr(owner, name, MethodType(hooked, owner))  # bound, as torch's schedulers take `step` apart


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """A context in which these attributes of one instance have other values."""
    own = {name: vars(owner).get(name, _MISSING) for name in values}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name, value in own.items():
            if value is _MISSING:  # an attribute of its class
                delattr(owner, name)
            else:
                setattr(owner, name, value)


def kind_of(one: Any) -> str:
    """The class of an object, including its module, for errors."""
    return f"{type(one).__module__}.{type(one).__qualname__}"


def check_new(
    owner: Any,
    what: str,
    *,
    missing: Sequence[str] = (),
    headline: str = "",
    expected: str = "",
    action: str | None = None,
) -> None:
    """Refuse an object of another kind, and one that is already attached.

    Args:
        owner: the object.
        what: its name.
        missing: attributes that it lacks, and that objects of its kind have.
        headline, expected, action: of the error, if anything is missing.

    Raises:
        UsageError: it is of another kind, or already attached.
    """
    if missing:
        raise UsageError(
            headline, found=f"{kind_of(owner)}, without {', '.join(missing)}", expected=expected, action=action
        )
    if getattr(owner, SLOT, None) is not None:
        raise UsageError(
            f"this {what} is attached already",
            found=kind_of(owner),
            expected=f"a {what} that megaresume.attach was not given before",
            action=f"call megaresume.attach once for each {what}",
        )


def refuse(refused: Mapping[str, tuple[Any, str]], *, expected: str | None = None) -> None:
    """Refuse settings that would change the data, or that are not known to work.

    Args:
        refused: setting -> what was found (nothing, if that is false) and the way out.
        expected: what would be accepted. By default, for a setting that is True: that it is not set.

    Raises:
        UsageError: names the first one.
    """
    for name, (found, action) in refused.items():
        if found:
            raise UsageError(
                f"{name} cannot be used with megaresume.attach",
                found=f"{name}: {found}",
                expected="not set" if found is True else expected,
                action=action,
            )


def require(needed: Mapping[str, tuple[Any, str]]) -> None:
    """Refuse a trainer whose settings make it save too little.

    Args:
        needed: setting -> what was found and, if that is false, the way out.

    Raises:
        UsageError: names the first one that is false.
    """
    for name, (found, action) in needed.items():
        if not found:
            raise UsageError(f"megaresume.attach needs {name}", found=f"{name}: {found}", action=action)
