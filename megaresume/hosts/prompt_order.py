"""`PromptOrder`: the item of an ordinal, in the order of `megaresume.DataLoader`, across epochs, blends and stages.

A change at a resume (prompts appended, other weights) begins with the first ordinal that was never issued: those in
flight keep their items. So a state has one state of the stream for each order that prompts in flight came from.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaresume.batches.data_loader import DataLoader
from megaresume.batches.rank_loader import available
from megaresume.stream.errors import StateError, UsageError
from megaresume.stream.state import StreamState
from megaresume.stream.stream import Stream

log = logging.getLogger(__name__)

#: (epoch, item, dataset, place) of an ordinal: `DataLoader.places`.
Place = tuple[int, int, str, Any]

#: ordinals planned at a time, and the number of such blocks kept, for prompts that are issued again.
BLOCK, BLOCKS = 4096, 32
#: options of `DataLoader` that are meaningful here.
OF_ORDER = ("seed", "shuffle", "max_epochs", "append", "on_change", "blend", "stages", "skip", "keyed")


@dataclass(slots=True)
class _Part:
    """An order, and the first ordinal after it; None: it continues."""

    stream: Stream
    stop: int | None = None


class PromptOrder:
    """The order of prompts.

    Args:
        loader: must not be read by anything else.
    """

    def __init__(self, loader: DataLoader) -> None:
        self.loader = loader
        #: the orders that prompts in flight came from; the last one is current.
        self._parts = [_Part(loader.stream)]
        #: blocks, last used first: the first ordinal, and the place of each.
        self._planned: list[tuple[int, list[Place]]] = []

    # An ordinal

    def place(self, ordinal: int) -> Place:
        """The place of an ordinal that was issued."""
        return self.places(ordinal, 1)[0]

    def places(self, ordinal: int, n: int) -> list[Place]:
        """The places of at most ``n`` ordinals from this one on; fewer at the end of the data."""
        if n <= 0:
            return []
        for at, (first, places) in enumerate(self._planned):
            if first <= ordinal < first + len(places):
                if at:
                    self._planned.insert(0, self._planned.pop(at))
                return places[ordinal - first : ordinal - first + n]
        part = next(one for one in self._parts if one.stop is None or ordinal < one.stop)
        first = max(part.stream.start, ordinal - ordinal % BLOCK)
        there = part.stop - first if part.stop is not None else available(part.stream, first, BLOCK)
        if ordinal - first >= there:
            return []
        places = self.loader.places(first, first + min(there, BLOCK), part.stream)
        self._planned = [(first, places), *self._planned[: BLOCKS - 1]]
        return places[ordinal - first : ordinal - first + n]

    def read(self, places: Sequence[Place]) -> list[Any]:
        """The items at places. Raises CorpusError: one cannot be read."""
        return self.loader.read([place for *_, place in places]) if places else []

    # Kept

    def to_list(self, frontier: int) -> list[dict[str, Any]]:
        """The states of the stream for ordinals from this one on.

        Raises:
            StateError: something else has read from the loader.
        """
        loader = self.loader
        if loader.samples != loader.stream.start:
            raise StateError(
                "something else read from the loader",
                found=f"the DataLoader at sample {loader.samples}",
                expected=f"at sample {loader.stream.start}: Prompts alone reads from it",
                cause="a `for` over the loader itself",
                action="take items from prompts.issue(n) alone; make another DataLoader to look at the data",
            )
        self._parts = [one for one in self._parts if one.stop is None or one.stop > frontier]
        return [self._state_at(one.stream, frontier).to_dict() for one in self._parts]

    def load(self, states: Sequence[StreamState], next_one: int) -> None:
        """Continue from these; changes since then begin with the next ordinal.

        Raises:
            StateError: they are for other prompts. Nothing is changed.
        """
        before = self.loader.stream.base_state
        try:
            self._parts = self._parts_of(states, next_one)
        except BaseException:
            self.loader.stream.restore(before)
            raise
        self._planned = []
        for said in self.loader.stream.accepted:
            log.info("megaresume: %s", said)

    def _parts_of(self, states: Sequence[StreamState], next_one: int) -> list[_Part]:
        loader = self.loader
        stops = [after.samples for after in states[1:]]
        parts = [_Part(loader.as_recorded(state), stop) for state, stop in zip(states, stops, strict=False)]
        loader.restore(states[-1])
        if loader.stream.accepted and states[-1].samples < next_one:
            before = loader.as_recorded(states[-1])
            parts.append(_Part(before, next_one))
            loader.restore(self._state_at(before, next_one))
        return [*parts, _Part(loader.stream)]

    def _state_at(self, stream: Stream, ordinal: int) -> StreamState:
        return stream.state_at(max(ordinal, stream.start), batches=((0, self.loader.step_samples),))


def loader_of(data: Any, order: Mapping[str, Any]) -> DataLoader:
    """A loader with one prompt per batch, in this order: see `megaresume.Prompts`.

    Raises:
        UsageError: items are packed, an option is for batches, or the loader was already read from.
        ConfigError, CorpusError: as `DataLoader`.
    """
    if not isinstance(data, DataLoader):
        if "seq_length" in order:
            raise _packed("seq_length=")
        if wrong := [name for name in order if name not in OF_ORDER]:
            raise _batches_error(wrong, "leave them out")
        return DataLoader(data, 1, dp_rank=0, dp_size=1, **order).made_by("megaresume.Prompts")
    if order:
        raise UsageError(
            "the order is that of the DataLoader",
            found=", ".join(f"{name}=" for name in order),
            expected="a dataset with these options, or a DataLoader alone",
            action="give them to the DataLoader",
        )
    if data.is_packed:
        raise _packed("a DataLoader with seq_length")
    given = {"drop_last": data.drop_last, "accumulation": data.accumulation > 1, "balance": data.balance is not None}
    if wrong := [name for name, is_given in (given | {"collate_fn": data.collates}).items() if is_given]:
        raise _batches_error(wrong, "leave them out of the DataLoader")
    if data.samples:
        raise UsageError(
            "the loader was read from already",
            found=f"a DataLoader at sample {data.samples}",
            expected="a new one, which Prompts alone reads",
            action="load the state of the prompts: prompts.load_state_dict",
        )
    return data


def _batches_error(wrong: Sequence[str], action: str) -> UsageError:
    return UsageError(
        "Prompts makes no batches",
        found=", ".join(f"{name}=" for name in wrong),
        expected=f"options of the order: {', '.join(OF_ORDER)}",
        action=f"{action}: issue(n) gives as many prompts as are asked for, to one process for all",
    )


def _packed(found: str) -> UsageError:
    return UsageError(
        "packed items are no prompts",
        found=found,
        expected="samples that are items",
        action="leave seq_length and packing out: rollouts are packed by whoever trains them",
    )
