"""Image processors by kind: from options in YAML to the processor.

built_in.py      patches       one square of fixed size                CLIP, LLaVA-1.5, SigLIP
                 tiles         squares, as many as its shape asks for  InternVL, NVLM
                 native        patches of about its own size           Qwen2-VL and its successors
python.py        python        one's own, from a factory
hugging_face.py  transformers  a model's own, of transformers          Idefics3, Pixtral, LLaVA-NeXT, LLaVA-OneVision

base.py        what a processor promises, and what stands in a sequence for one image
pixels.py      resized, cut and normalised as Pillow and as torchvision do it, into the batch
resample.py    resizing in 8 bits, compiled
pretrained.py  a model's own preprocessor_config.json, or a published one, as options of these kinds
"""

from __future__ import annotations

from typing import Any

from megaresume.encoding.images.processors.base import Processor
from megaresume.encoding.images.processors.built_in import Native, Patches, Tiles
from megaresume.encoding.images.processors.hugging_face import TransformersProcessor
from megaresume.encoding.images.processors.python import PythonProcessor
from megaresume.stream.schema import read_kind

__all__ = ["KINDS", "processor_from_options"]

KINDS: dict[str, type[Any]] = {
    cls.kind: cls for cls in (Patches, Tiles, Native, PythonProcessor, TransformersProcessor)
}


def processor_from_options(options: object, where: str = "processor") -> Processor:
    """The processor that the options describe: ``{kind: native, max_pixels: 1003520}``.

    Raises:
        ConfigError: an unknown kind or option, or a bad value.
    """
    processor: Processor = read_kind(options, KINDS, where)
    return processor
