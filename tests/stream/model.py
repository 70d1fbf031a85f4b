"""A run of the stream, slow and plain: it is never killed, never saved, and every change is applied to it as it stands.

Lists of Python integers, one document at a time. Nothing of the package but the permutation of ``reference.py``, which
other tests hold against the compiled one. What a stream that is saved, killed, restored and reconfigured trains on must
be what this trains on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import ceil
from typing import Any

from megaresume.stream.reference import permute

#: source, position, offset, tokens.
Piece = tuple[str, int, int, int]


@dataclass
class Model:
    """Sources go by their first names; ``order`` is that in which the run came to know them."""

    seed: int
    lengths: dict[str, list[int]]
    packing: dict[str, Any]
    seq_length: int
    weights: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    #: tokens since the stage began.
    drawn: dict[str, int] = field(default_factory=dict)
    #: [sample after which it was opened, pieces].
    bins: list[tuple[int, list[Piece]]] = field(default_factory=list)
    pending: list[Piece] = field(default_factory=list)
    #: absolute numbers that are not trained.
    skipped: set[int] = field(default_factory=set)
    masked: dict[str, set[int]] = field(default_factory=dict)
    #: samples closed.
    closed: int = 0
    trained: list[list[Piece]] = field(default_factory=list)
    left_out: list[Piece] = field(default_factory=list)
    passed_over: set[tuple[str, int]] = field(default_factory=set)

    def document(self, name: str, position: int) -> int:
        epoch, index = divmod(position, len(self.lengths[name]))
        return permute(index, len(self.lengths[name]), self.seed, name, epoch)

    def length(self, name: str, position: int) -> int:
        return self.lengths[name][self.document(name, position)]

    def begin_stage(self, weights: dict[str, int], packing: dict[str, Any], seq_length: int) -> None:
        self.order += [name for name in weights if name not in self.order]
        if (packing, seq_length) != (self.packing, self.seq_length):
            self.pending = [piece for _, pieces in self.bins for piece in pieces] + self.pending
            self.bins = []
        self.weights, self.packing, self.seq_length, self.drawn = dict(weights), packing, seq_length, {}

    def skip(self, first: int, stop: int) -> None:
        self.skipped |= set(range(max(first, self.closed), stop))

    def mask(self, name: str, documents: list[int]) -> None:
        self.masked[name] = self.masked.get(name, set()) | set(documents)

        def gone(piece: Piece) -> bool:
            return piece[0] == name and self.document(name, piece[1]) in documents

        waiting = [p for _, pieces in self.bins for p in pieces] + self.pending
        self.left_out += [p for p in waiting if gone(p)]
        self.bins = [(at, kept) for at, pieces in self.bins if (kept := [p for p in pieces if not gone(p)])]
        self.pending = [p for p in self.pending if not gone(p)]

    def train(self) -> None:
        """One sample more."""
        while self.closed in self.skipped:
            self.left_out += self._next_sample()
        self.trained.append(self._next_sample())

    def _next_sample(self) -> list[Piece]:
        mode = self.packing["mode"]
        while True:
            if mode == "best_fit" and self.bins and self.closed - self.bins[0][0] >= self.packing["max_age"]:
                return self._close(0)
            if not self.pending:
                self.pending = [self._draw()]
            length = self.pending[0][3]
            if mode == "none" or (mode == "best_fit" and length >= self.seq_length):
                self.closed += 1
                return [self._take(self.seq_length)]
            if mode == "split":
                if not self.bins:
                    self.bins = [(self.closed, [])]
                self.bins[0][1].append(self._take(self.seq_length - self._used(0)))
                if self._used(0) == self.seq_length:
                    return self._close(0)
                continue
            rooms = [self.seq_length - self._used(b) for b in range(len(self.bins))]
            fitting = [b for b, room in enumerate(rooms) if room >= length]
            if not fitting and len(self.bins) == self.packing["open_bins"]:
                return self._close(rooms.index(min(rooms)))
            if not fitting:
                self.bins.append((self.closed, []))
                rooms.append(self.seq_length)
                fitting = [len(self.bins) - 1]
            best = min(fitting, key=lambda b: rooms[b])
            self.bins[best][1].append(self._take(length))
            if self._used(best) == self.seq_length:
                return self._close(best)

    def _used(self, b: int) -> int:
        align = self.packing["align"]
        return sum(-(-piece[3] // align) * align for piece in self.bins[b][1])

    def _close(self, b: int) -> list[Piece]:
        self.closed += 1
        return self.bins.pop(b)[1]

    def _take(self, tokens: int) -> Piece:
        name, position, offset, length = self.pending.pop(0)
        if length > tokens:
            self.pending.insert(0, (name, position, offset + tokens, length - tokens))
        return name, position, offset, min(length, tokens)

    def _head(self, name: str) -> int:
        position = self.positions.get(name, 0)
        while not self.length(name, position) or self.document(name, position) in self.masked.get(name, ()):
            position += 1
        return position

    def _draw(self) -> Piece:
        parts, total = sum(self.weights.values()), sum(self.drawn.values())
        ends = []
        for k, name in enumerate(self.order):
            if self.weights.get(name, 0):
                share, mine = Fraction(self.weights[name], parts), self.drawn.get(name, 0)
                if mine < share * (total + 1):
                    ends.append((ceil((mine + self.length(name, self._head(name))) / share), k))
        name = self.order[min(ends)[1]]
        position = self._head(name)
        for passed in range(self.positions.get(name, 0), position):
            self.passed_over.add((name, passed))
        length = self.length(name, position)
        self.positions[name] = position + 1
        self.drawn[name] = self.drawn.get(name, 0) + length
        return name, position, 0, length

    def check(self) -> None:
        """Every document of every source once an epoch: trained, waiting, left out, or passed over by its number."""
        tokens: dict[tuple[str, int], list[tuple[int, int]]] = {}
        waiting = [p for _, pieces in self.bins for p in pieces] + self.pending
        for name, position, offset, length in [*(p for s in self.trained for p in s), *waiting, *self.left_out]:
            tokens.setdefault((name, position), []).append((offset, length))
        for name, stop in self.positions.items():
            num = len(self.lengths[name])
            for epoch in range(-(-stop // num)):
                documents = [self.document(name, p) for p in range(epoch * num, (epoch + 1) * num)]
                assert sorted(documents) == list(range(num))
            for position in range(stop):
                parts = sorted(tokens.pop((name, position), []))
                if (name, position) in self.passed_over:
                    assert not parts
                    continue
                ends = [offset + length for offset, length in parts]
                assert [offset for offset, _ in parts] == [0, *ends[:-1]] and ends[-1] == self.length(name, position)
        assert not tokens
        parts, total = sum(self.weights.values()), sum(self.drawn.values())
        longest = max(max(self.lengths[name]) for name in self.weights)
        for name, weight in self.weights.items():
            assert abs(self.drawn.get(name, 0) - Fraction(weight, parts) * total) <= longest
