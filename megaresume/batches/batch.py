"""From a plan to torch tensors: what a training step receives.

A blend with image sources has the keys of images in every batch, also in one without an image: with 0 rows, so that
all ranks run the same graph.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch
import torch.utils.data

from megaresume.batches.assemble import Arrays, Assembler
from megaresume.batches.documents import DocumentReader, FaultEntry, Images
from megaresume.images.room import Room
from megaresume.stream.planning.plan import Plan


class _Always(TypedDict):
    #: int64[m, S].
    tokens: torch.Tensor
    #: int64[m, S]: the next token of the same document.
    labels: torch.Tensor
    #: float32[m, S]: 1 where the label counts.
    loss_mask: torch.Tensor
    #: int64[m, S]: from 0 in every segment.
    position_ids: torch.Tensor
    #: one int32[segments + 1] a sample: where its segments start, first 0, last S; padding is the last segment.
    cu_seqlens: list[torch.Tensor]
    #: int64[m]: numbers of the samples in the stream.
    samples: torch.Tensor
    #: int64[m]: identities of the samples (the bits of `Plan.hashes`).
    hashes: torch.Tensor


class Batch(_Always, total=False):
    """A micro-batch of m samples of S tokens."""

    #: bool[m, 1, S, S]: True where attention is not allowed (Megatron's convention); only if asked for.
    attention_mask: torch.Tensor

    # The rest only where the blend has image sources; n images, in the order of their tokens.

    #: float32[sum of num_tiles, ...]: tiles or patches of all images, one image after another.
    pixel_values: torch.Tensor
    #: int64[n, 3]: frames, rows and columns of patches (or of tiles) of each image.
    image_grid_thw: torch.Tensor
    #: int64[n, 3]: row of the micro-batch, column of the first token, tokens.
    image_positions: torch.Tensor
    #: int32[n]: rows of ``pixel_values`` of each image.
    num_tiles: torch.Tensor
    #: records that were not as the index announced them, and what was done.
    faults: list[FaultEntry]


def document_mask(cu_seqlens: Sequence[torch.Tensor], seq_length: int) -> torch.Tensor:
    """The causal mask in which no document sees another, for models without packed attention.

    Args:
        cu_seqlens: of each sample, int32[segments + 1].
        seq_length: tokens a sample.

    Returns:
        bool[m, 1, S, S], True where attention is not allowed.
    """
    masks = torch.triu(torch.ones(seq_length, seq_length, dtype=torch.bool), diagonal=1)
    masks = masks.repeat(len(cu_seqlens), 1, 1, 1)
    for mask, bounds in zip(masks[:, 0], cu_seqlens, strict=True):
        for start in bounds[1:-1].tolist():
            mask[start:, :start] = True
    return masks


def make_batch(
    plan: Plan,
    assembler: Assembler,
    *,
    samples: Sequence[int] | None = None,
    attention_mask: bool = False,
    pin_memory: bool = False,
) -> Batch:
    """Read the samples of a plan.

    Args:
        plan: the samples.
        assembler: reads them.
        samples: their numbers, where they are not consecutive.
        attention_mask: add the document-diagonal mask.
        pin_memory: put tensors into page-locked memory.

    Raises:
        CorpusError: a document is damaged, or not as long as the index says.
    """
    shape = (len(plan), assembler.seq_length)
    tokens, labels, position_ids = torch.empty((3, *shape), dtype=torch.int64, pin_memory=pin_memory)
    loss_mask = torch.empty(shape, dtype=torch.float32, pin_memory=pin_memory)
    arrays = Arrays(
        tokens=tokens.numpy(), labels=labels.numpy(), loss_mask=loss_mask.numpy(), position_ids=position_ids.numpy()
    )
    images = values = None
    if assembler.documents is not None:
        values = _room(plan, assembler.documents, pin_memory=pin_memory)
        images = Images(room=None if values is None else Room(values.numpy()))
    layout = assembler.fill(plan, arrays, images)
    batch: Batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "cu_seqlens": list(torch.split(torch.from_numpy(layout.bounds), layout.num_bounds.tolist())),
        "samples": torch.tensor(range(plan.first, plan.stop) if samples is None else samples, dtype=torch.int64),
        "hashes": torch.from_numpy(plan.hashes.view(np.int64).copy()),
    }
    if assembler.documents is not None and images is not None:
        _add_images(batch, images, values, assembler.documents.pixel_shape, pin_memory=pin_memory)
    if attention_mask:
        batch["attention_mask"] = document_mask(batch["cu_seqlens"], assembler.seq_length)
    return batch


def _room(plan: Plan, documents: DocumentReader, *, pin_memory: bool) -> torch.Tensor | None:
    """Rows for the pixels of a plan, where what is never written costs nothing; None: copy them together at the end."""
    if pin_memory or torch.utils.data.get_worker_info() is not None:
        return None
    # NumPy asks for large pages, PyTorch does not: faulting in small ones takes longer than writing the pixels.
    return torch.from_numpy(np.empty((documents.most_rows(plan), *documents.pixel_shape), np.float32))


def _add_images(
    batch: Batch, images: Images, room: torch.Tensor | None, pixel_shape: tuple[int, ...], *, pin_memory: bool
) -> None:
    num_tiles = [len(pixels) for pixels in images.pixels]
    if room is not None and images.room is not None and images.room.holds(images.pixels):
        # By way of NumPy: the tensor's storage is these rows alone.
        values = torch.from_numpy(room.numpy()[: sum(num_tiles)])
    else:
        values = _empty((sum(num_tiles), *pixel_shape), pin_memory=pin_memory)
        if images.pixels:
            np.concatenate(images.pixels, out=values.numpy())
    batch["pixel_values"] = values
    batch["image_grid_thw"] = torch.tensor(images.grids, dtype=torch.int64).reshape(-1, 3)
    batch["image_positions"] = torch.tensor(images.positions, dtype=torch.int64).reshape(-1, 3)
    batch["num_tiles"] = torch.tensor(num_tiles, dtype=torch.int32)
    samples = batch["samples"].tolist()
    batch["faults"] = [fault._replace(sample=samples[fault.sample]) for fault in images.faults]


def _empty(shape: tuple[int, ...], *, pin_memory: bool) -> torch.Tensor:
    """float32, not initialised; in a worker process where the consumer reads it: a copy takes a fifth of its time."""
    if torch.utils.data.get_worker_info() is None or not shape[0]:
        return torch.empty(shape, dtype=torch.float32, pin_memory=pin_memory)
    # As torch's own collation does it.
    shared = torch.UntypedStorage._new_shared(4 * math.prod(shape), device="cpu")  # type: ignore[no-untyped-call]
    return torch.empty(0, dtype=torch.float32).set_(shared).view(shape)
