"""The interface of an image processor; a user's own, from a factory; and a check that a processor follows the rules.

    PIL image, RGB, W x H  --processor-->  float32[k, ...] normalised, (frames, rows, columns)
    W, H                   --num_tokens->  tokens that the image takes in the sequence

A processor is a stateless function of (image, generator). `check_processor` tries it when an encoder is built, before
anything depends on it:

    same image, same generator, other global seeds  -->  the same bits, and no global generator moved
    image tokens of (width, height)                 ==   tokens_of(pixels, grid), for sizes of many shapes
    pickle.loads(pickle.dumps(processor))           -->  the same again

The sequence has a pattern for each image: runs of the image token, with text between and around them.

    (576,)                                                                   CLIP, Qwen2-VL: one run
    (4, "[IMG_BREAK]", 4, "[IMG_END]")                                       Pixtral: rows, 4 tokens each
    ("<fake><row_1_col_1>", 64, "\\n\\n<fake><global-img>", 64, "<fake>")      SmolVLM: tiles

A number is that many image tokens; text may have special tokens, and is not trained on. Only a processor whose images
are not one run has a method ``pattern``; for the others, `num_tokens` is enough.
"""

from __future__ import annotations

import json
import pickle
import pkgutil
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import After, Options, refused

if TYPE_CHECKING:
    from PIL.Image import Image


Pixels = npt.NDArray[np.float32]
#: (frames, rows, columns) of patches; of tiles for tiled processors.
Grid = tuple[int, int, int]
Pattern = tuple[int | str, ...]


class Processor(Protocol):
    """Stateless and picklable; all randomness comes from the generator given."""

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """Shape of one row of the pixels: (3, H, W) for a tile, or (3 * T * P * P,) for a patch."""

    def num_tokens(self, width: int, height: int) -> int:
        """The number of tokens of an image of this size. Raises CorpusError for an unsupported size."""

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """The number of tokens that the vision model makes of this output; must agree with `num_tokens`."""

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Process an RGB image: float32[k, *pixel_shape], C-contiguous, and its grid."""


@runtime_checkable
class Patterned(Protocol):
    """A processor whose images are not one run of image tokens."""

    def pattern(self, width: int, height: int) -> Pattern:
        """The runs of tokens of an image of this size in pixels. Raises CorpusError for an unsupported size."""


def pattern_of(processor: Processor, width: int, height: int) -> Pattern:
    """The pattern of an image of this size: the processor's, or one run.

    Raises:
        CorpusError: the processor does not support the size.
        ConfigError: what it returns is not a pattern.
    """
    if not isinstance(processor, Patterned):
        return (processor.num_tokens(width, height),)
    pattern = processor.pattern(width, height)
    runs = [part for part in pattern if type(part) is int] if isinstance(pattern, tuple) else []
    if not runs or min(runs) < 1 or not all(type(part) in (int, str) for part in pattern):
        raise ConfigError(
            "the image processor announces no length",
            found=f"{pattern!s:.200} for {width} x {height} pixels",
            expected="int, 1 or more; or a tuple of texts and such numbers, at least one number",
            action="correct num_tokens (or pattern) of the processor",
        )
    return pattern


def pattern_of_text(text: str, image_token: str) -> Pattern:
    """The pattern that a text describes: repetitions of ``image_token``, and other text."""
    runs: list[int | str] = []
    for k, between in enumerate(text.split(image_token)):
        if k:
            if runs and isinstance(runs[-1], int):
                runs[-1] += 1
            else:
                runs.append(1)
        if between:
            runs.append(between)
    return tuple(runs)


def image_tokens(pattern: Pattern) -> int:
    """The number of image tokens in a pattern, not counting its text."""
    return sum(part for part in pattern if isinstance(part, int))


def of_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value, if JSON can represent it: a validator of options."""
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise refused(expected="keys and values of JSON: texts, numbers, true, false, null, lists, mappings")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonProcessor(Options):
    """A user's processor: the object that a factory returns.

        processor: {kind: python, factory: "my_package.images:build", kwargs: {size: 224}}

    ``build(size=224)`` returns a `Processor`. It raises a `CorpusError` for an image that it cannot take, which is
    handled by the policy of the source; any other exception ends the run.

    Raises:
        ConfigError: the factory cannot be imported, or does not return a processor.
    """

    kind: ClassVar[str] = "python"

    #: the factory, as "package.module:callable".
    factory: str = ""
    #: arguments of the factory; part of the encoder's fingerprint. Add a version to them when the code changes.
    kwargs: Annotated[dict[str, Any], After(of_json)] | None = None
    _inner: Processor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        inner = _factory(self.factory)(**(self.kwargs or {}))
        length = "pattern" if isinstance(inner, Patterned) else "num_tokens"
        lacking = [name for name in ("pixel_shape", length, "tokens_of", "__call__") if not hasattr(inner, name)]
        if lacking:
            raise ConfigError(
                f"what {self.factory}returns is not an image processor",
                found=f"{type(inner).__name__} without {', '.join(lacking)}",
                expected="pixel_shape, num_tokens(width, height) or pattern(width, height), tokens_of(pixels, grid), "
                "call (image, generator)",
                action="see docs/images.md, 'Your own processor'",
            )
        object.__setattr__(self, "_inner", inner)

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """The pixel shape of the factory's object."""
        return tuple(self._inner.pixel_shape)

    def num_tokens(self, width: int, height: int) -> int:
        """The number of tokens, as the factory's object counts them."""
        return image_tokens(self.pattern(width, height))

    def pattern(self, width: int, height: int) -> Pattern:
        """The pattern from the factory's object; one run, if it only has `num_tokens`."""
        return pattern_of(self._inner, width, height)

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """The number of tokens of pixels, as the factory's object counts them."""
        return self._inner.tokens_of(pixels, grid)

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Process an image by the factory's object."""
        return self._inner(image, generator)


def _factory(name: str) -> Any:
    try:
        if ":" not in name:
            raise ImportError("no package.module:callable")
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            "the factory of the image processor cannot be imported",
            found=f"factory: {name!r} ({error})",
            expected="factory: package.module:callable",
            cause="a wrong name, or a module that is not on PYTHONPATH",
            action="correct processor.factory, or set PYTHONPATH",
        ) from error


#: width, height in pixels: square, wide, tall, small, odd.
_SIZES = ((64, 64), (301, 97), (75, 220), (29, 31), (448, 336))


def check_processor(processor: Processor) -> None:
    """Try a processor on images of several sizes.

    Raises:
        ConfigError: which rule it breaks, and how to fix it.
    """
    copy = _pickled(processor)
    generators = _Globals()
    states = generators.states()
    try:
        for width, height in _SIZES:
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
    """The global generators that libraries use implicitly."""

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
    """An image whose colours differ everywhere, made without a generator."""
    import PIL.Image

    x, y = np.arange(width)[None, :], np.arange(height)[:, None]
    channels = [(x * 5 + y * 3) % 256, (x * y) % 253, (x * 2 - y * 7) % 251]
    return PIL.Image.fromarray(np.stack(channels, axis=-1).astype(np.uint8))


def _broken(headline: str, found: str, expected: str, mend: str | None = None) -> ConfigError:
    return ConfigError(
        f"the image processor {headline}", found=found, expected=expected, action=mend or "correct the processor"
    )
