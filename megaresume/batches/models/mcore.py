"""Batches for megatron-core's `GPTModel` and `LLaVAModel`.

A batch holds an image as many tokens as its features take; `LLaVAModel` wants one, and makes room itself:

    tokens      t t I I I I t t      ->   input_ids   t t I t t      (it inserts img_seq_len features a tile for I)
    labels      1 . . . . 5 6 7           labels      1 . 5 6 7      (an image has the label of its last token)

so that what the model puts together has every token where the batch has it. Checked with megatron-core 0.16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megaresume.batches.batch import Batch, document_mask, image_places
from megaresume.stream.errors import UsageError


def packed_seq_params(cu_seqlens: Sequence[torch.Tensor], device: torch.device | None = None) -> Any:
    """The bounds of documents for attention over rows that are joined to one.

    Args:
        cu_seqlens: of each sample, int32[segments + 1].
        device: where attention runs.

    Returns:
        megatron-core's `PackedSeqParams` (``thd``) for ``[1, m * S]`` tokens. Alignment belongs to the document before
        it, padding at the end is a document of its own.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = [torch.zeros(1, dtype=torch.int32)]
    offset = 0
    for row in cu_seqlens:
        bounds.append(row[1:].cpu() + offset)
        offset += int(row[-1])
    joined = torch.cat(bounds).to(torch.int32)
    longest = int((joined[1:] - joined[:-1]).max())
    joined = joined.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=joined,
        cu_seqlens_kv=joined,
        # Context parallelism looks at these. There is nothing between documents that attention would have to leave out.
        cu_seqlens_q_padded=joined,
        cu_seqlens_kv_padded=joined,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def for_mcore_gpt(batch: Batch, *, packed: bool = True) -> dict[str, Any]:
    """Keyword arguments of `GPTModel.forward`, which gives the loss of every token.

    Args:
        batch: m samples of S tokens.
        packed: join the rows to ``[1, m * S]`` and pass `PackedSeqParams` (attention of Transformer Engine); otherwise
            rows stay, and a mask keeps documents apart (bool[m, 1, S, S], True where attention is not allowed).

    Returns:
        input_ids, position_ids, labels, loss_mask, attention_mask, packed_seq_params. Weigh the losses with
        ``loss_mask``.
    """
    rows = {"input_ids": batch["tokens"], **{key: batch[key] for key in ("position_ids", "labels", "loss_mask")}}
    if packed:
        rows = {key: value.reshape(1, -1) for key, value in rows.items()}
    return {**rows, **_attention(batch, packed=packed)}


def for_mcore_llava(
    batch: Batch, *, img_seq_len: int, image_token_index: int = -200, packed: bool = True
) -> dict[str, Any]:
    """Keyword arguments of `LLaVAModel.forward`.

    The model gives the loss of every token of the sample, images included, and a loss mask of the same shape. Its mask
    leaves out the first token after an image, which the template of a caption trains on: weigh the losses with
    ``batch["loss_mask"]`` instead, whose places are the same.

    Args:
        batch: m samples of S tokens, with square tiles (processors ``patches`` and ``tiles``).
        img_seq_len: features a tile: ``model.img_seq_len``.
        image_token_index: that of the model; no token of the vocabulary.
        packed: pass `PackedSeqParams`, for micro-batches of one sample; otherwise a mask.

    Returns:
        images, input_ids, position_ids, labels, loss_mask, num_image_tiles, image_token_index, attention_mask,
        packed_seq_params. With several samples, rows are filled up to the longest: the model cuts what is after
        ``language_max_sequence_length``, which has to be S.

    Raises:
        UsageError: images of another number of tokens; no images at all in this blend; packed rows.
    """
    if "pixel_values" not in batch:
        raise UsageError(
            "a blend without image sources",
            found="batches of text only",
            expected="batches with images",
            action="use for_mcore_gpt, or add an image source",
        )
    tokens = batch["tokens"]
    if packed and len(tokens) != 1:
        raise UsageError(
            "packed samples need micro-batches of one sample here",
            found=f"{len(tokens)} samples in a micro-batch",
            expected="1: LLaVAModel puts images into rows, and rows cannot be joined before that",
            action="a micro-batch of 1 and a longer seq_length, or packed=False",
        )
    _check_sizes(batch, img_seq_len)
    keep = torch.ones_like(tokens, dtype=torch.bool)
    input_ids, labels, loss_mask = tokens.clone(), batch["labels"].clone(), batch["loss_mask"].clone()
    for row, column, num in batch["image_positions"].tolist():
        keep[row, column + 1 : column + num] = False
        input_ids[row, column] = image_token_index
        # What the last token of the image predicts: the model moves it there.
        labels[row, column] = labels[row, column + num - 1]
        loss_mask[row, column] = loss_mask[row, column + num - 1]
    return {
        "images": batch["pixel_values"],
        "input_ids": _kept(input_ids, keep, 0),
        "position_ids": _kept(batch["position_ids"], keep, 0),
        "labels": _kept(labels, keep, 0),
        "loss_mask": _kept(loss_mask, keep, 0.0),
        "num_image_tiles": batch["num_tiles"],
        "image_token_index": image_token_index,
        **_attention(batch, packed=packed),
    }


def _attention(batch: Batch, *, packed: bool) -> dict[str, Any]:
    device = batch["tokens"].device
    if packed:
        return {"attention_mask": None, "packed_seq_params": packed_seq_params(batch["cu_seqlens"], device)}
    mask = document_mask(batch["cu_seqlens"], batch["tokens"].shape[1])
    return {"attention_mask": mask.to(device), "packed_seq_params": None}


def _check_sizes(batch: Batch, img_seq_len: int) -> None:
    """Images of another size would shift all that follows, without a word."""
    places = image_places(batch)
    for row, column, num in batch["image_positions"].tolist():
        if not bool(places[row, column : column + num].all()):
            raise UsageError(
                "the image tokens of an image are not one run, which LLaVAModel would make of them",
                found=f"other tokens between the {num} image tokens from column {column} on",
                expected="a processor without a pattern: patches or tiles",
                action="prepare the shards again with the processor of this model",
            )
    num_tokens, num_tiles = batch["image_positions"][:, 2], batch["num_tiles"]
    wrong = torch.nonzero(num_tokens != num_tiles * img_seq_len).flatten()
    if len(wrong):
        k = int(wrong[0])
        raise UsageError(
            "the images have other lengths than the model gives them",
            found=f"an image of {int(num_tiles[k])} tiles that takes {int(num_tokens[k])} tokens",
            expected=f"{img_seq_len} tokens a tile (img_seq_len)",
            cause="the shards were prepared for another image size, patch size, pixel shuffle or tile tags",
            action="prepare the shards again with the processor of this model, or change the model",
        )


def _kept(rows: torch.Tensor, keep: torch.Tensor, fill: float) -> torch.Tensor:
    """The kept columns of each row, filled up at the end: [m, longest]."""
    kept = [row[mask] for row, mask in zip(rows, keep, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=fill)
