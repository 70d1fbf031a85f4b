"""The definition of an encoder as plain JSON: the index stores it, and any machine builds the same encoder from it.

    options in YAML (a tokenizer by path)  --spec_from_options-->  spec (the tokenizer's content)  -->  encoder

A model's processor is written as options of our own, with the values that its preprocessor_config.json has, not with
the defaults of transformers' class.

    {model: ./Qwen3-VL-8B}   preprocessor_config.json, config.json -+
    {preset: qwen3-vl}       PUBLISHED -----------------------------+-->  {kind: native, patch_size: 16, ...}
    {kind: transformers, model: ...}   hugging_face.py

Index, fingerprint and state contain only the resulting values, neither a path nor a name. A key that transformers uses
and we do not know is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from megaresume.encoding.images.hugging_face import TransformersProcessor, files_of, json_object
from megaresume.encoding.images.pixels import CLIP, IMAGENET, STATISTICS
from megaresume.encoding.images.processors import processor_from_options
from megaresume.encoding.images.rgb import ImageOptions
from megaresume.encoding.images.templates import template_from_options
from megaresume.encoding.text.tokenizers import pack_tokenizer, read_tokenizer_file
from megaresume.stream.errors import ConfigError
from megaresume.stream.schema import Options, Truth, plain, plain_kind, read

FORMAT = "megaresume.image-text-encoder"
#: raise it if an older program would misread the spec.
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class EncoderOptions(Options):
    """The encoder as the user writes it; template, processor and images have their own readers."""

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
    """The normalised spec for an encoder's options.

    ============ ==========================================================================================
    tokenizer    path of a tokenizer.json (relative to base_dir), or null: bytes
    image_token  a token of the tokenizer; null: the id after its vocabulary
    image_start  text before and after the tokens of an image, such as ``<|vision_start|>``; none by default
    image_end
    eod          true: every document ends with the end-of-document token
    eod_token    by default the first that the tokenizer has of `megaresume.encoding.text.tokenizers.EOD_TOKENS`
    template     see `megaresume.encoding.images.templates`; caption by default
    processor    see `megaresume.encoding.images.processors`; ``model`` and ``preset`` are replaced by their values
    images       see `megaresume.encoding.images.rgb.ImageOptions`
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
    """Refuse a spec that this version cannot read.

    Raises:
        ConfigError: not an encoder's spec, or a newer one.
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


#: PIL's numbers for the filters.
_FILTERS = {1: "lanczos", 2: "bilinear", 3: "bicubic"}
#: keys that do not change any pixel of an RGB image.
_WITHOUT_EFFECT = {
    *("image_processor_type", "feature_extractor_type", "processor_class", "video_processor_type", "auto_map"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "do_convert_rgb"),
    *("default_to_square", "image_seq_length", "_valid_processor_keys", "model_valid_processing_keys"),
    *("size_divisor", "pad_size", "image_token", "num_additional_image_tokens", "vision_feature_select_strategy"),
}
_COMMON = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True, "resample": 3}
_OF_CLIP = {"image_mean": list(CLIP.mean), "image_std": list(CLIP.std)}
_OF_SIGLIP = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_OF_IMAGENET = {"image_mean": list(IMAGENET.mean), "image_std": list(IMAGENET.std)}


def resolved(options: object, base_dir: str | Path = ".") -> object:
    """Options with ``model`` or ``preset`` replaced by their values; other options unchanged.

    Args:
        options: ``{preset: qwen3-vl, max_pixels: 401408}``; further keys take precedence over the preset.
        base_dir: the base of the path of ``model``.

    Raises:
        ConfigError: an unknown preset, a file that is missing or damaged, a processor without an equivalent here.
    """
    if not isinstance(options, Mapping) or not {"model", "preset"} & set(options):
        return options
    given = dict(options)
    model, preset = given.pop("model", None), given.pop("preset", None)
    if None not in (model, preset):
        raise ConfigError(
            "processor names a model twice",
            found=f"model: {model}, preset: {preset}",
            expected="a directory, or a preset",
            action="remove one of the two",
        )
    directory = Path(base_dir) / Path(str(model)).expanduser()
    if model is not None and given.get("kind") == "transformers":
        return {**files_of(directory), **given}
    found = _of_preset(preset) if model is None else _of_directory(directory)
    if given.pop("kind", found["kind"]) != found["kind"]:
        raise ConfigError(
            f"processor.kind is not that of {model or preset}",
            found=repr(options["kind"]),
            expected=found["kind"],
            action="remove processor.kind",
        )
    return {**found, **given}


def _of_preset(name: object) -> dict[str, Any]:
    if not isinstance(name, str) or name not in PUBLISHED:
        raise ConfigError.unknown(
            "preset of processor",
            name,
            PUBLISHED,
            action="correct processor.preset, or give a directory with the model's preprocessor_config.json: model",
        )
    return options_of(*PUBLISHED[name], f"preset {name}")


def _of_directory(directory: Path) -> dict[str, Any]:
    nested = json_object(directory / "processor_config.json").get("image_processor")
    file = directory / ("processor_config.json" if nested else "preprocessor_config.json")
    # The order in which transformers reads them.
    config = nested or json_object(file)
    if not isinstance(config, dict) or not config:
        raise ConfigError(
            f"no values of an image processor in {directory}",
            found="neither preprocessor_config.json nor image_processor in processor_config.json",
            expected="the directory of a model that was downloaded from the Hub",
            action="correct processor.model; or see preset, and kind for values of one's own",
        )
    return options_of(config, json_object(directory / "config.json"), str(file))


def options_of(config: Mapping[str, Any], model: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Options of our processor that makes the same pixels as transformers with these files.

    Args:
        config: content of preprocessor_config.json.
        model: content of config.json, for the sizes of patches; may be empty.
        where: the file, for errors.

    Raises:
        ConfigError: a class, a key or a value that none of our processors supports.
    """
    written = config.get("image_processor_type", config.get("feature_extractor_type", "none"))
    name = str(written).removesuffix("Fast").removesuffix("Pil").replace("FeatureExtractor", "ImageProcessor")
    if name not in _CLASSES:
        raise ConfigError(
            f"{where}: none of our processors does the same as this one",
            found=f"image_processor_type {written}",
            expected=f"one of {', '.join(_CLASSES)}",
            action="take transformers' own: processor: {kind: transformers, model: DIRECTORY}",
        )
    if model.get("model_type") == "internvl_chat":
        raise ConfigError(
            f"{where} is not what this model's own code does",
            found="model_type internvl_chat, whose code cuts tiles, and a file that says squares",
            expected="the files of transformers, such as OpenGVLab/InternVL3-8B-hf",
            action="preset: internvl",
        )
    cls = _CLASSES[name]
    values = {**_COMMON, **cls.defaults, **{key: value for key, value in config.items() if value is not None}}
    for key, value in config.items():
        if key not in {*_COMMON, *cls.defaults, *_WITHOUT_EFFECT} and value not in (None, False):
            raise _bad(where, key, repr(value)[:60], f"keys that {name} is known to heed")
    for key in ("do_resize", "do_rescale"):
        if values[key] is not True:
            raise _bad(where, key, repr(values[key]), "true: models are shown images of their size, from 0 to 1")
    if not isinstance(values["rescale_factor"], float) or abs(values["rescale_factor"] * 255 - 1) > 1e-12:
        raise _bad(where, "rescale_factor", repr(values["rescale_factor"]), "1 / 255")
    if not isinstance(values["resample"], int) or values["resample"] not in _FILTERS:
        raise _bad(where, "resample", repr(values["resample"]), "1 (lanczos), 2 (bilinear) or 3 (bicubic)")
    normal = {"mean": values["image_mean"], "std": values["image_std"]}
    shared = {
        "resample": _FILTERS[values["resample"]],
        "normalize": normal if values["do_normalize"] else plain(STATISTICS["none"]),
    }
    return {**cls.options(values, model, where), **shared}


def _native(values: dict[str, Any], model: Mapping[str, Any], where: str) -> dict[str, Any]:
    size = values["size"]
    if not isinstance(size, Mapping) or set(size) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise _bad(where, "size", repr(size), "shortest_edge and longest_edge")
    least, most = (size.get(edge) if values[key] is None else values[key] for key, edge in _LIMITS)
    if least is None or most is None:
        raise _bad(where, "size", repr(size), "shortest_edge and longest_edge, or min_pixels and max_pixels beside it")
    return {
        "kind": "native",
        "patch_size": values["patch_size"],
        "merge": values["merge_size"],
        "temporal_patch_size": values["temporal_patch_size"],
        "min_pixels": least,
        "max_pixels": most,
    }


_LIMITS = (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge"))


def _crop(values: dict[str, Any], model: Mapping[str, Any], where: str) -> dict[str, Any]:
    size, cut = _edge(values, "size", {"shortest_edge"}, where), _edge(values, "crop_size", {"height", "width"}, where)
    if values["do_center_crop"] is not True or cut != size:
        found = f"size {values['size']}, crop_size {values['crop_size']}, do_center_crop {values['do_center_crop']}"
        raise _bad(where, "crop_size", found, "a square is cut out, as large as the shorter edge")
    full = model.get("vision_feature_select_strategy") == "full"
    fit = "pad" if values.get("do_pad") else "crop"
    return {**_square(model, where), "size": size, "fit": fit, "class_tokens": int(full)}


def _stretch(values: dict[str, Any], model: Mapping[str, Any], where: str) -> dict[str, Any]:
    if values.get("do_pan_and_scan"):
        raise _bad(where, "do_pan_and_scan", "true", "false: crops of an image are not a single run of tokens")
    size, square = _edge(values, "size", {"height", "width"}, where), _square(model, where)
    tokens = model.get("mm_tokens_per_image")
    if isinstance(tokens, int) and tokens > 0:
        square["merge"] = max(1, size // square["patch_size"] // math.isqrt(tokens))
    return {**square, "size": size, "fit": "stretch"}


def _tiles(values: dict[str, Any], model: Mapping[str, Any], where: str) -> dict[str, Any]:
    # InternVL's processor requests tiles, whatever the image processor's file says.
    if not values["crop_to_patches"] and values.get("processor_class") != "InternVLProcessor":
        raise _bad(where, "crop_to_patches", "false", "true: tiles, as InternVL takes them")
    ratio = model.get("downsample_ratio", 0.5)
    if not isinstance(ratio, float) or not 0 < ratio <= 1:
        raise _bad(where, "downsample_ratio of config.json", repr(ratio), "from 0 to 1, such as 0.5")
    return {
        "kind": "tiles",
        "patch_size": _square(model, where)["patch_size"],
        "tile_size": _edge(values, "size", {"height", "width"}, where),
        "merge": round(1 / ratio),
        "min_tiles": values["min_patches"],
        "max_tiles": values["max_patches"],
    }


def _square(model: Mapping[str, Any], where: str) -> dict[str, Any]:
    vision = model.get("vision_config", model)
    size = vision.get("patch_size") if isinstance(vision, Mapping) else None
    size = size[0] if isinstance(size, list) and size and size.count(size[0]) == len(size) else size
    if not isinstance(size, int):
        raise ConfigError(
            f"{where} does not say how large a patch is",
            found=f"patch_size {size!r} in config.json",
            expected="vision_config: {patch_size: 14}, for the number of tokens",
            cause="a directory without the model's config.json" if not model else None,
            action="put config.json beside the file",
        )
    return {"kind": "patches", "patch_size": size}


def _edge(values: Mapping[str, Any], key: str, edges: set[str], where: str) -> int:
    """The edge of a square: 336, or {"height": 336, "width": 336} with both of these edges."""
    size = values[key]
    found = [size] if isinstance(size, int) else []
    if isinstance(size, Mapping) and set(size) == edges:
        found = list(size.values())
    if not found or found.count(found[0]) != len(found) or not isinstance(found[0], int):
        raise _bad(where, key, repr(size), f"the edge of a square, or {' and '.join(sorted(edges))} of one")
    return found[0]


def _bad(where: str, key: str, found: str, expected: str) -> ConfigError:
    return ConfigError(
        f"{where}: {key} is not what our processors follow",
        found=found,
        expected=expected,
        action="give the values themselves: kind and its options (docs/images.md)",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Class:
    """One of transformers' image processors: its defaults, and our equivalent."""

    defaults: Mapping[str, Any]
    options: Callable[[dict[str, Any], Mapping[str, Any], str], dict[str, Any]]


_QWEN = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "min_pixels": None,
    "max_pixels": None,
    "patch_size": 14,
    "merge_size": 2,
    "temporal_patch_size": 2,
    **_OF_CLIP,
}
_CROPPED = {"size": 224, "crop_size": 224, "do_center_crop": True, **_OF_CLIP}
_PAN_AND_SCAN = {"do_pan_and_scan": False, "pan_and_scan_min_crop_size": None, "pan_and_scan_max_num_crops": None}
_PAN_AND_SCAN |= {"pan_and_scan_min_ratio_to_activate": None}
#: The image processors of transformers 5, by name.
_CLASSES = {
    "Qwen2VLImageProcessor": _Class(defaults=_QWEN, options=_native),
    "Qwen2_5_VLImageProcessor": _Class(defaults=_QWEN, options=_native),
    "CLIPImageProcessor": _Class(defaults=_CROPPED, options=_crop),
    "LlavaImageProcessor": _Class(defaults={**_CROPPED, "do_pad": False}, options=_crop),
    "SiglipImageProcessor": _Class(defaults={"size": 224, **_OF_SIGLIP}, options=_stretch),
    "Gemma3ImageProcessor": _Class(
        defaults={"size": 224, "resample": 2, **_PAN_AND_SCAN, **_OF_SIGLIP}, options=_stretch
    ),
    "GotOcr2ImageProcessor": _Class(
        defaults={"size": 384, "crop_to_patches": False, "min_patches": 1, "max_patches": 12, **_OF_CLIP},
        options=_tiles,
    ),
}

_QWEN_FILE = {"merge_size": 2, "temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
_QWEN2 = {**_QWEN_FILE, **_OF_CLIP, "patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}
_QWEN3 = {**_QWEN_FILE, **_OF_SIGLIP, "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
_SIGLIP = {**_OF_SIGLIP, "image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}
_PATCHES_OF_14: dict[str, Any] = {"vision_config": {"patch_size": 14}}

#: the published files of well-known models: preprocessor_config.json, and the part of config.json that affects tokens.
PUBLISHED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2-vl": (_QWEN2, {}),
    "qwen2.5-vl": (_QWEN2, {}),
    "qwen3-vl": (_QWEN3, {}),
    "llava-1.5": (
        {
            **_OF_CLIP,
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 336},
            "crop_size": {"height": 336, "width": 336},
            "resample": 3,
        },
        {**_PATCHES_OF_14, "vision_feature_select_strategy": "default"},
    ),
    "siglip-so400m-384": ({**_SIGLIP, "resample": 3}, _PATCHES_OF_14),
    # bilinear, as in transformers' conversion script of these models; those of SigLIP are bicubic.
    "siglip2-so400m-384": ({**_SIGLIP, "resample": 2}, _PATCHES_OF_14),
    "internvl": (
        {
            **_OF_IMAGENET,
            "image_processor_type": "GotOcr2ImageProcessor",
            "processor_class": "InternVLProcessor",
            "size": {"height": 448, "width": 448},
            "crop_to_patches": False,
            "min_patches": 1,
            "max_patches": 12,
            "resample": 3,
        },
        {"vision_config": {"patch_size": [14, 14]}, "downsample_ratio": 0.5},
    ),
    "gemma-3": (
        {
            **_OF_SIGLIP,
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 896, "width": 896},
            "do_pan_and_scan": None,
            "resample": 2,
        },
        {**_PATCHES_OF_14, "mm_tokens_per_image": 256},
    ),
}
