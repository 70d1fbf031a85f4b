"""`ItemSource`: any map-style dataset as a source of the stream. One item is one document.

How many tokens each item has is a column, a list, or counted by a function. They are kept, if a directory is given:

    <directory>/<name>.<16 hex digits>.lengths.npy    int64[items]

The digits are a hash of the number of items, of what 32 of them hold, and of the function's name, so that another
dataset has another file and is counted; of a column or a list, a hash of the lengths. A file that is damaged is written
again. Only what is read later shows an item that changed and is none of the 32: the reader refuses an item that is not
as long as it was counted.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import xxhash

from megaresume.batches.items.streaming import calls_instead, is_streaming
from megaresume.data.files import written_atomically
from megaresume.data.scan import contents_hash, sized_fingerprint
from megaresume.stream.errors import CorpusError, StateError, UsageError
from megaresume.stream.progress import progress
from megaresume.stream.state import Fingerprint

Int64Array = npt.NDArray[np.int64]
Measure = Callable[[Any], int]

#: items that are read for a fingerprint, spread evenly: each may be a picture to decode.
PLACES = 32
#: items that a worker reads at a time to count their tokens.
CHUNK = 256

log = logging.getLogger(__name__)


def check_map_style(dataset: Any, name: str) -> None:
    """Refuse what has no items by number.

    Raises:
        UsageError: an IterableDataset, or an object without ``len(dataset)`` and ``dataset[i]``.
    """
    is_iterable = isinstance(dataset, torch.utils.data.IterableDataset)
    if not is_iterable and all(hasattr(type(dataset), member) for member in ("__len__", "__getitem__")):
        return
    of_files, instead = calls_instead(dataset) if is_streaming(dataset) else ("", "the map-style form of the same data")
    raise UsageError(
        f"dataset '{name}' has no items by number",
        found=f"{type(dataset).__module__}.{type(dataset).__qualname__}"
        + (", an IterableDataset" if is_iterable or hasattr(type(dataset), "__iter__") else "")
        + of_files,
        expected="a map-style dataset: len(dataset), and dataset[i] for each i below it",
        cause="an IterableDataset can only be read from its beginning, so no position of it can be returned to",
        action=f"use {instead}; or, under DeepSpeed, give its own loader, with state_dict and load_state_dict, to "
        "megaresume.attach(engine, loader)",
    )


class ItemSource:
    """See `megaresume.stream.source.LengthSource`.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        name: for errors and progress.
        lengths: int64[items] tokens of each item; None: an item is a sample.
        whole: items are never cut.
        kept: file of the lengths, or of the sizes.
        sizes: int64[items], by which items that are samples are grouped; None: they are not.
    """

    #: the call that made it, for errors.
    call = "DataLoader"
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
        sizes: Int64Array | None = None,
    ) -> None:
        self.dataset, self.name, self.tokens, self.whole, self.kept = dataset, name, lengths, whole, kept
        self._sizes = sizes
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

    def sizes(self, ids: Int64Array) -> Int64Array:
        """By which they are grouped: int64[n] to int64[n]."""
        return self.lengths(ids) if self._sizes is None else self._sizes[ids]

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """The number of items, their lengths or sizes, and a hash of `PLACES` of them.

        Each is read twice: if one comes out differently, the dataset draws random numbers, and its contents cannot be
        compared (``contents`` is None).
        """
        items = len(self) if first is None else first
        contents = items_hash(self.dataset, self.name, items)
        if contents is None:
            log.warning(
                "megaresume: items of dataset '%s' are different each time they are read: only their number%s "
                "compared at a resume",
                self.name,
                " is" if self.tokens is None and self._sizes is None else " and lengths are",
            )
        what = f"fingerprint of {self.name}"
        return replace(sized_fingerprint(self.lengths, self.sizes, items, what), contents=contents)

    def changed(self, name: str, before: Fingerprint, now: Fingerprint) -> StateError:
        """Why a state of other items cannot be gone on from, in the words of the call that made the dataset a source.

        Args:
            name: of the dataset, in the state.
            before, now: what it was, and is; they differ.
        """
        more = now.documents - before.documents
        keep = "give back the dataset as it was"
        if more > 0 and self.fingerprint(first=before.documents) == before:
            cause = f"{_items(more)} added after the old ones"
            action = (
                f"{self.call}(..., append='next_epoch') trains them from the next epoch on, append='now' from now on"
            )
        elif more > 0:
            cause = f"{_items(more)} added, and the first {before.documents:,} are not those of before: new ones were "
            cause += "put between the old ones, or the dataset was shuffled, filtered or made anew"
            action = f"add new items after the old ones and call {self.call}(..., append='next_epoch'); or {keep}"
        elif more < 0:
            cause, action = f"{_items(-more)} removed: by a filter, another split, or a file that is missing", keep
        elif now.lengths != before.lengths:
            cause, action = "items have other lengths: another tokenizer, template, max_length or lengths=", keep
        else:
            cause = "items hold something else: the dataset was shuffled or made anew, or its transform was changed"
            action = f"{keep}. If items differ each time they are read, draw their random numbers under keyed=True"
        # Of another number of items the hashes say nothing more.
        asked = [] if more else ["contents"] if self.tokens is None else ["lengths", "contents"]
        fields = [field for field in asked if getattr(before, field) != getattr(now, field)]
        return StateError(
            f"dataset '{name}' is not the one that the state was made with",
            found=", ".join(f"{f} {getattr(now, f)}" for f in fields) or f"{now.documents:,} items",
            expected=", ".join(f"{f} {getattr(before, f)}" for f in fields) or f"{before.documents:,} items",
            cause=cause,
            action=action,
        )


def _items(number: int) -> str:
    return "1 item was" if number == 1 else f"{number:,} items were"


def items_hash(dataset: Any, name: str, items: int) -> str | None:
    """The hash of what `PLACES` of the first ``items`` items hold; None if they are not the same when read again."""

    def read(item: int, _offset: int, _count: int) -> Int64Array:
        with named(name, item):
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


def token_count(item: Any) -> int:
    """Tokens of an item: ``len(item["input_ids"])``, or ``len(item)`` if it is no mapping."""
    return len(item["input_ids"] if isinstance(item, Mapping) else item)


def lengths_of(
    dataset: Any, name: str, lengths: Any, *, directory: Path | None, num_workers: int
) -> tuple[Int64Array, Path | None]:
    """Tokens of each item of a dataset, int64[items], and the file that they are kept in; None: none.

    Args:
        dataset: map-style.
        name: for errors and the file.
        lengths: name of a column, ``dataset[lengths]``; a list or array; a function of an item; None: `token_count`.
        directory: where they are kept; None: nowhere.
        num_workers: processes that read the items to be counted; 0: this one.

    Raises:
        UsageError: no such column, or not one whole number for each item.
        CorpusError: an item of which the tokens cannot be counted.
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
        known = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return known if known.shape == (items,) and known.dtype == np.int64 else None


def _count(dataset: Any, name: str, measure: Measure, num_workers: int) -> Int64Array:
    reader = torch.utils.data.DataLoader(
        _Measured(dataset, name, measure),
        batch_size=CHUNK,
        num_workers=num_workers,
        collate_fn=list,
        generator=torch.Generator(),
    )
    counts: list[int] = []
    with generators_kept(), progress(f"lengths of {name}", len(dataset), "items") as bar:
        for some in reader:
            counts += some
            bar.update(len(some))
    return np.array(counts, np.int64)


class _Measured(torch.utils.data.Dataset[int]):
    """The lengths of a dataset's items."""

    def __init__(self, dataset: Any, name: str, measure: Measure) -> None:
        self._dataset, self._name, self._measure = dataset, name, measure

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, i: int) -> int:
        with named(self._name, i):
            item = self._dataset[i]
        try:
            return int(self._measure(item))
        except (TypeError, KeyError) as error:
            raise uncounted(self._name, i, item, error) from error


@contextlib.contextmanager
def named(name: str, i: int) -> Iterator[None]:
    """Add to an error of a dataset's own which item it was read for."""
    try:
        yield
    except Exception as error:
        error.add_note(f"megaresume: item {i} of dataset '{name}' was read")
        raise


def uncounted(name: str, i: int, item: Any, error: Exception) -> CorpusError:
    """An item of which the tokens cannot be counted."""
    keys = f" of {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
    return CorpusError(
        f"the tokens of item {i} of dataset '{name}' cannot be counted",
        found=f"{type(item).__name__}{keys}: {type(error).__name__}: {error}",
        expected='item["input_ids"], or what the function in lengths= takes',
        action="lengths=<name of a column, a list, or a function of an item>",
    )
