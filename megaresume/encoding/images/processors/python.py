"""Processor ``python``: one's own, from a factory.

    processor: {kind: python, factory: "my_package.images:build", kwargs: {size: 224}}

``build(size=224)`` returns an object as `megaresume.encoding.images.processors.base.Processor` describes it. It is
tried when the encoder is built (`megaresume.encoding.images.checks`). What an image cannot be, it says by
`CorpusError`: that follows the policy of the source; any other exception ends the run.
"""

from __future__ import annotations

import json
import pkgutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np
from pydantic import AfterValidator

from megaresume.encoding.images.processors.base import (
    Grid,
    Pattern,
    Patterned,
    Pixels,
    Processor,
    image_tokens,
    pattern_of,
)
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Options, refused

if TYPE_CHECKING:
    from PIL.Image import Image


def of_json(value: dict[str, Any]) -> dict[str, Any]:
    """The value, if JSON can hold it: a validator of options."""
    try:
        same = json.loads(json.dumps(value)) == value
    except (TypeError, ValueError):
        same = False
    if not same:
        raise refused(expected="keys and values of JSON: texts, numbers, true, false, null, lists, mappings")
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class PythonProcessor(Options):
    """The object that a factory returns.

    Raises:
        ConfigError: the factory cannot be imported, or what it returns is not a processor.
    """

    kind: ClassVar[str] = "python"

    #: "package.module:callable".
    factory: str = ""
    #: of the factory; part of the encoder's fingerprint. Put a version in it when the code changes.
    kwargs: Annotated[dict[str, Any], AfterValidator(of_json)] | None = None
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
        """Of the object."""
        return tuple(self._inner.pixel_shape)

    def num_tokens(self, width: int, height: int) -> int:
        """Of the object."""
        return image_tokens(self.pattern(width, height))

    def pattern(self, width: int, height: int) -> Pattern:
        """Of the object; one run, if it has only `num_tokens`."""
        return pattern_of(self._inner, width, height)

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """Of the object."""
        return self._inner.tokens_of(pixels, grid)

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Of the object."""
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
