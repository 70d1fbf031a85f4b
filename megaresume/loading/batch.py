"""From a plan to torch tensors: what a training step receives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

import numpy as np
import torch

from megaresume.loading.assemble import Arrays, Assembler
from megaresume.stream.plan import Plan

__all__ = ["Batch", "document_mask", "make_batch"]


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


def make_batch(plan: Plan, assembler: Assembler, *, attention_mask: bool = False, pin_memory: bool = False) -> Batch:
    """Read the samples of a plan.

    Raises:
        CorpusError: a document is damaged, or not as long as the index says.
    """
    shape = (len(plan), assembler.seq_length)
    tokens, labels, position_ids = torch.empty((3, *shape), dtype=torch.int64, pin_memory=pin_memory)
    loss_mask = torch.empty(shape, dtype=torch.float32, pin_memory=pin_memory)
    layout = assembler.fill(
        plan,
        Arrays(
            tokens=tokens.numpy(), labels=labels.numpy(), loss_mask=loss_mask.numpy(), position_ids=position_ids.numpy()
        ),
    )
    batch: Batch = {
        "tokens": tokens,
        "labels": labels,
        "loss_mask": loss_mask,
        "position_ids": position_ids,
        "cu_seqlens": list(torch.split(torch.from_numpy(layout.bounds), layout.num_bounds.tolist())),
        "samples": torch.arange(plan.first, plan.stop),
        "hashes": torch.from_numpy(plan.hashes.view(np.int64).copy()),
    }
    if attention_mask:
        batch["attention_mask"] = document_mask(batch["cu_seqlens"], assembler.seq_length)
    return batch
