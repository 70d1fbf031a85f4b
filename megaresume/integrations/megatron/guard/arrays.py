"""Hashes of index arrays: by value, so that neither the dtype nor the version of Megatron that chose it matters."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.progress import progress

__all__ = ["array_digest", "index_arrays"]

Array = npt.NDArray[Any]

#: entries hashed at once: 8 MB after the conversion.
_CHUNK = 1 << 20
#: what a dataset may hold that is no index: what it was given, and what it keeps for speed.
_NO_INDEX = frozenset({"indices", "cached_attention_mask", "cached_loss_mask", "cached_position_ids"})
#: digests of files, and of arrays in memory (nobody writes to a built index).
_memo: dict[tuple[object, ...], str] = {}
_held: dict[int, tuple[weakref.ref[Array], str]] = {}


def array_digest(array: Array, what: str) -> str:
    """16 hex digits over the shape and the values, each as a little-endian int64.

    Hashes 10^8 entries in less than a second, if they are in memory; shows progress where it takes longer. An array,
    or a file that did not change, is not hashed twice.

    Args:
        array: integers, any shape; may be memory-mapped.
        what: named in the progress.
    """
    key = _file_key(array)
    if key is not None and key in _memo:
        return _memo[key]
    held = _held.get(id(array))
    if held is not None and held[0]() is array:
        return held[1]
    hasher = xxhash.xxh3_64(repr(array.shape).encode())
    with progress(f"hash {what}", array.size, "entries") as shown:
        for chunk in _chunks(array):
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            shown.update(chunk.size)
    digest = hasher.hexdigest()
    if key is not None:
        _memo[key] = digest
    else:
        _held[id(array)] = weakref.ref(array), digest
    return digest


def _chunks(array: Array) -> Iterator[Array]:
    rows = max(1, _CHUNK // max(1, int(np.prod(array.shape[1:]))))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _file_key(array: Array) -> tuple[object, ...] | None:
    filename = getattr(array, "filename", None)
    if filename is None or not Path(filename).is_file():
        return None
    stat = Path(filename).stat()
    return str(filename), stat.st_ino, stat.st_size, stat.st_mtime_ns, array.shape


def index_arrays(dataset: Any) -> dict[str, Array]:
    """The index arrays that a dataset built or loaded, by the names of its attributes.

    ``GPTDataset`` has document_index, sample_index and shuffle_index; ``BlendedDataset`` dataset_index and
    dataset_sample_index; others have others, or none.
    """
    found: dict[str, Array] = {}
    for name, value in vars(dataset).items():
        if isinstance(value, np.ndarray) and name not in _NO_INDEX and value.dtype.kind in "iub":
            found[name] = value
        elif value is None and isinstance(path := vars(dataset).get(f"path_to_{name}"), str):
            # --dataloader-defer-npy-index-mmap: opened at the first access
            found[name] = np.load(path, mmap_mode="r")
    return found
