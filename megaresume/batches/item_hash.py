"""A hash of a dataset item's contents, by which a resume notices that it changed."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
import xxhash


def item_hash(item: Any) -> int:
    """xxh3_64 of an item's contents: tensors, arrays, numbers, text, pictures, in mappings, lists and objects.

    The same in every process. For an object of unknown structure, only the type counts.
    """
    try:
        return xxhash.xxh3_64_intdigest(_plain(item).encode())
    except _NotPlain:
        pass
    hasher = xxhash.xxh3_64()
    _hash_into(hasher, item)
    return hasher.intdigest()


class _NotPlain(Exception):
    """Raised for an item that holds something other than text, numbers, and lists and mappings of these."""


def _plain(value: Any) -> str:
    """Encode plain items directly, in half the time of `_hash_into`: conversations and other rows."""
    kind = type(value)
    if kind is str:
        return f"str {value!r}:"
    if kind is dict:
        parts = [f"mapping {len(value)}:"]
        for key in sorted(value, key=str):
            if type(key) is not str:
                raise _NotPlain
            parts += (f"str {key!r}:", _plain(value[key]))
        return "".join(parts)
    if kind is list:
        return f"list {len(value)}:" + "".join([_plain(one) for one in value])
    if kind is int or kind is float or kind is bool or value is None:
        return f"{kind.__name__} {value!r}:"
    raise _NotPlain


def _hash_into(hasher: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        keys = sorted(value.keys(), key=str)  # a TensorDict's own iteration and length are those of its rows
        hasher.update(f"mapping {len(keys)}:".encode())
        for key in keys:
            _hash_into(hasher, str(key))
            _hash_into(hasher, value[key])
    elif isinstance(value, list | tuple):
        hasher.update(f"list {len(value)}:".encode())
        for one in value:
            _hash_into(hasher, one)
    elif isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        hasher.update(f"tensor {value.dtype} {tuple(value.shape)}:".encode())
        hasher.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        hasher.update(f"array {value.dtype} {value.shape}:".encode())
        hasher.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, np.ndarray | np.generic):
        _hash_into(hasher, value.tolist())
    elif isinstance(value, bytes | bytearray):
        hasher.update(f"bytes {len(value)}:".encode())
        hasher.update(bytes(value))
    elif isinstance(value, str | int | float | complex | bool | None):
        hasher.update(f"{type(value).__name__} {value!r}:".encode())
    elif isinstance(value, Enum):  # a member refers to its class, which refers to its members
        hasher.update(f"{type(value).__qualname__} {value.name}:".encode())
    elif callable(getattr(value, "tobytes", None)):  # a picture of Pillow
        hasher.update(f"picture {getattr(value, 'mode', '')} {getattr(value, 'size', '')}:".encode())
        hasher.update(value.tobytes())
    else:
        hasher.update(f"{type(value).__qualname__}:".encode())
        _hash_into(hasher, getattr(value, "__dict__", {}))
