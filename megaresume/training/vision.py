"""A small vision transformer of plain torch, and the projector behind it: images of any size to features of tokens.

    patches float[K, F] of n images  ->  [n, longest, H], padded     attention within an image
                                     ->  [K, H]                      M * M neighbours side by side
                                     ->  projector  ->  [K / M**2, hidden size of the language model]

Where a patch lies enters as sines of its row and column in units of the image's height: the same digit at another
scale has the same place, and no image is too large for a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

__all__ = ["VisionEncoder", "VisionShape"]

#: wavelengths of the sines: from four heights of the image to a fraction of a small patch.
_LONGEST, _SHORTEST = 8.0, 0.06


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionShape:
    """What an image processor gives, as far as the model must know."""

    #: F: numbers of a patch, 3 * P * P.
    patch_features: int
    #: M: patches of a side of the square that becomes one token.
    merge: int
    #: P: side of the patches that tiles [k, 3, height, width] are cut into, in pixels; None: the processor has cut.
    patch_size: int | None


class _Block(nn.Module):
    """A layer, normalised before attention and MLP."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.up, self.down = nn.Linear(hidden_size, 4 * hidden_size), nn.Linear(4 * hidden_size, hidden_size)

    def forward(self, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """x: [n, L, H]; allowed: bool[n, 1, 1, L], True at patches, False at padding."""
        n, length, width = x.shape
        # [3, n, heads, L, H / heads]
        q, k, v = self.qkv(self.norm_attention(x)).view(n, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=allowed)
        x = x + self.out(attended.transpose(1, 2).reshape(n, length, width))
        out: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm_mlp(x))))
        return out


class VisionEncoder(nn.Module):
    """Vision transformer and projector.

    Args:
        shape: of what the image processor gives.
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
        self.layers = nn.ModuleList(_Block(hidden_size, num_heads) for _ in range(num_layers))
        self.norm = nn.LayerNorm(hidden_size)
        merged = hidden_size * shape.merge**2
        self.projector = nn.Sequential(nn.Linear(merged, output_size), nn.GELU(), nn.Linear(output_size, output_size))

    def forward(self, patches: torch.Tensor, grids: list[tuple[int, int]]) -> torch.Tensor:
        """Encode.

        Args:
            patches: float[K, F], image by image; within one, square after square of M * M patches, squares and
                patches of a square each row by row.
            grids: rows and columns of patches of each image; their products add up to K.

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
    """float32[rows * columns, 2]: row and column of the centre of each patch, in heights of the image."""
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"), dim=-1)
    squares = grid.view(rows // merge, merge, columns // merge, merge, 2).transpose(1, 2)
    return (squares.reshape(-1, 2) + 0.5) / rows


def _sines(places: torch.Tensor, width: int) -> torch.Tensor:
    """float32[K, width]: sines and cosines of both coordinates."""
    steps = torch.arange(width // 4) / max(width // 4 - 1, 1)
    waves = 2 * math.pi / (_LONGEST * (_SHORTEST / _LONGEST) ** steps)
    angles = (places[:, :, None] * waves).flatten(1)
    return torch.cat([angles.sin(), angles.cos()], dim=1)
