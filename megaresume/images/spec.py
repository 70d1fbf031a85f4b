"""What defines an encoder, as plain JSON: the index keeps it, and any machine builds the same encoder from it.

options in YAML (a tokenizer by path)  --spec_from_options-->  spec (the tokenizer's content)  -->  encoder
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megaresume.corpora.prepare.tokenizers import Tokenizer, read_tokenizer_file, tokenizer_from_content
from megaresume.images.decode import ImageOptions
from megaresume.images.options import (
    boolean,
    known_keys,
    mapping,
    optional,
    plain,
    read_options,
    string,
)
from megaresume.images.processors import processor_from_options, processor_options
from megaresume.images.templates import template_from_options, template_options
from megaresume.stream.errors import ConfigError

__all__ = ["FORMAT", "VERSION", "check_spec", "pack_tokenizer", "spec_from_options", "unpack_tokenizer"]

FORMAT = "megaresume.image-text-encoder"
#: raised when an older program would misread the spec.
VERSION = 1

_TEXTS = {
    "image_token": optional(string),
    "image_start": string,
    "image_end": string,
    "eod": boolean,
    "eod_token": optional(string),
}
_DEFAULTS = {"image_token": None, "image_start": "", "image_end": "", "eod": True, "eod_token": None}


def spec_from_options(options: object, base_dir: str | Path = ".") -> dict[str, Any]:
    """The normalised spec of the options of an encoder.

    ============ ==========================================================================================
    tokenizer    path of a tokenizer.json (relative to base_dir), or null: bytes
    image_token  a token of the tokenizer; null: the id behind its vocabulary
    image_start  text before and after the tokens of an image, such as ``<|vision_start|>``; none by default
    image_end
    eod          true: every document ends with the end-of-document token
    eod_token    by default the first that the tokenizer has of `megaresume.corpora.prepare.tokenizers.EOD_TOKENS`
    template     see `megaresume.images.templates`; caption by default
    processor    see `megaresume.images.processors`
    images       see `megaresume.images.decode.ImageOptions`
    ============ ==========================================================================================

    Raises:
        ConfigError: an unknown key or a bad value.
        UsageError: the tokenizer cannot be read.
    """
    data = mapping(options, "the encoder")
    known_keys(data, [*_TEXTS, "tokenizer", "template", "processor", "images"], "the encoder")
    if "processor" not in data:
        raise ConfigError(
            "the encoder has no processor",
            found=f"keys {', '.join(data) or 'none'}",
            expected="how an image becomes pixels and tokens",
            action="add processor: {kind: patches} (or tiles, native, python)",
        )
    path = optional(string)(data.get("tokenizer"), "tokenizer")
    content, name = read_tokenizer_file(None if path is None else Path(base_dir) / Path(path).expanduser())
    texts = {key: read(data[key], key) if key in data else _DEFAULTS[key] for key, read in _TEXTS.items()}
    return {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": pack_tokenizer(content, name),
        **texts,
        "template": template_options(template_from_options(data.get("template", {}))),
        "processor": processor_options(processor_from_options(data["processor"])),
        "images": plain(read_options(ImageOptions, data.get("images", {}), "images")),
    }


def pack_tokenizer(content: bytes | None, name: str) -> dict[str, Any]:
    """Plain JSON of what `read_tokenizer_file` returned."""
    packed = None if content is None else base64.b64encode(zlib.compress(content, 6)).decode("ascii")
    return {"name": name, "content": packed}


def unpack_tokenizer(packed: Mapping[str, Any], eod_token: str | None) -> Tokenizer:
    """The tokenizer that `pack_tokenizer` packed."""
    content = packed["content"]
    raw = None if content is None else zlib.decompress(base64.b64decode(content))
    return tokenizer_from_content(raw, packed["name"], eod_token=eod_token)


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
