"""Declared random changes of an image that keep its size, each drawing from the generator that it is given.

    augment: [{flip: 0.5}, {crop: {scale: [0.8, 1.0]}}, {color_jitter: {brightness: 0.2, contrast: 0.2}}]

They run in the order in which they stand there, on the image as it was decoded, before the processor: lengths do not
depend on them, so they are no part of the encoder's fingerprint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from megaresume.images.options import choose_kind, mapping, number, option, plain, read_options, sequence
from megaresume.stream.errors import ConfigError

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["STEPS", "Step", "augmentation_from_options", "augmentation_options"]


class Step(Protocol):
    """Picklable; the image that it returns has the size of the one that it was given."""

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """A changed image, or the same."""
        ...


_share = number(0.0, 1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip:
    """Left and right exchanged."""

    kind: ClassVar[str] = "flip"
    main: ClassVar[str] = "p"
    #: probability.
    p: float = option(0.5, _share)

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """One draw."""
        from PIL.Image import Transpose

        return image.transpose(Transpose.FLIP_LEFT_RIGHT) if generator.random() < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop:
    """A part of the image, of the same shape, enlarged to its size."""

    kind: ClassVar[str] = "crop"
    main: ClassVar[str] = "scale"
    #: least and largest share of the area that is kept.
    scale: tuple[float, float] = option((0.8, 1.0), sequence(number(0.01, 1.0), 2))
    #: probability.
    p: float = option(1.0, _share)

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
class ColorJitter:
    """Brightness, contrast, saturation, each by a factor from 1 - x to 1 + x."""

    kind: ClassVar[str] = "color_jitter"
    main: ClassVar[str | None] = None
    brightness: float = option(0.0, _share)
    contrast: float = option(0.0, _share)
    saturation: float = option(0.0, _share)
    #: probability.
    p: float = option(1.0, _share)

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
class Grayscale:
    """Without colour."""

    kind: ClassVar[str] = "grayscale"
    main: ClassVar[str] = "p"
    #: probability.
    p: float = option(0.1, _share)

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """One draw."""
        return image.convert("L").convert("RGB") if generator.random() < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianBlur:
    """Out of focus."""

    kind: ClassVar[str] = "gaussian_blur"
    main: ClassVar[str] = "radius"
    #: least and largest radius, pixels.
    radius: tuple[float, float] = option((0.1, 2.0), sequence(number(0.0, 100.0), 2))
    #: probability.
    p: float = option(0.5, _share)

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
class GaussianNoise:
    """Noise on every value."""

    kind: ClassVar[str] = "gaussian_noise"
    main: ClassVar[str] = "std"
    #: largest standard deviation, of values from 0 to 255; the one used is drawn from 0 up to it.
    std: float = option(8.0, number(0.0, 255.0))
    #: probability.
    p: float = option(1.0, _share)

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


def augmentation_from_options(options: object, where: str = "augment") -> tuple[Step, ...]:
    """The steps of a list: ``{name: {option: value}}``, ``{name: value of its main option}``, or the name alone.

    Raises:
        ConfigError: not a list, an unknown step or option, or a bad value.
    """
    if options is None:
        return ()
    if not isinstance(options, list | tuple):
        raise ConfigError(
            f"{where} is not a list",
            found=f"{options!r:.80}",
            expected="the steps in order: [{flip: 0.5}, {crop: {scale: [0.8, 1.0]}}]",
            action=f"correct {where}",
        )
    return tuple(_step(item, f"{where}[{number}]") for number, item in enumerate(options))


def augmentation_options(steps: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Normalised: every default written out."""
    return [{step.kind: plain(step)} for step in steps]


def _step(item: object, where: str) -> Step:
    given = {item: {}} if isinstance(item, str) else mapping(item, where)
    if len(given) != 1:
        raise ConfigError(
            f"{where} names {len(given)} steps",
            found=", ".join(map(str, given)) or "nothing",
            expected="one: their order counts",
            action=f"make one list item of each in {where}",
        )
    name, value = next(iter(given.items()))
    kind, _ = choose_kind({"kind": name}, STEPS, where)
    cls = STEPS[kind]
    if not isinstance(value, dict) and cls.main is not None:
        value = {cls.main: value}
    step: Step = read_options(cls, value, f"{where}.{kind}")
    return step


def _ascending(values: tuple[float, float], where: str) -> None:
    if values[0] > values[1]:
        raise ConfigError(
            f"{where} ends before it begins",
            found=f"{values[0]:g} to {values[1]:g}",
            expected="the smaller number first",
            action=f"exchange the two numbers of {where}",
        )
