"""Hashes of what the model gets of a sample: tokens, labels, masks, positions, and its images down to the last bit."""

from __future__ import annotations

import torch
import xxhash

from megaresume.loading.batch import Batch

__all__ = ["content_hashes"]


def content_hashes(batch: Batch) -> list[int]:
    """An unsigned 64-bit hash of each sample of a micro-batch; the same in any layout of micro-batches and ranks.

    Images enter with their pixels, grid, column and number of tokens. The row does not: it belongs to the layout.
    """
    arrays = [batch[name].numpy() for name in ("tokens", "labels", "loss_mask", "position_ids")]
    hashers = [xxhash.xxh3_64() for _ in range(len(arrays[0]))]
    for row, hasher in enumerate(hashers):
        for array in arrays:
            hasher.update(array[row].data)
    if "pixel_values" in batch:
        pixels = torch.split(batch["pixel_values"], batch["num_tiles"].tolist())
        for place, grid, image in zip(batch["image_positions"], batch["image_grid_thw"], pixels, strict=True):
            hasher = hashers[int(place[0])]
            hasher.update(repr((place[1:].tolist(), grid.tolist(), tuple(image.shape))).encode())
            hasher.update(image.contiguous().numpy().data)
    return [hasher.intdigest() for hasher in hashers]
