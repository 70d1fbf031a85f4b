"""What defines an encoder, as plain JSON: the index keeps it, and any machine builds the same encoder from it.

options in YAML (a tokenizer by path)  --spec_from_options-->  spec (the tokenizer's content)  -->  encoder
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from megaresume.encoding.images.decode import ImageOptions
from megaresume.encoding.images.processors import processor_from_options
from megaresume.encoding.images.processors.hugging_face import TransformersProcessor
from megaresume.encoding.images.processors.pretrained import resolved
from megaresume.encoding.images.templates import template_from_options
from megaresume.encoding.text.tokenizers import pack_tokenizer, read_tokenizer_file
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Options, Truth, plain, plain_kind, read

FORMAT = "megaresume.image-text-encoder"
#: raised when an older program would misread the spec.
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOptions(Options):
    """The encoder as it is written; template, processor and images have readers of their own."""

    tokenizer: str | None = None
    image_token: str | None = None
    image_start: str = ""
    image_end: str = ""
    eod: Truth = True
    eod_token: str | None = None
    template: Any = "caption"
    processor: Any = None
    images: ImageOptions = field(default_factory=ImageOptions)


def spec_from_options(options: object, base_dir: str | Path = ".") -> dict[str, Any]:
    """The normalised spec of the options of an encoder.

    ============ ==========================================================================================
    tokenizer    path of a tokenizer.json (relative to base_dir), or null: bytes
    image_token  a token of the tokenizer; null: the id after its vocabulary
    image_start  text before and after the tokens of an image, such as ``<|vision_start|>``; none by default
    image_end
    eod          true: every document ends with the end-of-document token
    eod_token    by default the first that the tokenizer has of `megaresume.encoding.text.tokenizers.EOD_TOKENS`
    template     see `megaresume.encoding.images.templates`; caption by default
    processor    see `megaresume.encoding.images.processors`; ``model`` and ``preset`` become the values they stand for
    images       see `megaresume.encoding.images.decode.ImageOptions`
    ============ ==========================================================================================

    Raises:
        ConfigError: an unknown key or a bad value.
        UsageError: the tokenizer cannot be read.
    """
    said: EncoderOptions = read(EncoderOptions, options, "the encoder", inside="")
    if said.processor is None:
        raise ConfigError(
            "the encoder has no processor",
            found=f"keys {', '.join(cast(dict[str, Any], options)) or 'none'}",
            expected="how an image becomes pixels and tokens",
            action="add processor: {preset: qwen3-vl}, {model: DIRECTORY} or {kind: patches} (tiles, native, python)",
        )
    processor = resolved(said.processor, base_dir)
    if isinstance(processor, dict) and processor.get("kind") == TransformersProcessor.kind:
        processor.setdefault("image_token", said.image_token)
    path = said.tokenizer
    content, name = read_tokenizer_file(None if path is None else Path(base_dir) / Path(path).expanduser())
    return plain(said) | {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": pack_tokenizer(content, name),
        "template": plain_kind(template_from_options(said.template)),
        "processor": plain_kind(processor_from_options(processor)),
    }


def check_spec(spec: Mapping[str, Any]) -> None:
    """Refuse what this version cannot read.

    Raises:
        ConfigError: no spec of an encoder, or a newer one.
    """
    found = f"format {spec.get('format')!r}, version {spec.get('version')!r}"
    if spec.get("format") != FORMAT or spec.get("version") != VERSION:
        raise ConfigError(
            "not a spec of an image-text encoder that this version reads",
            found=found,
            expected=f"format '{FORMAT}', version {VERSION}",
            cause="an index that a newer version wrote" if spec.get("format") == FORMAT else None,
            action="pip install --upgrade megaresume, or write the index again with this version",
        )
