"""What happens around Megatron's ``save_checkpoint`` and ``load_checkpoint``.

    save   state of the consumed samples -> args.megaresume_state, before Megatron collects its own
           rank 0: marker -> Megatron's save, with its tracker -> rank 0: state, manifest, ledger line beside it
           (an asynchronous save: in its finalizer, with the values of when it began)
    load   the arguments in the checkpoint are seen on their way -> their state, read on every rank
           -> compared with what lies beside; the order itself goes on from it when the data is built

The state in the checkpoint is the truth: it is in the same file as the weights. What lies beside is its copy, for
people and for ``megaresume inspect``; a kill between Megatron's tracker and the copy costs nothing, since the next
start writes it (`after_data_is_built`).
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megaresume.checkpoint.lock import check_owned
from megaresume.integrations.megatron import checks, records
from megaresume.integrations.megatron.calls import check_save
from megaresume.integrations.megatron.session import Loaded, Session, session
from megaresume.integrations.megatron.state import KEY, SavedState, read_state, state_on, write_state
from megaresume.integrations.megatron.stopping import listen
from megaresume.integrations.ranks import is_rank_0, on_all_ranks, on_rank_0, same_on_all_ranks, written_by_all
from megaresume.integrations.resume import Resume
from megaresume.stream.errors import CheckpointError, StateError

__all__ = [
    "after_data_is_built",
    "around_check_checkpoint_args",
    "around_load_checkpoint",
    "around_save_checkpoint",
    "around_schedule_async_save",
    "is_loading",
    "put_state",
    "see_checkpoint_args",
]


class _Underway:
    """What one wrapped function tells another that Megatron calls inside it."""

    #: a load of ours is running: the arguments in the checkpoint, once they were seen.
    loading: bool = False
    checkpoint_args: Any = None
    #: when the last asynchronous save began, by the monotonic clock.
    began: float = 0.0
    #: an asynchronous save has begun and is not scheduled yet.
    save: records.Save | records.GuardSave | None = None


_underway = _Underway()


# Save


def around_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``save_checkpoint(iteration, model, ...)``, with the state of the data in it.

    Raises, on every rank:
        StateError: the ranks' states differ.
        CheckpointError: the records beside the checkpoint cannot be written.
    """

    @functools.wraps(original)
    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        current = session()
        if current.settings.mode == "off":
            return original(iteration, *args, **kwargs)
        prepare = getattr(current.order, "prepare", None)  # of a loader: its state is where it is, not computed
        if prepare is not None:
            prepare(int(current.args.consumed_train_samples))
        put_state(current, int(iteration))
        given = _arguments(original, iteration, *args, **kwargs)
        current.saved.add("release" if given.get("release") else str(int(iteration)))
        if current.settings.retention and getattr(current.args, "save_retain_interval", None):
            current.args.save_retain_interval = None  # it is part of ours, which knows what is complete
        write = functools.partial(original, iteration, *args, **kwargs)
        if getattr(current.args, "async_save", False):
            _underway.began = time.monotonic()  # over in the finalizer
        else:
            write = functools.partial(_measured, current, write)
        plain = not given.get("non_persistent_ckpt") and not given.get("release")
        # Megatron-DeepSpeed saves through its engine, which has records of its own.
        if current.project.kind != "megatron-lm" or not plain or not records.can_be_written(current.args.save):
            return write()
        return _with_records(current, int(iteration), write)

    return save_checkpoint


def _measured(current: Session, write: Callable[[], Any]) -> Any:
    """A save that is over when Megatron's function returns."""
    began = time.monotonic()
    result = write()
    _is_over(current, began)
    return result


def _is_over(current: Session, began: float) -> None:
    """How long a save takes is how long before its end a job must stop; and a file that asked for it is used up."""
    current.save_seconds = time.monotonic() - began
    if current.stopper is not None and current.stopper.stopping:
        current.stopper.saved()


def put_state(current: Session, iteration: int) -> None:
    """Set ``args.megaresume_state`` to the state of ``args.consumed_train_samples``. Collective.

    Without an order (a conversion between formats) the state that was loaded is handed on, if it still belongs to the
    counter; otherwise there is none.

    Raises:
        SetupError: see `check_save`.
    """
    check_save(current)
    args, order = current.args, current.order
    samples = int(args.consumed_train_samples)

    def text() -> str | None:
        if order is None:
            kept = current.loaded is not None and current.loaded.samples == samples
            return current.loaded.text if kept and current.loaded is not None else None
        return write_state(
            project=current.project.kind,
            version=current.project.version,
            iteration=iteration,
            samples=samples,
            kind=order.kind,
            payload=order.payload(samples),
        )

    value = on_all_ranks(text)
    same_on_all_ranks(
        None if value is None else value[-60:],  # ends in the checksum of all of it
        f"the data state at sample {samples}",
        cause="the ranks have read different corpora, or count different optimizer steps",
        action="compare the corpora on the nodes: megaresume stream DATA.yaml",
    )
    if value is not None:
        setattr(args, KEY, value)
    elif hasattr(args, KEY):
        delattr(args, KEY)


def _arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    try:
        return inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # another patcher's signature: Megatron passes these two by name
        return kwargs


def _with_records(current: Session, iteration: int, write: Callable[[], Any]) -> Any:
    order, args = current.order, current.args
    if order is None:
        return write()
    samples = int(args.consumed_train_samples)
    is_async = bool(getattr(args, "async_save", False))
    state = on_all_ranks(lambda: order.stream_state(samples))
    if state is None:
        save: records.Save | records.GuardSave = on_rank_0(
            lambda: records.begin_guard(current, iteration, order.payload(samples))
        )
    else:
        pending = on_rank_0(lambda: records.begin(current, iteration, state, tracker=not is_async))
        write_beside = getattr(order, "write_beside", None)
        root = Path(args.save).absolute()
        beside = () if write_beside is None else written_by_all(lambda: write_beside(root, iteration))
        save = records.Save(
            pending=pending, origin=order.origin, beside=beside, checksums=current.settings.verify_checkpoint
        )
    if not is_async:
        result = write()
        on_rank_0(save.commit)
        return result
    _underway.save = save
    try:
        result = write()
        if _underway.save is not None and is_rank_0():
            print(
                "megaresume: this Megatron schedules asynchronous saves in a way of its own: the records beside the "
                "checkpoint are written by the next start",
                flush=True,
            )
    finally:
        _underway.save = None
    return result


def around_schedule_async_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``schedule_async_save(request)``: our records are its last finalizer, behind the tracker.

    Finalizers run on all ranks, in the order of the saves, once all ranks have written their files.
    """

    @functools.wraps(original)
    def schedule_async_save(async_request: Any, *args: Any, **kwargs: Any) -> Any:
        save, _underway.save = _underway.save, None
        if save is not None:
            current, began = session(), _underway.began
            # Before Megatron's own, which writes the tracker in place: a job that has lost the directory must not.
            async_request.finalize_fns.insert(0, lambda: on_rank_0(lambda: check_owned(save.save_dir)))
            async_request.add_finalize_fn(lambda: on_rank_0(save.commit))
            async_request.add_finalize_fn(lambda: _is_over(current, began))
        return original(async_request, *args, **kwargs)

    return schedule_async_save


# Load


def around_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``load_checkpoint(...) -> (iteration, ...)``, which also restores ``session().loaded``.

    Only the load to go on from (``--load``) counts, not that of a teacher or of a reference model.

    Raises, on every rank:
        StateError: the state is damaged, or is not that of these weights, or not the one beside the checkpoint.
        CheckpointError: see `checks.before_load` and `checks.after_load`; or Megatron gave up with status 0.
        UsageError: flags that would silently change the data (`checks`).
    """

    @functools.wraps(original)
    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        current = session()
        is_ours = _arguments(original, *args, **kwargs).get("load_arg", "load") == "load"
        if current.settings.mode == "off" or not is_ours:
            return original(*args, **kwargs)
        current.loaded, current.loaded_from = None, None
        checks.before_load(current)
        _underway.loading, _underway.checkpoint_args = True, None
        try:
            result = original(*args, **kwargs)
            seen = _underway.checkpoint_args
        except SystemExit as ending:
            raise _not_loaded(current, ending) from ending
        finally:
            _underway.loading, _underway.checkpoint_args = False, None
        iteration = result[0] if isinstance(result, tuple) else result
        _restore(current, int(iteration), seen)
        current.first_samples = int(getattr(current.args, "consumed_train_samples", 0) or 0)
        return result

    return load_checkpoint


def _not_loaded(current: Session, ending: SystemExit) -> BaseException:
    """Megatron prints why it cannot load a checkpoint, and exits with status 0, as if the training were over."""
    if ending.code not in (None, 0):
        return ending
    return CheckpointError(
        "Megatron could not load the checkpoint, and would have ended with status 0",
        found=f"--load {current.args.load}; what it printed above says why",
        expected="a checkpoint that this Megatron can read with this torch",
        cause="an old Megatron under torch 2.6 or later, which loads weights only; another --ckpt-format, parallel "
        "layout or model; or nothing there, with --exit-on-missing-checkpoint",
        action=f"megaresume doctor {current.args.load} --log LOG",
    )


def around_check_checkpoint_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Megatron's ``check_checkpoint_args(checkpoint_args)``: every rank sees the arguments in the checkpoint here."""

    @functools.wraps(original)
    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        if _underway.loading:
            _underway.checkpoint_args = checkpoint_args
        return original(checkpoint_args, *args, **kwargs)

    return check_checkpoint_args


def is_loading() -> bool:
    """Whether Megatron's load of the checkpoint to go on from is running: what an engine loads now is that."""
    return _underway.loading


def see_checkpoint_args(checkpoint_args: Any) -> None:
    """The arguments in the checkpoint, where Megatron does not pass them through ``check_checkpoint_args``."""
    if _underway.loading and _underway.checkpoint_args is None:
        _underway.checkpoint_args = checkpoint_args


def _restore(current: Session, iteration: int, checkpoint_args: Any) -> None:
    args = current.args
    if iteration == 0 or getattr(args, "finetune", False):
        _begin_anew(current)
        return
    on_all_ranks(lambda: checks.after_load(current, iteration, checkpoint_args))
    current.loaded_from = Loaded(load_dir=Path(args.load), iteration=iteration, args=checkpoint_args)

    def read() -> SavedState | None:
        text = state_on(checkpoint_args)
        if text is None:
            return None
        state = read_state(text)
        if getattr(args, "override_ckpt_iteration", None) is None:
            _check_same_step(state, iteration, int(getattr(checkpoint_args, "consumed_train_samples", 0)))
        checks.after_restore(current, state, checkpoint_args)
        if current.project.kind == "megatron-lm":
            records.compare(current, state)
        return state

    current.loaded = on_all_ranks(read)


def _begin_anew(current: Session) -> None:
    """--finetune and released weights: the run begins at iteration 0, and so does our stream."""
    args = current.args
    passed = int(getattr(args, "consumed_train_samples", 0) or 0)
    if passed and current.settings.mode == "stream":
        if is_rank_0():
            print(
                f"megaresume: the checkpoint holds weights to begin with (iteration 0): the data begins at sample 0, "
                f"not at sample {passed} of the run that trained them",
                flush=True,
            )
        args.consumed_train_samples = 0


def _check_same_step(state: SavedState, iteration: int, samples: int) -> None:
    if (state.iteration, state.samples) != (iteration, samples):
        raise StateError(
            "the weights and the data state are of different steps",
            found=f"weights of iteration {iteration} and {samples} samples; data state of iteration "
            f"{state.iteration} and {state.samples} samples",
            expected="the same",
            cause="files of two checkpoints were mixed in one directory, or the counters were changed by hand",
            action="load another one with --ckpt-step N: megaresume inspect DIR shows which are whole",
        )


# Start


def after_data_is_built(current: Session) -> None:
    """Settle a start once the position of the data is known: say what was resumed, and put it into the ledger.

    Called once a start, on all ranks, with ``session.order`` set. Writes what records the loaded checkpoint lacks.

    Raises, on every rank:
        CheckpointError: the directory of ``--save`` cannot be written.
        UsageError: flags that would silently change the data, where nothing was loaded (`checks`).
    """
    args, order = current.args, current.order
    if current.settings.mode == "off" or order is None:
        return
    checks.check_arguments(current)
    _warn_of_no_random_state(args)
    listen(current)
    iteration, position = int(args.iteration), int(args.consumed_train_samples)
    state = on_all_ranks(lambda: order.stream_state(position))
    if iteration and current.loaded is not None:
        digest = state.digest if state is not None else str(getattr(order, "digest", "-"))
        current.resume = _resume(current, iteration, position, digest)
        if is_rank_0():
            # Printed, not logged: it must be in the job's output whatever the program does with its logging.
            print(current.resume.line(), flush=True)
    elif iteration and is_rank_0():
        print(
            f"megaresume: the checkpoint of iteration {iteration} has no data state: it was trained without "
            f"megaresume; its order is recorded from sample {position} on",
            flush=True,
        )
    on_rank_0(lambda: records.settle_start(current, iteration, state))


def _random_state(args: Any, saved_with: Any) -> str | None:
    """What to say of the random state, which is Megatron's own business; None: nothing, it restores it."""
    for flag, its in (("no_load_rng", args), ("no_save_rng", saved_with)):
        if getattr(its, flag, None):
            return f"random state NOT restored (--{flag.replace('_', '-')}): with dropout, losses differ"
    return None


def _warn_of_no_random_state(args: Any) -> None:
    if is_rank_0() and getattr(args, "save", None) and getattr(args, "no_save_rng", None):
        print(
            "megaresume: warning: --no-save-rng: the checkpoints of this run hold no random state. With dropout, "
            "losses after a resume differ from those of a run that was never stopped",
            flush=True,
        )


def _resume(current: Session, iteration: int, position: int, digest: str) -> Resume:
    loaded, source = current.loaded, current.loaded_from
    assert loaded is not None and source is not None
    return Resume(
        step=iteration,
        samples=position,
        digest=digest,
        tag=records.tag_of(current.project, source.iteration),
        before=records.topology_of(source.args, loaded.samples),
        now=records.topology_of(current.args, position, current.project),
        random=_random_state(current.args, source.args),
        repeated=max(loaded.samples - position, 0),
        skipped=max(position - loaded.samples, 0),
        order_changed=tuple(getattr(current.order, "changed", ())),
    )
