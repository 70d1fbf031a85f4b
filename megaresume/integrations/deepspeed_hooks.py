"""The methods of a DeepSpeed engine that carry its data, hooked on the instance: other wrappers stay in the chain.

save_checkpoint, load_checkpoint   the data state goes with the weights: `deepspeed_host`
step, forward, backward            a step trains exactly its micro-batches: `taken`
train_batch                        of a pipeline engine: the same
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megaresume.integrations import deepspeed_engine as facts
from megaresume.integrations import in_flight
from megaresume.integrations.deepspeed_host import around_load
from megaresume.integrations.engine_data import EngineData

__all__ = ["hook"]

#: where an engine keeps what is attached to it.
_SLOT = "_megaresume_attached"


@dataclass(slots=True)
class _Slot:
    """What is attached to an engine now; the hooks look here at every call."""

    data: EngineData


def hook(engine: Any, attached: EngineData) -> None:
    """Let the engine's methods carry this data from now on, in the place of what was attached before."""
    slot: _Slot | None = engine.__dict__.get(_SLOT)
    if slot is not None:
        slot.data.detach("megaresume.attach was called again on the same engine")
        slot.data = attached
        return
    slot = _Slot(attached)
    setattr(engine, _SLOT, slot)
    in_flight.watch(engine)
    engine.save_checkpoint = _save_hook(engine.save_checkpoint, slot)
    engine.load_checkpoint = _load_hook(engine.load_checkpoint, slot)
    if facts.is_pipeline(engine):
        engine.train_batch = _train_batch_hook(engine.train_batch, slot)
    else:
        engine.step = _step_hook(engine.step, slot)
        engine.forward = _forward_hook(engine.forward, slot)
        engine.backward = _backward_hook(engine.backward, slot)


def _save_hook(save: Callable[..., Any], slot: _Slot) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_checkpoint(
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        **more: Any,
    ) -> Any:
        if exclude_frozen_parameters:
            more["exclude_frozen_parameters"] = True
        write = functools.partial(save, **more)
        data = slot.data
        return data.host.save_checkpoint(
            data.session,
            functools.partial(write, save_dir),
            os.fspath(save_dir),
            tag=tag,
            client_state=client_state or {},
            latest=save_latest,
            is_untouched=data.is_untouched,
        )

    return save_checkpoint


def _load_hook(load: Callable[..., Any], slot: _Slot) -> Callable[..., Any]:
    def load_ours(read: Callable[..., Any], load_dir: str, tag: str | None, module_only: bool, _optimizer: bool) -> Any:
        data = slot.data
        return data.host.load_checkpoint(data.session, read, os.fspath(load_dir), tag, module_only)

    return around_load(load, load_ours)


def _train_batch_hook(train: Callable[..., Any], slot: _Slot) -> Callable[..., Any]:
    @functools.wraps(train)
    def train_batch(data_iter: Iterator[Any] | None = None, *args: Any, **more: Any) -> Any:
        in_flight.settle(slot.data.engine)  # a pipeline changes its weights without waiting for its writer
        slot.data.before_train_batch()
        with slot.data.broken_by_errors_of("engine.train_batch()", weights=True):
            result = train(slot.data if data_iter is None else data_iter, *args, **more)
        slot.data.after_train_batch()
        return result

    return train_batch


def _step_hook(step: Callable[..., Any], slot: _Slot) -> Callable[..., Any]:
    @functools.wraps(step)
    def engine_step(*args: Any, **more: Any) -> Any:
        slot.data.before_step()
        with slot.data.broken_by_errors_of("engine.step()", weights=True):
            result = step(*args, **more)
        slot.data.after_step()
        return result

    return engine_step


def _forward_hook(forward: Callable[..., Any], slot: _Slot) -> Callable[..., Any]:
    @functools.wraps(forward)
    def engine_forward(*inputs: Any, **more: Any) -> Any:
        slot.data.saw((*inputs, *more.values()))
        return forward(*inputs, **more)

    return engine_forward


def _backward_hook(backward: Callable[..., Any], slot: _Slot) -> Callable[..., Any]:
    @functools.wraps(backward)
    def engine_backward(*args: Any, **more: Any) -> Any:
        with slot.data.broken_by_errors_of("engine.backward()"):
            return backward(*args, **more)

    return engine_backward
