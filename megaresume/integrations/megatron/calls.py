"""Proof that training calls what we wrapped, at places that every loop passes before the weights change.

    megatron-core's schedules    forward and backward of one step, in Megatron's loop and in those of most forks
    torch's optimizers           every step of every ``torch.optim.Optimizer``, whatever the loop is

A name that is wrapped proves nothing about a fork that calls a copy of it. So, when a step begins, our part of
``build_train_valid_test_data_iterators`` must have run: it is called on every rank of every layout, also on those that
read no data. And what it built must have been read before the second step and before a save, on global rank 0: the
first pipeline stage and the first tensor-parallel rank always need tokens.

    at the start  `check_load`       training goes on from something that was loaded past us
    at a step     `before_step`      nothing was built: stop before the weights change
    at a save     `check_save`       samples were trained, and no order was set, or nothing was read from it
                  `around_save`      any ``torch.save`` of Megatron's arguments: they hold the state of their counter
    at the end    `at_exit`          what was trained or saved past us: exit status 1; nothing trained: one line
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from megaresume.checkpoint.layout import TRACKER
from megaresume.integrations.megatron import session as sessions
from megaresume.integrations.megatron.arguments import Settings
from megaresume.integrations.megatron.call_errors import (
    not_asked,
    not_built,
    not_loaded,
    not_read,
    saved_past_us,
    seam_name,
    without_state,
)
from megaresume.integrations.megatron.importing import wrap
from megaresume.integrations.megatron.project import current_project, package_name
from megaresume.integrations.megatron.seams import ITERATORS, SAVE, SIGNALS, Factory, called
from megaresume.integrations.megatron.session import Session
from megaresume.integrations.megatron.state import KEY, read_state
from megaresume.stream.errors import MegaresumeError, SetupError

__all__ = [
    "around_forward_backward",
    "around_save",
    "before_step",
    "check_load",
    "check_provider",
    "check_save",
    "is_built",
    "watch_optimizers",
]

#: Functions of these libraries that step an optimizer to allocate its state: nothing is trained there.
_SETUP = ("__init__", "dummy_step", "initialize_optimizer_states", "_init_optimizer_states_with_dummy_values")


class _Process:
    """What is known of this process."""

    #: the launcher runs it: then any training in it is meant to be hooked.
    launched: bool = False
    #: torch's handle of our hook on all optimizers.
    handle: Any = None
    #: a training step began.
    trained: bool = False
    #: an error of ours was raised: nothing more has to be said at the end.
    refused: bool = False


_process = _Process()


@functools.cache
def watch_optimizers(module: ModuleType, *, launched: bool) -> None:
    """Watch this process for training steps, from now on until its data was built through our hook.

    Args:
        module: ``torch.optim.optimizer``.
        launched: by `megaresume.run`. Otherwise only steps of a process that has set Megatron's arguments count.
    """
    _process.launched = launched
    register = getattr(module, "register_optimizer_step_pre_hook", None)
    if register is not None:  # since torch 2.0
        _process.handle = register(_on_optimizer_step)
    atexit.register(at_exit)


def _on_optimizer_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if not _allocates_state(sys._getframe()):
        before_step(f"a step of {type(optimizer).__name__}")


def _allocates_state(frame: FrameType | None) -> bool:
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if frame.f_code.co_name in _SETUP and package in ("deepspeed", package_name()):
            return True
        frame = frame.f_back
    return False


def around_forward_backward(original: Callable[..., Any]) -> Callable[..., Any]:
    """A schedule of megatron-core: ``forward_backward_…(*, forward_step_func, ..., forward_only=False)``."""

    @functools.wraps(original)
    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("forward_only", False):
            before_step(f"the forward and backward passes of a step ({original.__name__})")
        return original(*args, **kwargs)

    return forward_backward


def check_provider() -> None:
    """A provider of the script that `megaresume.provider` wrapped is called.

    Raises:
        SetupError: by something else than our part of ``build_train_valid_test_data_iterators``.
    """
    current = _session()
    if _mode(current) != "off" and (current is None or not current.building):
        raise _refused(not_built(current, "the datasets are built"))


def before_step(what: str) -> None:
    """A training step begins. All ranks come here; the answer is the same on all of them.

    Args:
        what: of the step is about to happen.

    Raises:
        SetupError: the data was not built through our hook, or what it built was not read in the step before.
    """
    current = _session()
    if current is None and not _process.launched:
        return
    if _mode(current) == "off" or "megaresume.integrations.deepspeed" in sys.modules:  # `attach` is its own proof
        return
    if current is None or not current.built:
        raise _refused(not_built(current, what))
    if _process.trained:
        _check_read(current)
    _process.trained = True


def check_load(current: Session) -> None:
    """Before the data is built: what training goes on from was loaded through our hook.

    Raises:
        SetupError: the iteration is not 0, and our hook has seen no checkpoint. The same on every rank.
    """
    iteration = int(getattr(current.args, "iteration", 0) or 0)
    if iteration == 0 or current.loaded_from is not None:
        return
    raise _refused(not_loaded(iteration))


def is_built(current: Session, iterators: Any) -> Any:
    """The data of this session was built through our hook: from now on its training iterator is counted.

    Args:
        current: the session.
        iterators: (train, valid, test), as Megatron returns them; None where this rank reads no data.
    """
    current.built, current.building = True, False
    if _process.handle is not None:
        # What was to be shown by it is shown; and it would be in the way of a compiled optimizer step.
        _process.handle.remove()
        _process.handle = None
    if os.environ.get("RANK", "0") == "0":
        current.tracker_at_start = _tracker(current)
    if current.project.kind == "megatron-lm":  # DeepSpeed's engine has a check of its own
        _watch_saves()
    train, *others = iterators
    if train is None:
        return iterators
    inner = getattr(train, "iterable", None)
    batches = train if inner is None else inner
    if not hasattr(batches, "__next__"):  # a list of loaders, which the script's own functions know how to read
        return iterators
    current.num_read = current.num_read or 0
    if inner is None:
        return (_Counted(batches, current), *others)
    train.iterable = _Counted(batches, current)
    return iterators


def _watch_saves() -> None:
    import torch

    home, factory = sys.modules["torch.serialization"], Factory("calls.around_save")
    is_plain = torch.save is home.save
    wrap(home, "save", factory)
    if is_plain:
        torch.save = home.save  # one object, or it could not be pickled by its name
    else:
        wrap(torch, "save", factory)


class _Counted:
    """Hands batches on, and counts them; everything else is asked of what it wraps."""

    def __init__(self, batches: Iterator[Any], current: Session) -> None:
        self._batches, self._session = batches, current

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        self._session.num_read += 1  # type: ignore[operator]
        return next(self._batches)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)


# Saves


def check_save(current: Session) -> None:
    """Before a save: what was trained was trained in an order of ours.

    Raises:
        SetupError: samples were trained, and no order was set, or none of the data was read. The same on every rank.
    """
    if not _trained(current):
        return  # a conversion, or weights before the first step
    if not current.built:
        raise _refused(not_built(current, "a save, after samples were trained"))
    _check_read(current)


def around_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.save(obj, f, ...)``: Megatron's arguments leave this process with the state of their counter, or not."""

    @functools.wraps(original)
    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        current = sessions.latest()
        if current is not None and current.order is not None and _holds(obj, current.args):
            _check_state(current)
        return original(obj, *args, **kwargs)

    return save


def _holds(obj: Any, args: Any) -> bool:
    return obj is args or (isinstance(obj, Mapping) and obj.get("args") is args and "iteration" in obj)


def _check_state(current: Session) -> None:
    samples, text = int(current.args.consumed_train_samples), getattr(current.args, KEY, None)
    if current.settings.mode == "off" or (text is not None and read_state(text).samples == samples):
        return
    raise _refused(without_state(samples))


# The end of the process


def at_exit() -> None:
    """What only the end shows. A process that trained past us does not end with status 0."""
    current = sessions.latest()
    if _process.refused:
        os._exit(1)  # whatever a program made of the error that it was given
    if getattr(sys, "last_value", None) is not None or _mode(current) == "off":
        return
    error = _passed_by(current)
    if error is not None:
        from megaresume.integrations.refusals import say

        say(error)
        sys.stdout.flush()
        os._exit(1)
    if _process.launched and os.environ.get("RANK", "0") == "0" and ITERATORS not in called:
        words = f"nothing was trained in this process, and no data was built: {seam_name(ITERATORS)} was never called"
        print(f"megaresume: {words}", file=sys.stderr, flush=True)


def _passed_by(current: Session | None) -> MegaresumeError | None:
    if current is None or not _trained(current):
        return None
    try:
        check_save(current)
    except MegaresumeError as error:
        return error
    if current.stopper is not None and SIGNALS not in called:
        return not_asked(current)
    saved = _tracker(current)
    if SAVE in called or saved in (None, current.tracker_at_start) or os.environ.get("RANK", "0") != "0":
        return None
    return saved_past_us(current, saved)


def _tracker(current: Session) -> str | None:
    """What Megatron's tracker in ``--save`` says; None: there is none that we can read."""
    directory = getattr(current.args, "save", None)
    try:
        return Path(directory, TRACKER).read_text(encoding="utf-8").strip() if directory else None
    except (OSError, UnicodeDecodeError):
        return None


# What is known


def _session() -> Session | None:
    """The session of Megatron's arguments; None: this process has not set them."""
    try:
        name = current_project().modules["global_vars"]
        return sessions.session() if name in sys.modules else None
    except (AssertionError, SetupError):
        return None


def _mode(current: Session | None) -> str:
    return (current.settings if current is not None else Settings.from_args(None)).mode


def _trained(current: Session) -> bool:
    """Whether the weights are not those that the process began with."""
    return int(getattr(current.args, "consumed_train_samples", 0) or 0) > current.first_samples


def _check_read(current: Session) -> None:
    if current.num_read != 0 or os.environ.get("RANK", "0") != "0":
        return
    raise _refused(not_read())


def _refused(error: MegaresumeError) -> MegaresumeError:
    _process.refused = True
    return error
