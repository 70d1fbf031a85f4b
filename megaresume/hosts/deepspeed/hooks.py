"""The methods of an engine that carry its data, hooked on the instance; other wrappers stay in the chain.

save_checkpoint, load_checkpoint   the data state goes with the weights: `host`
step, forward, backward            a step trains exactly its micro-batches: `micro_batches`
train_batch                        of a pipeline engine: the same
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaresume.checkpoint.session.session import Session
from megaresume.checkpoint.session.settings import Checkpoints
from megaresume.hosts import instances
from megaresume.hosts.deepspeed import decoupled
from megaresume.hosts.deepspeed import engine as facts
from megaresume.hosts.deepspeed.engine_data import EngineData
from megaresume.hosts.deepspeed.host import EngineHost, around_load
from megaresume.stream.errors import UsageError

#: where an engine keeps what is attached to it.
_SLOT = "_megaresume_attached"


@dataclass(slots=True)
class _Slot:
    """What is attached to an engine now; the hooks look here at every call."""

    data: EngineData


def hook(engine: Any, attached: EngineData) -> None:
    """Let the engine's methods carry this data from now on, in place of what was attached before."""
    slot: _Slot | None = engine.__dict__.get(_SLOT)
    if slot is not None:
        slot.data.detach("megaresume.attach was called again on the same engine")
        slot.data = attached
        return
    slot = _Slot(attached)
    setattr(engine, _SLOT, slot)
    decoupled.watch(engine)
    hooks: dict[str, Callable[..., Any]] = {"save_checkpoint": _save}
    if facts.is_pipeline(engine):
        hooks["train_batch"] = _train_batch
    else:
        hooks |= {"step": _step, "forward": _forward, "backward": _backward}
    for name, function in hooks.items():
        instances.hook(engine, name, functools.partial(function, slot))
    engine.load_checkpoint = around_load(engine.load_checkpoint, functools.partial(_load, slot))


def _save(
    slot: _Slot,
    save: Callable[..., Any],
    /,
    save_dir: str,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
    **more: Any,
) -> Any:
    if exclude_frozen_parameters:
        more["exclude_frozen_parameters"] = True
    data = slot.data
    return data.host.save_checkpoint(
        data.session,
        functools.partial(save, save_dir, **more),
        os.fspath(save_dir),
        tag=tag,
        client_state=client_state or {},
        latest=save_latest,
        is_untouched=data.is_untouched,
    )


def _load(
    slot: _Slot, read: Callable[..., Any], load_dir: str, tag: str | None, module_only: bool, _optimizer: bool
) -> Any:
    data = slot.data
    return data.host.load_checkpoint(data.session, read, os.fspath(load_dir), tag, module_only)


def _train_batch(
    slot: _Slot, train: Callable[..., Any], /, data_iter: Iterator[Any] | None = None, *args: Any, **more: Any
) -> Any:
    decoupled.settle(slot.data.engine)  # a pipeline changes its weights without waiting for its writer
    slot.data.before_train_batch()
    with slot.data.broken_by_errors_of("engine.train_batch()", weights=True):
        result = train(slot.data if data_iter is None else data_iter, *args, **more)
    slot.data.after_train_batch()
    return result


def _step(slot: _Slot, step: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    slot.data.before_step()
    with slot.data.broken_by_errors_of("engine.step()", weights=True):
        result = step(*args, **more)
    slot.data.after_step()
    return result


def _forward(slot: _Slot, forward: Callable[..., Any], /, *inputs: Any, **more: Any) -> Any:
    slot.data.saw((*inputs, *more.values()))
    return forward(*inputs, **more)


def _backward(slot: _Slot, backward: Callable[..., Any], /, *args: Any, **more: Any) -> Any:
    with slot.data.broken_by_errors_of("engine.backward()"):
        return backward(*args, **more)


def session_of(host: EngineHost, checkpoints: Checkpoints, **more: Any) -> Session:
    """The session of an engine.

    Args:
        host: of the engine.
        checkpoints: where the run saves, what it keeps, and what it may load.
        more: further arguments of `Session`.

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
    return Session(host, **checkpoints.of_session, random=host.random_state(), **more)
