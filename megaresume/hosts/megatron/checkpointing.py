"""Hooks around Megatron's ``save_checkpoint`` and ``load_checkpoint``; the protocol itself is `Session`'s.

    save   state of the consumed samples -> args.megaresume_state, before Megatron collects its own
           Megatron-LM: `Session.save` around Megatron's save, which moves its tracker by itself
           (an asynchronous save: committed in its finalizer, with the values from when it began)
           Megatron-DeepSpeed: the same around the save of its engine (`engine`)
    load   the arguments in the checkpoint are seen as they pass -> their state, read on every rank
           -> `Session.accept`; the data resumes from it when it is built -> `Session.resume`, `Session.begin`

The state inside the checkpoint is authoritative: it is in the same file as the weights. The records next to the
checkpoint are copies; a kill between Megatron's tracker and the copy costs nothing, since the next start writes it
(`record_loaded`).
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from megaresume.checkpoint.ending import before_end, is_end_of_all
from megaresume.checkpoint.file_errors import is_damage, read_on_all_ranks, read_undamaged
from megaresume.checkpoint.host import Restored
from megaresume.checkpoint.load.search import Choice
from megaresume.checkpoint.lock.lock import check_owned
from megaresume.checkpoint.ranks import is_rank_0, on_all_ranks, on_rank_0
from megaresume.checkpoint.records.envelope import Envelope
from megaresume.checkpoint.records.manifest import FileEntry
from megaresume.checkpoint.records.names import megatron_tag
from megaresume.checkpoint.saver import Save, record_loaded
from megaresume.hosts.loader_states import LoaderRecord
from megaresume.hosts.megatron import checks
from megaresume.hosts.megatron.calls import check_save
from megaresume.hosts.megatron.host import (
    KEY,
    Found,
    MegatronHost,
    can_be_written,
    envelope_on,
    latest_host,
    megatron_host,
    topology_of,
)
from megaresume.hosts.writers import ending_with_us, written_with_us
from megaresume.stream.errors import CheckpointError

# Save


def around_save_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``save_checkpoint(iteration, model, ...)`` that adds the state of the data.

    Raises, on every rank: see `Session.save`.
    """

    def save_checkpoint(iteration: int, *args: Any, **kwargs: Any) -> Any:
        host = megatron_host()
        if host.settings.mode == "off":
            return original(iteration, *args, **kwargs)
        if host.session.replay is not None:
            return None  # a replay saves nothing
        envelope = _put_state(host, int(iteration))
        given = _arguments(original, iteration, *args, **kwargs)
        host.proof.saved.add("release" if given.get("release") else str(int(iteration)))
        if host.settings.checkpoints.retention and getattr(host.args, "save_retain_interval", None):
            host.args.save_retain_interval = None  # part of our own retention, which knows what is complete
        write = ending_with_us()(functools.partial(original, iteration, *args, **kwargs))
        if host.project.kind != "megatron-lm":
            return write()  # saves through its engine, which is wrapped as well
        plain = not given.get("non_persistent_ckpt") and not given.get("release")
        if envelope is None or host.order is None or not plain or not can_be_written(host.args.save):
            return _without_records(host, write)
        return host.session.save(
            host.args.save,
            functools.partial(_write, host, write),
            tag=megatron_tag(int(iteration)),
            envelope=envelope,
            latest=False,
            # Write it again, durably, as Megatron writes it in place.
            tracker=not _is_async(host),
        )

    return save_checkpoint


def _is_async(host: MegatronHost) -> bool:
    return bool(getattr(host.args, "async_save", False))


def _put_state(host: MegatronHost, iteration: int) -> Envelope | None:
    """Set ``args.megaresume_state`` to the state of ``args.consumed_train_samples``. Collective.

    Without data (a conversion between formats), the loaded state is passed on if it still matches the counter;
    otherwise there is none.

    Raises:
        SetupError: see `check_save`.
    """
    check_save(host)
    if host.order is not None:
        envelope: Envelope | None = host.session.snapshot(iteration)
    else:
        envelope = host.loaded if host.loaded is not None and host.loaded.samples == host.samples() else None
    if envelope is not None:
        setattr(host.args, KEY, envelope.to_text())
    elif hasattr(host.args, KEY):
        delattr(host.args, KEY)
    return envelope


def _arguments(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    try:
        return inspect.signature(function).bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):  # another patcher's signature: Megatron passes these two by name
        return kwargs


def _without_records(host: MegatronHost, write: Callable[[], Any]) -> Any:
    """A save without records beside it. Its duration tells how long before its end a job must stop."""
    began = time.monotonic()
    result = write()
    if not _is_async(host):
        host.session.is_saved(began)
    return result


def _write(host: MegatronHost, write: Callable[[], Any], save: Save) -> Any:
    """Megatron's own save, for `Session.save`."""
    host.unscheduled = save if _is_async(host) else None
    try:
        result = write()
        if host.unscheduled is not None:
            save.defer()
            if is_rank_0():
                print(
                    "megaresume: this Megatron schedules asynchronous saves in its own way: the records beside "
                    "the checkpoint are written by the next start",
                    flush=True,
                )
    finally:
        host.unscheduled = None
    return result


def around_schedule_async_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``schedule_async_save(request)`` that makes our commit its last finalizer, after the tracker.

    Finalizers run on all ranks, in the order of the saves, once all ranks have written their files.
    """

    def schedule_async_save(async_request: Any, *args: Any, **kwargs: Any) -> Any:
        host = latest_host()
        save = None if host is None else host.unscheduled
        if host is not None and save is not None:
            host.unscheduled = None
            save.defer()
            # Before Megatron's own, which writes the tracker in place: a job that lost the directory must not.
            async_request.finalize_fns.insert(0, lambda: on_rank_0(lambda: check_owned(save.save_dir)))
            async_request.add_finalize_fn(lambda: host.session.commit(save))
            _finish_before_end(sys.modules.get(original.__module__))
        write = getattr(async_request, "async_fn", None)
        if host is not None and host.settings.mode != "off" and write is not None:
            async_request = async_request._replace(async_fn=written_with_us(write))
        return original(async_request, *args, **kwargs)

    return schedule_async_save


@functools.cache
def _finish_before_end(async_utils: ModuleType | None) -> None:
    """Finish the asynchronous saves, for which Megatron needs all ranks, before an error that all of them have ends
    the program. With another error they end, as without us.

    Args:
        async_utils: Megatron's module that schedules them.
    """
    finalize = getattr(async_utils, "maybe_finalize_async_save", None)

    def finish() -> None:
        if finalize is not None and is_end_of_all():
            finalize(blocking=True)

    before_end(finish)


# Load


def around_load_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``load_checkpoint(...) -> (iteration, ...)`` that also accepts the state of the data.

    Only the load to resume from (``--load``) counts, not that of a teacher or reference model.

    Raises, on every rank:
        StateError: the state is damaged, belongs to other weights, or differs from the one beside the checkpoint.
        CheckpointError: see `checks.before_load` and `checks.after_load`; or Megatron gave up with status 0.
        UsageError: flags that would silently change the data (`checks`).
    """

    def load_checkpoint(*args: Any, **kwargs: Any) -> Any:
        host = megatron_host()
        is_ours = _arguments(original, *args, **kwargs).get("load_arg", "load") == "load"
        if host.settings.mode == "off" or not is_ours:
            return original(*args, **kwargs)
        result, seen = _load(host, functools.partial(original, *args, **kwargs))
        _accept(host, int(result[0] if isinstance(result, tuple) else result), seen)
        host.proof.first_samples = int(getattr(host.args, "consumed_train_samples", 0) or 0)
        return result

    return load_checkpoint


#: What a load sets on Megatron's arguments before it has read everything, and asserts to be 0 when it begins.
_SET_BY_A_LOAD = ("ckpt_step", "consumed_train_samples", "consumed_valid_samples", "skipped_train_samples")


def _load(host: MegatronHost, read: Callable[[], Any]) -> tuple[Any, Any]:
    """Megatron's own load, retried with an older checkpoint if files cannot be read; and the arguments it has seen."""
    before = {name: getattr(host.args, name) for name in _SET_BY_A_LOAD if hasattr(host.args, name)}

    def read_one(damaged: Mapping[Path, str]) -> tuple[Any, Any]:
        vars(host.args).update(before)
        host.session.loaded = None
        host.found = Found()
        choice, beside = checks.before_load(host, damaged)
        host.found, load = Found(choice, beside, is_loading=True), host.args.load
        if choice is not None and host.session.roots.copies_of(Path(load)) is not None:
            host.args.load = str(choice.load_dir)  # may be the directory of the copies
        try:
            if choice is None:
                return _read(host, read, None), host.found.args
            return read_on_all_ranks(lambda: _read(host, read, choice), choice), host.found.args
        finally:
            host.found, host.args.load = replace(host.found, args=None, is_loading=False), load

    return read_undamaged(read_one)


def _read(host: MegatronHost, read: Callable[[], Any], choice: Choice | None) -> Any:
    try:
        return read()
    except SystemExit as ending:
        reason = ending.__context__
        if choice is not None and isinstance(reason, Exception) and is_damage(reason, choice):
            raise reason from ending
        raise _not_loaded(host, ending) from ending
    except Exception:
        raise
    except BaseException as error:  # from torch.distributed.checkpoint, with every rank's error
        if choice is not None and isinstance(getattr(error, "failures", None), dict) and is_damage(error, choice):
            raise RuntimeError(str(error)) from error
        raise


def _not_loaded(host: MegatronHost, ending: SystemExit) -> BaseException:
    """The error when Megatron prints why it cannot load, then exits with status 0, as if the training were over."""
    if ending.code not in (None, 0):
        return ending
    return CheckpointError(
        "Megatron could not load the checkpoint, and would have ended with status 0",
        found=f"--load {host.args.load}; what it printed above says why",
        expected="a checkpoint that this Megatron can read with this torch",
        cause="an old Megatron under torch 2.6 or later, which loads weights only; another --ckpt-format, parallel "
        "layout or model; a checkpoint of --no-save-rng, without --no-load-rng; or nothing there, with "
        "--exit-on-missing-checkpoint",
        action=f"megaresume doctor {host.args.load} --log LOG",
    )


def around_check_checkpoint_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hook on Megatron's ``check_checkpoint_args(checkpoint_args)``, where every rank sees a checkpoint's arguments."""

    def check_checkpoint_args(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        host = latest_host()
        if host is not None and host.found.is_loading:
            host.found = replace(host.found, args=checkpoint_args)
        return original(checkpoint_args, *args, **kwargs)

    return check_checkpoint_args


def _accept(host: MegatronHost, iteration: int, seen: Any) -> None:
    """Accept what Megatron has loaded as what the run resumes from. Collective."""
    args = host.args
    if iteration == 0 or getattr(args, "finetune", False):
        _begin_anew(host)
        return
    on_all_ranks(lambda: checks.after_load(host, iteration, seen))
    host.found = replace(host.found, args=seen)
    envelope = on_all_ranks(lambda: envelope_on(seen))
    if envelope is None:
        return
    on_all_ranks(lambda: checks.after_restore(host, envelope, seen))
    trained = iteration, int(getattr(seen, "consumed_train_samples", 0))
    if getattr(args, "override_ckpt_iteration", None) is not None:  # asked for, and reported when the data is built
        trained = envelope.iteration, envelope.samples
    root, tag = Path(os.path.abspath(args.load)), host.tag(trained[0])
    choice = host.found.choice or Choice(load_dir=root, tag=tag, iteration=trained[0], record=None, manifest=None)
    topology = topology_of(seen, envelope.samples)
    restored = Restored(
        envelope=envelope,
        iteration=trained[0],
        samples=trained[1],
        counter="consumed_train_samples",
        topology=topology,
    )
    host.session.accept(choice, host.found.beside, restored)


def _begin_anew(host: MegatronHost) -> None:
    """With --finetune or released weights, start the stream at sample 0, as the run starts at iteration 0."""
    args = host.args
    passed = int(getattr(args, "consumed_train_samples", 0) or 0)
    if passed and host.settings.mode == "stream":
        if is_rank_0():
            print(
                f"megaresume: the checkpoint holds weights to begin with (iteration 0): the data begins at sample 0, "
                f"not at sample {passed} of the run that trained them",
                flush=True,
            )
        args.consumed_train_samples = 0


# Start


def after_data_is_built(host: MegatronHost) -> None:
    """Settle a start once the data's position is known: report what was resumed, and record it in the ledger.

    Called once per start, on all ranks, with ``host.order`` set. Writes any records that the loaded checkpoint lacks.
    Raises, on every rank:
        CheckpointError: the directory of ``--save`` cannot be written, or start after start leads to no save.
        UsageError: the run would save over another one.
    """
    args, session = host.args, host.session
    if host.settings.mode == "off" or host.order is None:
        return
    _warn_of_no_random_state(args)
    if session.stopper is not None:
        session.stopper.install()
    iteration, position = host.iteration(), host.samples()
    if iteration and session.loaded is not None:
        session.resume(position=position, words=_random_state(args, host.found.args))
        _record_loaded(host)
    elif iteration:
        session.roots.mark_as_own(args.load)
        if is_rank_0():
            print(
                f"megaresume: the checkpoint of iteration {iteration} has no data state: it was trained without "
                f"megaresume; its order is recorded from sample {position} on",
                flush=True,
            )
    trains = not (host.is_over(iteration, position) or getattr(args, "skip_train", False))
    session.begin(trains=trains, save_interval=getattr(args, "save_interval", None))


def _record_loaded(host: MegatronHost) -> None:
    """Megatron moves its tracker by itself, so a kill right after that loses only the records."""
    session, loaded, root = host.session, host.session.loaded, host.session.roots.save_dir
    if loaded is None or root is None or host.project.kind != "megatron-lm":
        return
    envelope = loaded.envelope
    files: tuple[FileEntry, ...] = ()
    if envelope.kind == "loader":  # whose states were written before Megatron's own files
        files = LoaderRecord.from_state(envelope.state).entries(envelope.iteration, loaded.choice.tag)
    replaces = not getattr(host.args, "non_persistent_ckpt_type", None)

    def record() -> None:
        session.loaded = record_loaded(root, loaded, beside=files, replaces=replaces)

    on_rank_0(record)


def _random_state(args: Any, saved_with: Any) -> str | None:
    """The warning if the random state is not restored; None if Megatron restores it."""
    for flag, its in (("no_load_rng", args), ("no_save_rng", saved_with)):
        if getattr(its, flag, None):
            return f"random state NOT restored (--{flag.replace('_', '-')}): with dropout, losses differ"
    return None


def _warn_of_no_random_state(args: Any) -> None:
    if is_rank_0() and getattr(args, "save", None) and getattr(args, "no_save_rng", None):
        print(
            "megaresume: warning: --no-save-rng: the checkpoints of this run hold no random state. Megatron resumes "
            "from them only with --no-load-rng, and with dropout, losses then differ from those of a run that was "
            "never stopped",
            flush=True,
        )
