"""`ItemReader`: the places of the items of a batch -> these items. What torch's ``DataLoader`` reads from.

A place is a number, if there is one dataset; else a list

    [dataset, item]                                         several datasets
    [dataset, item, epoch, offset, length, tokens, key]     packed, or with keyed randomness

With keyed randomness, the generators of Python, NumPy and torch (of the CPU) are seeded before each ``dataset[item]``
by (key, epoch, item), the key by the seed and the dataset, and are as they were after the batch: what an item draws
then depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.utils.data

from megaresume.batches.items.lengths import Measure, token_count, uncounted
from megaresume.batches.items.packed import part_of
from megaresume.batches.items.source import generators_kept, seed_generators
from megaresume.stream.errors import CorpusError


def reader(datasets: Mapping[str, Any], measures: Mapping[str, Measure] | None, *, keyed: bool) -> Any:
    """What torch reads from: see `ItemReader`; or the dataset itself, if all that it would do is to ask it."""
    one = next(iter(datasets.values()))
    if len(datasets) == 1 and measures is None and not keyed and not hasattr(one, "__getitems__"):
        return one
    return ItemReader(datasets, measures, keyed=keyed)


class ItemReader(torch.utils.data.Dataset[Any]):
    """Items by place, in the training process or in a worker, which plans nothing.

    Args:
        datasets: by name, in the order in which places count them.
        measures: functions by name that count the tokens of an item, if items are packed: each must be as long as it
            was when it was planned.
        keyed: randomness is keyed.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        measures: Mapping[str, Measure] | None = None,
        *,
        keyed: bool = False,
    ) -> None:
        self._names, self._datasets = list(datasets), list(datasets.values())
        self._measures = None if measures is None else list(measures.values())
        self._keyed = keyed

    def __getitem__(self, place: Any) -> Any:
        """One item."""
        return self.__getitems__([place])[0]

    def __getitems__(self, places: Sequence[Any]) -> list[Any]:
        """Items in this order; by the dataset's own ``__getitems__`` if it has one and randomness is not keyed.

        Raises:
            CorpusError: it answers with more or fewer items, or an item is not as long as it was.
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
                f"dataset '{self._names[number]}' gives another number of items than it was asked for",
                found=f"{len(read)} items from __getitems__({list(items)})",
                expected=f"{len(items)}",
                action="correct __getitems__ of the dataset: one item for each number, in that order",
            )
        return read  # type: ignore[no-any-return]

    def _cut(self, item: Any, place: Sequence[int]) -> Any:
        """The part of an item that was planned, mostly all of it."""
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
