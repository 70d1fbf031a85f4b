"""How a Trainer's items become a batch: by its own collator, or, packed, as a row without padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from megaresume.batches.items.reader import flatten
from megaresume.hosts.instances import kind_of
from megaresume.stream.errors import UsageError

Collate = Callable[[list[Any]], Any]


def collator(trainer: Any) -> Collate:
    """The Trainer's own, without the columns that its model does not take."""
    collate: Collate = trainer._get_collator_with_removed_columns(trainer.data_collator, description="Training")
    return collate


def packing_collator(trainer: Any) -> Collate:
    """What makes a row of the items of packed samples: `flatten`, if the Trainer was given no collator; else its own.

    Raises:
        UsageError: it pads: items that were packed would be laid side by side.
    """
    from transformers import default_data_collator
    from transformers.data import data_collator as theirs

    given = trainer.data_collator
    if given is default_data_collator or type(given) is theirs.DataCollatorWithPadding:
        return flatten
    pads = isinstance(given, theirs.DataCollatorMixin | theirs.DataCollatorForSeq2Seq | theirs.DataCollatorWithPadding)
    if isinstance(given, theirs.DataCollatorWithFlattening) or getattr(given, "padding_free", not pads):
        return OneRow(collator(trainer))
    if any(base.__module__ == "trl.trainer.sft_trainer" for base in type(trainer).__mro__):
        raise _pads(kind_of(given), "SFTConfig(padding_free=True, max_length=None): TRL's collator then makes one row")
    raise _pads(kind_of(given))


class OneRow:
    """A collator of somebody else's, of which nothing else shows whether it pads.

    Args:
        collate: the items of a batch to one row.
    """

    def __init__(self, collate: Collate) -> None:
        self._collate = collate

    def __call__(self, items: list[Any]) -> Any:
        """Raises UsageError: more rows than one."""
        batch = self._collate(items)
        rows = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if rows is not None and len(rows) > 1 and getattr(rows, "ndim", 2) > 1:
            raise _pads(f"{len(rows)} rows of {len(items)} items")
        return batch


_LEAVE_OUT = "leave data_collator out: labels are then those of the items, or their input_ids"


def _pads(found: str, action: str = _LEAVE_OUT) -> UsageError:
    return UsageError(
        "this data_collator pads, and seq_length packs",
        found=f"data_collator: {found}",
        expected="none; DataCollatorWithFlattening; or a function that makes one row of the items of a batch",
        cause="the items of a packed sample would be laid side by side, each padded to the longest",
        action=action,
    )
