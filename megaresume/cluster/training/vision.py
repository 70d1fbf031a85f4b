"""Images in front of a GPTModel: their features replace the embeddings of image tokens.

    tokens, position ids  -->  embedding of the language model  -->  [S, m, H]  --+-->  decoder_input  -->  GPTModel
    pixel values, grids   -->  vision encoder, projector  -->  [image tokens, H] -+   written at image_positions

Every rank runs the vision encoder in every micro-batch; without images it gets a blank one, whose features are added
with weight 0. So all parameters have gradients on all ranks, which ZeRO's collectives require.

The encoder is a small vision transformer in plain torch, followed by a projector: images of any size to features.

    patches float[K, F] of n images  ->  [n, longest, H], padded     attention within an image
                                     ->  [K, H]                      M * M neighbours side by side
                                     ->  projector  ->  [K / M**2, hidden size of the language model]

The position of a patch is encoded as sines of its row and column, in units of the image's height: the same digit at
another scale has the same position, and no image is too large for a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from megaresume.batches.batch import Batch, image_places
from megaresume.cluster.training.launch import Arguments
from megaresume.stream.errors import SetupError, UsageError

#: wavelengths of the sines: from several heights of the image to a fraction of a small patch.
_LONGEST, _SHORTEST = 8.0, 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """The shape of an image processor's output, as the model needs it."""

    #: F: values in a patch, 3 * P * P.
    patch_features: int
    #: M: edge, in patches, of the square that becomes one token.
    merge: int
    #: P: edge of the patches that tiles [k, 3, height, width] are cut into, in pixels; None if the processor cuts.
    patch_size: int | None


class _TransformerBlock(nn.Module):
    """A layer with normalisation before attention and MLP."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """x: [n, L, H]; allowed: bool[n, 1, 1, L], True for patches, False for padding."""
        n, length, width = x.shape
        # [3, n, heads, L, H / heads]
        q, k, v = self.qkv(self.norm_attention(x)).view(n, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return out


class ImageModel(nn.Module):
    """Vision transformer and projector.

    Args:
        shape: of the image processor's output.
        num_layers, hidden_size, num_heads: of the transformer.
        output_size: hidden size of the language model.
    """

    def __init__(
        self, shape: VisionShape, *, num_layers: int, hidden_size: int, num_heads: int, output_size: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self.patches = nn.Linear(shape.patch_features, hidden_size)
        self.places = nn.Linear(hidden_size, hidden_size)
        self.layers = nn.ModuleList(_TransformerBlock(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        merged = hidden_size * shape.merge**2
        self.projector = nn.Sequential(nn.Linear(merged, output_size), nn.GELU(), nn.Linear(output_size, output_size))

    def forward(self, patches: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
        """Encode images.

        Args:
            patches: float[K, F], by image; within an image by squares of M * M patches; squares, and patches within a
                square, row by row.
            grids: rows and columns of patches of each image; the products add up to K.

        Returns:
            [K / M**2, output size], in the order of the squares.
        """
        lengths = [rows * columns for rows, columns in grids]
        places = torch.cat([_places(rows, columns, self.shape.merge) for rows, columns in grids])
        x = self.patches(patches) + self.places(_sines(places, self.places.in_features).to(patches))
        # allowed: bool[n, longest]; x: [K, H] -> [n, longest, H], padded with zeros
        counts = torch.tensor(lengths)
        allowed = (torch.arange(max(lengths))[None] < counts[:, None]).to(x.device)
        padded = x.new_zeros(*allowed.shape, x.shape[-1]).masked_scatter(allowed[..., None], x)
        for layer in self.layers:
            padded = layer(padded, allowed[:, None, None])
        x = self.norm(padded[allowed])
        features: torch.Tensor = self.projector(x.reshape(-1, x.shape[-1] * self.shape.merge**2))
        return features


def _places(rows: int, columns: int, merge: int) -> torch.Tensor:
    """Row and column of the centre of each patch, in heights of the image: float32[rows * columns, 2]."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
    return (squares.reshape(-1, 2) + 0.5) / rows


def _sines(places: torch.Tensor, width: int) -> torch.Tensor:
    """Sines and cosines of both coordinates: float32[K, width]."""
    steps = torch.arange(width // 4) / max(width // 4 - 1, 1)
    waves = 2 * math.pi / (_LONGEST * (_SHORTEST / _LONGEST) ** steps)
    angles = (places[:, :, None] * waves).flatten(1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """The images of a micro-batch, on the device."""

    #: float32[sum k, ...]: patches [K, F], or tiles [k, 3, height, width].
    pixels: torch.Tensor
    #: int64[n, 3], on the CPU: frames, rows and columns of patches, if the processor returns patches.
    grids: torch.Tensor
    #: int64[image tokens] each: row and column of each image token in the batch.
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, batch: Batch, device: torch.device) -> Images:
        """Take them from a batch."""
        rows, columns = image_places(batch).nonzero(as_tuple=True)
        return cls(
            pixels=batch["pixel_values"].to(device, non_blocking=True),
            grids=batch["image_grid_thw"],
            rows=rows.to(device, non_blocking=True),
            columns=columns.to(device, non_blocking=True),
        )


def encoders_of(sources: Sequence[Any]) -> list[Any]:
    """The encoders of the image sources among these sources."""
    return [source.encoder for source in sources if getattr(source, "encoder", None) is not None]


def image_encoder(args: Arguments, sources: Sequence[Any]) -> Any | None:
    """The encoder of the image sources of a blend; None if the data has no images.

    Raises:
        UsageError: the data has images and the model has no vision encoder, or vice versa.
    """
    encoders = encoders_of(sources)
    if encoders and args.vision_num_layers is None:
        raise UsageError(
            "the data has images, and the model has no vision encoder",
            found="an image source, and no --vision-num-layers",
            expected="a vision encoder, or data of text alone",
            action="--vision-num-layers 2 --vision-hidden-size 64 --vision-num-attention-heads 4, or larger",
        )
    if args.vision_num_layers is not None and not encoders:
        raise UsageError(
            "the data has no images for the vision encoder",
            found=f"--vision-num-layers {args.vision_num_layers}, and sources of text alone",
            expected="a source of kind webdataset, image_folder or energon in --megaresume-data",
            action="remove the --vision flags, or add the source with weight 0 for a stage to come",
        )
    return encoders[0] if encoders else None


def with_vision(args: Arguments, language: Any, encoder: Any, device: torch.device) -> VisionLanguageModel:
    """Put a vision encoder in front of a GPTModel; its weights depend on ``args.seed``.

    Args:
        args: the flags, including those for vision.
        language: the GPTModel of this rank.
        encoder: of the data's image sources.
        device: for training.

    Raises:
        SetupError: the encoder's image processor does not fit.
    """
    torch.manual_seed(xxhash.xxh3_64_intdigest(f"vision {args.seed}".encode()) >> 1)
    assert args.vision_num_layers and args.vision_hidden_size and args.vision_num_attention_heads
    vision = ImageModel(
        vision_shape(encoder.processor, args.vision_patch_size),
        num_layers=args.vision_num_layers,
        hidden_size=args.vision_hidden_size,
        num_heads=args.vision_num_attention_heads,
        output_size=args.hidden_size,
    )
    dtype = next(language.parameters()).dtype
    return VisionLanguageModel(language, vision.to(device=device, dtype=dtype))


def vision_shape(processor: Any, patch_size: int) -> VisionShape:
    """Try an image processor to find out the shape of its output.

    Args:
        processor: of the encoder of the data's image sources.
        patch_size: P, for processors that return tiles.

    Raises:
        SetupError: the output does not fit this program's vision encoder.
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
    """A vision encoder in front of a GPTModel.

    Args:
        language: the GPTModel of this rank.
        vision: encoder and projector, with the same weights on all tensor-parallel ranks.
    """

    def __init__(self, language: Any, vision: ImageModel) -> None:
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
        """Compute the output of GPTModel.

        Args:
            tokens, position_ids, labels: int64[m, S].
            attention_mask: bool[m, 1, S, S], True where attention is forbidden.
            images: of the micro-batch; None or empty: a blank one is used, so that parameters have gradients.

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
    """Patches float[K, F], with rows and columns of every sequence of patches that attend to each other."""
    if images.pixels.ndim == 2:
        # One sequence per frame.
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
