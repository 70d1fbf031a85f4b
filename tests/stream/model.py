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

from tests.stream.reference import permute

#: source, position, offset, tokens.
Piece = tuple[str, int, int, int]
#: epoch, document, offset, tokens.
Part = tuple[int, int, int, int]
#: Ends of pieces that are kept back.
TAILS = 256
#: Pieces that wait to fill; so many wait before one that fills a sample passes by.
FILLERS, FEW_FILLERS = 128, 16


@dataclass
class Model:
    """Sources go by their first names; ``order`` is that in which the run came to know them."""

    seed: int
    lengths: dict[str, list[int]]
    packing: dict[str, Any]
    seq_length: int
    #: sources that are cut to fill what the whole documents of the others leave free.
    fillers: set[str] = field(default_factory=set)
    weights: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    positions: dict[str, int] = field(default_factory=dict)
    #: what comes at the positions of a source, written down an epoch at a time, when it is first looked at.
    parts: dict[str, list[Part]] = field(default_factory=dict)
    #: tokens since the stage began.
    drawn: dict[str, int] = field(default_factory=dict)
    #: [sample after which it was opened, pieces].
    bins: list[tuple[int, list[Piece]]] = field(default_factory=list)
    pending: list[Piece] = field(default_factory=list)
    #: what waits to fill, and what was left of pieces that were cut.
    waits: list[Piece] = field(default_factory=list)
    tails: list[Piece] = field(default_factory=list)
    #: absolute numbers that are not trained.
    skipped: set[int] = field(default_factory=set)
    masked: dict[str, set[int]] = field(default_factory=dict)
    #: samples closed.
    closed: int = 0
    trained: list[list[Piece]] = field(default_factory=list)
    left_out: list[Piece] = field(default_factory=list)
    passed_over: set[tuple[str, int]] = field(default_factory=set)

    def part(self, name: str, position: int) -> Part:
        parts = self.parts.setdefault(name, [])
        while position >= len(parts):
            lengths, epoch = self.lengths[name], parts[-1][0] + 1 if parts else 0
            pieces, step = [(d, 0) for d in range(len(lengths))], self.seq_length
            pieces += [(d, at) for d, n in enumerate(lengths) for at in range(step, n, step)]
            order = (pieces[permute(i, len(pieces), self.seed, name, epoch)] for i in range(len(pieces)))
            parts += [(epoch, d, at, min(lengths[d] - at, self.seq_length)) for d, at in order]
        return parts[position]

    def document(self, name: str, position: int) -> int:
        return self.part(name, position)[1]

    def length(self, name: str, position: int) -> int:
        return self.part(name, position)[3]

    def begin_stage(
        self, weights: dict[str, int], packing: dict[str, Any], seq_length: int, fillers: set[str] = frozenset()
    ) -> None:
        self.order += [name for name in weights if name not in self.order]
        # What a source that is gone did, it does.
        fillers = {n for n in self.fillers if n not in weights} | fillers if packing["mode"] == "best_fit" else set()
        if (packing, seq_length, fillers) != (self.packing, self.seq_length, self.fillers):
            in_bins = [piece for _, pieces in self.bins for piece in pieces]
            self.pending = in_bins + self.waits + self.tails + self.pending
            self.bins, self.waits, self.tails = [], [], []
        for name, parts in self.parts.items():
            # An epoch of which nothing was drawn is written down anew.
            begun = {epoch for epoch, *_ in parts[: self.positions.get(name, 0)]}
            self.parts[name] = [part for part in parts if part[0] in begun]
        self.weights, self.packing, self.seq_length, self.drawn = dict(weights), packing, seq_length, {}
        self.fillers = fillers

    def skip(self, first: int, stop: int) -> None:
        self.skipped |= set(range(max(first, self.closed), stop))

    def mask(self, name: str, documents: list[int]) -> None:
        self.masked[name] = self.masked.get(name, set()) | set(documents)

        def gone(piece: Piece) -> bool:
            return piece[0] == name and self.document(name, piece[1]) in documents

        waiting = [p for _, pieces in self.bins for p in pieces] + self.pending + self.waits + self.tails
        self.left_out += [p for p in waiting if gone(p)]
        self.bins = [(at, kept) for at, pieces in self.bins if (kept := [p for p in pieces if not gone(p)])]
        self.pending = [p for p in self.pending if not gone(p)]
        kept = [p for p in self.waits + self.tails if not gone(p)]
        # What was left of pieces, at the end of all: as many as are kept back.
        young = 0
        while self.fillers and young < min(len(kept), TAILS):
            name, position, offset, _ = kept[-1 - young]
            if offset == self.part(name, position)[2]:
                break
            young += 1
        num = len(kept) - (young if self.fillers else len(kept))
        self.waits, self.tails = kept[:num], kept[num:]

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
            if not self.pending and len(self.waits) >= FILLERS:
                self.pending = [self.waits.pop(0)]
            if not self.pending and len(self.tails) == TAILS and not self.fillers and not self.bins:
                self.pending = [self.tails.pop(0)]
            if not self.pending:
                self.pending = [self._draw()]
                waits = self.pending[0][3] < self.seq_length or len(self.waits) < FEW_FILLERS
                if waits and self.pending[0][0] in self.fillers:
                    self.waits.append(self.pending.pop())
                    continue
            length = self.pending[0][3]
            if self.pending[0][0] in self.fillers and length >= self.seq_length:
                self.closed += 1
                whole = [self._take(self.seq_length)]
                if length > self.seq_length:
                    self._keep(self.pending.pop(0))
                return whole
            if mode == "none" or (mode == "best_fit" and length >= self.seq_length):
                self.closed += 1
                return [self._take(self.seq_length)]
            if mode == "split" and length >= self.seq_length:
                self.closed += 1
                whole = [self._take(self.seq_length)]
                self._keep_back(whole[0])
                return whole
            if mode == "split":
                if not self.bins:
                    self.bins = [(self.closed, [])]
                self.bins[0][1].append(self._take(self.seq_length - self._used(0)))
                self._keep_back(self.bins[0][1][-1])
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
        return sum(self._aligned(piece[3]) for piece in self.bins[b][1])

    def _aligned(self, tokens: int) -> int:
        align = self.packing["align"]
        return -(-tokens // align) * align

    def _close(self, b: int) -> list[Piece]:
        self.closed += 1
        least = self.packing.get("min_fragment", max(min(self.seq_length // 64, 64), 1))
        while self.fillers and (room := self.seq_length - self._used(b)):
            whole = [k for k, piece in enumerate(self.waits) if piece[3] <= room]
            cut = [k for k, piece in enumerate(self.waits) if piece[3] > room and min(room, piece[3] - room) >= least]
            chosen = max(whole, key=lambda k: self.waits[k][3], default=None)
            if cut and (chosen is None or room - self._aligned(self.waits[chosen][3]) > self.seq_length // 512):
                chosen = cut[0]
            if chosen is None:
                break
            name, position, offset, length = self.waits.pop(chosen)
            self.bins[b][1].append((name, position, offset, min(length, room)))
            if length > room:
                self._keep((name, position, offset + room, length - room))
        return self.bins.pop(b)[1]

    def _keep(self, piece: Piece) -> None:
        if len(self.tails) == TAILS:
            self.waits.append(self.tails.pop(0))
        self.tails.append(piece)

    def _take(self, tokens: int) -> Piece:
        name, position, offset, length = self.pending.pop(0)
        if length > tokens:
            self.pending.insert(0, (name, position, offset + tokens, length - tokens))
        return name, position, offset, min(length, tokens)

    def _keep_back(self, taken: Piece) -> None:
        """What is left of a piece that was cut waits behind others."""
        if self.pending and self.pending[0][:2] == taken[:2] and len(self.tails) < TAILS:
            self.tails.append(self.pending.pop(0))

    def _head(self, name: str) -> int:
        position = self.positions.get(name, 0)
        while not self.length(name, position) or self.document(name, position) in self.masked.get(name, ()):
            position += 1
        return position

    def _draw(self) -> Piece:
        parts, total = sum(self.weights.values()), sum(self.drawn.values())
        ends = []
        for name in self.order:
            if self.weights.get(name, 0):
                share, mine = Fraction(self.weights[name], parts), self.drawn.get(name, 0)
                if mine < share * (total + 1):
                    ends.append((ceil((mine + self.length(name, self._head(name))) / share), name))
        _, name = min(ends)
        position = self._head(name)
        for passed in range(self.positions.get(name, 0), position):
            self.passed_over.add((name, passed))
        length = self.length(name, position)
        self.positions[name] = position + 1
        self.drawn[name] = self.drawn.get(name, 0) + length
        return name, position, self.part(name, position)[2], length

    def check(self) -> None:
        """Every token of every source once an epoch: trained, waiting, left out, or passed over by its number."""
        pieces: dict[tuple[str, int], list[tuple[int, int]]] = {}
        waiting = [p for _, pieces in self.bins for p in pieces] + self.pending + self.waits + self.tails
        for name, position, offset, length in [*(p for s in self.trained for p in s), *waiting, *self.left_out]:
            pieces.setdefault((name, position), []).append((offset, length))
        for name, stop in self.positions.items():
            parts = [self.part(name, position) for position in range(stop)]
            of_document: dict[tuple[int, int], list[tuple[int, int]]] = {}
            for epoch, document, offset, length in parts:
                of_document.setdefault((epoch, document), []).append((offset, length))
            for epoch in range(parts[-1][0] if parts else 0):
                for document, tokens in enumerate(self.lengths[name]):
                    end = 0
                    for offset, length in sorted(of_document[epoch, document]):
                        assert offset == end
                        end += length
                    assert end == tokens
            for position, (_, _, first, length) in enumerate(parts):
                found = sorted(pieces.pop((name, position), []))
                if (name, position) in self.passed_over:
                    assert not found
                    continue
                ends = [offset + length for offset, length in found]
                assert [offset for offset, _ in found] == [first, *ends[:-1]] and ends[-1] == first + length
        assert not pieces
        parts, total = sum(self.weights.values()), sum(self.drawn.values())
        longest = max(max(self.lengths[name]) for name in self.weights)
        for name, weight in self.weights.items():
            assert abs(self.drawn.get(name, 0) - Fraction(weight, parts) * total) <= longest
