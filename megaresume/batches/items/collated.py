"""What can be seen of a ``collate_fn`` that drops items: they would count as trained, and never come again."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from megaresume.stream.errors import UsageError

log = logging.getLogger(__name__)


class Collated:
    """Looks at every batch of a loader, by the rows of its first tensor.

    A batch with fewer rows than items, beside another one with as many, is said once. A ``collate_fn`` that always
    makes one row of several items is none that drops any.

    Args:
        row_by_item: False: items are packed, so that rows say nothing.
    """

    def __init__(self, *, row_by_item: bool) -> None:
        self._whole, self._said = False, not row_by_item
        #: rows and items of the first batch that has fewer rows.
        self._fewer: tuple[int, int] | None = None

    def check(self, batch: Any, items: int) -> None:
        """Of so many items.

        Raises:
            UsageError: there is no batch.
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
    """Of the first tensor; None: it has none."""
    if not isinstance(batch, torch.Tensor):
        if isinstance(batch, dict | Mapping):
            batch = next(iter(batch.values()), None)
        elif isinstance(batch, list | tuple) and batch:
            batch = batch[0]
        if not isinstance(batch, torch.Tensor):
            return None
    return batch.shape[0] if batch.ndim else None
