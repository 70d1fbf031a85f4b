"""The random generators that training may draw from without anybody saying so: those that belong to the process.

    python           random
    numpy            numpy.random, the old global generator
    torch            torch's generator on the CPU
    cuda, xpu, ...   torch's generator of the device that the engine uses
    deepspeed:NAME   those of DeepSpeed's activation checkpointing, where a program has made some
    megatron:NAME    those of Megatron's tensor-parallel layers, likewise

Generators that a program makes for itself (``torch.Generator()``, ``numpy.random.default_rng()``) nobody can find.
"""

from __future__ import annotations

import base64
import contextlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import xxhash

from megaresume.stream.errors import StateError

__all__ = ["Snapshot", "from_plain", "kept", "put", "seeded", "take", "to_plain"]

#: by name: ``random.getstate()``, ``numpy.random.get_state(legacy=False)``, or uint8 tensors of torch's.
Snapshot = dict[str, Any]

#: where trackers of generators live, if a program has imported them; all with the same methods.
_TRACKERS = {
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron": "megatron.core.tensor_parallel.random",
}


def take(device: torch.device) -> Snapshot:
    """The state of every generator of this process. Draws nothing; some 40 µs.

    Args:
        device: that the engine uses.
    """
    snapshot: Snapshot = {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if device.type != "cpu":
        snapshot[device.type] = torch.get_device_module(device).get_rng_state(device)
    for name, tracker in _trackers():
        for label, state in tracker.get_states().items():
            snapshot[f"{name}:{label}"] = state.get_state() if isinstance(state, torch.Generator) else state.clone()
    return snapshot


def put(snapshot: Snapshot, device: torch.device) -> None:
    """Set every generator that a snapshot and this process both have.

    Raises:
        StateError: a library does not take the state back.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    if device.type != "cpu":
        module = torch.get_device_module(device)
        setters[device.type] = lambda state: module.set_rng_state(state, device)
    for name, tracker in _trackers():
        setters |= {f"{name}:{label}": _setter(tracker, label) for label in tracker.get_states()}
    for name in setters.keys() & snapshot.keys():
        try:
            setters[name](snapshot[name])
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise StateError(
                f"the random state of {name} cannot be put back",
                found=f"{type(error).__name__}: {error}",
                expected="the library that saved it",
                cause="another version of it, which holds its state in another form",
                action="go on with the version that saved the checkpoint",
            ) from error


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """What is drawn within it, on the CPU, was never drawn."""
    before = take(torch.device("cpu"))
    try:
        yield
    finally:
        put(before, torch.device("cpu"))


def _setter(tracker: Any, label: str) -> Callable[[torch.Tensor], None]:
    def set_state(state: torch.Tensor) -> None:
        states = tracker.get_states()
        if isinstance(states[label], torch.Generator):
            states[label].set_state(state)
        else:
            tracker.set_states({**states, label: state.clone()})

    return set_state


def _trackers() -> Iterator[tuple[str, Any]]:
    for name, module in _TRACKERS.items():
        # Megatron's own function would make one, of a kind that the program may not want.
        tracker = getattr(sys.modules.get(module), "_CUDA_RNG_STATE_TRACKER", None)
        if tracker is not None and hasattr(tracker, "get_states"):
            yield name, tracker


def seeded(now: Snapshot, device: torch.device, key: Callable[[str], str]) -> Snapshot:
    """New states for the generators of a snapshot, from a hash of ``key(name)``."""
    snapshot: Snapshot = {}
    for name in now:
        number = xxhash.xxh3_128_intdigest(key(name).encode())
        if name == "python":
            snapshot[name] = random.Random(number).getstate()
        elif name == "numpy":
            words = [number >> shift & 0xFFFFFFFF for shift in (0, 32, 64, 96)]
            snapshot[name] = np.random.RandomState(words).get_state(legacy=False)
        else:
            generator = torch.Generator("cpu" if name == "torch" else device)
            snapshot[name] = generator.manual_seed(number >> 65).get_state()
    return snapshot


def to_plain(snapshot: Snapshot) -> dict[str, Any]:
    """Plain JSON; arrays as base64 of their bytes."""
    return {name: _plain(state) for name, state in snapshot.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": _base64(value.cpu().numpy())}
    if isinstance(value, np.ndarray):
        return {"array": _base64(value), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        if len(value) > 100:  # of Python's generator: its words, and where it stands among them
            return {"words": _base64(np.array(value, np.uint32))}
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def from_plain(plain: dict[str, Any]) -> Snapshot:
    """Read what `to_plain` made.

    Raises:
        ValueError, KeyError, TypeError: something else did.
    """
    return {name: _restored(value) for name, value in plain.items()}


def _restored(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_restored(item) for item in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return torch.frombuffer(bytearray(base64.b64decode(value["tensor"])), dtype=torch.uint8)
    if "words" in value:
        return tuple(np.frombuffer(base64.b64decode(value["words"]), np.uint32).tolist())
    if "array" in value:
        return np.frombuffer(base64.b64decode(value["array"]), value["dtype"]).copy()
    return {name: _restored(item) for name, item in value.items()}
