"""Does a processor keep its promises? Asked when an encoder is built, before anything depends on it.

same image, same generator, other global seeds  -->  the same bits, and no global generator moved
image tokens of (width, height)                 ==   tokens_of(pixels, grid), for sizes of many shapes
pickle.loads(pickle.dumps(processor))           -->  the same again
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from megaresume.encoding.images.processors.base import image_tokens, pattern_of
from megaresume.stream.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

    from megaresume.encoding.images.processors.base import Grid, Pixels, Processor

#: width, height in pixels: square, wide, tall, small, odd.
SIZES = ((64, 64), (301, 97), (75, 220), (29, 31), (448, 336))


def check_processor(processor: Processor, sizes: tuple[tuple[int, int], ...] = SIZES) -> None:
    """Try it on images of several sizes.

    Raises:
        ConfigError: which promise it breaks, and how to mend it.
    """
    copy = _pickled(processor)
    generators = _Globals()
    states = generators.states()
    try:
        for width, height in sizes:
            _check_size(processor, copy, _picture(width, height), generators)
    finally:
        generators.restore(states)


def _check_size(processor: Processor, copy: Processor, image: Image, generators: _Globals) -> None:
    width, height = image.size
    announced = image_tokens(pattern_of(processor, width, height))
    first = _run(processor, image, generators, seed=1)
    pixels, grid = first
    shape = tuple(processor.pixel_shape)
    if not isinstance(pixels, np.ndarray) or pixels.dtype != np.float32 or pixels.shape[1:] != shape:
        what = f"{pixels.dtype}{list(pixels.shape)}" if isinstance(pixels, np.ndarray) else type(pixels).__name__
        raise _broken("returns pixels other than promised", what, f"float32[k, {', '.join(map(str, shape))}]")
    if not pixels.flags.c_contiguous or not np.isfinite(pixels).all():
        raise _broken("returns pixels that are not plain numbers", "a view, or NaN", "finite, C-contiguous float32")
    if len(grid) != 3 or not all(type(part) is int for part in grid):
        raise _broken("returns a bad grid", repr(grid), "(frames, rows, columns), three int")
    made = processor.tokens_of(pixels, grid)
    if made != announced:
        raise _broken(
            "announces different lengths from those it makes",
            f"{announced} for {width} x {height} pixels, and {made!r} tokens of a grid of {grid}",
            "the same number from both",
            "compute num_tokens (or pattern) by the formula that the pixels are cut by",
        )
    for other in (processor, copy):
        again = _run(other, image, generators, seed=2)
        if not np.array_equal(again[0], pixels) or again[1] != grid:
            raise _broken(
                "is not a function of image and generator",
                f"two results for one image of {width} x {height} pixels and equal generators",
                "the same bits",
                "draw only from the generator that it is given: not from random, numpy.random, torch, time or a state",
            )


def _run(processor: Processor, image: Image, generators: _Globals, *, seed: int) -> tuple[Pixels, Grid]:
    generators.seed(seed)
    before = generators.states()
    result = processor(image.copy(), np.random.Generator(np.random.Philox(key=7)))
    moved = [name for name, state in generators.states().items() if not _equal(state, before[name])]
    if moved:
        raise _broken(
            "moves a generator that belongs to the whole process",
            f"{', '.join(moved)} after one image",
            "every draw from the given generator",
            "call generator.random(), generator.integers() and so on, with the second argument of the processor",
        )
    return result


def _pickled(processor: Processor) -> Processor:
    try:
        copy: Processor = pickle.loads(pickle.dumps(processor))
    except Exception as error:  # pickle raises whatever the object's methods raise
        raise _broken(
            "cannot be sent to a worker process",
            f"{type(error).__name__}: {error}",
            "an object that pickle can write and read",
            "keep no open file, lambda or module in it; define its class at the top of a module",
        ) from error
    return copy


class _Globals:
    """The generators that libraries share behind everybody's back."""

    def __init__(self) -> None:
        self._ways: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[int], Any]]] = {
            "random": (random.getstate, random.setstate, random.seed),
            "numpy.random": (np.random.get_state, np.random.set_state, np.random.seed),
        }
        torch = sys.modules.get("torch")
        if torch is not None and hasattr(torch, "get_rng_state"):

            def seed_torch(seed: int) -> None:
                torch.default_generator.manual_seed(seed)

            self._ways["torch"] = (torch.get_rng_state, torch.set_rng_state, seed_torch)

    def states(self) -> dict[str, Any]:
        return {name: get() for name, (get, _, _) in self._ways.items()}

    def restore(self, states: dict[str, Any]) -> None:
        for name, state in states.items():
            self._ways[name][1](state)

    def seed(self, seed: int) -> None:
        for _, _, set_seed in self._ways.values():
            set_seed(seed)


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def _picture(width: int, height: int) -> Image:
    """Colours that differ everywhere, without a generator."""
    import PIL.Image

    x, y = np.arange(width)[None, :], np.arange(height)[:, None]
    channels = [(x * 5 + y * 3) % 256, (x * y) % 253, (x * 2 - y * 7) % 251]
    return PIL.Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def _broken(headline: str, found: str, expected: str, mend: str | None = None) -> ConfigError:
    return ConfigError(
        f"the image processor {headline}", found=found, expected=expected, action=mend or "correct the processor"
    )
