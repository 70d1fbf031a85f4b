"""Items of any map-style dataset: as the documents of a stream, and read by their places in a batch.

`ItemSource`: one item is one document. `ItemReader`: reads items by their places in a batch (`item_places`). A place is
a number if there is one dataset, otherwise a list

    [dataset, item]                                         several datasets
    [dataset, item, epoch, offset, length, tokens, key]     packed, or with keyed randomness

With keyed randomness, the generators of Python, NumPy and torch (of the CPU) are seeded before each ``dataset[item]``
by (key, epoch, item), with the key from seed and dataset, and restored after the batch, so that an item's draws depend
on nothing else.

`flatten` makes one row without padding, with the keys that transformers uses for packed attention:

    items        a a a | b b | c c c c          total = 9
    position_ids 0 1 2   0 1   0 1 2 3
    labels      -100 a a -100 b -100 c c c      a model shifts them: the first token of an item is not a target
    cu_seq_lens  0, 3, 5, 9
"""

from __future__ import annotations

import contextlib
import copy
import logging
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.utils.data
import xxhash

from megaresume.batches.item_hash import item_hash
from megaresume.data.source import contents_hash, sized_fingerprint
from megaresume.stream.arrays import Int64Array
from megaresume.stream.errors import CorpusError, StateError, UsageError, listed
from megaresume.stream.state import Fingerprint

Measure = Callable[[Any], int]

#: the label that is not a target.
IGNORED = -100
#: items read for a fingerprint, spread evenly: few, as each may be a picture to decode.
PLACES = 32

log = logging.getLogger(__name__)


class ItemSource:
    """See `megaresume.stream.source.LengthSource`.

    Args:
        dataset: has ``__len__`` and ``__getitem__``.
        name: for errors and progress.
        lengths: int64[items] tokens of each item; None if an item is a sample.
        whole: items are never cut.
        kept: file of the lengths, or of the sizes.
        sizes: int64[items], by which unpacked items are grouped; None if they are not grouped.
    """

    #: the call that made it, for errors.
    call = "DataLoader"
    #: whether that call takes ``contents=``.
    takes_contents = True
    #: by dataset, the hashes of changed contents that a resume accepts; others must be those of the state.
    accepted: Mapping[str, str | None] = MappingProxyType({})
    #: whether it is one of several datasets.
    is_one_of_several = False
    #: advice about an item that is longer than a sample.
    advice = "raise seq_length; or shorten the items or leave them out; or let packing='split' cut them"

    def __init__(
        self,
        dataset: Any,
        name: str,
        lengths: Int64Array | None,
        *,
        whole: bool,
        kept: Path | None,
        sizes: Int64Array | None,
    ) -> None:
        self.dataset, self.name, self.tokens, self.whole, self.kept = dataset, name, lengths, whole, kept
        self._sizes = sizes
        self._items = len(dataset)
        if not self._items:
            raise UsageError(
                f"dataset '{name}' is empty",
                found="0 items",
                expected="at least one item",
                action="check the path and the filter that it was made with",
            )

    def __len__(self) -> int:
        """Number of items when the loader was made."""
        return self._items

    def first(self, items: int) -> ItemSource:
        """The source before items were appended: its first ``items``."""
        source = copy.copy(self)
        source._items = items
        return source

    @property
    def longest(self) -> int:
        """The number of tokens of the longest item."""
        return 1 if self.tokens is None else int(self.tokens.max())

    def lengths(self, ids: Int64Array) -> Int64Array:
        """The tokens of each item, or 1: int64[n] to int64[n]."""
        return np.ones(len(ids), np.int64) if self.tokens is None else self.tokens[ids]

    def sizes(self, ids: Int64Array) -> Int64Array:
        """The sizes by which items are grouped: int64[n] to int64[n]."""
        return self.lengths(ids) if self._sizes is None else self._sizes[ids]

    def fingerprint(self, *, first: int | None = None) -> Fingerprint:
        """The number of items, their lengths or sizes, and a hash of `PLACES` of them.

        Each is read twice, with the generators seeded as under ``keyed``: if one comes out differently, it draws from
        another generator, and its contents cannot be compared (``contents`` is None).
        """
        items = len(self) if first is None else first
        contents = items_hash(self.dataset, self.name, items)
        if contents is None:
            log.warning(
                "megaresume: items of dataset '%s' are different when they are read again under the same seeds: they "
                "draw from a generator of their own, which no checkpoint holds and keyed=True does not reach. They "
                "draw other numbers after a resume, and only their number%s compared",
                self.name,
                " is" if self.tokens is None and self._sizes is None else " and lengths are",
            )
        what = f"fingerprint of {self.name}"
        return replace(sized_fingerprint(self.lengths, self.sizes, items, what), contents=contents)

    def changed(self, name: str, before: Fingerprint, now: Fingerprint) -> StateError | None:
        """Why a state of other items cannot be resumed from, in the words of the call that made the dataset a source.

        None if it can: contents are `accepted` or could not be compared before, and everything else is the same.

        Args:
            name: of the dataset, in the state.
            before, now: what it was, and is; they differ.
        """
        if before == replace(now, contents=None):
            return None
        wanted = self.accepted.get(self.name)
        if wanted is not None and now == replace(before, contents=wanted):
            return None
        more = now.documents - before.documents
        keep = "give back the dataset as it was"
        if more > 0 and self.fingerprint(first=before.documents) == before:
            cause = f"{_items(more)} added after the old ones"
            action = (
                f"{self.call}(..., append='next_epoch') trains them from the next epoch on, append='now' from now on"
            )
        elif more > 0:
            cause = f"{_items(more)} added, and the first {before.documents:,} are not as before: new ones were "
            cause += "put between the old ones, the dataset was shuffled, filtered or rebuilt, or its transform was "
            cause += "changed"
            action = f"add new items after the old ones and call {self.call}(..., append='next_epoch'); or {keep}"
            if self.takes_contents:
                action += "; if they were added after the old ones and a transform was changed too: start without the "
                action += "new ones first, with contents=, and with append= after a save"
        elif more < 0:
            cause, action = f"{_items(-more)} removed: by a filter, another split, or a file that is missing", keep
        elif now.lengths != before.lengths:
            cause, action = "items have other lengths: another tokenizer, template, max_length or lengths=", keep
        elif now.contents is None:
            cause = "items are different each time they are read, and were not: they draw from a generator of their own"
            action = f"{keep}; or draw random numbers from the generators of Python, NumPy or torch"
        else:
            cause = "items hold something else: the dataset was shuffled or rebuilt, or its transform was changed"
            action = f"{keep}; if the program shuffles or splits it, with the same seed at every start"
            if self.takes_contents:
                action += "; or, if every item is the one that it was and only its transform was changed, on purpose, "
                action += f"{self.call}(..., contents={self._accepting(now.contents)!r})"
        # If the number of items differs, the hashes add nothing.
        asked = [] if more else ["contents"] if self.tokens is None else ["lengths", "contents"]
        fields = [field for field in asked if getattr(before, field) != getattr(now, field)]
        return StateError(
            f"dataset '{name}' is not the one that the state was made with",
            found=", ".join(f"{f} {getattr(now, f)}" for f in fields) or f"{now.documents:,} items",
            expected=", ".join(f"{f} {getattr(before, f)}" for f in fields) or f"{before.documents:,} items",
            cause=cause,
            action=action,
        )

    def _accepting(self, contents: str) -> str | dict[str, str]:
        """The option that accepts these contents, and what it accepts already."""
        if not self.is_one_of_several:
            return contents
        return {name: one for name, one in self.accepted.items() if one is not None} | {self.name: contents}


def _items(number: int) -> str:
    return "1 item was" if number == 1 else f"{number:,} items were"


def items_hash(dataset: Any, name: str, items: int) -> str | None:
    """The hash of the contents of `PLACES` of the first ``items`` items; None if reading them again gives others.

    The generators are seeded before each, with other seeds than a run uses, so random items are compared too.

    Args:
        dataset, name: see `ItemSource`.
        items: how many.

    Raises:
        UsageError: see `_check_numbers`.
    """

    def read(item: int, _offset: int, _count: int) -> Int64Array:
        seed_generators(f"contents {item}")
        with reading_item(name, item):
            found = np.array([item_hash(dataset[item])], np.uint64).view(np.int64)
        were_read.append(item)
        return found

    were_read: list[int] = []
    with generators_kept():
        try:
            once, again = (contents_hash(items, np.ones_like, read, PLACES) for _ in range(2))
        except Exception:
            _check_numbers(dataset, name, items, were_read)
            raise
        if once != again:
            _check_numbers(dataset, name, items, were_read)
    return once if once == again else None


def _check_numbers(dataset: Any, name: str, items: int, were_read: Sequence[int]) -> None:
    """Refuse a dataset that gives the item that is next in an order of its own, whatever number it is asked for.

    Only for one of which a second reading was different, or failed, as this reads from shallow copies: a count of what
    was read is one for each of them, and a generator the same for all.

    Args:
        dataset, name, items: see `items_hash`.
        were_read: the items that it gave before.
    """
    numbers = sorted({0, items // 2, items - 1})
    hashes = {_hash_of(dataset, number, of_copy=True) for number in numbers}
    if 0 in were_read and _hash_of(dataset, 0) is None:
        found = "item 0 cannot be read any more, after others were"
    elif len(numbers) > 1 and len(hashes) == 1 and None not in hashes:
        found = f"items {listed(numbers, 3)} are the same one, and it changes with each reading"
    else:
        return
    raise UsageError(
        f"dataset '{name}' gives its items in an order of its own",
        found=f"{type(dataset).__module__}.{type(dataset).__qualname__}: {found}",
        expected="dataset[i] is item i, whatever was read before",
        cause="it counts what it was asked for, and ignores i: it would begin anew at every start, so that items are "
        "repeated and others are lost",
        action="a dataset whose __getitem__ reads by number (FlagEmbedding: --same_dataset_within_batch False)",
    )


def _hash_of(dataset: Any, number: int, *, of_copy: bool = False) -> int | None:
    """The hash of an item, or of that of a shallow copy, read under the same seeds; None if it cannot be read."""
    seed_generators("numbers")
    try:
        return item_hash((copy.copy(dataset) if of_copy else dataset)[number])
    except Exception:  # noqa: BLE001  of any dataset
        return None


@contextlib.contextmanager
def generators_kept() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch (of the CPU) at the end of the block."""
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


def token_count(item: Any) -> int:
    """The number of tokens of an item: ``len(item["input_ids"])``, or ``len(item)`` if it is not a mapping."""
    return len(item["input_ids"] if isinstance(item, Mapping) else item)


@contextlib.contextmanager
def reading_item(name: str, i: int) -> Iterator[None]:
    """Add to an error of the dataset's own which item was being read."""
    try:
        yield
    except Exception as error:
        error.add_note(f"megaresume: item {i} of dataset '{name}' was read")
        raise


def uncounted(name: str, i: int, item: Any, error: Exception) -> CorpusError:
    """The error for an item whose tokens cannot be counted."""
    keys = f" of {', '.join(map(str, item))}" if isinstance(item, Mapping) else ""
    return CorpusError(
        f"the tokens of item {i} of dataset '{name}' cannot be counted",
        found=f"{type(item).__name__}{keys}: {type(error).__name__}: {error}",
        expected='item["input_ids"], or what the function in lengths= takes',
        action="lengths=<name of a column, a list, or a function of an item>",
    )


def reader(datasets: Mapping[str, Any], measures: Mapping[str, Measure] | None, *, keyed: bool) -> Any:
    """The object that torch reads from: an `ItemReader`; or the dataset itself, if a reader would only pass on."""
    one = next(iter(datasets.values()))
    if len(datasets) == 1 and measures is None and not keyed and not hasattr(one, "__getitems__"):
        return one
    return ItemReader(datasets, measures, keyed=keyed)


class ItemReader(torch.utils.data.Dataset[Any]):
    """Items by place, in the training process or in a worker, which plans nothing.

    Args:
        datasets: by name, in the order in which places number them.
        measures: functions by name that count the tokens of an item, if items are packed: each item must still have its
            planned length.
        keyed: randomness is keyed.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        measures: Mapping[str, Measure] | None,
        *,
        keyed: bool,
    ) -> None:
        self._names, self._datasets = list(datasets), list(datasets.values())
        self._measures = None if measures is None else list(measures.values())
        self._keyed = keyed

    @property
    def dataset(self) -> Any:
        """The dataset; or several by name."""
        return self._datasets[0] if len(self._datasets) == 1 else dict(zip(self._names, self._datasets, strict=True))

    def __getitem__(self, place: Any) -> Any:
        """The item at a place."""
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[Any]) -> list[Any]:
        """Items in this order; by the dataset's own ``__getitems__`` if it has one and randomness is not keyed.

        Raises:
            CorpusError: it returns more or fewer items, or an item's length has changed.
        """
        if isinstance(places[0], int):
            return self._many(0, places)
        items = self._read_keyed(places) if self._keyed else self._read(places)
        if self._measures is None:
            return items
        return [self._cut(item, place) for item, place in zip(items, places, strict=True)]

    def _read_keyed(self, places: Sequence[Sequence[int]]) -> list[Any]:
        items = []
        with generators_kept():
            for dataset, item, epoch, *_, key in places:
                seed_generators(f"{key} {epoch} {item}")
                items.append(self._datasets[dataset][item])
        return items

    def _read(self, places: Sequence[Sequence[int]]) -> list[Any]:
        items: list[Any] = [None] * len(places)
        by_dataset: dict[int, list[int]] = {}
        for k, place in enumerate(places):
            by_dataset.setdefault(place[0], []).append(k)
        for dataset, mine in by_dataset.items():
            for k, item in zip(mine, self._many(dataset, [places[k][1] for k in mine]), strict=True):
                items[k] = item
        return items

    def _many(self, number: int, items: Sequence[int]) -> list[Any]:
        dataset = self._datasets[number]
        many = getattr(dataset, "__getitems__", None)
        if many is None:
            return [dataset[item] for item in items]
        read = many(items)
        if len(read) != len(items):
            raise CorpusError(
                f"dataset '{self._names[number]}' returns a different number of items than it was asked for",
                found=f"{len(read)} items from __getitems__({list(items)})",
                expected=f"{len(items)}",
                action="correct __getitems__ of the dataset: one item for each number, in that order",
            )
        return read  # type: ignore[no-any-return]

    def _cut(self, item: Any, place: Sequence[int]) -> Any:
        """The planned part of an item, mostly all of it."""
        dataset, number, _, offset, length, tokens, _ = place
        assert self._measures is not None
        try:
            found = int(self._measures[dataset](item))
        except (TypeError, KeyError) as error:
            raise uncounted(self._names[dataset], number, item, error) from error
        if found != tokens or (length != tokens and token_count(item) != tokens):
            raise CorpusError(
                f"item {number} of dataset '{self._names[dataset]}' is not as long as its length says",
                found=f"{found} tokens",
                expected=f"{tokens}, as it was when the loader was made",
                cause="the lengths are of other data, or the item is random",
                action="correct lengths=, or remove the files in lengths_dir",
            )
        return item if length == tokens else part_of(item, offset, length)


def part_of(item: Any, offset: int, length: int) -> Any:
    """Cut tokens out of an item, as packing ``split`` does: of every list, array or tensor with one entry a token.

    Args:
        item: a mapping with ``input_ids``, or a sequence of tokens.
        offset, length: tokens before the part, tokens in it.
    """
    if not isinstance(item, Mapping):
        return item[offset : offset + length]
    tokens = token_count(item)
    return {key: value[offset : offset + length] if _entries(value) == tokens else value for key, value in item.items()}


def _entries(value: Any) -> int | None:
    """The number of entries of a list, array or tensor."""
    if isinstance(value, np.ndarray | torch.Tensor):
        return len(value) if value.ndim else None
    return len(value) if isinstance(value, list | tuple) else None


def flatten(items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One batch of all items, like transformers' ``DataCollatorWithFlattening(return_flash_attn_kwargs=True)``.

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
