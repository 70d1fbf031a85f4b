"""Reads an RGB image from the bytes of a shard, or its size from the header, and applies random augmentation.

    bytes -- header --> format, pixels, EXIF orientation --> size                      measure: decodes nothing
                        `-- decode -- turn -- RGB on background --> PIL image          encode

Both paths go through `_open`, so that the measured and the decoded size follow the same rules.

    augment: [{flip: 0.5}, {crop: {scale: [0.8, 1.0]}}, {color_jitter: {brightness: 0.2, contrast: 0.2}}]

The steps keep the size of the image, and each uses the generator that it is given. They run in the listed order on the
decoded image, before the processor: lengths do not depend on them, so they are not part of the encoder's fingerprint.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

import numpy as np

from megaresume.stream.errors import ConfigError, CorpusError, near, require
from megaresume.stream.schema import Before, Items, ListOf, Options, Texts, Within, plain, read, refused

if TYPE_CHECKING:
    from PIL.Image import Image


#: EXIF tag of the orientation.
_ORIENTATION = 0x0112
#: orientation -> the `PIL.Image.Transpose` that shows the image upright (EXIF 2.32, table 6).
_UPRIGHT = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}


Shade = Annotated[int, Within(0, 255)]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageOptions(Options):
    """Which formats are read as images, and how they become RGB."""

    #: the formats that are accepted, by Pillow's names; files of other formats are refused.
    formats: Texts = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    #: limit on width * height; a larger file is treated as a decompression bomb. Pillow's own limit is 178,956,970.
    max_pixels: Annotated[int, Within(1, 178_956_970)] = 89_478_485
    #: ``exif``: turned upright as the header says; ``ignore``: as stored.
    orientation: Literal["exif", "ignore"] = "exif"
    #: red, green, blue behind transparent pixels, 0 to 255.
    background: Annotated[tuple[Shade, Shade, Shade], Items()] = (255, 255, 255)
    #: an animated GIF, PNG or WebP: its first frame, or an error.
    animated: Literal["first", "error"] = "first"


def size_of(content: bytes, options: ImageOptions, name: str) -> tuple[int, int]:
    """(width, height) in pixels of the result of `decode`, from the header alone.

    Args:
        content: the file.
        options: as for `decode`.
        name: record and member, for errors.

    Raises:
        CorpusError: empty, not an image of an accepted format, a damaged header, too large.
    """
    image, orientation = _open(content, options, name)
    width, height = image.size
    return (height, width) if orientation >= 5 else (width, height)


def decode(content: bytes, options: ImageOptions, name: str) -> Image:
    """The image, upright, in mode RGB.

    Raises:
        CorpusError: as `size_of`; truncated or damaged.
    """
    image, orientation = _open(content, options, name)
    try:
        image.load()
        image = _rgb(image, options.background)
    except MemoryError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise _damaged(name, f"{image.format}, {image.width} x {image.height} pixels by its header", error) from error
    if orientation in _UPRIGHT:
        from PIL.Image import Transpose

        image = image.transpose(Transpose[_UPRIGHT[orientation]])
    return image


def _open(content: bytes, options: ImageOptions, name: str) -> tuple[Image, int]:
    """The image, not yet decoded, and its EXIF orientation: 1 to 8."""
    require("PIL.Image", "it reads the images", "pip install 'megaresume[vlm]'")
    import PIL.Image
    import PIL.ImageFile

    if PIL.ImageFile.LOAD_TRUNCATED_IMAGES:
        # Otherwise the result for a truncated file would depend on which process has set it.
        raise ConfigError(
            "Pillow is told to fill truncated images with grey",
            found="PIL.ImageFile.LOAD_TRUNCATED_IMAGES = True, set by a library or the training script",
            expected="False: a truncated image follows the policy of its source, on every rank the same",
            action="set PIL.ImageFile.LOAD_TRUNCATED_IMAGES = False; on_fault: mask keeps the run going",
        )
    if not content:
        raise CorpusError(
            f"{name} is empty", found="0 bytes", expected="an image", action="write the shard again, or see on_fault"
        )
    try:
        image = PIL.Image.open(io.BytesIO(content), formats=options.formats)
        width, height = image.size
        orientation = _orientation(image) if options.orientation == "exif" else 1
        frames = options.animated == "error" and image.format != "MPO" and getattr(image, "is_animated", False)
    except MemoryError:
        raise
    except (PIL.Image.DecompressionBombError, PIL.Image.DecompressionBombWarning) as error:
        raise _bomb(name, "more pixels than Pillow opens", options) from error
    except PIL.UnidentifiedImageError as error:
        raise CorpusError(
            f"{name} is not an image of a known format",
            found=f"{len(content)} bytes that begin with {content[:8].hex(' ')}",
            expected=f"one of {', '.join(options.formats)}",
            cause="a damaged file, an error page saved as an image, or a format that is not named",
            action="write the shard again, see on_fault, or name the format: images: {formats: [..., TIFF]}, also "
            "AVIF with a new Pillow",
        ) from error
    except KeyError as error:
        raise ConfigError(
            "Pillow does not know an image format",
            found=str(error),
            expected="names as Pillow writes them: JPEG, PNG, WEBP, GIF, BMP, TIFF ...",
            cause="a slip; or AVIF with an old Pillow; or HEIF, which Pillow itself does not read",
            action="correct images.formats, or convert such images to JPEG or PNG first",
        ) from error
    except Exception as error:  # a damaged header may raise anything
        raise _damaged(name, f"{len(content)} bytes", error) from error
    if width * height > options.max_pixels:
        raise _bomb(name, f"{width} x {height} = {width * height} pixels in {len(content)} bytes", options)
    if frames:
        raise CorpusError(
            f"{name} is animated",
            found=f"several frames, {image.format}",
            expected="one frame, as images: {animated: error} asks for",
            action="images: {animated: first} takes the first frame",
        )
    return image, orientation


def _orientation(image: Image) -> int:
    # Pillow turns a TIFF itself when it loads it, and reports the size after that.
    if image.format == "TIFF":
        return 1
    # For a PNG without eXIf before the pixels, Pillow would decode the pixels to read what follows.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    value = image.getexif().get(_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _rgb(image: Image, background: tuple[int, int, int]) -> Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    import PIL.Image

    if image.mode.startswith("I;16"):
        # The high byte, as Pillow uses for 16-bit colours; convert("L") would clip at 255.
        grey = (np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8)
        return PIL.Image.fromarray(grey).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode}, which have no range of their own")
    if image.has_transparency_data:
        image = image.convert("RGBA")
        canvas = PIL.Image.new("RGBA", image.size, (*background, 255))
        return PIL.Image.alpha_composite(canvas, image).convert("RGB")
    return image.convert("RGB")


def _damaged(name: str, found: str, error: Exception) -> CorpusError:
    # Pillow's message may contain memory addresses and changes with its version: keep it out of the state.
    return CorpusError(
        f"{name} is truncated or damaged",
        found=found,
        expected="an image that can be decoded to its last row",
        cause=f"Pillow says: {type(error).__name__}: {error}",
        action="write the shard again, or see on_fault",
    )


def _bomb(name: str, found: str, options: ImageOptions) -> CorpusError:
    return CorpusError(
        f"{name} is larger than images may be",
        found=found,
        expected=f"at most {options.max_pixels} pixels",
        cause="a decompression bomb, or an image of extraordinary size",
        action="scale the image down, see on_fault, or raise images: {max_pixels: N}",
    )


class Step(Protocol):
    """Picklable; returns an image of the same size."""

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """The changed image, or the same one."""


Probability = Annotated[float, Within(0.0, 1.0)]
Area = Annotated[float, Within(0.01, 1.0)]
Radius = Annotated[float, Within(0.0, 100.0)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Flip(Options):
    """Mirrors the image horizontally."""

    kind: ClassVar[str] = "flip"
    main: ClassVar[str] = "p"
    #: the probability that the step is applied.
    p: Probability = 0.5

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Mirror the image, or not: one draw."""
        from PIL.Image import Transpose

        return image.transpose(Transpose.FLIP_LEFT_RIGHT) if generator.random() < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class Crop(Options):
    """Crops the image, keeping its shape, and enlarges it to its old size."""

    kind: ClassVar[str] = "crop"
    main: ClassVar[str] = "scale"
    #: least and largest share of the area to keep.
    scale: Annotated[tuple[Area, Area], Items()] = (0.8, 1.0)
    #: the probability that the step is applied.
    p: Probability = 1.0

    def __post_init__(self) -> None:
        _ascending(self.scale, "crop.scale")

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Crop the image, or not: four draws."""
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
    """Changes brightness, contrast and saturation, each by a factor from 1 - x to 1 + x."""

    kind: ClassVar[str] = "color_jitter"
    main: ClassVar[str | None] = None
    brightness: Probability = 0.0
    contrast: Probability = 0.0
    saturation: Probability = 0.0
    #: the probability that the step is applied.
    p: Probability = 1.0

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Change brightness, then contrast, then saturation, or nothing: four draws."""
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
    """Removes colour."""

    kind: ClassVar[str] = "grayscale"
    main: ClassVar[str] = "p"
    #: the probability that the step is applied.
    p: Probability = 0.1

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Remove colour, or not: one draw."""
        return image.convert("L").convert("RGB") if generator.random() < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianBlur(Options):
    """Blurs the image."""

    kind: ClassVar[str] = "gaussian_blur"
    main: ClassVar[str] = "radius"
    #: least and largest radius, pixels.
    radius: Annotated[tuple[Radius, Radius], Items()] = (0.1, 2.0)
    #: the probability that the step is applied.
    p: Probability = 0.5

    def __post_init__(self) -> None:
        _ascending(self.radius, "gaussian_blur.radius")

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Blur the image, or not: two draws."""
        from PIL import ImageFilter

        applied, draw = generator.random(2)
        low, high = self.radius
        radius = low + (high - low) * float(draw)
        return image.filter(ImageFilter.GaussianBlur(radius)) if applied < self.p else image


@dataclass(frozen=True, kw_only=True, slots=True)
class GaussianNoise(Options):
    """Adds noise to every value."""

    kind: ClassVar[str] = "gaussian_noise"
    main: ClassVar[str] = "std"
    #: largest standard deviation, for values from 0 to 255; the actual one is drawn from 0 up to it.
    std: Annotated[float, Within(0.0, 255.0)] = 8.0
    #: the probability that the step is applied.
    p: Probability = 1.0

    def __call__(self, image: Image, generator: np.random.Generator) -> Image:
        """Add noise, or not: two draws, and one for each value when it is applied."""
        import PIL.Image

        applied, draw = generator.random(2)
        if applied >= self.p:
            return image
        noise = generator.standard_normal((image.height, image.width, 3), np.float32)
        noise *= np.float32(self.std * float(draw))
        noise += np.asarray(image)
        return PIL.Image.fromarray(np.clip(np.rint(noise, out=noise), 0, 255, out=noise).astype(np.uint8))


#: name in the YAML -> class.
STEPS: dict[str, type[Any]] = {
    step.kind: step for step in (Flip, Crop, ColorJitter, Grayscale, GaussianBlur, GaussianNoise)
}


def _step(item: Any) -> Any:
    """One item of the list of steps, as (class, its options)."""
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
    tuple[Annotated[dict[str, Any], Before(_step)], ...],
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
    """The steps as options, with every default written out."""
    return [{step.kind: plain(step)} for step in steps]


def _ascending(values: tuple[float, float], where: str) -> None:
    if values[0] > values[1]:
        raise ConfigError(
            f"{where} ends before it begins",
            found=f"{values[0]:g} to {values[1]:g}",
            expected="the smaller number first",
            action=f"exchange the two numbers of {where}",
        )
