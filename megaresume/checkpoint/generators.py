"""The generators of a process that training may use implicitly: takes and restores their states, as plain JSON.

    python           random
    numpy            numpy.random, the legacy global generator
    torch            torch's generator on the CPU
    cuda, xpu, ...   torch's generator of the engine's device
    deepspeed:NAME   those of DeepSpeed's activation checkpointing, if a program created any
    megatron:NAME    those of Megatron's tensor-parallel layers, likewise

Generators that a program creates itself (``torch.Generator()``, ``numpy.random.default_rng()``) cannot be found.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import functools
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import xxhash

from megaresume.stream.errors import StateError

#: by name: ``random.getstate()``, ``numpy.random.get_state(legacy=False)``, uint8 tensors of torch's, or a count.
Snapshot = dict[str, Any]

#: modules with trackers of generators, if a program has imported them; all trackers have the same methods.
_TRACKERS = {
    "deepspeed": "deepspeed.runtime.activation_checkpointing.checkpointing",
    "megatron": "megatron.core.tensor_parallel.random",
}


#: the content of a generator's memory, for comparison; None if unknown.
_Content = tuple[object, ...] | None


class _Remembered:
    """The state of a generator, extracted again only if its memory has changed.

    Extracting those of Python and numpy takes 40 µs, and 120 µs in a step whose work has filled the caches; most
    programs never use them during training. No memory layout is assumed: bytes are compared with earlier ones, and
    `follows` has tried whether every draw changes them.

    Args:
        get: extracts the state.
        content: reads the memory; None: it cannot be relied on.
    """

    def __init__(self, get: Callable[[], Any], content: Callable[[], _Content] | None) -> None:
        self._get, self._content = get, content
        self._last: tuple[_Content, Any] = None, None

    def take(self) -> Any:
        """The state: the same object as last time if nothing was drawn."""
        # Before the state, so that a draw by another thread in between is noticed next time.
        content = None if self._content is None else self._content()
        if content is None:
            return self._get()
        if self._last[0] != content:
            self._last = content, self._get()
        return self._last[1]


def follows(content: Callable[[], _Content], *draws: Callable[[], object]) -> bool:
    """Whether each of these draws changes the content, and nothing else does."""
    for draw in draws:
        before = content()
        if before is None or content() != before:
            return False
        draw()
        if content() == before:
            return False
    return True


def content_of_python(generator: Any) -> Callable[[], _Content]:
    """A function that returns the content of a Python generator's memory."""
    memory = _memory(generator, random.Random.__base__)
    return lambda: (memory.raw, generator.gauss_next)


def content_of_numpy(generator: Any) -> Callable[[], _Content]:
    """A function that returns the content of a legacy numpy generator's memory; None if its bits were replaced since,
    or are not a Mersenne Twister's: others store them elsewhere.
    """
    bits = generator._bit_generator
    own, of_bits = _memory(generator, np.random.RandomState), _memory(bits, np.random.MT19937)
    is_known = type(bits) is np.random.MT19937
    return lambda: (own.raw, of_bits.raw) if is_known and generator._bit_generator is bits else None


def _memory(thing: object, kind: Any) -> Any:
    """The content of a C object of this type, after reference count and type. Only valid while the object exists."""
    head = object.__basicsize__
    return (ctypes.c_char * (kind.__basicsize__ - head)).from_address(id(thing) + head)


@functools.cache
def _of_process() -> tuple[_Remembered, _Remembered]:
    """The global generators of Python and numpy."""
    python, numpy = random.Random(0), np.random.RandomState(0)
    # A second value of a normal distribution is stored beside the bits, which do not change when it is drawn.
    draws_of_python = python.random, *[lambda: python.gauss(0, 1)] * 3
    draws_of_numpy = numpy.random_sample, *[numpy.standard_normal] * 3
    return (
        _remembered(random.getstate, content_of_python, python, draws_of_python),
        _remembered(np.random.get_state, content_of_numpy, numpy, draws_of_numpy, legacy=False),
    )


def _remembered(
    get: Any, content_of: Callable[[Any], Callable[[], _Content]], trial: object, draws: Sequence[Any], **options: Any
) -> _Remembered:
    own = get.__self__  # a method of the generator
    is_followed = type(own) is type(trial) and follows(content_of(trial), *draws)
    return _Remembered(functools.partial(get, **options), content_of(own) if is_followed else None)


def take(device: torch.device) -> Snapshot:
    """The state of every generator of this process. Draws nothing; takes 3 µs, or 45 if all were used.

    Args:
        device: of the engine.
    """
    python, numpy = _of_process()
    snapshot: Snapshot = {
        "python": python.take(),
        "numpy": numpy.take(),
        "torch": torch.default_generator.get_state(),
    }
    if (accelerator := _accelerator(device)) is not None:
        kind, module = accelerator
        snapshot[kind] = module.get_rng_state(device)
    for name, tracker in _trackers():
        for label, state in tracker.get_states().items():
            snapshot[f"{name}:{label}"] = state.get_state() if isinstance(state, torch.Generator) else state.clone()
    return snapshot


@functools.cache
def _accelerator(device: torch.device) -> tuple[str, Any] | None:
    """The type of a device and torch's module for it; None for the CPU. Cached, as torch builds the type's name each
    time: 15 µs in a step whose work has filled the caches.
    """
    return None if device.type == "cpu" else (device.type, torch.get_device_module(device))


def put(snapshot: Snapshot, device: torch.device) -> None:
    """Set every generator that is in a snapshot and in this process.

    Raises:
        StateError: a library does not accept the state.
    """
    setters: dict[str, Callable[[Any], object]] = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
    }
    if (accelerator := _accelerator(device)) is not None:
        kind, module = accelerator
        setters[kind] = lambda state: module.set_rng_state(state, device)
    for name, tracker in _trackers():
        setters |= {f"{name}:{label}": _setter(tracker, label) for label in tracker.get_states()}
    for name in setters.keys() & snapshot.keys():
        try:
            setters[name](snapshot[name])
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise StateError(
                f"the random state of {name} cannot be restored",
                found=f"{type(error).__name__}: {error}",
                expected="the library that saved it",
                cause="another version of it, which holds its state in another form",
                action="use the version that saved the checkpoint",
            ) from error


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """A context after which the generators on the CPU are as before it."""
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
        # Megatron's own function would create one, of a kind that the program may not want.
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
    """A snapshot as plain JSON; arrays as base64 of their bytes."""
    return {name: _plain(state) for name, state in snapshot.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"tensor": _base64(value.cpu().numpy())}
    if isinstance(value, np.ndarray):
        return {"array": _base64(value), "dtype": str(value.dtype)}
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        if len(value) > 100:  # Python's generator: its words, and the position in them
            return {"words": _base64(np.array(value, np.uint32))}
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode("ascii")


def from_plain(plain: dict[str, Any]) -> Snapshot:
    """Read the result of `to_plain`.

    Raises:
        ValueError, KeyError, TypeError: it is something else.
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


def drawn_between(before: Snapshot, after: Snapshot) -> list[str]:
    """The generators that were used between two snapshots."""
    old, new = to_plain(before), to_plain(after)
    return [name for name in new if old.get(name) != new[name]]
