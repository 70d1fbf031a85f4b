"""Declared random changes of an image that keep its size, each drawing from the generator that it is given.

    augment: [{flip: 0.5}, {crop: {scale: [0.8, 1.0]}}, {color_jitter: {brightness: 0.2, contrast: 0.2}}]

They run in the order in which they stand there, on the image as it was decoded, before the processor: lengths do not
depend on them, so they are no part of the encoder's fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Protocol

import numpy as np
from pydantic import BeforeValidator

from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Items, ListOf, Options, Within, near, plain, read, refused

if TYPE_CHECKING:
    from PIL.Image import Image


class Step(Protocol):
    """Picklable; the image that it returns has the size of the one that it was given."""

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """A changed image, or the same."""
        ...


Share = Annotated[float, Within(0.0, 1.0)]
Area = Annotated[float, Within(0.01, 1.0)]
Radius = Annotated[float, Within(0.0, 100.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip(Options):
    """Left and right exchanged."""

    kind: ClassVar[str] = "flip"
    main: ClassVar[str] = "p"
    #: probability.
    p: Share = 0.5

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """One draw."""
        from PIL.Image import Transpose

        return image.transpose(Transpose.FLIP_LEFT_RIGHT) if generator.random() < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop(Options):
    """A part of the image, of the same shape, enlarged to its size."""

    kind: ClassVar[str] = "crop"
    main: ClassVar[str] = "scale"
    #: least and largest share of the area that is kept.
    scale: Annotated[tuple[Area, Area], Items()] = (0.8, 1.0)
    #: probability.
    p: Share = 1.0

    def __post_init__(self) -> None:
        _ascending(self.scale, "crop.scale")

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Four draws."""
        from PIL.Image import Resampling

        low, high = self.scale
        applied, share, x, y = generator.random(4)
        edge = float(np.sqrt(low + (high - low) * share))
        if applied >= self.p or edge == 1.0:
            return image
        width, height = image.width * edge, image.height * edge
        left, top = x * (image.width - width), y * (image.height - height)
        return image.resize(image.size, Resampling.BICUBIC, box=(left, top, left + width, top + height))


@dataclass(frozen=True, kw_only=True, slots=True)
class ColorJitter(Options):
    """Brightness, contrast, saturation, each by a factor from 1 - x to 1 + x."""

    kind: ClassVar[str] = "color_jitter"
    main: ClassVar[str | None] = None
    brightness: Share = 0.0
    contrast: Share = 0.0
    saturation: Share = 0.0
    #: probability.
    p: Share = 1.0

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Four draws; brightness, then contrast, then saturation."""
        from PIL import ImageEnhance

        applied, *draws = generator.random(4)
        if applied >= self.p:
            return image
        ways: tuple[tuple[Callable[[Image], Any], float], ...] = (
            (ImageEnhance.Brightness, self.brightness),
            (ImageEnhance.Contrast, self.contrast),
            (ImageEnhance.Color, self.saturation),
        )
        for (enhance, width), draw in zip(ways, draws, strict=True):
            if width:
                image = enhance(image).enhance(1 + width * (2 * float(draw) - 1))
        return image


@dataclass(frozen=True, kw_only=True, slots=True)
class Grayscale(Options):
    """Without colour."""

    kind: ClassVar[str] = "grayscale"
    main: ClassVar[str] = "p"
    #: probability.
    p: Share = 0.1

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """One draw."""
        return image.convert("L").convert("RGB") if generator.random() < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianBlur(Options):
    """Out of focus."""

    kind: ClassVar[str] = "gaussian_blur"
    main: ClassVar[str] = "radius"
    #: least and largest radius, pixels.
    radius: Annotated[tuple[Radius, Radius], Items()] = (0.1, 2.0)
    #: probability.
    p: Share = 0.5

    def __post_init__(self) -> None:
        _ascending(self.radius, "gaussian_blur.radius")

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Two draws."""
        from PIL import ImageFilter

        applied, draw = generator.random(2)
        low, high = self.radius
        radius = low + (high - low) * float(draw)
        return image.filter(ImageFilter.GaussianBlur(radius)) if applied < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianNoise(Options):
    """Noise on every value."""

    kind: ClassVar[str] = "gaussian_noise"
    main: ClassVar[str] = "std"
    #: largest standard deviation, of values from 0 to 255; the one used is drawn from 0 up to it.
    std: Annotated[float, Within(0.0, 255.0)] = 8.0
    #: probability.
    p: Share = 1.0

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Two draws, and one for each value when it is applied."""
        import PIL.Image

        applied, draw = generator.random(2)
        if applied >= self.p:
            return image
        noise = generator.standard_normal((image.height, image.width, 3), np.float32)
        noise *= np.float32(self.std * float(draw))
        noise += np.asarray(image)
        return PIL.Image.fromarray(np.clip(np.rint(noise, out=noise), 0, 255, out=noise).astype(np.uint8))


#: name in the YAML to the class.
STEPS: dict[str, type[Any]] = {
    step.kind: step for step in (Flip, Crop, ColorJitter, Grayscale, GaussianBlur, GaussianNoise)
}


def _step(item: Any) -> Any:
    """One item of the list as (class, its options)."""
    given = {item: {}} if isinstance(item, str) else item
    if not isinstance(given, Mapping):
        raise refused(expected="keys and values: the name of a step, and its options")
    if len(given) != 1:
        found = ", ".join(map(str, given)) or "nothing"
        raise refused(f"{{place}} names {len(given)} steps", found=found, expected="one: their order counts")
    name, options = next(iter(given.items()))
    if name not in STEPS:
        raise refused(
            "unknown kind of {place}",
            found=repr(name),
            expected=f"one of {', '.join(sorted(STEPS))}",
            cause=near(name, STEPS),
        )
    main = STEPS[name].main
    return {name: {main: options} if main is not None and not isinstance(options, Mapping) else options}


Steps = Annotated[
    tuple[Annotated[dict[str, Any], BeforeValidator(_step)], ...],
    ListOf("the steps in order: [{flip: 0.5}, {crop: {scale: [0.8, 1.0]}}]"),
]


def augmentation_from_options(options: object, where: str = "augment") -> tuple[Step, ...]:
    """The steps of a list: ``{name: {option: value}}``, ``{name: value of its main option}``, or the name alone.

    Raises:
        ConfigError: not a list, an unknown step or option, or a bad value.
    """
    if options is None:
        return ()
    named = [next(iter(item.items())) for item in read(Steps, options, where)]
    return tuple(read(STEPS[name], given, f"{where}[{k}].{name}") for k, (name, given) in enumerate(named))


def augmentation_options(steps: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Normalised: every default written out."""
    return [{step.kind: plain(step)} for step in steps]


def _ascending(values: tuple[float, float], where: str) -> None:
    if values[0] > values[1]:
        raise ConfigError(
            f"{where} ends before it begins",
            found=f"{values[0]:g} to {values[1]:g}",
            expected="the smaller number first",
            action=f"exchange the two numbers of {where}",
        )
