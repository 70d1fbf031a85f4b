"""The tokens of each item of a dataset: from a column or a list, or counted by a function.

With a directory, they are kept in:

    <directory>/<name>.<16 hex digits>.lengths.npy    int64[items], and after the array its checksum, 16 bytes

The digits hash the number of items, the contents of 32 of them, and the function's name, so that another dataset gets
another file and is counted; for a column or a list, they hash the lengths. A damaged file is written again. A changed
item that is not among the 32 is only noticed when it is read: the reader refuses an item whose length differs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.utils.data
import xxhash

from megaresume.batches.items import Measure, generators_kept, items_hash, reading_item, token_count, uncounted
from megaresume.files import written_atomically
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import UsageError
from megaresume.stream.progress import progress

log = logging.getLogger(__name__)

#: items that a worker counts at a time.
CHUNK = 256


def lengths_of(
    dataset: Any, name: str, lengths: Any, *, directory: Path | None, num_workers: int
) -> tuple[Int64Array, Path | None]:
    """Measure the tokens of each item of a dataset: int64[items], and the file that keeps them, or None.

    Args:
        dataset: map-style.
        name: for errors and the file.
        lengths: name of a column, ``dataset[lengths]``; a list or array; a function of an item; None: `token_count`.
        directory: where to keep them; None: nowhere.
        num_workers: processes that read the items to be counted; 0: this one.

    Raises:
        UsageError: no such column, or not one whole number for each item.
        CorpusError: an item whose tokens cannot be counted.
    """
    path: Path | None = None
    if isinstance(lengths, str):
        lengths = _column(dataset, name, lengths)
    elif lengths is None or callable(lengths):
        lengths, path = _counted(dataset, name, lengths or token_count, directory, num_workers)
    found = np.asarray(lengths)
    if found.shape != (len(dataset),) or found.dtype.kind not in "iu" or found.min() < 0:
        raise UsageError(
            f"these are not the lengths of dataset '{name}'",
            found=f"{found.dtype}{list(found.shape)}" + (f", the least {found.min()}" if found.size else ""),
            expected=f"{len(dataset)} whole numbers, one for each item, at least 0",
            action="correct lengths=",
        )
    found = np.ascontiguousarray(found, np.int64)
    if directory is not None and path is None:
        path = _kept_path(directory, name, found.tobytes())
        path = path if _read_kept(path, len(found)) is not None else _keep(path, name, found)
    return found, path


def _column(dataset: Any, name: str, column: str) -> Any:
    try:
        return list(dataset[column])
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise UsageError(
            f"dataset '{name}' has no column of lengths",
            found=f"dataset[{column!r}]: {type(error).__name__}: {error}",
            expected="one number for each item",
            action="lengths=<name of a column, a list, or a function of an item>",
        ) from error


def _counted(
    dataset: Any, name: str, measure: Measure, directory: Path | None, num_workers: int
) -> tuple[Int64Array, Path | None]:
    path = None if directory is None else _kept_path(directory, name, _kept_key(dataset, name, measure))
    if path is not None and (known := _read_kept(path, len(dataset))) is not None:
        return known, path
    counted = _count(dataset, name, measure, num_workers)
    if path is None:
        log.info("megaresume: lengths of '%s' were counted; with lengths_dir= they would be kept", name)
        return counted, None
    return counted, _keep(path, name, counted)


def _keep(path: Path, name: str, lengths: Int64Array) -> Path | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_atomically(path) as file:
            np.save(file, lengths)
            file.write(xxhash.xxh3_128_digest(lengths.data))
    except OSError as error:
        log.warning("megaresume: lengths of '%s' could not be kept: %s", name, error)
        return None
    return path


def _kept_path(directory: Path, name: str, key: bytes) -> Path:
    return directory / f"{name}.{xxhash.xxh3_64_hexdigest(key)}.lengths.npy"


def _kept_key(dataset: Any, name: str, measure: Measure) -> bytes:
    function = f"{getattr(measure, '__module__', '')}.{getattr(measure, '__qualname__', type(measure).__qualname__)}"
    return f"{len(dataset)} {items_hash(dataset, name, len(dataset))} {function}".encode()


def _read_kept(path: Path, items: int) -> Int64Array | None:
    try:
        with open(path, "rb") as file:
            known = np.load(file, allow_pickle=False)
            checksum = file.read()
    except (OSError, ValueError, EOFError):
        return None
    # A damaged length would be believed: an item of 0 tokens is never trained, so never read and compared.
    is_whole = known.shape == (items,) and known.dtype == np.int64
    return known if is_whole and checksum == xxhash.xxh3_128_digest(known.data) else None


def _count(dataset: Any, name: str, measure: Measure, num_workers: int) -> Int64Array:
    reader = torch.utils.data.DataLoader(
        _Measured(dataset, name, measure),
        batch_size=CHUNK,
        num_workers=num_workers,
        collate_fn=list,
        generator=torch.Generator(),
    )
    counts: list[int] = []
    with generators_kept(), progress(f"lengths of {name}", len(dataset), "items") as advance:
        for some in reader:
            counts += some
            advance(len(some))
    return np.array(counts, np.int64)


class _Measured(torch.utils.data.Dataset[int]):
    """The lengths of a dataset's items."""

    def __init__(self, dataset: Any, name: str, measure: Measure) -> None:
        self._dataset, self._name, self._measure = dataset, name, measure

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> int:
        with reading_item(self._name, i):
            item = self._dataset[i]
        try:
            return int(self._measure(item))
        except (TypeError, KeyError) as error:
            raise uncounted(self._name, i, item, error) from error
