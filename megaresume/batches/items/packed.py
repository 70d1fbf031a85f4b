"""Packed items as one row without padding, with the keys that transformers takes for packed attention.

items        a a a | b b | c c c c          total = 9
position_ids 0 1 2   0 1   0 1 2 3
labels      -100 a a -100 b -100 c c c      a model shifts them: the first token of an item is no target
cu_seq_lens  0, 3, 5, 9
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megaresume.batches.items.lengths import token_count

#: the label that is no target.
IGNORED = -100


def flatten(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A batch of all items, as transformers' ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)`` gives it.

    Args:
        items: each with ``input_ids``, and ``labels`` of the same length if any has them.

    Returns:
        ``input_ids``, ``labels``, ``position_ids``: int64[1, total]; ``cu_seq_lens_q``, ``cu_seq_lens_k``:
        int32[items + 1]; ``max_length_q``, ``max_length_k``: numbers.
    """
    tokens = [_array(item["input_ids"]) for item in items]
    labels = [_array(item["labels"]) for item in items] if "labels" in items[0] else tokens
    lengths = np.array([len(one) for one in tokens], np.int64)
    bounds = np.concatenate([[0], np.cumsum(lengths)])
    targets = np.concatenate(labels)
    targets[bounds[:-1]] = IGNORED
    longest = int(lengths.max())
    boundaries = torch.from_numpy(bounds.astype(np.int32))
    return {
        "input_ids": _row(np.concatenate(tokens)),
        "labels": _row(targets),
        "position_ids": _row(np.arange(bounds[-1]) - np.repeat(bounds[:-1], lengths)),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def _array(tokens: Any) -> npt.NDArray[np.int64]:
    return np.asarray(tokens, np.int64)


def _row(values: npt.NDArray[np.int64]) -> torch.Tensor:
    return torch.from_numpy(values)[None]


def part_of(item: Any, offset: int, length: int) -> Any:
    """Some of the tokens of an item that packing ``split`` cuts: of every list, array or tensor with one entry a token.

    Args:
        item: a mapping with ``input_ids``, or a sequence of tokens.
        offset, length: tokens before the part, tokens in it.
    """
    if not isinstance(item, Mapping):
        return item[offset : offset + length]
    tokens = token_count(item)
    return {key: value[offset : offset + length] if _entries(value) == tokens else value for key, value in item.items()}


def _entries(value: Any) -> int | None:
    """How many a list, array or tensor has."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None
