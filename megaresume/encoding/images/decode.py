"""Bytes of a shard to an RGB image, and its size from the header alone.

    bytes -- header --> format, pixels, EXIF orientation --> size                      measure: nothing is decoded
                        `-- decode -- turn -- RGB on background --> PIL image          encode

Both ways go through `_open`, so that the size announced and the size decoded follow the same rules.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np

from megaresume.stream.errors import ConfigError, CorpusError, SetupError
from megaresume.stream.schema import Items, Options, Texts, Within

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
    """What is taken for an image, and how it becomes RGB."""

    #: as Pillow calls them; a file of another format is refused.
    formats: Texts = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
    #: largest width * height; above it the file is taken for a decompression bomb. Pillow itself opens no more than
    #: 178,956,970.
    max_pixels: Annotated[int, Within(1, 178_956_970)] = 89_478_485
    #: ``exif``: turned as the header says; ``ignore``: as stored.
    orientation: Literal["exif", "ignore"] = "exif"
    #: red, green, blue under transparent pixels, 0 to 255.
    background: Annotated[tuple[Shade, Shade, Shade], Items()] = (255, 255, 255)
    #: an animated GIF, PNG or WebP: its first frame, or an error.
    animated: Literal["first", "error"] = "first"


def size_of(content: bytes, options: ImageOptions, name: str) -> tuple[int, int]:
    """(width, height) in pixels of what `decode` will return, from the header alone.

    Args:
        content: the file.
        options: as for `decode`.
        name: record and member, for errors.

    Raises:
        CorpusError: empty, not an image of the formats, damaged in the header, too large.
    """
    image, orientation = _open(content, options, name)
    width, height = image.size
    return (height, width) if orientation >= 5 else (width, height)


def decode(content: bytes, options: ImageOptions, name: str) -> Image:
    """The image, upright, in mode RGB.

    Raises:
        CorpusError: as `size_of`, and truncated or damaged.
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
    """The image, not decoded, and its EXIF orientation: 1 to 8."""
    try:
        import PIL.Image
        import PIL.ImageFile
    except ImportError as error:
        raise SetupError(
            "the library Pillow is missing",
            found=str(error),
            expected="it reads the images",
            action="pip install 'megaresume[vlm]'",
        ) from error
    if PIL.ImageFile.LOAD_TRUNCATED_IMAGES:
        # What comes out of a cut file would depend on which process has set it.
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
    # Pillow turns a TIFF itself when it loads it, and gives the size that it will have then.
    if image.format == "TIFF":
        return 1
    # For a PNG without eXIf before the pixels Pillow would decode the pixels to read what follows them.
    if image.format == "PNG" and "exif" not in image.info:
        return 1
    value = image.getexif().get(_ORIENTATION, 1)
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def _rgb(image: Image, background: tuple[int, int, int]) -> Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    import PIL.Image

    if image.mode.startswith("I;16"):
        # The high byte, as Pillow takes it of 16-bit colours; convert("L") would clip at 255.
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
    # What Pillow says may name addresses in memory, and changes with its version: not in what the state keeps.
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
