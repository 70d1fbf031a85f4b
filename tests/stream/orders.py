"""Orders of documents that are never cut."""

from __future__ import annotations

import numpy as np

from megaresume.stream.data_yaml import ShuffleConfig
from megaresume.stream.order import SourceOrder
from megaresume.stream.source import PieceLists
from megaresume.testing import LengthList


def order_of(num: int, seed: int, name: str, shuffle: ShuffleConfig | None = None) -> SourceOrder:
    return SourceOrder(name, seed, shuffle, PieceLists(LengthList([]))).revised(0, documents=num, piece=0)


def document_at(position: int, order: SourceOrder) -> tuple[int, int]:
    """Epoch and document."""
    return order.epoch_of(position), int(order.pieces_at(np.array([position]))[0][0])


def position_of(document: int, order: SourceOrder, epoch: int) -> int:
    (position,) = order.positions_of(document, epoch)
    return position
