"""Megatron-DeepSpeed: what happens around ``DeepSpeedEngine.save_checkpoint`` and ``load_checkpoint``.

    save   Megatron's save_checkpoint -> client state with its args (the data state is on them) -> here: `Session.save`
    load   Megatron's load_checkpoint -> here: `Session.choose` by ``latest``, with which the tracker must agree
           -> DeepSpeed's load of exactly that tag -> back in Megatron's: `Session.accept`

Every other save or load of an engine passes through untouched: a save is Megatron's if the client state holds the
host's own ``args``, a load if it comes from within ``load_checkpoint(load_arg="load")`` of Megatron's checkpointing.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megaresume.checkpoint.choosing.candidates import read_pointers
from megaresume.checkpoint.choosing.search import Choice
from megaresume.checkpoint.data_state import Envelope
from megaresume.checkpoint.paths import LATEST
from megaresume.checkpoint.session.file_errors import read_undamaged, reading
from megaresume.checkpoint.session.ranks import on_all_ranks
from megaresume.checkpoint.step_file import StepFile
from megaresume.hosts.deepspeed import decoupled
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.host import EngineHost, around_load
from megaresume.hosts.megatron.host import MegatronHost, envelope_on, latest_host, megatron_host
from megaresume.stream.errors import CheckpointError, SetupError


def around_engine_save(original: Callable[..., Any]) -> Callable[..., Any]:
    """``DeepSpeedEngine.save_checkpoint``, committed and with the data state where Megatron-DeepSpeed calls it.

    Raises, on every rank:
        SetupError: Megatron's own save_checkpoint was not wrapped.
        Others: see `Session.save`.
    """

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
        host = _host_of(client_state)
        if host is None or host.order is None:
            return original(self, save_dir, tag=tag, client_state=client_state, save_latest=save_latest, **more)
        facts.check_engine(self)
        check_micro_batches(self, host.args)
        host.engine = EngineHost(self, elastic=host.settings.checkpoints.elastic)
        iteration = int(client_state["iteration"])
        return host.engine.save_checkpoint(
            host.session,
            functools.partial(original, self, save_dir, **more),
            os.fspath(save_dir),
            tag=tag,
            client_state=client_state,
            latest=save_latest,
            envelope=on_all_ranks(lambda: _state_to_save(host, iteration)),
        )

    return save_checkpoint


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
    """The host whose Megatron makes this save; None if somebody else does."""
    args = client_state.get("args")
    if args is None or "iteration" not in client_state or not hasattr(args, "consumed_train_samples"):
        return None
    host = megatron_host()
    return host if host.args is args and host.settings.mode != "off" else None


def _state_to_save(host: MegatronHost, iteration: int) -> Envelope:
    """What the hook around Megatron's ``save_checkpoint`` has put on ``args``, which must be of this save."""
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
    """``DeepSpeedEngine.load_checkpoint``, of the newest complete checkpoint where Megatron-DeepSpeed calls it.

    Raises, on every rank:
        CheckpointError: what was asked for is not whole, nothing is, or no pointer says which one; or the number of
            ZeRO partitions changed, and the checkpoint is not converted or cannot be.
    """

    def load_checkpoint(engine: Any, *args: Any, **more: Any) -> Any:
        return around_load(functools.partial(original, engine), functools.partial(_load, engine))(*args, **more)

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
    if host is None or not host.is_loading or load_dir is None:
        return read(load_dir, tag=tag)
    decoupled.watch(engine)
    check_micro_batches(engine, host.args)
    engine_host = host.engine = EngineHost(engine, elastic=host.settings.checkpoints.elastic)
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
        return None, None  # a directory without any checkpoint: as DeepSpeed, without its warning on every rank
    beside, loaded, path, client_state = found
    if not load_module_only and not getattr(host.args, "reset_iteration", False):
        host.choice, host.beside = loaded, beside
        # bigscience does not check the arguments in a universal checkpoint, so nobody else would see them.
        host.loaded_args = host.loaded_args or (client_state or {}).get("args")
    return path, client_state


def _check_pointed(choice: Choice, *, explicit: bool) -> None:
    """A checkpoint that no commit of ours vouches for is loaded only if something names it: Megatron-DeepSpeed itself
    would begin again at iteration 0, with a warning."""
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
