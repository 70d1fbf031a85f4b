"""Processor ``transformers``: a model's own processor from Hugging Face transformers, whatever it makes of an image.

    {kind: transformers, model: ./Idefics3-8B}   processor_config.json, preprocessor_config.json, ... -> files, tokens

    W x H  --its processor, on an empty image of that size-->  the placeholder text  -->  pattern
    image  --its processor-->  tiles [k, 3, S, S], or patches of an image that keeps its shape (Pixtral)

The options include the content of the files, so neither the directory nor the model's tokenizer is needed again; the
encoder's tokenizer tokenizes the text. Results depend on the installed version of transformers.
"""

from __future__ import annotations

import functools
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from megaresume.encoding.images.pixels import Backend
from megaresume.encoding.images.processor import Grid, Pattern, Pixels, image_tokens, of_json, pattern_of_text
from megaresume.stream.errors import ConfigError, CorpusError, SetupError
from megaresume.stream.schema import After, Options, Texts

if TYPE_CHECKING:
    from PIL.Image import Image


#: The files that are read from a model's directory; of config.json only the type.
_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
#: Outputs that a processor may have beside the pixels: text, values that follow from the size, masks without holes.
_UNDERSTOOD = {
    *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets"),
    *("pixel_values", "pixel_attention_mask", "image_sizes", "batch_num_images", "num_crops", "rows", "cols"),
}
#: how many sizes a process caches the pattern for.
_MOST_SIZES = 100_000


def files_of(directory: Path) -> dict[str, Any]:
    """Options of the processor in a model's directory: ``kind``, ``files``, ``tokens``.

    Raises:
        ConfigError: there is none, or a file is damaged.
    """
    files = {name: value for name in _FILES if (value := json_object(directory / name))}
    if not files:
        raise ConfigError(
            f"no processor of transformers in {directory}",
            found=f"none of {', '.join(_FILES)}",
            expected="the directory of a model that was downloaded from the Hub",
            action="correct processor.model",
        )
    if model_type := json_object(directory / "config.json").get("model_type"):
        files["config.json"] = {"model_type": model_type}
    said = json_object(directory / "tokenizer_config.json")
    extra = said.get("extra_special_tokens")
    named = {key: value for key, value in said.items() if key.endswith("_token")} | (
        extra if isinstance(extra, dict) else {}
    )
    files["tokenizer_config.json"] = {
        **{key: said[key] for key in ("processor_class",) if key in said},
        **{key: text for key, value in named.items() if (text := _text(value))},
    }
    added = [
        *said.get("added_tokens_decoder", {}).values(),
        *json_object(directory / "tokenizer.json").get("added_tokens", []),
    ]
    tokens = {_text(token) for token in [*added, *(extra if isinstance(extra, list) else [])]}
    return {"kind": "transformers", "files": files, "tokens": sorted(tokens - {""})}


def _text(token: Any) -> str:
    """The text of a token in the Hub's files, which have a text or an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def json_object(path: Path) -> dict[str, Any]:
    """The object in a file; empty if the file does not exist.

    Raises:
        ConfigError: it cannot be read, or is not a JSON object.
    """
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError(f"its JSON is of the type {type(value).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError.unreadable(
            path, error, "one JSON object", action="download the file again, or correct processor.model"
        ) from error
    return value


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformersProcessor(Options):
    """The processor that transformers builds from these files.

    Raises:
        ConfigError: no files.
    """

    kind: ClassVar[str] = "transformers"

    #: name -> content, from the model's directory.
    files: Annotated[dict[str, Any], After(of_json)] | None = None
    #: special tokens of the model's tokenizer.
    tokens: Texts = ()
    #: the token that features replace: the encoder's; None: the one that the files name.
    image_token: str | None = None
    #: which library computes the pixels: pillow, or torchvision, which must then be installed.
    backend: Backend = "pillow"
    _content: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError(
                "kind: transformers needs a model",
                found="no model",
                expected="the directory of a model that was downloaded from the Hub",
                action="processor: {kind: transformers, model: DIRECTORY}",
            )
        object.__setattr__(self, "_content", json.dumps([self.files, self.tokens], sort_keys=True))

    @property
    def pixel_shape(self) -> tuple[int, ...]:
        """(3, S, S) for a tile; (3 * P * P,) for a patch."""
        return self._loaded_processor.pixel_shape

    @property
    def alone(self) -> bool:
        """Whether its pattern only holds for the only image of a document."""
        return self._loaded_processor.alone

    def num_tokens(self, width: int, height: int) -> int:
        """Image tokens of the pattern."""
        return image_tokens(self.pattern(width, height))

    def pattern(self, width: int, height: int) -> Pattern:
        """The text that the processor writes for an empty image of this size.

        Raises:
            CorpusError: the processor does not accept the size.
        """
        import PIL.Image

        known = self._loaded_processor.patterns.get((width, height))
        if known is None:
            self._loaded_processor.shown(PIL.Image.new("RGB", (width, height)))
            known = self._loaded_processor.patterns[width, height]
        return known

    def tokens_of(self, pixels: Pixels, grid: Grid) -> int:
        """The number of tokens of pixels: for patches, their number; for tiles, that of the size, which `__call__`
        checked."""
        if pixels.ndim == 2:
            return len(pixels) // self._loaded_processor.merge**2
        return self.num_tokens(grid[2], grid[1])

    def __call__(self, image: Image, generator: np.random.Generator) -> tuple[Pixels, Grid]:
        """Process an image: float32[k, *pixel_shape], and (1, height, width) in pixels, the model's ``image_sizes``.
        Draws nothing.

        Raises:
            CorpusError: the processor does not accept the image, or writes another pattern for it than for its size.
        """
        return self._loaded_processor.shown(image)

    @property
    def _loaded_processor(self) -> _LoadedProcessor:
        return _loaded(self._content, self.image_token, self.backend)


class _LoadedProcessor:
    """The processor, and its patterns for images of each size.

    Args:
        processor: of transformers.
        image_token: the token that features replace.
    """

    def __init__(self, processor: Any, image_token: str) -> None:
        import PIL.Image

        self._processor = processor
        self._image_token = image_token
        #: (width, height) -> pattern.
        self.patterns: dict[tuple[int, int], Pattern] = {}
        self.merge = int(getattr(processor, "spatial_merge_size", 1))
        self.alone = False
        self.pixel_shape = self.shown(PIL.Image.new("RGB", (64, 64)))[0].shape[1:]

    def shown(self, image: Image) -> tuple[Pixels, Grid]:
        """Pixels and grid of an image; also stores its pattern in `patterns`."""
        width, height = image.size
        try:
            made = self._processor(
                images=[image],
                text=[self._processor.image_token],
                return_text_replacement_offsets=True,
                return_tensors="np",
            )
            (written,) = made["text_replacement_offsets"][0]
        except (ValueError, ZeroDivisionError) as error:
            raise CorpusError(
                "transformers' processor does not take this image",
                found=f"{width} x {height} pixels; {type(error).__name__}: {error}",
                expected="an image of a size that the processor is made for",
                action="see on_fault, or leave the record out",
            ) from error
        self._check(made)
        self.alone |= "batch_num_images" in made
        pattern = self._pattern(written["replacement"])
        if len(self.patterns) > _MOST_SIZES:
            self.patterns.clear()
        if self.patterns.setdefault((width, height), pattern) != pattern:
            raise CorpusError(
                "transformers' processor writes two patterns for images of one size",
                found=f"{image_tokens(pattern)} image tokens for one of {width} x {height} pixels",
                expected=f"{image_tokens(self.patterns[width, height])}, as for another image of this size",
                cause="a processor that looks at the content of images",
                action="take a processor whose lengths follow from the size",
            )
        pixels = np.asarray(made["pixel_values"], np.float32)
        if pixels.ndim == 4 and "image_sizes" in made:
            return self._patches(pixels[0])
        tiles = pixels[0] if pixels.ndim == 5 else pixels
        return np.ascontiguousarray(tiles), (1, height, width)

    def _pattern(self, text: str) -> Pattern:
        pattern = pattern_of_text(text, self._image_token)
        if not image_tokens(pattern):
            raise ConfigError(
                f"image_token is not what {type(self._processor).__name__} writes for images",
                found=f"{self._image_token!r}, and the text {text[:80]!r} ...",
                expected="the token of that text whose place features take",
                action="correct image_token of the encoder",
            )
        return pattern

    def _patches(self, values: Pixels) -> tuple[Pixels, Grid]:
        """The patches of an image that keeps its shape, [3, H, W], row by row, and its size."""
        size = int(self._processor.patch_size)
        _, height, width = values.shape
        cut = values.reshape(3, height // size, size, width // size, size).transpose(1, 3, 0, 2, 4)
        return np.ascontiguousarray(cut).reshape(-1, 3 * size * size), (1, height, width)

    def _check(self, made: Any) -> None:
        unknown = sorted(set(made) - _UNDERSTOOD)
        axes = np.asarray(made["pixel_values"]).ndim
        if not unknown and axes not in (4, 5):
            unknown = [f"pixel_values of {axes} axes"]
        if not unknown and not np.all(made.get("pixel_attention_mask", 1)):
            unknown = ["pixel_attention_mask with holes"]
        if unknown:
            raise ConfigError(
                f"kind: transformers does not follow {type(self._processor).__name__}",
                found=", ".join(unknown),
                expected="tiles or whole images, and nothing else that the model must be given",
                action="kind: native for Qwen's models; otherwise your own processor: kind: python",
            )


@functools.lru_cache(maxsize=8)
def _loaded(content: str, image_token: str | None, backend: Backend) -> _LoadedProcessor:
    """The processor of these files, loaded once per process.

    Raises:
        SetupError: transformers, or a library that the processor needs, is missing.
        ConfigError: transformers cannot build a processor from the files, or not one that writes images as text.
    """
    files, tokens = json.loads(content)
    try:
        import transformers

        with tempfile.TemporaryDirectory(prefix="megaresume-processor-") as directory:
            _write(Path(directory), files, tokens)
            processor: Any = transformers.AutoProcessor.from_pretrained(directory, local_files_only=True)  # type: ignore[no-untyped-call]
            image_processor: Any = transformers.AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                directory, local_files_only=True, backend="pil" if backend == "pillow" else backend
            )
    except ImportError as error:
        raise SetupError(
            "a library that transformers' processor needs is missing",
            found=" ".join(str(error).split())[:300],
            expected="transformers, and what the processor of this model imports (torchvision, num2words)",
            action="pip install 'transformers>=5.23' torchvision num2words",
        ) from error
    except (ValueError, TypeError, KeyError, AttributeError, OSError) as error:
        raise _unusable(
            "cannot make a processor of the model's files", f"{type(error).__name__}: {error}"[:500]
        ) from error
    if type(image_processor).__name__.endswith("Pil") != (backend == "pillow"):
        raise SetupError(
            "transformers does not have the image processor for this back-end",
            found=f"{type(image_processor).__name__}, for backend: {backend}",
            expected="a class that ends with Pil for pillow alone",
            cause="torchvision is not installed" if backend == "torchvision" else None,
            action="pip install torchvision" if backend == "torchvision" else "backend: torchvision",
        )
    processor.image_processor = image_processor
    if not getattr(processor, "image_token", None) or not hasattr(processor, "replace_image_token"):
        raise _unusable("says no text that stands for an image", type(processor).__name__)
    named = getattr(processor.tokenizer, "image_token", None) or processor.image_token
    try:
        return _LoadedProcessor(processor, image_token or named)
    except (LookupError, TypeError, AttributeError, RuntimeError, CorpusError) as error:
        found = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        raise _unusable(f"does not follow {type(processor).__name__}", found) from error


def _write(directory: Path, files: dict[str, Any], tokens: list[str]) -> None:
    """Write the files, and a tokenizer with only the special tokens."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.models import WordLevel

    of_tokenizer = files.get("tokenizer_config.json", {})
    special = [*tokens, *(value for key, value in of_tokenizer.items() if key.endswith("_token"))]
    tokenizer = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in dict.fromkeys(special)])
    tokenizer.save(str(directory / "tokenizer.json"))
    of_tokenizer = {"pad_token": "[UNK]", **of_tokenizer, "tokenizer_class": "PreTrainedTokenizerFast"}
    written = {**files, "tokenizer_config.json": of_tokenizer}
    for name, value in written.items():
        (directory / name).write_text(json.dumps(value), encoding="utf-8")


def _unusable(headline: str, found: str) -> ConfigError:
    return ConfigError(
        f"kind: transformers {headline}",
        found=found,
        expected="transformers 5.23 or later, and a processor of it that writes a text for an image",
        cause="an older transformers, a model with its own code, or one that is not given images as tokens",
        action="pip install --upgrade transformers; or your own processor: kind: python (docs/images.md)",
    )
