"""The stream in plain Python integers, to hold the compiled loop against: slow, short, and obviously right.

Nothing of ``kernel.py`` is used, and nothing is done in the same way where there is another one: the permutation is
built from tuples of halves, the blend compares exact fractions, the packers are generators over documents, and no
position is ever resumed. Only `StreamConfig` is shared. Imports neither numpy nor numba.

    for sample in reference_samples(config, {"web": [512, 80, ...], "code": [...]}): ...
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import islice
from math import ceil
from typing import NamedTuple

from megaresume.stream.config import SourceConfig, StreamConfig

__all__ = ["ReferenceSegment", "hash_of", "permute", "reference_digests", "reference_documents", "reference_samples"]


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


def permute(index: int, num_documents: int, seed: int, name: str, epoch: int) -> int:
    """The document at ``index`` of an epoch: an alternating Feistel network, walked until it lands below N.

    The lower half of the bits is the longer one. A round hashes the one half with its key and adds the outcome to the
    other, bit by bit; the upper half is changed first.
    """
    bits = max((num_documents - 1).bit_length(), 2)
    widths = (bits // 2, bits - bits // 2)
    text = f"megaresume.permutation.1|{seed}|{len(name.encode())}|{name}|{epoch}"
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


def _documents_of(number: int, source: SourceConfig, lengths: Sequence[int], seed: int) -> Iterator[ReferenceSegment]:
    """One source's documents that are not empty, epoch after epoch, until it is exhausted."""
    ends = source.max_epochs is not None and source.on_exhausted != "repeat"
    epoch = 0
    while not ends or epoch < (source.max_epochs or 0):
        for index in range(len(lengths)):
            document = permute(index, len(lengths), seed, source.name, epoch)
            if lengths[document]:
                yield ReferenceSegment(number, epoch * len(lengths) + index, document, 0, lengths[document])
        epoch += 1


def reference_documents(config: StreamConfig, lengths: Mapping[str, Sequence[int]]) -> Iterator[ReferenceSegment]:
    """Documents in the order in which the blend draws them.

    With T units drawn in all since the last source ended, and c of a source whose share is s, its next document of l
    units may be drawn once s * (T + 1) exceeds c: at the latest when unit T + 1 is handed out, the source is owed a
    part of it. Of those that may, the one goes first whose document should end first: by unit (c + l) / s.
    """
    feeds = {
        i: _documents_of(i, source, lengths[source.name], config.seed)
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

    if not all(look_ahead(i) for i in list(feeds)):
        return
    while feeds:
        total = sum(drawn.values())
        parts = sum(config.sources[i].weight for i in feeds)
        ends: list[tuple[int, int]] = []
        for i in feeds:
            share = Fraction(config.sources[i].weight, parts)
            if drawn.get(i, 0) < share * (total + 1):
                ends.append((ceil((drawn.get(i, 0) + _units(heads[i], config)) / share), i))
        _, chosen = min(ends)
        document = heads[chosen]
        drawn[chosen] = drawn.get(chosen, 0) + _units(document, config)
        goes_on = look_ahead(chosen)
        yield document
        if not goes_on:
            return


def _units(document: ReferenceSegment, config: StreamConfig) -> int:
    return document.length if config.blend.unit == "tokens" else 1


def _pack_none(documents: Iterable[ReferenceSegment], config: StreamConfig) -> Iterator[Sample]:
    """One document a sample; a longer one fills as many samples as it needs."""
    return ([piece] for piece in _no_longer_than_a_sample(documents, config.seq_length))


def _pack_split(documents: Iterable[ReferenceSegment], config: StreamConfig) -> Iterator[Sample]:
    """Concatenate and cut. A segment starts at a multiple of the alignment."""
    sample: Sample = []
    for rest in documents:
        while rest.length:
            room = config.seq_length - _used(sample, config)
            piece, rest = rest.split(min(rest.length, room))
            sample.append(piece)
            if _used(sample, config) == config.seq_length:
                yield sample
                sample = []
    if sample:
        yield sample


class _Bin(NamedTuple):
    opened_at: int
    segments: Sample


def _pack_best_fit(documents: Iterable[ReferenceSegment], config: StreamConfig) -> Iterator[Sample]:
    """Whole documents into the open bin with the least room that holds them; `min` gives ties to the oldest."""
    bins: list[_Bin] = []  # in the order in which they were opened
    closed = 0

    def close(which: _Bin) -> Sample:
        nonlocal closed
        closed += 1
        bins.remove(which)
        return which.segments

    for piece in _no_longer_than_a_sample(documents, config.seq_length):
        placed = False
        while not placed:
            while bins and closed - bins[0].opened_at >= config.packing.max_age:
                yield close(bins[0])
            if piece.length == config.seq_length:
                closed += 1
                yield [piece]
                break
            fitting = [b for b in bins if _used(b.segments, config) + piece.length <= config.seq_length]
            if fitting or len(bins) < config.packing.open_bins:
                if not fitting:
                    bins.append(_Bin(closed, []))
                best = max(fitting, key=lambda b: _used(b.segments, config)) if fitting else bins[-1]
                best.segments.append(piece)
                placed = True
                if _used(best.segments, config) == config.seq_length:
                    yield close(best)
            else:
                yield close(max(bins, key=lambda b: _used(b.segments, config)))
    while bins:
        yield close(bins[0])


def _no_longer_than_a_sample(documents: Iterable[ReferenceSegment], seq_length: int) -> Iterator[ReferenceSegment]:
    for rest in documents:
        while rest.length > seq_length:
            piece, rest = rest.split(seq_length)
            yield piece
        yield rest


def _used(segments: Sample, config: StreamConfig) -> int:
    align = config.packing.align
    return sum((s.length + align - 1) // align * align for s in segments)


def reference_samples(
    config: StreamConfig, lengths: Mapping[str, Sequence[int]], num_samples: int | None = None
) -> Iterator[Sample]:
    """Samples 0, 1, 2, ... of the stream.

    Args:
        config: what defines the order.
        lengths: tokens of each document, by source name.
        num_samples: stop after as many; None: never, or when the stream ends.
    """
    pack = {"best_fit": _pack_best_fit, "split": _pack_split, "none": _pack_none}[config.packing.mode]
    return islice(pack(reference_documents(config, lengths), config), num_samples)
