"""Directories of small models of transformers, as the Hub has them: their processors, and a tokenizer of bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

#: where the processors of these families put features.
IMAGE_TOKENS = {
    "llava_next": "<image>",
    "llava_onevision": "<image>",
    "idefics3": "<image>",
    "smolvlm": "<image>",
    "pixtral": "[IMG]",
    "mistral3": "[IMG]",
    "gemma3": "<image_soft_token>",
    "internvl": "<IMG_CONTEXT>",
}
#: of transformers, what imports further libraries.
_NEEDS = {
    "llava_onevision": ["torchvision"],
    "pixtral": ["torchvision"],
    "mistral3": ["torchvision"],
    "smolvlm": ["torchvision", "num2words"],
    "internvl": ["torchvision"],
}
_PINPOINTS = [[16, 32], [32, 16], [32, 32], [16, 48]]


def tokenizer(*extra: str, **named: str) -> Any:
    """Bytes, and these special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bytes_of = Tokenizer(models.BPE(vocab={letter: k for k, letter in enumerate(alphabet)}, merges=[]))
    bytes_of.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", *extra, *named.values()]
    bytes_of.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return PreTrainedTokenizerFast(tokenizer_object=bytes_of, eos_token="<|endoftext|>", extra_special_tokens=named)


def write_processor(directory: Path, family: str) -> Any:
    """Save the family's processor there, and return it; the test is skipped where a library is missing."""
    transformers = pytest.importorskip("transformers")
    for library in _NEEDS.get(family, ()):
        pytest.importorskip(library)
    made = _MADE[family](transformers)
    made.save_pretrained(directory)
    return made


def _pil(transformers: Any, name: str, **values: Any) -> Any:
    return getattr(transformers, f"{name}ImageProcessorPil")(**values)


def _llava_next(transformers: Any) -> Any:
    edge = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    images = _pil(transformers, "LlavaNext", image_grid_pinpoints=_PINPOINTS, **edge)
    rest = {"patch_size": 4, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return transformers.LlavaNextProcessor(images, tokenizer(image_token="<image>"), **rest)


def _llava_onevision(transformers: Any) -> Any:
    images = _pil(transformers, "LlavaOnevision", size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS)
    rest = {"num_image_tokens": 16, "vision_feature_select_strategy": "full", "vision_aspect_ratio": "anyres_max_9"}
    video = transformers.LlavaOnevisionVideoProcessor()
    return transformers.LlavaOnevisionProcessor(images, tokenizer(image_token="<image>"), video, **rest)


_SIZE_OF_TILES = {"size": {"longest_edge": 48}, "max_image_size": {"longest_edge": 16}}


def _words_of_tiles() -> Any:
    tags = [f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4)]
    return tokenizer("<fake_token_around_image>", "<image>", "<global-img>", *tags)


def _idefics3(transformers: Any) -> Any:
    images = _pil(transformers, "Idefics3", **_SIZE_OF_TILES)
    return transformers.Idefics3Processor(images, _words_of_tiles(), image_seq_len=4)


def _smolvlm(transformers: Any) -> Any:
    images, video = _pil(transformers, "SmolVLM", **_SIZE_OF_TILES), transformers.SmolVLMVideoProcessor()
    return transformers.SmolVLMProcessor(images, _words_of_tiles(), video, image_seq_len=4)


def _pixtral(transformers: Any, merge: int = 1) -> Any:
    size = {"size": {"longest_edge": 32}, "patch_size": {"height": 4, "width": 4}}
    words = tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    rest = {"patch_size": 4, "spatial_merge_size": merge}
    return transformers.PixtralProcessor(_pil(transformers, "Pixtral", **size), words, **rest)


def _mistral3(transformers: Any) -> Any:
    return _pixtral(transformers, 2)


def _gemma3(transformers: Any) -> Any:
    words = tokenizer(boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>")
    images = _pil(transformers, "Gemma3", size={"height": 16, "width": 16})
    return transformers.Gemma3Processor(images, words, image_seq_length=4)


def _internvl(transformers: Any) -> Any:
    words = tokenizer(
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = _pil(transformers, "GotOcr2", size={"height": 16, "width": 16}, max_patches=4)
    return transformers.InternVLProcessor(images, words, transformers.InternVLVideoProcessor(), image_seq_length=4)


_MADE = {
    "internvl": _internvl,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
}
