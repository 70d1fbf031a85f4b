"""Any map-style dataset as a source of the stream: one item is one document of length 1.

`ItemSource` tells the stream how many items there are, and what they are; `ItemReader` reads those that it has planned,
in the training process or in its workers, which are handed names and numbers and plan nothing.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import xxhash

from megaresume.corpora.contents import contents_hash
from megaresume.corpora.items import item_fingerprint
from megaresume.stream.errors import CorpusError, UsageError
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
    """

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name
        self._items = len(dataset)
        if not self._items:
            raise UsageError(f"dataset '{name}' is empty", found="0 items", expected="at least one item")

    def __len__(self) -> int:
        """Items, as they were when the loader was made."""
        return self._items

    def lengths(self, ids: Int64Array) -> Int64Array:
        """1 for each: int64[n] to int64[n]."""
        return np.ones(len(ids), np.int64)

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """The number of items, and a hash of `PLACES` of them.

        Each is read twice: if one comes out differently, the dataset draws random numbers, and its contents cannot be
        compared (``contents`` is None).
        """
        items = len(self) if first is None else first
        with _drawing_nothing():
            once, again = (contents_hash(items, self.lengths, self._hashes, PLACES) for _ in range(2))
        if once != again:
            log.warning(
                "megaresume: items of dataset '%s' are different each time they are read: only their number is "
                "compared at a resume",
                self.name,
            )
        return item_fingerprint(items, once if once == again else None, self.name)

    def _hashes(self, item: int, _offset: int, _count: int) -> Int64Array:
        return np.array([item_hash(self.dataset[item])], np.uint64).view(np.int64)


@contextlib.contextmanager
def _drawing_nothing() -> Iterator[None]:
    """What a dataset draws within it from the global generators was never drawn."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


class ItemReader(torch.utils.data.Dataset[Any]):
    """Items by (name of the dataset, number): what torch's ``DataLoader`` is given.

    Args:
        datasets: by name.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self._datasets = dict(datasets)

    def __getitem__(self, place: tuple[str, int]) -> Any:
        """One item."""
        name, item = place
        return self._datasets[name][item]

    def __getitems__(self, places: Sequence[tuple[str, int]]) -> list[Any]:
        """Items in this order; by the dataset's own ``__getitems__`` if it has one.

        Raises:
            CorpusError: it answers with more or fewer items.
        """
        items: list[Any] = [None] * len(places)
        by_name: dict[str, list[int]] = {}
        for k, (name, _) in enumerate(places):
            by_name.setdefault(name, []).append(k)
        for name, mine in by_name.items():
            numbers = [places[k][1] for k in mine]
            dataset = self._datasets[name]
            many = getattr(dataset, "__getitems__", None)
            read = many(numbers) if callable(many) else [dataset[number] for number in numbers]
            if len(read) != len(numbers):
                raise CorpusError(
                    f"dataset '{name}' gives another number of items than it was asked for",
                    found=f"{len(read)} items from __getitems__({numbers})",
                    expected=f"{len(numbers)}",
                    action="correct __getitems__ of the dataset: one item for each number, in that order",
                )
            for k, item in zip(mine, read, strict=True):
                items[k] = item
        return items


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
