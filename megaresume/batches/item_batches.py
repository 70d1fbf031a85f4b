"""Micro-batches of items: read and collated, by whoever takes them or by a worker process, and what they draw there.

Three things may draw random numbers: a dataset, a ``collate_fn``, and the training. Where they draw from:

                      dataset                            collate_fn
    in a worker       seeded by the first sample         seeded by the first sample
    else, if keyed    seeded item by item (`items`)      seeded by the first sample; the training's are left alone
    else              of the process, which a checkpoint holds

Seeded are the generators of Python, NumPy and torch (of the CPU), by the seed of the order and the number of the first
sample of the micro-batch: so what a worker draws does not depend on which worker it is, or what it has read before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch.utils.data

from megaresume.batches.items import generators_kept, seed_generators


class Asked(NamedTuple):
    """A micro-batch that is to be read."""

    #: the number of its first sample.
    sample: int
    #: of its items: see `items`.
    places: list[Any]


class ItemBatches(torch.utils.data.Dataset[Any]):
    """Micro-batches by what is asked for.

    Args:
        items: gives items by place: see `items.reader`.
        collate_fn: makes a batch of them.
        seed: of the order.
        keyed: randomness is keyed in the training process too.
    """

    def __init__(self, items: Any, collate_fn: Callable[[list[Any]], Any], *, seed: int, keyed: bool) -> None:
        self._items, self.collate_fn, self._seed, self._keyed = items, collate_fn, seed, keyed

    def __getitems__(self, asked: Asked) -> Any:
        """A batch. torch calls it so."""
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
