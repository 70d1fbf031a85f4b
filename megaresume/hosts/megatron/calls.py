"""Proof that training calls what we wrapped, checked where every loop passes before the weights change.

    megatron-core's schedules    forward and backward of one step, in Megatron's loop and in those of most forks
    torch's optimizers           every step of every ``torch.optim.Optimizer``, in any loop

Wrapping a name proves nothing about a fork that calls a copy of it. So when a step begins, our part of
``build_train_valid_test_data_iterators`` must have run: it is called on every rank of every layout, even on ranks that
read no data. And training must use what it built: on global rank 0 (the first pipeline stage and first
tensor-parallel rank always need tokens), and on every other rank that reads, the number of samples taken must equal
what Megatron counts as trained, or include those of the current step as well.

    at the start  `check_load`       training resumes from something that was loaded past us
    at a step     `before_step`      nothing was built: stop before the weights change
    at a save     `check_save`       samples were trained without an order, or not those that were taken
                  `around_save`      any ``torch.save`` of Megatron's arguments: their data state must match their
                                     sample counter
    at the end    `at_exit`          something was trained or saved past us: exit status 1; nothing was trained: one
                                     line; nothing left to train: a line in the ledger that says so
"""

from __future__ import annotations

import atexit
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, Literal

from megaresume.checkpoint.metrics.clocks import Clocks
from megaresume.checkpoint.records.names import TRACKER
from megaresume.files import read_file
from megaresume.hosts.count import Count, Words
from megaresume.hosts.importing import wrap
from megaresume.hosts.megatron.arguments import Settings, data_parallel_size
from megaresume.hosts.megatron.project import current_project, package_name
from megaresume.hosts.megatron.seams import (
    ITERATORS,
    SIGNALS,
    Factory,
    called,
    not_asked,
    not_built,
    not_loaded,
    not_read,
    not_trained,
    saved_past_us,
    seam_name,
    without_state,
)
from megaresume.stream.errors import MegaresumeError, SetupError, StateError

if TYPE_CHECKING:
    from megaresume.hosts.megatron.host import MegatronHost


#: Functions of these libraries that step an optimizer only to allocate its state, without training.
_SETUP = ("__init__", "dummy_step", "initialize_optimizer_states", "_init_optimizer_states_with_dummy_values")

#: Imported where something was attached with `megaresume.attach` or similar, which has its own proof.
_PROOFS = ("megaresume.hosts.deepspeed.attach", "megaresume.hosts.trainer")


class _Process:
    """The state of this process."""

    #: Launched by `megaresume.run`: all training in this process is meant to be hooked.
    launched: bool = False
    #: Torch's handle of our hook on all optimizers.
    handle: Any = None
    #: One of our errors was raised: say nothing more at the end.
    refused: bool = False


process = _Process()


@dataclass
class Proof:
    """What is known of one run of this process."""

    #: Samples trained before it.
    first_samples: int
    #: Whether our hook is building the data right now, and whether it has.
    is_building: bool = False
    is_built: bool = False
    #: This rank's training iterators, one per chunk; empty if there are none, or none that can be counted.
    taken: list[Counted] = field(default_factory=list)
    #: Iterations saved through our hook, as Megatron's tracker names them.
    saved: set[str] = field(default_factory=set)
    #: What the tracker in ``--save`` said when the data was built.
    tracker_at_start: str | None = None


#: Imports torch, and that import calls `watch_optimizers`: so this file imports it only when needed.
_HOST = "megaresume.hosts.megatron.host"


def _host_module() -> ModuleType:
    return importlib.import_module(_HOST)


def _latest_host() -> MegatronHost | None:
    """The latest host; None also if its module was never needed."""
    return _host_module().latest_host() if _HOST in sys.modules else None


@functools.cache
def watch_optimizers(module: ModuleType) -> None:
    """Watch this process for training steps until its data has been built through our hook.

    Args:
        module: ``torch.optim.optimizer``.
            If `megaresume.run` did not launch this process, only steps after Megatron's arguments were set count.
    """
    register = getattr(module, "register_optimizer_step_pre_hook", None)
    if register is not None:  # since torch 2.0
        process.handle = register(_on_optimizer_step)
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
    """Hook on a schedule of megatron-core: ``forward_backward_…(*, forward_step_func, ..., forward_only=False)``."""

    def forward_backward(*args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("forward_only", False):
            before_step(f"the forward and backward passes of a step ({original.__name__})")
            current = _latest_host()
            if current is not None and current.losses is not None and "forward_step_func" in kwargs:
                kwargs["forward_step_func"] = current.losses.watched(kwargs["forward_step_func"])
        return original(*args, **kwargs)

    return forward_backward


def around_train_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``train_step(...) -> (losses by name, skipped, ..., gradient norm, ...)`` for live figures."""

    def train_step(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        current = _latest_host()
        if current is not None and current.session.meter is not None and isinstance(result, tuple):
            current.note_step(result)
        return result

    return train_step


def check_provider() -> None:
    """Called when a script's provider, wrapped by `megaresume.provider`, is called.

    Raises:
        SetupError: the caller is not our part of ``build_train_valid_test_data_iterators``.
    """
    current = _session()
    if _mode(current) != "off" and (current is None or not current.proof.is_building):
        raise _refused(not_built(current, "the datasets are built"))


def before_step(what: str) -> None:
    """Check the proof when a training step begins. All ranks come here and get the same answer.

    Args:
        what: the part of the step that is about to happen.

    Raises:
        SetupError: the data was not built through our hook, or earlier steps did not train what it built.
    """
    current = _session()
    if current is None and not process.launched:
        return
    if _mode(current) == "off" or any(name in sys.modules for name in _PROOFS):
        return
    if current is None or not current.proof.is_built:
        raise _refused(not_built(current, what))
    _check_read(current, during="a step")


def check_load(current: MegatronHost) -> None:
    """Check, before the data is built, that what training resumes from was loaded through our hook.

    Raises:
        SetupError: the iteration is not 0 and our hook has seen no checkpoint. The same on every rank.
    """
    iteration = int(getattr(current.args, "iteration", 0) or 0)
    if iteration == 0 or current.found.args is not None:
        return
    raise _refused(not_loaded(iteration))


def is_built(current: MegatronHost, iterators: Any) -> Any:
    """Note that the data of this session was built through our hook, and count its training iterator from now on.

    Args:
        current: the host.
        iterators: (train, valid, test), as Megatron returns them; None if this rank reads no data.
    """
    current.proof.is_built, current.proof.is_building = True, False
    if current.session.meter is not None:
        current.session.meter.start()
    if process.handle is not None:
        # It has served its purpose, and it would keep an optimizer step from being compiled.
        process.handle.remove()
        process.handle = None
    if os.environ.get("RANK", "0") == "0":
        current.proof.tracker_at_start = _tracker(current)
    if current.project.kind == "megatron-lm":  # DeepSpeed's engine has its own check
        _watch_saves()
    train, *others = iterators
    if train is None:
        return iterators
    inner = getattr(train, "iterable", None)
    batches = train if inner is None else inner
    if not hasattr(batches, "__next__"):  # a list of loaders, which only the script's own functions can read
        return iterators
    if getattr(_rerun_machine(), "data_iterator_checkpoints", None):  # starts with batches from the checkpoint
        return iterators
    samples = int(getattr(current.args, "consumed_train_samples", 0) or 0)
    if current.proof.taken and current.proof.taken[0].begin != samples:  # a new phase; otherwise another chunk
        current.proof.taken.clear()
    size = int(current.args.micro_batch_size) * data_parallel_size(current.args)
    counted = Counted(batches, samples, size, current.session.clocks, keeps=current.losses is not None)
    current.proof.taken.append(counted)
    if inner is None:
        return (counted, *others)
    train.iterable = counted
    return iterators


def _watch_saves() -> None:
    import torch

    home, factory = sys.modules["torch.serialization"], Factory("calls.around_save")
    is_plain = torch.save is home.save
    wrap(home, "save", factory)
    if is_plain:
        torch.save = home.save  # one object, or it could not be pickled by name
    else:
        wrap(torch, "save", factory)


#: Megatron's clock is its sample counter, which marks no steps, so `Count.trained_to` is asked instead. The
#: refusals are `not_read` and `not_trained`, which name the interfering function of a fork.
_WORDS = Words(
    trainer="Megatron",
    clock="a step",
    next="the next one is asked for",
    untrained=("", ""),
    incomplete=("", ""),
    early_save=("", ""),
    other_count=("", ""),
)


class Counted:
    """Passes micro-batches on and counts them; all other attributes are those of the iterator it wraps.

    Args:
        batches: the iterator to wrap.
        begin: samples trained before the first micro-batch.
        size: samples in a micro-batch, over all data-parallel ranks.
        clocks: those of this process.
        keeps: whether to keep the last micro-batch.
    """

    def __init__(self, batches: Iterator[Any], begin: int, size: int, clocks: Clocks, *, keeps: bool = False) -> None:
        self._batches, self._clocks, self._keeps = batches, clocks, keeps
        self.begin, self.size = begin, size
        #: The last micro-batch handed out, for `megaresume.hosts.megatron.losses`.
        self.latest: Any = None
        self.count: Count[str] = Count(_WORDS, samples=begin)
        self.count.begin(sys.maxsize)

    @property
    def is_untouched(self) -> bool:
        """Whether no micro-batch was ever taken."""
        return self.count.end == self.begin

    def __iter__(self) -> Counted:
        return self

    def __next__(self) -> Any:
        self.count.take("", self.count.end + self.size)
        batch = self._clocks.wait(next, self._batches)
        self.latest = batch if self._keeps else None
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_batches"], name)


# Saves


def check_save(current: MegatronHost) -> None:
    """Check, before a save, that what was trained came from our order.

    Raises:
        SetupError: samples were trained without an order (the same on every rank), or others than those taken.
    """
    if not current.proof.is_built:
        if not _trained(current):
            return  # a conversion, or weights before the first step
        raise _refused(not_built(current, "a save, after samples were trained"))
    _check_read(current, during="a save")


def around_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on ``torch.save(obj, f, ...)``: refuse Megatron's arguments unless they carry the state at their counter."""

    def save(obj: Any, *args: Any, **kwargs: Any) -> Any:
        current = _latest_host()
        if current is not None and current.order is not None and current.settings.mode != "off":
            names = _arguments_in(obj, current.args)
            if names is not None:
                _check_state(names)
        return original(obj, *args, **kwargs)

    return save


def _arguments_in(obj: Any, args: Any) -> Mapping[str, Any] | None:
    """Megatron's arguments in what is about to be written: the namespace itself, or a copy of it in a checkpoint."""
    if obj is args:
        return dict(vars(args))
    if isinstance(obj, list) and len(obj) == 1:  # the common state of ``torch_dist``, from megatron-core 0.19 on
        obj = obj[0]
    if not isinstance(obj, Mapping) or "iteration" not in obj:
        return None
    found = obj.get("args")
    names: Mapping[str, Any] = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    return names if "consumed_train_samples" in names else None


def _check_state(names: Mapping[str, Any]) -> None:
    samples, envelope = int(names["consumed_train_samples"]), _host_module().envelope_on(names)
    if envelope is None or envelope.samples != samples:
        raise _refused(without_state(samples))


# The end of the process


#: imported if a Trainer of Hugging Face's was attached, in a script that might have been Megatron's.
_TRAINER = "megaresume.hosts.hugging_face"


def at_exit() -> None:
    """Checks at the end of the process. If it trained past us, it does not end with status 0."""
    current = _latest_host()
    if process.refused:
        os._exit(1)  # whatever the program did with the error
    if getattr(sys, "last_value", None) is not None or _mode(current) == "off":
        return
    from megaresume.checkpoint.ending import say

    error = _passed_by(current)
    if error is not None:
        say(error)
        sys.stdout.flush()
        os._exit(1)
    if current is not None and current.session.meter is not None:
        current.session.meter.close()
    if os.environ.get("RANK", "0") != "0":
        return
    if current is not None:
        try:
            _finish(current)
        except MegaresumeError as problem:  # all that was trained is saved
            say(problem)
    if process.launched and ITERATORS not in called and _TRAINER not in sys.modules:
        words = f"nothing was trained in this process, and no data was built: {seam_name(ITERATORS)} was never called"
        print(f"megaresume: {words}", file=sys.stderr, flush=True)


def _finish(current: MegatronHost) -> None:
    """Record that the run is over, if its last checkpoint is the final one. Not at the save itself: what follows (the
    last validation) may fail, and is then done by the next start.
    """
    if current.session.committed is not None:
        iteration, state, _ = current.session.committed
        if current.is_over(iteration, state.samples):
            current.session.finish_at_exit()


def _passed_by(current: MegatronHost | None) -> MegaresumeError | None:
    if current is None or not _trained(current):
        return None
    if not current.proof.is_built:
        return not_built(current, "the end, after samples were trained")
    try:
        _check_read(current, during="the end")
    except MegaresumeError as error:
        return error
    if current.session.stopper is not None and SIGNALS not in called:
        return not_asked(current)
    saved = _tracker(current)
    if (
        saved is None
        or saved in {current.proof.tracker_at_start, *current.proof.saved}
        or os.environ.get("RANK", "0") != "0"
    ):
        return None
    return saved_past_us(current, saved)


def _tracker(current: MegatronHost) -> str | None:
    """The iteration in Megatron's tracker in ``--save``; None if there is none or it cannot be read."""
    directory = getattr(current.args, "save", None)
    try:
        return read_file(Path(directory, TRACKER)).decode().strip() if directory else None
    except (OSError, UnicodeDecodeError):
        return None


# What is known


def _session() -> MegatronHost | None:
    """The host of Megatron's arguments; None if this process has not set them."""
    try:
        name = current_project().modules["global_vars"]
        return _host_module().megatron_host() if name in sys.modules else None
    except (AssertionError, SetupError):
        return None


def _mode(current: MegatronHost | None) -> str:
    return (current.settings if current is not None else Settings.from_args(None)).mode


def _trained(current: MegatronHost) -> bool:
    """Whether the weights have changed since this process began."""
    return int(getattr(current.args, "consumed_train_samples", 0) or 0) > current.proof.first_samples


def _check_read(current: MegatronHost, during: Literal["a step", "a save", "the end"]) -> None:
    """Check that this rank trained exactly what it took from its training iterators.

    Raises:
        SetupError: it took fewer samples, so it trained others; or more (not at the end, which may come within a step).
    """
    if not current.proof.taken:
        return
    trained, is_rank_0 = int(current.args.consumed_train_samples), os.environ.get("RANK", "0") == "0"
    for chunk, counted in enumerate(current.proof.taken):
        if counted.is_untouched and (chunk or not is_rank_0):
            continue  # a stage that needs no tokens
        count = counted.count
        if current.project.kind != "megatron-lm" and not counted.is_untouched:
            count.trained_to(min(trained, count.end), ahead=None)  # the engine takes its own batches, and proves them
            continue
        # A loop may take a step's batches before the schedule begins, and a step may be rerun on the same batches.
        ahead = {0} if during == "a save" and not _is_run_again() else {0, _step_size(current.args)}
        try:
            count.trained_to(trained, ahead=None if during == "the end" else ahead)
        except StateError:
            words = not_read if count.end < trained else not_trained
            raise _refused(words(count.end - counted.begin, trained - counted.begin)) from None


def _step_size(args: Any) -> int:
    """Samples in the current step; 0: unknown."""
    module = sys.modules.get(f"{package_name()}.core.num_microbatches_calculator")
    size = int(args.micro_batch_size) * data_parallel_size(args)
    return 0 if module is None else size * int(module.get_num_microbatches())


def _rerun_machine() -> Any:
    """Megatron's machine for rerunning a step with doubtful results; None if this core has none."""
    module = sys.modules.get(f"{package_name()}.core.rerun_state_machine")
    return None if module is None else module.get_rerun_state_machine()


def _is_run_again() -> bool:
    state = getattr(_rerun_machine(), "state", None)
    return state is not None and state.name != "NOT_RUNNING_YET"


def _refused(error: MegaresumeError) -> MegaresumeError:
    process.refused = True
    return error
