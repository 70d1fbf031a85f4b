"""`Eras`: where the epochs of a source begin and end. See ``order.py`` for what they are made of.

Imports neither numpy nor numba, as `megaresume.stream.state`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Era:
    """A run of positions of a source with one set of pieces."""

    #: its first position.
    first: int
    #: the epoch that this one is in.
    epoch: int
    #: documents of the source.
    documents: int
    #: tokens of the longest piece; 0: documents are whole.
    piece: int
    #: pieces of an epoch; of the rest of one, positions.
    pieces: int
    #: 0; or the rest of an epoch, into which new documents came: positions of it that were to come without them.
    rest: int = 0
    #: number of the stage in which it was settled: who plans an earlier one again must not look ahead into it.
    stage: int = 0


class Eras:
    """The eras of one source.

    Args:
        eras: in order; none while nothing can be drawn from the source.
    """

    def __init__(self, eras: Sequence[Era]) -> None:
        self.eras = tuple(eras)
        self._firsts = [era.first for era in self.eras]

    @staticmethod
    def epoch_bounds(era: Era, position: int) -> tuple[int, int]:
        """Where the epoch of a position of an era begins and ends; of the rest of an epoch, where that does."""
        if era.rest:
            end = era.first + era.pieces
            return (era.first, end) if position < end else (end, end)
        begin = era.first + (position - era.first) // era.pieces * era.pieces
        return begin, begin + era.pieces

    def _number(self, position: int) -> int:
        return bisect_right(self._firsts, position) - 1

    def epoch_of(self, position: int) -> int:
        """The epoch that a position is in."""
        if not self.eras:
            return 0
        era = self.eras[self._number(position)]
        return era.epoch if era.rest else era.epoch + (position - era.first) // era.pieces

    def end_of_epoch(self, position: int) -> int:
        """The position after the last one of the epoch that a position is in."""
        k = self._number(position)
        end = self.epoch_bounds(self.eras[k], position)[1]
        # An era that begins before that is the rest of the same epoch.
        while k + 1 < len(self.eras) and self.eras[k + 1].first < end:
            k += 1
            end = self.eras[k].first + self.eras[k].pieces
        return end

    def left(self, position: int) -> int:
        """Positions from this one on that are of one epoch and one era."""
        k = self._number(position)
        end = self.epoch_bounds(self.eras[k], position)[1]
        return (min(end, self.eras[k + 1].first) if k + 1 < len(self.eras) else end) - position

    def start_of(self, epoch: int) -> int:
        """The first position of an epoch."""
        era = next(e for e in reversed(self.eras) if e.epoch <= epoch and not e.rest)
        return era.first + (epoch - era.epoch) * era.pieces

    def piece_length(self, position: int) -> int:
        """Tokens of the longest piece there; 0: documents are whole."""
        return self.eras[self._number(position)].piece
