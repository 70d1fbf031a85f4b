"""A task encoder for Energon, with random augmentation and packing. Imported late: Energon takes seconds."""

from __future__ import annotations

import random
from typing import Any

import torch
from megatron.energon import CaptioningSample, DefaultTaskEncoder, stateless


class Encoder(DefaultTaskEncoder[Any, Any, Any, Any]):
    """Flips images at random; packs up to 3 records a sample."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: CaptioningSample) -> CaptioningSample:
        image = sample.image
        if random.random() < 0.5:
            image = image.flip(-1)
        sample.image = (image + torch.rand(1)).float()
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        by_size = sorted(samples, key=lambda sample: (sample.image.numel(), sample.__key__))
        return [by_size[i : i + 3] for i in range(0, len(by_size), 3)]

    @stateless
    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return CaptioningSample(
            __key__=",".join(sample.__key__ for sample in samples),
            __restore_key__=(),
            image=torch.cat([sample.image.flatten() for sample in samples]),
            caption="|".join(sample.caption for sample in samples),
        )

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"keys": [sample.__key__ for sample in samples], "pixels": [sample.image for sample in samples]}
