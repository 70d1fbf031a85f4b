"""transformers' own image processors, of either back-end, for the tests that compare with them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest

#: class -> module of transformers.models.
MODULES = {
    "CLIPImageProcessor": "clip",
    "LlavaImageProcessor": "llava",
    "SiglipImageProcessor": "siglip",
    "Gemma3ImageProcessor": "gemma3",
    "GotOcr2ImageProcessor": "got_ocr2",
    "Qwen2VLImageProcessor": "qwen2_vl",
}
#: as `backend` names them.
BACKENDS = ("pillow", "torchvision")


def theirs(name: str, backend: str, **values: Any) -> Any:
    """The processor with these values; the test is skipped where torchvision is missing."""
    pytest.importorskip("transformers")
    if backend == "torchvision":
        pytest.importorskip("torchvision")
    folder = MODULES[name]
    of_pillow = backend == "pillow"
    module = f"transformers.models.{folder}.image_processing_{'pil_' if of_pillow else ''}{folder}"
    return getattr(importlib.import_module(module), name + ("Pil" if of_pillow else ""))(**values)


def pixels_of(processor: Any, image: PIL.Image.Image) -> np.ndarray:
    """What it makes of one image: float32[k, ...]."""
    made = processor(image, return_tensors="np")["pixel_values"]
    return np.ascontiguousarray(np.asarray(made, np.float32))


def write_model(directory: Path, config: dict[str, Any], model: dict[str, Any]) -> Path:
    """A directory as the Hub has it."""
    directory.mkdir()
    (directory / "preprocessor_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps(model))
    return directory


def picture(width: int, height: int) -> PIL.Image.Image:
    """Smooth with noise: every place of the image is its own."""
    generator = np.random.default_rng(width * 10007 + height)
    x, y = np.linspace(0, 200, width)[None, :, None], np.linspace(0, 200, height)[:, None, None]
    values = (x + y * [0.3, 0.6, 0.9]) / 2 + generator.integers(0, 50, (height, width, 3))
    return PIL.Image.fromarray(np.clip(values, 0, 255).astype(np.uint8))
