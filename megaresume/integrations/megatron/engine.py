"""Megatron-DeepSpeed: what happens around ``DeepSpeedEngine.save_checkpoint`` and ``load_checkpoint``.

    save   Megatron's save_checkpoint -> client state with its args (the data state is on them) -> here:
           client_state["megaresume"], marker -> DeepSpeed's files -> every file there? records, latest, tracker
    load   Megatron's load_checkpoint -> here: choose by ``latest``, with which the tracker must agree
           -> DeepSpeed's load of exactly that tag -> the state on the args is the one beside the checkpoint?

Every other save or load of an engine passes through untouched: a save is Megatron's if the client state holds the
session's own ``args``, a load if it comes from within ``load_checkpoint(load_arg="load")`` of Megatron's checkpointing.

In guard mode the state rides on ``args`` alone; ``latest`` is written all the same only when every file is there.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choose import Choice
from megaresume.checkpoint.layout import LATEST, deepspeed_tag
from megaresume.checkpoint.pointers import read_pointers, write_latest
from megaresume.checkpoint.state_file import StepFile
from megaresume.checkpoint.topology import Topology
from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations import in_flight
from megaresume.integrations.claiming import hold_directory
from megaresume.integrations.deepspeed_tags import (
    KEY,
    choose_tag,
    read_tag,
    state_within,
    write_tag,
    written_files,
)
from megaresume.integrations.megatron import records
from megaresume.integrations.megatron.checkpointing import is_loading, see_checkpoint_args
from megaresume.integrations.megatron.launch import BEGIN_ANEW
from megaresume.integrations.megatron.session import Session, session
from megaresume.integrations.megatron.state import SavedState, read_state, state_on
from megaresume.integrations.ranks import on_all_ranks, on_rank_0, same_on_all_ranks
from megaresume.stream.errors import CheckpointError, SetupError, StateError
from megaresume.stream.state import StreamState

__all__ = ["around_engine_load", "around_engine_save"]


# Save


def around_engine_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine.save_checkpoint``, committed and with the data state where Megatron-DeepSpeed calls it.

    Raises, on every rank:
        StateError: the ranks hold different data states.
        SetupError: Megatron's own save_checkpoint was not wrapped.
        CheckpointError: files are missing or empty, or the disk refuses. The pointers stay as they were.
    """

    @functools.wraps(original)
    def save_checkpoint(
        self: Any,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **more: Any,
    ) -> Any:
        if exclude_frozen_parameters:
            more["exclude_frozen_parameters"] = True
        client_state = {} if client_state is None else client_state
        current = _session_of(client_state)
        if current is None or current.order is None:
            return original(self, save_dir, tag=tag, client_state=client_state, save_latest=save_latest, **more)
        facts.check_engine(self)
        root = os.fspath(save_dir)
        name = deepspeed_tag(int(self.global_steps)) if tag is None else str(tag)
        iteration = int(client_state["iteration"])
        saved = on_all_ranks(lambda: _state_to_save(current, iteration))
        same_on_all_ranks(
            saved.text,
            "the data that was trained",
            cause="the ranks have read different corpora, or were restored differently",
            action="compare the corpora on the nodes: megaresume stream DATA.yaml",
        )
        write = functools.partial(original, self, save_dir, **more)
        if saved.stream is None:
            result = _save_guarded(self, write, root, name, client_state, save_latest)
            on_rank_0(lambda: records.write_guard(root, saved.payload))
            return result
        return write_tag(
            self,
            write,
            root,
            tag=name,
            iteration=iteration,
            state=StreamState.from_json(saved.stream),
            topology=lambda: _topology(self, current.args),
            client_state=client_state,
            latest=save_latest,
            origin=current.order.origin,
            checksums=current.settings.verify_checkpoint,
            retention=current.settings.retention,
        )

    return save_checkpoint


def _session_of(client_state: Mapping[str, Any]) -> Session | None:
    """The session whose Megatron makes this save; None: somebody else does."""
    args = client_state.get("args")
    if args is None or "iteration" not in client_state or not hasattr(args, "consumed_train_samples"):
        return None
    current = session()
    return current if current.args is args and current.settings.mode != "off" else None


def _state_to_save(current: Session, iteration: int) -> SavedState:
    """What the hook around Megatron's ``save_checkpoint`` has put on ``args``, which must be of this save."""
    text = state_on(current.args)
    saved = None if text is None else read_state(text)
    samples = int(current.args.consumed_train_samples)
    if saved is None or (saved.iteration, saved.samples) != (iteration, samples):
        was = "none" if saved is None else f"one of iteration {saved.iteration}, sample {saved.samples}"
        raise SetupError(
            "the data state was not put on Megatron's args before the save",
            found=f"data state: {was}",
            expected=f"one of iteration {iteration}, sample {samples}",
            cause="the engine's save_checkpoint was called past Megatron's own save_checkpoint, or that was replaced",
            action="save through megatron.checkpointing.save_checkpoint",
        )
    return saved


def _save_guarded(
    engine: Any,
    write: Callable[..., Any],
    save_dir: str,
    tag: str,
    client_state: Mapping[str, Any],
    latest: bool,
) -> Any:
    hold_directory(save_dir)
    result = write(tag=tag, client_state=client_state, save_latest=False)
    files = written_files(engine, save_dir, tag)

    def commit() -> None:
        tag_dir = Path(save_dir, tag)
        bad = [name for name in files if not (tag_dir / name).is_file() or not (tag_dir / name).stat().st_size]
        if bad:
            raise CheckpointError(
                f"{len(bad)} files of the checkpoint are missing or empty",
                found=f"{tag_dir}: {', '.join(bad[:10])}",
                expected=f"all {len(files)} files that the ranks wrote",
                cause="the disk is full, or the directory is not shared by all nodes",
                action="the pointers still name the checkpoint before; free space, or mount the directory everywhere",
            )
        if latest:
            write_latest(Path(save_dir), tag)

    on_rank_0(commit)
    return result


def _topology(engine: Any, args: Any) -> Topology:
    return facts.topology(engine, num_workers=int(getattr(args, "num_workers", 0) or 0))


# Load


def around_engine_load(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine.load_checkpoint``, of the newest complete checkpoint where Megatron-DeepSpeed calls it.

    Raises, on every rank:
        CheckpointError: what was asked for is not whole, nothing is, or no pointer says which one; or the number of
            ZeRO partitions changed, and the checkpoint is not converted or cannot be.
        StateError: no data state (stream mode), or another one than that beside the checkpoint.
    """

    @functools.wraps(original)
    def load_checkpoint(
        self: Any,
        load_dir: str,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
        **more: Any,
    ) -> Any:
        read = functools.partial(
            original,
            self,
            load_module_strict=load_module_strict,
            load_optimizer_states=load_optimizer_states,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
            custom_load_fn=custom_load_fn,
            **more,
        )
        if not is_loading() or load_dir is None:
            return read(load_dir, tag=tag)
        in_flight.watch(self)
        in_flight.settle(self)
        current, root = session(), os.fspath(load_dir)
        anew = load_module_only or bool(getattr(current.args, "reset_iteration", False))
        universal = facts.loads_universal(self)
        choice, step_file = choose_tag(root, tag, universal, checksums=current.settings.verify_checkpoint)
        if choice is None:
            return None, None  # a directory without any checkpoint: as DeepSpeed, without its warning on every rank

        on_all_ranks(lambda: _check_pointed(choice, explicit=tag is not None or universal))
        _, path, client_state = read_tag(
            self,
            read,
            choice,
            step_file,
            elastic=current.settings.elastic,
            optimizer=not load_module_only and load_optimizer_states,
        )
        if not anew:
            on_all_ranks(lambda: _check_state(current, choice, step_file, client_state or {}))
            # bigscience does not check the arguments in a universal checkpoint, so nobody else would see them.
            see_checkpoint_args((client_state or {}).get("args"))
        return path, client_state

    return load_checkpoint


def _check_pointed(choice: Choice, *, explicit: bool) -> None:
    """A checkpoint that no commit of ours vouches for is loaded only if something names it: Megatron-DeepSpeed itself
    would begin anew at iteration 0, with a warning."""
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
        action=f"name one: --load-tag {choice.tag}; or write its name into {choice.load_dir / LATEST}; to begin "
        "anew, leave out --load",
    )


def _check_state(current: Session, choice: Choice, step_file: StepFile | None, client_state: Mapping[str, Any]) -> None:
    """The state on the args in the checkpoint, the one in the client state and the one beside it are the same."""
    args = client_state.get("args")
    text = None if args is None else state_on(args)
    saved = None if text is None else read_state(text)
    if current.settings.mode == "stream" and (saved is None or saved.stream is not None):
        within = state_within(choice, step_file, client_state, BEGIN_ANEW)
        if saved is None or saved.stream is None or StreamState.from_json(saved.stream) != within:
            raise StateError(
                "the checkpoint holds two data states",
                found="none on its args" if saved is None else f"sample {saved.samples} on its args",
                expected=f"sample {within.samples}, digest {within.digest}, as in client_state[{KEY!r}]",
                cause="one of them was edited",
                action=f"megaresume inspect {choice.load_dir}; load a checkpoint that is whole",
            )
    iteration = client_state.get("iteration")
    if step_file is not None and iteration is not None and step_file.iteration != int(iteration):
        raise StateError(
            "the weights and the data state are of different steps",
            found=f"weights of iteration {iteration}, data state of iteration {step_file.iteration}",
            expected="the same iteration",
            cause="files of two checkpoints were mixed in one directory",
            action="megaresume inspect DIR shows which checkpoints are whole; load one of those",
        )
