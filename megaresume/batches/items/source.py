"""`ItemSource`: any map-style dataset as a source of the stream. One item is one document."""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import xxhash

from megaresume.corpora.scan import contents_hash, scan_fingerprint
from megaresume.stream.errors import UsageError
from megaresume.stream.state import Fingerprint

Int64Array = npt.NDArray[np.int64]

#: items that are read for a fingerprint, spread evenly: each may be a picture to decode.
PLACES = 32

log = logging.getLogger(__name__)


def check_map_style(dataset: Any, name: str) -> None:
    """Refuse what has no items by number.

    Raises:
        UsageError: an IterableDataset, or an object without ``len(dataset)`` and ``dataset[i]``.
    """
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_iterable and all(hasattr(type(dataset), member) for member in ("__len__", "__getitem__")):
        return
    raise UsageError(
        f"dataset '{name}' has no items by number",
        found=f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        + (", an IterableDataset" if is_iterable or hasattr(type(dataset), "__iter__") else ""),
        expected="a map-style dataset: len(dataset), and dataset[i] for each i below it",
        cause="an IterableDataset can only be read from its beginning, so no position of it can be returned to",
        action="use the map-style form of the same data (datasets.load_dataset without streaming=True); or give its "
        "own loader, with state_dict and load_state_dict, to megaresume.attach_loader",
    )


class ItemSource:
    """See `megaresume.stream.source.LengthSource`.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        name: for errors and progress.
        lengths: int64[items] tokens of each item; None: an item is a sample.
        whole: items are never cut.
        kept: file of the lengths.
    """

    #: what to do about an item that is longer than a sample.
    advice = "raise seq_length; or shorten the items or leave them out; or let packing='split' cut them"

    def __init__(
        self,
        dataset: Any,
        name: str,
        lengths: Int64Array | None = None,
        *,
        whole: bool = False,
        kept: Path | None = None,
    ) -> None:
        self.dataset, self.name, self.tokens, self.whole, self.kept = dataset, name, lengths, whole, kept
        self._items = len(dataset)
        if not self._items:
            raise UsageError(f"dataset '{name}' is empty", found="0 items", expected="at least one item")

    def __len__(self) -> int:
        """Items, as they were when the loader was made."""
        return self._items

    @property
    def longest(self) -> int:
        """Tokens of the longest item."""
        return 1 if self.tokens is None else int(self.tokens.max())

    def lengths(self, ids: Int64Array) -> Int64Array:
        """Tokens of each, or 1: int64[n] to int64[n]."""
        return np.ones(len(ids), np.int64) if self.tokens is None else self.tokens[ids]

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """The number of items, their lengths, and a hash of `PLACES` of them.

        Each is read twice: if one comes out differently, the dataset draws random numbers, and its contents cannot be
        compared (``contents`` is None).
        """
        items = len(self) if first is None else first
        contents = items_hash(self.dataset, items)
        if contents is None:
            log.warning(
                "megaresume: items of dataset '%s' are different each time they are read: only their number%s "
                "compared at a resume",
                self.name,
                " is" if self.tokens is None else " and lengths are",
            )
        return replace(scan_fingerprint(self.lengths, items, f"fingerprint of {self.name}"), contents=contents)


def items_hash(dataset: Any, items: int) -> str | None:
    """The hash of what `PLACES` of the first ``items`` items hold; None if they are not the same when read again."""

    def read(item: int, _offset: int, _count: int) -> Int64Array:
        return np.array([item_hash(dataset[item])], np.uint64).view(np.int64)

    with generators_kept():
        once, again = (contents_hash(items, _ones, read, PLACES) for _ in range(2))
    return once if once == again else None


def _ones(ids: Int64Array) -> Int64Array:
    return np.ones(len(ids), np.int64)


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """What is drawn within it from the generators of Python, NumPy and torch (of the CPU) was never drawn."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def seed_generators(key: str) -> None:
    """Seed the generators of Python, NumPy and torch (of the CPU) by a hash of a text."""
    seed = xxhash.xxh3_64_intdigest(key.encode())
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed >> 1)


def item_hash(item: Any) -> int:
    """xxh3_64 of what an item holds: tensors, arrays, numbers, text, pictures, in mappings, lists and objects.

    The same in every process. Of an object of which nothing is known only the type counts.
    """
    hasher = xxhash.xxh3_64()
    _hash_into(hasher, item)
    return hasher.intdigest()


def _hash_into(hasher: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        hasher.update(f"mapping {len(value)}:".encode())
        for key in sorted(value, key=str):
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
    elif callable(getattr(value, "tobytes", None)):  # a picture of Pillow
        hasher.update(f"picture {getattr(value, 'mode', '')} {getattr(value, 'size', '')}:".encode())
        hasher.update(value.tobytes())
    else:
        hasher.update(f"{type(value).__qualname__}:".encode())
        _hash_into(hasher, getattr(value, "__dict__", {}))
