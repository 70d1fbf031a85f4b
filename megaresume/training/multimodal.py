"""Images before a GPTModel: their features stand where the image tokens stood.

    tokens, position ids  -->  embedding of the language model  -->  [S, m, H]  --+-->  decoder_input  -->  GPTModel
    pixel values, grids   -->  vision encoder, projector  -->  [image tokens, H] -+   written at image_positions

Every rank runs the vision encoder in every micro-batch: one without images sees a blank one, whose features are added
with weight 0. All parameters so have gradients on all ranks, which ZeRO's collectives count on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn

from megaresume.loading.batch import Batch
from megaresume.stream.errors import SetupError, UsageError
from megaresume.training.arguments import Arguments
from megaresume.training.vision import VisionEncoder, VisionShape

__all__ = ["Images", "VisionLanguageModel", "encoders_of", "image_encoder", "vision_shape", "with_vision"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of a micro-batch, on the device."""

    #: float32[sum k, ...]: patches [K, F], or tiles [k, 3, height, width].
    pixels: torch.Tensor
    #: int64[n, 3], on the CPU: frames, rows and columns of patches, where the processor gives patches.
    grids: torch.Tensor
    #: int64[image tokens] each: where in the batch each image token stands.
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Images:
        """Take them from a batch: ``image_positions`` is int64[n, 3], (row, first column, tokens) of each image."""
        rows, starts, counts = batch["image_positions"].unbind(dim=1)
        first = torch.cumsum(counts, 0) - counts
        columns = torch.repeat_interleave(starts - first, counts) + torch.arange(int(counts.sum()))
        return cls(
            pixels=batch["pixel_values"].to(device, non_blocking=True),
            grids=batch["image_grid_thw"],
            rows=torch.repeat_interleave(rows, counts).to(device, non_blocking=True),
            columns=columns.to(device, non_blocking=True),
        )


def encoders_of(sources: Sequence[Any]) -> list[Any]:
    """The encoders of the image sources among these."""
    return [source.encoder for source in sources if getattr(source, "encoder", None) is not None]


def image_encoder(args: Arguments, sources: Sequence[Any]) -> Any | None:
    """The encoder of the image sources of a blend; None: the data has no images.

    Raises:
        UsageError: the data has images and the model no vision encoder, or the other way round.
    """
    encoders = encoders_of(sources)
    if encoders and args.vision_num_layers is None:
        raise UsageError(
            "the data has images, and the model cannot see",
            found="an image source, and no --vision-num-layers",
            expected="a vision encoder, or data of text alone",
            action="--vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4, or larger",
        )
    if args.vision_num_layers is not None and not encoders:
        raise UsageError(
            "the data has no images for the vision encoder",
            found=f"--vision-num-layers {args.vision_num_layers}, and sources of text alone",
            expected="a source of kind webdataset or energon in --megaresume-data",
            action="remove the --vision flags, or add the source with weight 0 for a stage to come",
        )
    return encoders[0] if encoders else None


def with_vision(args: Arguments, language: Any, encoder: Any, device: torch.device) -> VisionLanguageModel:
    """Put a vision encoder before a GPTModel; its weights follow from ``args.seed``.

    Args:
        args: the flags; those of vision are given.
        language: the GPTModel of this rank.
        encoder: of the data's image sources.
        device: where it will train.

    Raises:
        SetupError: the encoder's image processor does not fit.
    """
    torch.manual_seed(xxhash.xxh3_64_intdigest(f"vision {args.seed}".encode()) >> 1)
    assert args.vision_num_layers and args.vision_hidden_size and args.vision_num_attention_heads
    vision = VisionEncoder(
        vision_shape(encoder.processor, args.vision_patch_size),
        num_layers=args.vision_num_layers,
        hidden_size=args.vision_hidden_size,
        num_heads=args.vision_num_attention_heads,
        output_size=args.hidden_size,
    )
    dtype = next(language.parameters()).dtype
    return VisionLanguageModel(language, vision.to(device=device, dtype=dtype))


def vision_shape(processor: Any, patch_size: int) -> VisionShape:
    """What the model must know of an image processor, found out by trying it.

    Args:
        processor: of the encoder of the data's image sources.
        patch_size: P, for processors that give tiles.

    Raises:
        SetupError: its output does not fit this program's vision encoder.
    """
    import numpy as np
    from PIL import Image

    pixels, grid = processor(Image.new("RGB", (224, 224)), np.random.default_rng(0))
    tokens = processor.tokens_of(pixels, grid)
    if pixels.ndim == 2:
        num_patches, features, size = len(pixels), pixels.shape[1], None
    else:
        _, channels, height, width = pixels.shape
        if height % patch_size or width % patch_size:
            raise SetupError(
                "tiles do not divide into patches",
                found=f"tiles of {width} x {height} pixels, --vision-patch-size {patch_size}",
                expected="a patch size that divides both",
                action="--vision-patch-size P, with the processor's own patch_size",
            )
        num_patches = len(pixels) * (height // patch_size) * (width // patch_size)
        features, size = channels * patch_size**2, patch_size
    merge = math.isqrt(num_patches // max(tokens, 1))
    if merge**2 * tokens != num_patches:
        raise SetupError(
            "the vision encoder of this program cannot make as many tokens as the index counts",
            found=f"{tokens} tokens of {num_patches} patches",
            expected="a square of patches for every token, and no class tokens",
            cause="--vision-patch-size is not the processor's patch_size" if size else "a processor of another kind",
            action="change the flag, or prepare the index with class_tokens: 0",
        )
    return VisionShape(patch_features=features, merge=merge, patch_size=size)


class VisionLanguageModel(nn.Module):
    """A vision encoder before a GPTModel.

    Args:
        language: the GPTModel of this rank.
        vision: encoder and projector; the same weights on all tensor-parallel ranks.
    """

    def __init__(self, language: Any, vision: VisionEncoder) -> None:
        super().__init__()
        self.language, self.vision = language, vision

    def forward(
        self,
        tokens: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
        images: Images | None = None,
    ) -> torch.Tensor:
        """As GPTModel's.

        Args:
            tokens, position_ids, labels: int64[m, S].
            attention_mask: bool[m, 1, S, S], True where attention is not allowed.
            images: of the micro-batch; None or without any: a blank one stands in for gradients.

        Returns:
            float[m, S] token losses; without labels float[m, S, vocabulary] logits.
        """
        # embedded: [S, m, H]
        embedded = self.language.embedding(tokens, position_ids)
        if images is None or not len(images.rows):
            patches, grids = _blank(self.vision.shape, tokens.device)
            features = self.vision(patches.to(embedded), grids)
            embedded = embedded + 0.0 * features.sum().to(embedded)
        else:
            patches, grids = _sequences(images, self.vision.shape)
            features = self.vision(patches.to(embedded), grids)
            embedded = embedded.index_put((images.columns, images.rows), features.to(embedded))
        out: torch.Tensor = self.language(tokens, position_ids, attention_mask, decoder_input=embedded, labels=labels)
        return out


def _sequences(images: Images, shape: VisionShape) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """Patches float[K, F], and rows and columns of every sequence of patches that attends to itself."""
    if images.pixels.ndim == 2:
        # One sequence a frame.
        return images.pixels, [(rows, columns) for t, rows, columns in images.grids.tolist() for _ in range(t)]
    assert shape.patch_size is not None
    tiles, size, merge = images.pixels, shape.patch_size, shape.merge
    k, channels, height, width = tiles.shape
    rows, columns = height // size, width // size
    squares = tiles.view(k, channels, rows // merge, merge, size, columns // merge, merge, size)
    # -> [k, rows / M, columns / M, M, M, channels, P, P]
    patches = squares.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, channels * size**2)
    return patches, [(rows, columns)] * k


def _blank(shape: VisionShape, device: torch.device) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """The smallest image: one token."""
    return torch.zeros(shape.merge**2, shape.patch_features, device=device), [(shape.merge, shape.merge)]
