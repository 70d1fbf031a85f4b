"""Batches as the keyword arguments of third-party models.

    text           megatron-core GPTModel     for_mcore_gpt      rows joined, bounds of documents as PackedSeqParams
    image-text     megatron-core LLaVAModel   for_mcore_llava    one image token an image, as that model wants it
    both           Hugging Face transformers  for_hf             causal language models, LLaVA to Qwen3-VL

All keep documents apart: a model's result for one does not depend on its neighbours in a sample. They work on any
device.

A batch has as many image tokens as an image has features; ``LLaVAModel`` wants one, and makes room itself:

    tokens      t t I I I I t t      ->   input_ids   t t I t t      (it inserts img_seq_len features a tile for I)
    labels      1 . . . . 5 6 7           labels      1 . 5 6 7      (an image has the label of its last token)

so that every token is at the same place in the model's sequence as in the batch. Checked with megatron-core 0.16.

For transformers (checked with version 5):

    position_ids   0 1 2 3 | 0 1 2 | 0 0 0     restart in every document: without an attention mask and a cache,
                                               transformers separates documents by this alone, in every attention

Its `labels` are the token itself, which the model shifts; the last label of a document that continues in the next
sample would be lost in that shift. So ``shift_labels`` are passed too, which the losses of transformers prefer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch

from megaresume.batches.batch import Batch, document_mask, image_places
from megaresume.stream.errors import UsageError

Family = Literal[
    "causal_lm", "llava", "internvl", "gemma3", "qwen2_vl", "llava_next", "llava_onevision", "idefics3", "pixtral"
]
#: families whose pixels are patches of one size: [patches, values of a patch]; the others have tiles.
_OF_PATCHES = ("qwen2_vl", "pixtral")
#: The label that transformers excludes from a loss.
IGNORED = -100


def packed_seq_params(cu_seqlens: Sequence[torch.Tensor], device: torch.device | None = None) -> Any:
    """The bounds of documents, for attention over rows joined into one.

    Args:
        cu_seqlens: of each sample, int32[segments + 1].
        device: where attention runs.

    Returns:
        megatron-core's `PackedSeqParams` (``thd``) for ``[1, m * S]`` tokens. Alignment padding belongs to the document
        before it; padding at the end is a document of its own.
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
        # Context parallelism reads these. There are no gaps between documents for attention to leave out.
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
    """Keyword arguments of ``LLaVAModel.forward``.

    The model returns the loss of every token of the sample, images included, and a loss mask of the same shape. Its
    mask leaves out the first token after an image, which the template of a caption trains on: weigh the losses with
    ``batch["loss_mask"]`` instead, which has the same shape.

    Args:
        batch: m samples of S tokens, with square tiles (processors ``patches`` and ``tiles``).
        img_seq_len: features a tile: ``model.img_seq_len``.
        image_token_index: that of the model; no token of the vocabulary.
        packed: pass `PackedSeqParams`, for micro-batches of one sample; otherwise a mask.

    Returns:
        images, input_ids, position_ids, labels, loss_mask, num_image_tiles, image_token_index, attention_mask,
        packed_seq_params. With several samples, rows are padded to the longest: the model cuts off tokens after
        ``language_max_sequence_length``, which must be S.

    Raises:
        UsageError: an image has another number of tokens; the blend has no images; or packed rows.
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
        # The label of an image's last token: the model moves it there.
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
    """Check image sizes: another size would silently shift everything after it."""
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
    """The kept columns of each row, padded at the end: [m, longest]."""
    kept = [row[mask] for row, mask in zip(rows, keep, strict=True)]
    return torch.nn.utils.rnn.pad_sequence(kept, batch_first=True, padding_value=fill)


def for_hf(
    batch: Batch, *, family: Family, mask_dtype: torch.dtype | None = None, sliding_window: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of ``model.forward``; its loss is the mean over all tokens with ``loss_mask``.

    Args:
        batch: m samples of S tokens. For ``llava``, ``gemma3`` and ``internvl`` with tiles (processors ``patches``,
            ``tiles``), for ``qwen2_vl`` with patches (``native``), for the other families of ``kind: transformers``;
            the image token must be that of the model.
        family: the model.
        mask_dtype: add a mask for versions of transformers that do not look at position ids: [m, 1, S, S] in this dtype
            (that of the attention), added to the scores. ``gemma3`` always has masks, for sdpa unless this is given.
        sliding_window: of the model's config; ``gemma3`` needs it.

    Returns:
        input_ids, position_ids, labels, shift_labels, use_cache; pixel_values if there are images, for ``qwen2_vl``
        with image_grid_thw, for ``llava_next``, ``llava_onevision`` and ``pixtral`` with image_sizes (height, width);
        for ``gemma3`` token_type_ids and attention_mask; attention_mask with ``mask_dtype``.
        Without an image in the batch, the vision model is not run.

    Raises:
        UsageError: unknown family, pixels of another family, or no ``sliding_window`` for ``gemma3``.
    """
    if family not in get_args(Family):
        raise UsageError.unknown(
            "family of models", family, get_args(Family), action="pass the family whose arguments the model takes"
        )
    next_tokens = torch.where(batch["loss_mask"] > 0, batch["labels"], IGNORED)
    labels = torch.full_like(next_tokens, IGNORED)
    labels[:, 1:] = next_tokens[:, :-1]
    arguments = {
        "input_ids": batch["tokens"],
        "position_ids": batch["position_ids"],
        "labels": labels,
        "shift_labels": next_tokens,
        "use_cache": False,  # with a cache, transformers would ignore the position ids
    }
    if "pixel_values" in batch and family != "causal_lm":
        _check_pixels(batch, family)
        if family == "qwen2_vl":
            arguments["position_ids"] = _positions_of_axes(batch)
        if len(batch["num_tiles"]):
            arguments |= _images_for(batch, family)
    elif "pixel_values" in batch and len(batch["num_tiles"]):
        raise UsageError(
            "a language model without vision was given images",
            found=f"{len(batch['num_tiles'])} images",
            expected="text",
            action="pass the family of a model that takes images, or leave the image sources out",
        )
    if family == "gemma3":
        arguments["token_type_ids"], arguments["attention_mask"] = _of_gemma3(batch, sliding_window, mask_dtype)
    elif mask_dtype is not None:
        hidden = document_mask(batch["cu_seqlens"], batch["tokens"].shape[1]).to(batch["tokens"].device)
        arguments["attention_mask"] = _added(hidden, mask_dtype)
    return arguments


def _check_pixels(batch: Batch, family: str) -> None:
    axes = batch["pixel_values"].ndim
    expected = 2 if family in _OF_PATCHES else 4
    if axes != expected:
        raise UsageError(
            f"the images are not as {family} takes them",
            found=f"pixel_values {list(batch['pixel_values'].shape)}",
            expected="[patches, values of a patch]: processor native; for pixtral transformers"
            if expected == 2
            else "[tiles, 3, H, W]: processors patches and tiles; transformers",
            action="prepare the shards with the processor of this model",
        )


def _images_for(batch: Batch, family: str) -> dict[str, torch.Tensor]:
    """The image arguments for this family; at least one image."""
    pixels, grids = batch["pixel_values"], batch["image_grid_thw"]
    if family == "qwen2_vl":
        return {"pixel_values": pixels, "image_grid_thw": grids}
    if family in ("llava_next", "llava_onevision"):
        return {"pixel_values": pixels, "image_sizes": grids[:, 1:]}
    if family == "idefics3":
        return {"pixel_values": pixels[None]}
    if family == "pixtral":
        return {"pixel_values": _whole_images(batch), "image_sizes": grids[:, 1:]}
    return {"pixel_values": pixels}


def _whole_images(batch: Batch) -> torch.Tensor:
    """Whole images, float32[n, 3, H, W], from their patches; smaller ones are padded with zeros at the right and
    bottom."""
    pixels, sizes = batch["pixel_values"], batch["image_grid_thw"][:, 1:]
    edge = math.isqrt(pixels.shape[1] // 3)
    height, width = sizes.max(dim=0).values.tolist()
    images = pixels.new_zeros(len(sizes), 3, height, width)
    parts = torch.split(pixels, batch["num_tiles"].tolist())
    for image, patches, (h, w) in zip(images, parts, sizes.tolist(), strict=True):
        if patches.numel() != 3 * h * w or h % edge or w % edge:
            raise UsageError(
                "the images are not as pixtral takes them",
                found=f"{len(patches)} patches of {pixels.shape[1]} values, for {h} x {w} pixels",
                expected="patches that fill the image: processor transformers",
                action="prepare the shards with the processor of this model",
            )
        cut = patches.view(h // edge, w // edge, 3, edge, edge).permute(2, 0, 3, 1, 4)
        image[:, :h, :w] = cut.reshape(3, h, w)
    return images


def _added(hidden: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, torch.finfo(dtype).min)


def _of_gemma3(
    batch: Batch, window: int | None, dtype: torch.dtype | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Which tokens belong to images, and the masks of both kinds of layers.

    An image (or several that touch) sees all of itself. transformers locates the images of a packed row by positions
    that restart in every document, so its own masks for the layers with a window would be wrong.

    Returns:
        int64[m, S], and bool[m, 1, S, S] each, True where attention is allowed; with a dtype, added to the scores.
    """
    if window is None:
        raise UsageError(
            "gemma3 needs the window of its sliding layers",
            found="sliding_window=None",
            expected="a number of tokens",
            action="pass sliding_window=model.config.text_config.sliding_window",
        )
    no_image = torch.zeros_like(batch["tokens"], dtype=torch.bool)
    is_image = image_places(batch) if "image_positions" in batch else no_image
    types, begins = is_image.long(), no_image.clone()
    for row, bounds in enumerate(batch["cu_seqlens"]):
        begins[row, bounds[:-1].long()] = True
    begins[:, 1:] |= ~is_image[:, :-1]
    runs = torch.where(is_image, (begins & is_image).cumsum(1), 0)
    together = (runs[:, :, None] == runs[:, None, :]) & is_image[:, :, None]
    hidden = document_mask(batch["cu_seqlens"], types.shape[1]).to(types.device) & ~together[:, None]
    places = torch.arange(types.shape[1], device=types.device)
    masks = {"full_attention": hidden, "sliding_attention": hidden | (places <= places[:, None] - window)}
    return types, {name: ~mask if dtype is None else _added(mask, dtype) for name, mask in masks.items()}


def _positions_of_axes(batch: Batch) -> torch.Tensor:
    """Rotary positions of Qwen2-VL, from 0 in every document, as ``get_rope_index`` computes them for it alone.

    A text token has the same position on all three axes. An image token has its place in the grid, counted from the
    position after the preceding text; the following text continues from the largest of them.

    Returns:
        int64[4, m, S]: plain positions, which separate documents, and those in time, height and width.
    """
    plain = batch["position_ids"].cpu()
    # axes: [3, m, S]
    axes = plain.expand(3, -1, -1).clone()
    for (row, column, num), grid in zip(
        batch["image_positions"].tolist(), batch["image_grid_thw"].tolist(), strict=True
    ):
        frames, rows, columns = _in_tokens(num, grid)
        bounds = batch["cu_seqlens"][row]
        end = int(bounds[torch.searchsorted(bounds, column, right=True)])
        first = int(axes[0, row, column])
        steps = torch.meshgrid(torch.arange(frames), torch.arange(rows), torch.arange(columns), indexing="ij")
        axes[:, row, column : column + num] = first + torch.stack(steps).flatten(1)
        axes[:, row, column + num : end] += max(rows, columns) - num
    return torch.cat([plain[None], axes]).to(batch["position_ids"].device)


def _in_tokens(num: int, grid: list[int]) -> tuple[int, int, int]:
    """(frames, rows, columns) in tokens, for an image with this grid of patches."""
    frames, rows, columns = grid
    merge = math.isqrt(frames * rows * columns // num)
    if frames * rows * columns != num * merge * merge or rows % merge or columns % merge:
        raise UsageError(
            "an image has another number of tokens than its patches make",
            found=f"{num} tokens, a grid of {frames} x {rows} x {columns} patches",
            expected="as many patches a token along each axis: processor native",
            action="prepare the shards with the processor of this model",
        )
    return frames, rows // merge, columns // merge
