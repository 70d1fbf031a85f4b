"""Micro-batches of items: read and collated in the training process or a worker, and the random numbers drawn there.

A dataset, a ``collate_fn`` and the training may draw random numbers. The generators they use:

                      dataset                            collate_fn
    in a worker       seeded by the first sample         seeded by the first sample
    else, if keyed    seeded item by item (`items`)      seeded by the first sample; the training's are left alone
    else              of the process, which a checkpoint holds

Seeded are the generators of Python, NumPy and torch (of the CPU), by the seed of the order and the first sample of the
micro-batch, so what a worker draws does not depend on which worker it is, or on what it read before.

`Collated`: checks every batch for items that ``collate_fn`` dropped.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data

from megaresume.batches.items import ItemReader, generators_kept, seed_generators
from megaresume.stream.errors import UsageError

log = logging.getLogger(__name__)

_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
#: wrappers around the user's collate_fn: the Trainer's, and ours.
_WRAPPERS = 2


class Asked(NamedTuple):
    """A micro-batch that is to be read."""

    #: the number of its first sample.
    sample: int
    #: where its items come from: see `items`.
    places: list[Any]


class ItemBatches(torch.utils.data.Dataset[Any]):
    """Micro-batches, by what is `Asked` for.

    Args:
        items: gives items by place: see `items.reader`.
        collate_fn: makes a batch of them.
        seed: of the order.
        keyed: also key the randomness in the training process.
    """

    def __init__(self, items: Any, collate_fn: Callable[[list[Any]], Any], *, seed: int, keyed: bool) -> None:
        self._items, self.collate_fn, self._seed, self._keyed = items, collate_fn, seed, keyed

    @property
    def dataset(self) -> Any:
        """The user's dataset, in this process; or several by name."""
        return self._items.dataset if isinstance(self._items, ItemReader) else self._items

    def __getitems__(self, asked: Asked) -> Any:
        """A batch; torch calls this."""
        key = f"{self._seed} {asked.sample}"
        if torch.utils.data.get_worker_info() is not None:
            seed_generators(f"items {key}")
            items = self.read(asked.places)
            seed_generators(f"batch {key}")
            return self.collate_fn(items)
        items = self.read(asked.places)
        if not self._keyed:
            return self.collate_fn(items)
        with generators_kept():
            seed_generators(f"batch {key}")
            return self.collate_fn(items)

    def read(self, places: list[Any]) -> list[Any]:
        """The items of some places."""
        many = getattr(self._items, "__getitems__", None)
        return list(many(places)) if many else [self._items[place] for place in places]


def warn_of_generators(collate_fn: Callable[[list[Any]], Any]) -> None:
    """Warn of an object with its own generator, as transformers' collators have if given a ``seed``."""
    if own := list(_generators(collate_fn, _WRAPPERS)):
        log.warning(
            "megaresume: collate_fn has a generator of its own (%s): what it draws is different after a resume; "
            "leave it out, so that it draws from the generators of Python, NumPy or torch",
            ", ".join(own),
        )


def _generators(collate_fn: Any, wrappers: int) -> Iterator[str]:
    for name, value in getattr(collate_fn, "__dict__", {}).items():
        if isinstance(value, _GENERATORS) or (name == "seed" and value is not None):
            yield name
        elif wrappers and callable(value):
            yield from _generators(value, wrappers - 1)


class Collated:
    """Checks the rows in the first tensor of every batch: items that a ``collate_fn`` drops would count as trained, and
    never come again.

    Warns once if some batch has fewer rows than items while another has as many. A ``collate_fn`` that always makes one
    row of several items is fine.

    Args:
        row_by_item: False: items are packed, so the number of rows means nothing.
    """

    def __init__(self, *, row_by_item: bool) -> None:
        self._whole, self._said = False, not row_by_item
        #: rows and items of the first batch that has fewer rows.
        self._fewer: tuple[int, int] | None = None

    def check(self, batch: Any, items: int) -> None:
        """Check that a collated batch holds this many items.

        Raises:
            UsageError: the batch is None.
        """
        if batch is None:
            raise UsageError(
                "collate_fn gave nothing",
                found=f"None for {items} items",
                expected="a batch of all the items that it was given",
                cause="it drops items that it cannot use: they would never be trained",
                action="remove such items from the dataset before training",
            )
        if self._said or items < 2:
            return
        rows = _rows(batch)
        if rows == items:
            self._whole = True
        elif rows is not None and rows < items:
            self._fewer = self._fewer or (rows, items)
        if self._whole and self._fewer is not None:
            self._said = True
            log.warning(
                "megaresume: collate_fn made %d rows of %d items, and of others as many rows as items: items that it "
                "drops count as trained, and do not come again; remove them from the dataset, or name them in skip=",
                *self._fewer,
            )


def _rows(batch: Any) -> int | None:
    """The rows of the first tensor in a batch; None if it has none."""
    if not isinstance(batch, torch.Tensor):
        if isinstance(batch, Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        if not isinstance(batch, torch.Tensor):
            return None
    return batch.shape[0] if batch.ndim else None
