"""The stream in plain Python integers, to hold the compiled loop against: slow, short, and obviously right.

Nothing of ``kernel.py`` is used, and nothing is done in the same way where there is another one: the
permutation is built from tuples of halves, the blend compares exact fractions, the packers are generators over
documents, and no position is ever resumed. Only `StreamConfig` is shared. Imports neither numpy nor numba.

    for sample in reference_samples(config, {"web": [512, 80, ...], "code": [...]}): ...
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from math import ceil
from typing import NamedTuple

from megaresume.stream.config import SourceConfig, StreamConfig
from megaresume.stream.data_yaml import ShuffleConfig

#: Ends of documents that are kept back.
TAILS = 256
#: Pieces that wait to fill samples, and those from which on one that fills a sample does not wait.
FILLERS, FEW_FILLERS = 128, 16
#: Longest documents that ``knapsack`` tries a sample with.
STARTS = 8
#: Segments in open bins from which ``best_fit`` opens no further one.
OPEN_SEGMENTS = 2048
#: Units that no stream comes to.
LATE = 1 << 61


class ReferenceSegment(NamedTuple):
    """A run of tokens of one document; also a whole document, and what is left of one."""

    #: index into the sources of the config.
    source: int
    #: in the source, epochs included.
    position: int
    document: int
    #: tokens of the document before the segment.
    offset: int
    #: tokens.
    length: int

    def split(self, tokens: int) -> tuple[ReferenceSegment, ReferenceSegment]:
        """The first ``tokens`` tokens, and the rest."""
        rest = self._replace(offset=self.offset + tokens, length=self.length - tokens)
        return self._replace(length=tokens), rest


Sample = list[ReferenceSegment]

_WORD = 1 << 64
_GAMMA = 0x9E3779B97F4A7C15


def splitmix64(x: int) -> int:
    """The first output of splitmix64 seeded with ``x`` (Steele, Lea, Flood, OOPSLA 2014, figure 17)."""
    z = (x + _GAMMA) % _WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % _WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % _WORD
    return z ^ z >> 31


def hash_of(sample: Iterable[ReferenceSegment], names: Sequence[str]) -> int:
    """64-bit identity of a sample: a chain over three words a segment."""
    words: list[int] = []
    for segment in sample:
        name = hashlib.blake2b(f"megaresume.source.1|{names[segment.source]}".encode(), digest_size=8)
        words.append(int.from_bytes(name.digest(), "little"))
        words.append(segment.document ^ segment.position * _GAMMA % _WORD)
        words.append(segment.offset ^ segment.length << 32)
    chain = 0
    for word in words:
        chain = splitmix64(chain ^ word)
    return chain


def reference_digests(samples: Iterable[Sample], names: Sequence[str]) -> Iterator[int]:
    """The rolling digest after each sample."""
    digest = 0
    for sample in samples:
        digest = splitmix64(digest ^ hash_of(sample, names))
        yield digest


def permute(index: int, num_documents: int, seed: int, name: str, epoch: int, part: str = "") -> int:
    """The document at ``index`` of an epoch: an alternating Feistel network, walked until it lands below N.

    The lower half of the bits is the longer one. A round hashes the one half with its key and adds the outcome to the
    other, bit by bit; the upper half is changed first.
    """
    bits = max((num_documents - 1).bit_length(), 2)
    widths = (bits // 2, bits - bits // 2)
    text = f"megaresume.permutation.1|{seed}|{len(name.encode())}|{name}|{epoch}" + (f"|{part}" if part else "")
    rounds = 6 if bits >= 16 else 24
    secret = hashlib.shake_256(text.encode()).digest(8 * rounds)
    value = index
    while True:
        halves = list(divmod(value, 1 << widths[1]))
        for turn in range(rounds):
            key = int.from_bytes(secret[8 * turn : 8 * turn + 8], "little")
            changed, other = turn % 2, 1 - turn % 2
            halves[changed] ^= splitmix64(halves[other] ^ key) % (1 << widths[changed])
        value = halves[0] * (1 << widths[1]) + halves[1]
        if value < num_documents:
            return value


def epoch_order(num_documents: int, seed: int, name: str, epoch: int, shuffle: ShuffleConfig | None) -> Iterator[int]:
    """All documents of an epoch. In two levels: whole blocks permuted, then every window of some blocks."""
    if shuffle is None:
        yield from (permute(i, num_documents, seed, name, epoch) for i in range(num_documents))
        return
    block, size = shuffle.block, shuffle.block * shuffle.window
    blocks = [range(first, min(first + block, num_documents)) for first in range(0, num_documents, block)]
    places = [d for i in range(len(blocks)) for d in blocks[permute(i, len(blocks), seed, name, epoch, "blocks")]]
    for window, first in enumerate(range(0, num_documents, size)):
        here = places[first : first + size]
        yield from (here[permute(i, len(here), seed, name, epoch, f"window {window}")] for i in range(len(here)))


class _Walk:
    """One source from its first piece on. An epoch keeps the pieces with which it was begun, whatever comes later."""

    def __init__(self, number: int, source: SourceConfig, seed: int, lengths: Sequence[int]) -> None:
        self.number, self.source, self.seed, self.lengths = number, source, seed, lengths
        #: the epoch at hand, the position at which it begins, and how many of its pieces were drawn.
        self.epoch = self.begin = self.drawn = 0
        #: all its pieces, empty ones too; None: it has not begun.
        self.now: list[ReferenceSegment] | None = None

    def pieces(self, epoch: int, position: int, piece: int) -> list[ReferenceSegment]:
        """All pieces of an epoch that begins at a position, in its order."""
        firsts = [(document, 0) for document in range(len(self.lengths))]
        later = [(document, at) for document, length in enumerate(self.lengths) for at in range(piece, length, piece)]
        parts = firsts + later
        order = epoch_order(len(parts), self.seed, self.source.name, epoch, self.source.shuffle)
        return [
            ReferenceSegment(self.number, position + k, document, at, min(self.lengths[document] - at, piece))
            for k, (document, at) in enumerate(parts[i] for i in order)
        ]

    def ahead(self, source: SourceConfig, piece: int) -> Iterator[ReferenceSegment]:
        """What comes from here on in one stage, without the empty ones; `take` says how far it was drawn."""
        ends = source.max_epochs is not None and source.on_exhausted != "repeat"
        epoch, begin, pieces, drawn = self.epoch, self.begin, self.now, self.drawn
        while not ends or epoch < (source.max_epochs or 0):
            pieces = self.pieces(epoch, begin, piece) if pieces is None else pieces
            for here in range(drawn, len(pieces)):
                if pieces[here].length:
                    self._ahead = epoch, begin, pieces, here + 1
                    yield pieces[here]
            epoch, begin, pieces, drawn = epoch + 1, begin + len(pieces), None, 0

    def take(self) -> None:
        """The piece that `ahead` gave last is drawn."""
        self.epoch, self.begin, self.now, self.drawn = self._ahead
        if self.drawn == len(self.now):
            self.epoch, self.begin, self.now, self.drawn = self.epoch + 1, self.begin + self.drawn, None, 0


class _Blend:
    """Draws documents. It outlives the stages: every source goes on where it was.

    With T units drawn in all since the stage began or a source ended, and c of a source whose share is s, its next
    document of l units may be drawn once s * (T + 1) exceeds c: at the latest when unit T + 1 is handed out, the source
    is owed a part of it. Of those that may, the one goes first whose document should end first: by unit (c + l) / s;
    among equals, and among those that should end later than any stream does, the first by name.
    """

    def __init__(
        self, config: StreamConfig, lengths: Mapping[str, Sequence[int]], trained: Mapping[str, Sequence[Sequence[int]]]
    ) -> None:
        self._trained = trained
        self._walks = [_Walk(i, s, config.seed, lengths[s.name]) for i, s in enumerate(config.sources)]

    def documents(self, config: StreamConfig) -> Iterator[ReferenceSegment]:
        """Documents in the order in which they are drawn in one stage."""
        feeds = {
            i: self._walks[i].ahead(source, config.seq_length)
            for i, source in enumerate(config.sources)
            if source.weight > 0
        }
        heads: dict[int, ReferenceSegment] = {}
        drawn: dict[int, int] = {}

        def look_ahead(i: int) -> bool:
            """Fetch the next document of source i; False when the whole stream ends here."""
            head = next(feeds[i], None)
            if head is not None:
                heads[i] = head
                return True
            del feeds[i]
            heads.pop(i, None)
            drawn.clear()  # the others go on with deficits from zero
            return config.sources[i].on_exhausted != "stop"

        heads_found = [look_ahead(i) for i in list(feeds)]
        if not all(heads_found):
            return
        while feeds:
            total = sum(drawn.values())
            parts = sum(config.sources[i].weight for i in feeds)
            ends: list[tuple[int, str, int]] = []
            for i in feeds:
                share = Fraction(config.sources[i].weight, parts)
                if drawn.get(i, 0) < share * (total + 1):
                    end = ceil((drawn.get(i, 0) + self._units(heads[i], config)) / share)
                    ends.append((min(end, LATE), config.sources[i].name, i))
            *_, chosen = min(ends)
            document = heads[chosen]
            drawn[chosen] = drawn.get(chosen, 0) + self._units(document, config)
            self._walks[chosen].take()
            goes_on = look_ahead(chosen)
            yield document
            if not goes_on:
                return

    def _units(self, piece: ReferenceSegment, config: StreamConfig) -> int:
        """What the blend counts of a piece."""
        name = config.sources[piece.source].name
        if config.blend.unit == "documents":
            return int(piece.offset == 0)
        if config.blend.unit == "trained" and name in self._trained:
            return sum(self._trained[name][piece.document][piece.offset : piece.offset + piece.length])
        return piece.length


class _Bin(NamedTuple):
    opened_at: int
    segments: Sample


class _Packer:
    """Packs documents into samples. What is open when the iteration is given up is in ``bins`` and ``rest``."""

    def __init__(
        self,
        config: StreamConfig,
        bins: list[_Bin],
        waiting: list[ReferenceSegment],
        tails: deque[ReferenceSegment],
        closed: int,
    ) -> None:
        self.config = config
        self.bins = bins  # in the order in which they were opened
        #: what waits to fill samples, and what was cut off at the ends of samples; both the oldest first.
        self.waiting, self.tails = waiting, tails
        self.closed = closed
        #: of the document at hand, what is in no bin.
        self.rest: list[ReferenceSegment] = []

    def samples(self, carried: Iterator[ReferenceSegment], documents: Iterable[ReferenceSegment]) -> Iterator[Sample]:
        """Samples of what the stage before left, and then of documents."""
        modes = {"best_fit": self._best_fit, "knapsack": self._knapsack, "split": self._split, "none": self._none}
        mode = self.config.packing.mode
        place, best_fit, knapsack = modes[mode], mode == "best_fit", mode == "knapsack"
        documents = iter(documents)
        fills, ending = any(self.config.fillers), False
        while True:
            full: Sample | None = None
            if best_fit and self.bins and self.closed - self.bins[0].opened_at >= self.config.packing.max_age:
                full = self._close(self.bins[0])
            elif self.rest:
                full = place()
            elif len(self.waiting) >= FILLERS or (ending and self.waiting):
                self.rest = [self.waiting.pop(0)]
            elif (segment := next(carried, None)) is not None:
                self.rest = [segment]
            elif len(self.tails) == TAILS and not fills and not self.bins:
                self.rest = [self.tails.popleft()]
            elif (document := next(documents, None)) is not None:
                few = document.length < self.config.seq_length or len(self.waiting) < FEW_FILLERS
                waits = few and self._fills(document)
                (self.waiting if waits else self.rest).append(document)
            elif self.waiting:
                ending = True
            elif self.tails:
                self.rest = [self.tails.popleft()]
            elif self.bins:
                full = self._gather() if knapsack else self._close(self.bins[0])
            else:
                return
            if full is not None:
                yield full

    def _close(self, which: _Bin) -> Sample:
        self.closed += 1
        self.bins.remove(which)
        while (room := self._room(which)) and (chosen := self._filling(room)) is not None:
            self.waiting.remove(chosen)
            piece, rest = chosen.split(min(chosen.length, room))
            which.segments.append(piece)
            if rest.length:
                self._keep(rest)
        return which.segments

    def _filling(self, room: int) -> ReferenceSegment | None:
        """What goes next into a sample that is closed, of what waits.

        A whole piece, if hardly anything stays free; else the end of the sample cuts one, so that neither part is
        short; else any whole piece. Of whole ones the longest, of those that are cut the oldest.
        """
        align, length = self.config.packing.align, self.config.seq_length
        least = self.config.packing.min_fragment or max(min(length // 64, 64), 1)
        whole = max((p for p in self.waiting if p.length <= room), key=lambda p: p.length, default=None)
        long = (p for p in self.waiting if p.length > room and min(room, p.length - room) >= least)
        cut = next(long, None)
        if whole is not None and (cut is None or room - ceil(whole.length / align) * align <= length // 512):
            return whole
        return cut

    def _keep(self, rest: ReferenceSegment) -> None:
        """Of a piece that fills: it waits until `TAILS` others were kept back, and then again to fill."""
        if len(self.tails) == TAILS:
            self.waiting.append(self.tails.popleft())
        self.tails.append(rest)

    def _room(self, which: _Bin) -> int:
        return self.config.seq_length - _used(which.segments, self.config)

    def _fills(self, segment: ReferenceSegment) -> bool:
        return self.config.fillers[segment.source]

    def _take(self, tokens: int) -> ReferenceSegment:
        """A piece off the document at hand, of at most so many tokens."""
        (document,) = self.rest
        piece, rest = document.split(min(document.length, tokens))
        self.rest = [rest] if rest.length else []
        return piece

    def _none(self) -> Sample | None:
        """One document a sample; a longer one fills as many samples as it needs."""
        self.closed += 1
        return [self._take(self.config.seq_length)]

    def _split(self) -> Sample | None:
        """Concatenate and cut. A segment starts at a multiple of the alignment.

        What fills a sample goes past the open one. What is cut off waits until `TAILS` others were.
        """
        if self.rest[0].length >= self.config.seq_length:
            self.closed += 1
            full: Sample | None = [self._take(self.config.seq_length)]
        else:
            if not self.bins:
                self.bins.append(_Bin(self.closed, []))
            (sample,) = self.bins
            sample.segments.append(self._take(self.config.seq_length - _used(sample.segments, self.config)))
            full = self._close(sample) if _used(sample.segments, self.config) == self.config.seq_length else None
        if self.rest and len(self.tails) < TAILS:
            self.tails.append(self.rest.pop())
        return full

    def _best_fit(self) -> Sample | None:
        """Whole documents into the open bin with the least room that holds them; `min` gives ties to the oldest."""
        config, bins = self.config, self.bins
        length, fills = self.rest[0].length, self._fills(self.rest[0])
        if length >= config.seq_length:
            self.closed += 1
            whole = [self._take(config.seq_length)]
            if fills and self.rest:
                self._keep(self.rest.pop())
            return whole
        fitting = [b for b in bins if _used(b.segments, config) + length <= config.seq_length]
        many = sum(len(b.segments) for b in bins) >= OPEN_SEGMENTS
        if not fitting and (many or len(bins) == config.packing.open_bins):
            return self._close(max(bins, key=lambda b: _used(b.segments, config)))
        if not fitting:
            bins.append(_Bin(self.closed, []))
        best = max(fitting, key=lambda b: _used(b.segments, config)) if fitting else bins[-1]
        best.segments.append(self._take(length))
        return self._close(best) if _used(best.segments, config) == config.seq_length else None

    def _knapsack(self) -> Sample | None:
        """Documents wait in bins, a small one with the one before it if both are small, until all bins are in use."""
        config, bins = self.config, self.bins
        length = self.rest[0].length
        if length >= config.seq_length:
            self.closed += 1
            return [self._take(config.seq_length)]
        small = min(2 * config.seq_length // config.packing.lookahead, config.seq_length)
        if not bins or _used([*bins[-1].segments, self.rest[0]], config) > small:
            if len(bins) == config.packing.lookahead:
                return self._gather()
            bins.append(_Bin(self.closed, []))
        bins[-1].segments.append(self._take(length))
        return self._close(bins[-1]) if _used(bins[-1].segments, config) == config.seq_length else None

    def _gather(self) -> Sample:
        """The documents that fill a sample best, with one of the longest, or with the oldest when it is due."""
        sizes = [_used(b.segments, self.config) for b in self.bins]
        longest = sorted(range(len(sizes)), key=lambda b: -sizes[b])  # ties: the oldest
        due = self.closed - self.bins[0].opened_at >= self.config.packing.max_age
        fills = []
        for start in [0] if due else longest[:STARTS]:
            others = [b for b in longest if b != start and sizes[start] + sizes[b] <= self.config.seq_length]
            fills.append([start, *_fullest([sizes[b] for b in others], others, self.config.seq_length - sizes[start])])
        best = max(fills, key=lambda fill: sum(sizes[b] for b in fill))  # ties: the longest start
        chosen = [self.bins[b] for b in sorted(best)]
        self.closed += 1
        self.bins = [b for b in self.bins if b not in chosen]
        return [segment for b in chosen for segment in b.segments]


def _fullest(sizes: Sequence[int], names: Sequence[int], room: int) -> list[int]:
    """The names whose sizes sum up to as much of the room as any can; of several such, without the last ones."""
    sums = [{0}]  # sums[k]: what can be made of the first k
    for size in sizes:
        if room in sums[-1]:
            break
        sums.append(sums[-1] | {total + size for total in sums[-1] if total + size <= room})
    total = max(sums[-1])
    taken = []
    for k in range(len(sums) - 1, 0, -1):
        if total not in sums[k - 1]:
            taken.append(names[k - 1])
            total -= sizes[k - 1]
    return taken


def _used(segments: Sample, config: StreamConfig) -> int:
    align = config.packing.align
    return sum((s.length + align - 1) // align * align for s in segments)


def reference_samples(
    config: StreamConfig,
    lengths: Mapping[str, Sequence[int]],
    num_samples: int | None = None,
    trained: Mapping[str, Sequence[Sequence[int]]] | None = None,
) -> Iterator[Sample]:
    """Samples 0, 1, 2, ... of the stream, through all stages that the config declares (not by step).

    Args:
        config: what defines the order.
        lengths: tokens of each document, by source name.
        num_samples: stop after as many; None: never, or when the stream ends.
        trained: 1 for each token of each document that is trained, else 0, by source name; without: all are.
    """
    return islice(_staged(config, lengths, trained or {}), num_samples)


def _staged(
    config: StreamConfig, lengths: Mapping[str, Sequence[int]], trained: Mapping[str, Sequence[Sequence[int]]]
) -> Iterator[Sample]:
    blend = _Blend(config, lengths, trained)
    now = config.without_stages()
    to_come = list(config.stages)
    packer = _Packer(now, [], [], deque(), 0)
    waiting: Iterator[ReferenceSegment] = iter(())
    num_samples = num_tokens = 0
    while True:
        for sample in packer.samples(waiting, blend.documents(now)):
            yield sample
            num_samples += 1
            num_tokens += sum(segment.length for segment in sample)
            if to_come and to_come[0].at <= (num_tokens if to_come[0].unit == "tokens" else num_samples):
                break
        else:
            return
        # What is left of the document at hand, and what this stage has not come to of what it found waiting.
        unplaced = [*packer.rest, *waiting]
        while to_come and to_come[0].at <= (num_tokens if to_come[0].unit == "tokens" else num_samples):
            before, now = now, now.changed_by(to_come.pop(0))
            if not now.packs_as(before):
                in_bins = [segment for b in packer.bins for segment in b.segments]
                unplaced = [*in_bins, *packer.waiting, *packer.tails, *unplaced]
                packer.bins, packer.waiting, packer.tails = [], [], deque()
        packer = _Packer(now, packer.bins, packer.waiting, packer.tails, num_samples)
        waiting = iter(unplaced)
