"""The files of well-known models, as they were published: what ``preset`` names.

Each is the content of preprocessor_config.json, and of config.json what tokens depend on.
"""

from __future__ import annotations

from typing import Any

from megaresume.images.processors.statistics import CLIP, IMAGENET

_OF_CLIP = {"image_mean": list(CLIP.mean), "image_std": list(CLIP.std)}
_OF_IMAGENET = {"image_mean": list(IMAGENET.mean), "image_std": list(IMAGENET.std)}
_OF_SIGLIP = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_QWEN = {"merge_size": 2, "temporal_patch_size": 2, "image_processor_type": "Qwen2VLImageProcessor"}
_QWEN2 = {**_QWEN, **_OF_CLIP, "patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056}
_QWEN3 = {**_QWEN, **_OF_SIGLIP, "patch_size": 16, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
_SIGLIP = {**_OF_SIGLIP, "image_processor_type": "SiglipImageProcessor", "size": {"height": 384, "width": 384}}
_PATCHES_OF_14: dict[str, Any] = {"vision_config": {"patch_size": 14}}

Files = tuple[dict[str, Any], dict[str, Any]]
#: name -> (preprocessor_config.json, config.json).
PUBLISHED: dict[str, Files] = {
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
    # bilinear, as transformers' script that converted these models has it; those of SigLIP are bicubic.
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
