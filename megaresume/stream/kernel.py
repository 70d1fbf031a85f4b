"""The planning loop: draw documents by the blend, pack them, emit samples. One compiled function, no allocation.

It works on ids and lengths alone and is a pure function of its arrays. The tests compare it, sample by sample, with
``tests/stream/reference.py``, the same in plain Python.

Blend. Source i with integer weight ``w`` of ``W`` parts has drawn ``c`` units (tokens, or documents) of the ``T`` of
all sources since its stage began, and its next document has ``l`` units. In the ideal blend that document occupies
the units from ``c*W/w`` (its *release*) to ``(c+l)*W/w`` (its *deadline*) of all those drawn. The next document is
the one with the earliest deadline among those released (ties: by name). This is WF2Q (Bennett and Zhang,
"WF2Q: worst-case fair weighted fair queueing", INFOCOM 1996), for documents of one unit the quota method that solves
the chairman assignment problem (Tijdeman 1980): no source is ever a document ahead of its share or behind it,
whatever the number of sources. (Always taking the largest deficit instead is off by 1.8 documents with 100 equal
sources beside a large one.) Both times are exact; times beyond `LATE` count as `LATE`. They depend only on the
source's own documents, so they are computed for all pieces looked ahead at (`set_dues`). Few sources are scanned; among
many, a tournament (``selection.py``) finds the next one.

What is drawn is a *piece*: a document, or a part of one that is longer than a sample (``order.py``). Only the first
piece of a document counts as a document.

Packing. A drawn piece is *pending* until it is in a bin.

``split`` concatenates and cuts. The tail cut off at the end of a sample waits until `TAILS` others were cut, and then
begins another sample, so that both parts are in different batches. Pieces that fill a whole sample pass by uncut.

``best_fit`` puts a piece into the open bin that it fills best. If it fits nowhere, it opens a bin, after closing the
fullest one if all are in use or hold `OPEN_SEGMENTS` segments: tiny documents need few bins. Sources with ``split``
beside it *fill*: up to `FILLERS` of their pieces wait (`FEW_FILLERS` of those as long as a sample, so that some always
do), and fill a bin when it is closed (`_filling`). When that many wait, the oldest is packed as a whole document. The
tail of a cut piece waits until `TAILS` others were cut, as under ``split``, and then joins the pieces that wait to
fill.

``knapsack`` lets every document wait in a bin of its own, or share one with the previous document as long as both are
small (`Config.group`). When all bins are in use, it makes a sample of those that fill it best.

Bins are kept in opening order, and every tie goes to the oldest, so that the state needs no slot numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megaresume.stream.arrays import Int64Array, UInt64Array
from megaresume.stream.compiled import compiled
from megaresume.stream.permutation import GOLDEN, mix
from megaresume.stream.selection import (
    choose,
    is_due,
    play,
    prefetch,
    release_first,
    select_of_few,
    tournaments,
    winner,
)

# Packing modes.
BEST_FIT, SPLIT, NONE, KNAPSACK = 0, 1, 2, 3
#: The number of each packing mode; data_yaml.MODES has its other properties.
MODE_NUMBERS = {"best_fit": BEST_FIT, "split": SPLIT, "none": NONE, "knapsack": KNAPSACK}

# What `advance` returns: done, or what its caller must do before calling it again.
DONE, REFILL, GROW_BINS, GROW_OUT = 0, 1, 2, 3

# Rows of `Arrays.scalars`. SAMPLES: closed, those that are left out included (see `trained_samples`).
SAMPLES, DOCUMENTS, TOKENS, STAGE_UNITS, NUM_OPEN = 0, 1, 2, 3, 4
REFILL_SOURCE, OUT_SAMPLES, OUT_SEGMENTS = 5, 6, 7
PENDING = 8  # and the four after it: a segment; its length is 0 when nothing is pending
STAGE, NEXT_CARRIED = 13, 14
LEFT_OUT_SAMPLES = 15  # of SAMPLES: closed, and left out of the stream
NUM_WAITING, FREE = 16, 17  # segments in open bins; the first free row of `Arrays.segments`, or -1
FIRST_TAIL, NUM_TAILS = 18, 19
NUM_FILLERS = 20
NUM_SCALARS = 21
#: Counts of what was trained, which leaving samples out does not change.
COUNTS_OF_TRAINED = (DOCUMENTS, TOKENS)

# Columns of a segment.
SOURCE, POSITION, DOCUMENT, OFFSET, LENGTH = 0, 1, 2, 3, 4
SEGMENT_WIDTH = 5

# Columns of `Arrays.sources`; those that a draw touches come first, to share cache lines.
NEXT, DRAWN_PIECES, DRAWN_DOCUMENTS, DRAWN_TOKENS, DRAWN_IN_STAGE = 0, 1, 2, 3, 4
RELEASE, DUE = 5, 6  # of the next piece: when it is released, and when the one after it is; see `set_dues`
HEAD, NUM_AHEAD = 7, 8
WEIGHT = 9
SHARE, SHARE_REST = 10, 11  # quotient and remainder of all weights by its own: units of all sources to one of its own
SHARE_FRACTION = 12  # of SHARE_REST: in units of 2**-32 of the weight, rounded down
ACTIVE = 13  # 1 while the source is drawn
IS_EXHAUSTED = 14
LEFT_OUT_DOCUMENTS, LEFT_OUT_TOKENS = 15, 16  # of those drawn
FILLS = 17  # 1: its documents are cut to fill the samples of whole ones
SOURCE_WIDTH = 18

# Columns of a piece looked ahead at: its position, document, offset, length, its units in the blend, and the release of
# the piece after it.
UNITS, RELEASES = 4, 5
AHEAD_WIDTH = 6

#: Bits for the index of a bin: `data_yaml.MAX_OPEN_BINS` is below 2**INDEX_BITS.
INDEX_BITS = 11
#: With this many segments in open bins, ``best_fit`` opens no further bin.
OPEN_SEGMENTS = 2048
#: Tails that ``split`` keeps back, and those of pieces cut to fill: each is placed again once this many others were
#: kept back. As a sample cuts at most one piece, its parts are at least this many samples apart.
TAILS = 256
#: The most pieces that wait to fill; and the number from which on a piece that fills a sample does not wait.
FILLERS, FEW_FILLERS = 128, 16
#: More units than any stream reaches: later releases and deadlines count as this.
LATE = 1 << 61
#: The number of samples that are hashed at the same time.
LANES = 16
#: Up to this many sources, a scan is quicker than a tournament.
FEW = 6

_GOLDEN = np.uint64(GOLDEN)
_S32 = np.uint64(32)
_INDEX_BITS, _INDEX_MASK = np.uint64(INDEX_BITS), np.uint64((1 << INDEX_BITS) - 1)
_ALL, _HALF = np.uint64(0xFFFFFFFFFFFFFFFF), np.uint64(1 << 63)


class Config(NamedTuple):
    """The constants of one stage."""

    mode: int
    seq_length: int
    open_bins: int
    #: samples closed until a bin is due; unreachable in a mode without bins, see `feed.kernel_config`.
    max_age: int
    align: int
    #: whether some sources fill the gaps that whole documents of the others leave.
    fills: bool
    #: tokens of the shortest part cut from such a source; and tokens that may stay free rather than cut one.
    least: int
    spare: int
    #: ``knapsack``: documents of up to this many tokens in all wait together.
    group: int


class Arrays(NamedTuple):
    """Everything that `advance` changes. K: open bins and a spare one, n: sources, P: rows of the pool."""

    #: counts and positions, int64[NUM_SCALARS].
    scalars: Int64Array
    #: the rolling digest, uint64[1].
    digest: UInt64Array
    #: the cursors of the sources, int64[n, SOURCE_WIDTH].
    sources: Int64Array
    #: int64[K]: free tokens, in opening order; at least 1 for an open bin, else 0.
    room: Int64Array
    #: int64[K]: samples closed when the bin was opened, in opening order.
    opened: Int64Array
    #: int64[K]: first and last row of `segments`, in opening order.
    head: Int64Array
    tail: Int64Array
    #: int64[P, SEGMENT_WIDTH]: the pool of all bins.
    segments: Int64Array
    #: int64[P]: the next row of the same bin, or of the free rows; -1 at the end.
    link: Int64Array
    #: int64[w, SEGMENT_WIDTH]: taken out of the previous stage's bins, to be placed before anything is drawn.
    carried: Int64Array
    #: int64[TAILS, SEGMENT_WIDTH], or int64[0, SEGMENT_WIDTH] if nothing is packed by ``split``: a ring of NUM_TAILS
    #: tails of cut documents, the oldest at FIRST_TAIL.
    tails: Int64Array
    #: int64[F, SEGMENT_WIDTH]: NUM_FILLERS pieces that wait to fill, the oldest first; F = 0 if no source fills.
    fillers: Int64Array


def trained_samples(arrays: Arrays) -> int:
    """The number of the next sample, not counting those left out."""
    return int(arrays.scalars[SAMPLES] - arrays.scalars[LEFT_OUT_SAMPLES])


def set_shares(sources: Int64Array) -> None:
    """Compute the shares of the drawn sources from their weights."""
    active = sources[:, ACTIVE] > 0
    weights = sources[active, WEIGHT]
    sources[active, SHARE], rests = np.divmod(weights.sum(), weights)
    sources[active, SHARE_REST] = rests
    pairs = zip(rests.tolist(), weights.tolist(), strict=True)
    sources[active, SHARE_FRACTION] = [(rest << 32) // weight for rest, weight in pairs]


def set_dues(source: Int64Array, pieces: Int64Array) -> None:
    """Compute when a drawn source releases its next pieces.

    The time is twice the units that the blend has drawn from all sources by then, rounded down, plus 1 if there is a
    fraction. So half of it, rounded up, is also the deadline of the piece before.

    Args:
        source: int64[SOURCE_WIDTH], changed.
        pieces: int64[n, AHEAD_WIDTH], its next ones, changed.
    """
    # Python's integers: the product may overflow 64 bits.
    fields = source.tolist()
    drawn, weight, share, share_rest = (fields[k] for k in (DRAWN_IN_STAGE, WEIGHT, SHARE, SHARE_REST))
    release, rest = divmod(drawn * (share * weight + share_rest), weight)
    _set_dues(source, pieces, *((release, rest) if release < LATE else (LATE, 0)))


@compiled
def _set_dues(source, pieces, release, rest):  # type: ignore[no-untyped-def]
    """Set when the pieces of a source are due, from the first one's release on: a quotient, and its remainder by
    weight.

    ``units * W / w`` for W of up to 61 bits is ``units * (W // w)`` plus ``units * (W % w) / w``, which is below 2**31.
    The latter is estimated by `SHARE_FRACTION`, which is at most one too low, and then corrected by its exact
    remainder, which lies between 0 and 3 w; the products wrap around, but the remainder, their difference, fits 63
    bits.
    """
    source[RELEASE] = 2 * release + (1 if rest else 0)
    weight, share = source[WEIGHT], source[SHARE]
    share_rest, fraction = np.uint64(source[SHARE_REST]), source[SHARE_FRACTION]
    for k in range(pieces.shape[0]):
        units = pieces[k, UNITS]
        quotient = (units * fraction) >> 32
        rest = np.int64(np.uint64(units) * share_rest + np.uint64(rest) - np.uint64(quotient) * np.uint64(weight))
        once, twice = rest >= weight, rest >= 2 * weight  # no branch, as it could not be predicted
        rest -= (weight if once else 0) + (weight if twice else 0)
        too_far = (share >> 30) > 0 and share > LATE // max(units, 1)
        release = np.int64(LATE) if too_far else release + units * share + quotient + once + twice
        if release >= LATE:
            release, rest = np.int64(LATE), np.int64(0)
        pieces[k, RELEASES] = 2 * release + (1 if rest else 0)
    source[DUE] = pieces[0, RELEASES]


@compiled
def _best_fit(room, length):  # type: ignore[no-untyped-def]
    """The open bin that ``length`` tokens, at least one, fill best (ties: the oldest), or -1."""
    # Free room and bin index in one unsigned number, in which a bin that does not fit is larger than any that does. So
    # a plain minimum, compiled to vector instructions, finds the bin. It covers all bins, as those that are not open
    # have no room; the constant count makes the end of the loop predictable.
    best = _ALL
    for b in range(room.size):
        best = min(best, (np.uint64(room[b] - length) << _INDEX_BITS) | np.uint64(b))
    return np.int64(best & _INDEX_MASK) if best < _HALF else np.int64(-1)


@compiled
def _aligned(length, align):  # type: ignore[no-untyped-def]
    """The tokens that a piece takes of a sample: its length rounded up to a multiple of ``align``."""
    return length if align == 1 else -(-length // align) * align


@compiled
def _count(sources, i, ahead, at):  # type: ignore[no-untyped-def]
    """Count piece ``at`` of those ahead of a source as drawn."""
    sources[i, NEXT] = ahead[i, at, 0] + 1
    sources[i, DRAWN_PIECES] += 1
    sources[i, DRAWN_DOCUMENTS] += ahead[i, at, 2] == 0
    sources[i, DRAWN_TOKENS] += ahead[i, at, 3]
    sources[i, DRAWN_IN_STAGE] += ahead[i, at, UNITS]
    sources[i, RELEASE] = ahead[i, at, RELEASES]
    sources[i, HEAD] = at + np.uint64(1)


@compiled
def _filling(fillers, num_fillers, room, config):  # type: ignore[no-untyped-def]
    """The waiting piece to fill a bin with, or -1: the longest that fits if it leaves at most ``config.spare`` tokens
    free; else the oldest that fills the bin when cut, both parts being at least ``config.least`` tokens long; else the
    longest short one that fits."""
    whole, longest, cut = -1, 0, -1
    for k in range(num_fillers):
        length = fillers[k, LENGTH]
        if length <= room:
            if length > longest:
                whole, longest = k, length
        elif cut < 0 and room >= config.least and length - room >= config.least:
            cut = k
    left = room - _aligned(longest, config.align)
    return whole if whole >= 0 and (cut < 0 or left <= config.spare) else cut


@compiled
def _segment(rows, k):  # type: ignore[no-untyped-def]
    """Row ``k`` of segments: source, position, document, offset and length."""
    return rows[k, SOURCE], rows[k, POSITION], rows[k, DOCUMENT], rows[k, OFFSET], rows[k, LENGTH]


@compiled
def _put(rows, k, source, position, document, offset, length):  # type: ignore[no-untyped-def]
    """Make this segment row ``k``."""
    rows[k, SOURCE], rows[k, POSITION], rows[k, DOCUMENT] = source, position, document
    rows[k, OFFSET], rows[k, LENGTH] = offset, length


@compiled
def _copy(rows, k, others, other):  # type: ignore[no-untyped-def]
    """Copy a segment from other rows to row ``k``."""
    for column in range(SEGMENT_WIDTH):
        rows[k, column] = others[other, column]


@compiled
def _take(fillers, num_fillers, which):  # type: ignore[no-untyped-def]
    """Remove a piece of those that wait."""
    for k in range(which, num_fillers - 1):
        _copy(fillers, k, fillers, k + 1)


@compiled
def hash_samples(table, starts, keys, digest, hashes, digests):  # type: ignore[no-untyped-def]
    """Hash the identity of each sample: its segments, in order.

    Each step of a hash depends on the previous one, so `LANES` samples are hashed side by side, in vectors.

    Args:
        table: int64[s, SEGMENT_WIDTH].
        starts: int64[samples + 1], first segment of each sample.
        keys: uint64[n], hash of each source's name.
        digest: uint64[1], rolling digest, updated.
        hashes: uint64[samples], written.
        digests: uint64[samples], written: the rolling digest after each.
    """
    num, last = hashes.size, table.shape[0] - 1
    at, counts, h = np.empty(LANES, np.int64), np.empty(LANES, np.int64), np.empty(LANES, np.uint64)
    source, place, extent = np.empty(LANES, np.uint64), np.empty(LANES, np.uint64), np.empty(LANES, np.uint64)
    for first in range(0, num, LANES):
        most = 0
        for lane in range(LANES):
            sample = min(first + lane, num - 1)
            at[lane], counts[lane], h[lane] = starts[sample], starts[sample + 1] - starts[sample], 0
            most = max(most, counts[lane])
        for m in range(most):
            for lane in range(LANES):
                # Past the end of its sample, a lane reads some other row; its result is not used.
                row = np.uint64(min(at[lane] + m, last))
                source[lane] = keys[np.uint64(table[row, SOURCE])]
                place[lane] = np.uint64(table[row, DOCUMENT]) ^ (np.uint64(table[row, POSITION]) * _GOLDEN)
                extent[lane] = np.uint64(table[row, OFFSET]) ^ (np.uint64(table[row, LENGTH]) << _S32)
            for lane in range(LANES):
                following = mix(mix(mix(h[lane] ^ source[lane]) ^ place[lane]) ^ extent[lane])
                h[lane] = following if m < counts[lane] else h[lane]
        for lane in range(min(LANES, num - first)):
            hashes[first + lane] = h[lane]
    now = digest[0]
    for sample in range(num):
        now = mix(now ^ hashes[sample])
        digests[sample] = now
    digest[0] = now


@compiled
def _remove_bin(which, num_open, room, opened, head, tail):  # type: ignore[no-untyped-def]
    """Take a bin out of the opening order."""
    for b in range(which, num_open - 1):
        room[b], opened[b], head[b], tail[b] = room[b + 1], opened[b + 1], head[b + 1], tail[b + 1]
    room[num_open - 1] = 0


@compiled
def _close(a, chosen, begin, stop, free, num_open, out, num_segments):  # type: ignore[no-untyped-def]
    """Make one sample of the chosen bins among ``begin .. stop``, in opening order, and clear the choice.

    Returns:
        segments in ``out``, the first free row, bins that are open; tokens and documents of the sample.
    """
    tokens, documents = 0, 0
    for b in range(begin, stop):
        if not chosen[b]:
            continue
        following = a.head[b]
        while following >= 0:
            k, row = np.uint64(following), np.uint64(num_segments)
            _copy(out, row, a.segments, k)
            tokens += a.segments[k, LENGTH]
            documents += a.segments[k, OFFSET] == 0
            num_segments += 1
            following = a.link[k]
        a.link[a.tail[b]] = free
        free = a.head[b]
    for b in range(stop - 1, begin - 1, -1):
        if chosen[b]:
            chosen[b] = False
            _remove_bin(b, num_open, a.room, a.opened, a.head, a.tail)
            num_open -= 1
    return num_segments, free, num_open, tokens, documents


@compiled
def _keep(tails, first_tail, num_tails, source, position, document, offset, length):  # type: ignore[no-untyped-def]
    """Keep the tail of a cut document, in the ring."""
    _put(tails, (first_tail + num_tails) % tails.shape[0], source, position, document, offset, length)


@compiled
def _end_wait(tails, first_tail, num_tails, fillers, num_fillers):  # type: ignore[no-untyped-def]
    """If the ring of tails is full, move its oldest to the pieces that wait to fill.

    Returns:
        first_tail, num_tails, num_fillers.
    """
    if num_tails < tails.shape[0]:
        return first_tail, num_tails, num_fillers
    _copy(fillers, num_fillers, tails, first_tail)
    return (first_tail + 1) % tails.shape[0], num_tails - 1, num_fillers + 1


@compiled
def _fill(a, config, b, free, num_waiting, num_fillers, first_tail, num_tails):  # type: ignore[no-untyped-def]
    """Fill a bin that is about to be closed with waiting pieces.

    Returns:
        free, num_waiting, num_fillers, first_tail, num_tails; False if the pool has no row for the next piece.
    """
    room, segments, tail, link, tails, fillers = a.room, a.segments, a.tail, a.link, a.tails, a.fillers
    while room[b] > 0:
        which = _filling(fillers, num_fillers, room[b], config)
        if which < 0:
            break
        if free < 0:
            return free, num_waiting, num_fillers, first_tail, num_tails, False
        k = free
        free = link[k]
        source, position, document, offset, length = _segment(fillers, which)
        put = min(length, room[b])
        _put(segments, k, source, position, document, offset, put)
        link[tail[b]], link[k], tail[b] = k, -1, k
        num_waiting += 1
        room[b] -= _aligned(put, config.align)
        _take(fillers, num_fillers, which)
        num_fillers -= 1
        if length > put:
            first_tail, num_tails, num_fillers = _end_wait(tails, first_tail, num_tails, fillers, num_fillers)
            _keep(tails, first_tail, num_tails, source, position, document, offset + put, length - put)
            num_tails += 1
    return free, num_waiting, num_fillers, first_tail, num_tails, True


@compiled
def advance(a, config, by_name, ahead, want, out, starts):  # type: ignore[no-untyped-def]
    """Plan until ``a.scalars[OUT_SAMPLES] == want`` or until the caller must help.

    Args:
        a: `Arrays`, changed in place but for the digest.
        config: `Config`.
        by_name: int64[n], the sources in the order of their names: its inverse breaks ties.
        ahead: int64[n, A, AHEAD_WIDTH], the next pieces of each source; no length is 0.
        want: samples.
        out: int64[capacity, SEGMENT_WIDTH], segments of the samples planned.
        starts: int64[want + 1], first segment of each sample.

    Returns:
        DONE, also if the stream has ended; REFILL (``ahead`` of source ``scalars[REFILL_SOURCE]`` is used up);
        GROW_BINS; GROW_OUT.
    """
    scalars, sources, segments, link = a.scalars, a.sources, a.segments, a.link
    room, opened, head, tail = a.room, a.opened, a.head, a.tail
    free, num_waiting = scalars[FREE], scalars[NUM_WAITING]
    # Indexed by place in the order of names.
    release, deadline = sources[:, RELEASE][by_name] >> 1, (sources[:, DUE][by_name] + 1) >> 1
    many = by_name.size > FEW
    rows, scale = tournaments(release, deadline, scalars[STAGE_UNITS])
    # Local copies of the scalars, so that they stay in registers.
    samples, documents, tokens = scalars[SAMPLES], scalars[DOCUMENTS], scalars[TOKENS]
    carried, next_carried = a.carried, scalars[NEXT_CARRIED]
    tails, first_tail, num_tails = a.tails, scalars[FIRST_TAIL], scalars[NUM_TAILS]
    fillers, num_fillers = a.fillers, scalars[NUM_FILLERS]
    stage_units, num_open = scalars[STAGE_UNITS], scalars[NUM_OPEN]
    num_out, num_segments = scalars[OUT_SAMPLES], scalars[OUT_SEGMENTS]
    source, position, document = scalars[PENDING], scalars[PENDING + 1], scalars[PENDING + 2]
    offset, length = scalars[PENDING + 3], scalars[PENDING + 4]
    status = DONE
    ending = False  # nothing more is drawn
    knapsack = config.mode == KNAPSACK
    chosen = np.zeros(room.size, np.bool_)
    order, tried = np.empty(room.size, np.int64), np.empty(room.size, np.int64)
    num_sums, words = (room.size + 1, config.seq_length // config.align // 64 + 1) if knapsack else (0, 0)
    sums = np.empty((num_sums, words), np.uint64)

    while num_out < want:
        if num_segments + num_waiting + num_fillers + 1 > out.shape[0]:
            status = GROW_OUT
            break

        close = -1  # the bin that becomes the next sample
        gather = False  # the bins that fill a sample best become the next one
        overdue = num_open > 0 and samples - opened[0] >= config.max_age
        if overdue and not knapsack:
            close = 0
        elif length > 0:
            pass  # a segment is pending already
        elif num_fillers >= FILLERS or (ending and num_fillers > 0):
            source, position, document, offset, length = _segment(fillers, 0)
            _take(fillers, num_fillers, 0)
            num_fillers -= 1
        elif next_carried < carried.shape[0]:
            source, position, document, offset, length = _segment(carried, next_carried)
            next_carried += 1
        elif num_tails > 0 and (ending or (num_tails == tails.shape[0] and num_open == 0 and not config.fills)):
            source, position, document, offset, length = _segment(tails, first_tail)
            first_tail = (first_tail + 1) % tails.shape[0]
            num_tails -= 1
        else:
            place = -1
            if many:
                while is_due(rows, scale, stage_units):
                    j = by_name[np.uint64(release_first(rows, scale, deadline))]
                    # Prefetch: they will be needed some draws from now, and may be in a far cache.
                    for further in range(2):
                        prefetch(ahead, (j, sources[j, HEAD] + further))  # type: ignore[call-arg]
                place = winner(rows, scale, stage_units)
            if place < 0:
                place = select_of_few(release, deadline, stage_units)
            if place >= 0:
                i = np.uint64(by_name[np.uint64(place)])
                at = np.uint64(sources[i, HEAD])
                if at == np.uint64(sources[i, NUM_AHEAD]):
                    scalars[REFILL_SOURCE] = i
                    status = REFILL
                    break
                source, position, document = np.int64(i), ahead[i, at, 0], ahead[i, at, 1]
                offset, length = ahead[i, at, 2], ahead[i, at, 3]
                stage_units += ahead[i, at, UNITS]
                _count(sources, i, ahead, at)
                at += np.uint64(1)
                waits = length < config.seq_length or num_fillers < FEW_FILLERS
                if waits and config.fills and sources[i, FILLS] > 0:
                    _put(fillers, num_fillers, source, position, document, offset, length)
                    num_fillers += 1
                    length = 0
                if at == np.uint64(sources[i, NUM_AHEAD]):
                    scalars[REFILL_SOURCE] = i
                    status = REFILL
                    break
                due = ahead[i, at, RELEASES]
                sources[i, DUE] = due
                released, due = sources[i, RELEASE] >> 1, (due + 1) >> 1
                release[np.uint64(place)], deadline[np.uint64(place)] = released, due
                if many:
                    play(rows, scale, place, released, due, stage_units)
                    # Prefetch the pieces of this source after the next one.
                    prefetch(ahead, (np.int64(i), np.int64(at) + 2))  # type: ignore[call-arg]
            elif num_tails > 0 or num_fillers > 0:
                ending = True
            elif num_open > 0:
                gather = knapsack
                close = -1 if knapsack else 0  # the stream ends: close what is open, oldest first
            else:
                break  # the stream has ended

        if length > 0 and close < 0:
            # Where does the pending segment go?
            # (A document that fills a whole sample bypasses the open bins, in the spare slot.)
            b, is_full = -1, False
            if length < config.seq_length:
                if config.mode == BEST_FIT:
                    b = _best_fit(room, length)
                    is_full = num_open == config.open_bins or num_waiting >= OPEN_SEGMENTS
                elif config.mode == SPLIT:
                    b = num_open - 1
                elif knapsack:
                    if num_open > 0:
                        used = config.seq_length - room[num_open - 1] + _aligned(length, config.align)
                        b = num_open - 1 if used <= config.group else -1
                    is_full = num_open == config.open_bins
            if b < 0 and is_full:
                if knapsack:
                    gather = True
                else:
                    close = _best_fit(room, 1)  # the fullest
            else:
                if free < 0:
                    status = GROW_BINS
                    break
                if b < 0:
                    b = num_open
                    room[b], opened[b] = config.seq_length, samples
                    num_open += 1
                bin_, k = np.uint64(b), np.uint64(free)  # an unsigned index skips the check for negative ones
                free = link[k]
                left = room[bin_]
                put = min(length, left)
                _put(segments, k, source, position, document, offset, put)
                if left == config.seq_length:
                    head[bin_] = k
                else:
                    link[np.uint64(tail[bin_])] = k
                tail[bin_], link[k] = k, -1
                num_waiting += 1
                offset += put
                length -= put
                left -= _aligned(put, config.align)
                room[bin_] = left
                keeps = tails.shape[0] > 0 and (not config.fills or sources[source, FILLS] > 0)
                if length > 0 and keeps and config.fills:
                    first_tail, num_tails, num_fillers = _end_wait(tails, first_tail, num_tails, fillers, num_fillers)
                if length > 0 and keeps and num_tails < tails.shape[0]:
                    _keep(tails, first_tail, num_tails, source, position, document, offset, length)
                    num_tails += 1
                    length = 0
                if left == 0 or config.mode == NONE:
                    close = b

        if close >= 0 and config.fills:
            free, num_waiting, num_fillers, first_tail, num_tails, fits = _fill(
                a, config, close, free, num_waiting, num_fillers, first_tail, num_tails
            )
            if not fits:
                status = GROW_BINS  # the same bin will be closed after that
                break
        if gather:
            choose(room, num_open, config.seq_length, config.align, overdue, order, tried, sums, chosen)
        elif close >= 0:
            chosen[close] = True
        if close >= 0 or gather:
            begin, stop = (0, num_open) if gather else (close, close + 1)
            first = num_segments
            num_segments, free, num_open, sample_tokens, sample_documents = _close(
                a, chosen, begin, stop, free, num_open, out, num_segments
            )
            num_waiting -= num_segments - first
            tokens += sample_tokens
            documents += sample_documents
            num_out += 1
            starts[num_out] = num_segments
            samples += 1

    scalars[SAMPLES], scalars[DOCUMENTS], scalars[TOKENS] = samples, documents, tokens
    scalars[STAGE_UNITS], scalars[NUM_OPEN], scalars[NEXT_CARRIED] = stage_units, num_open, next_carried
    scalars[OUT_SAMPLES], scalars[OUT_SEGMENTS] = num_out, num_segments
    scalars[FREE], scalars[NUM_WAITING] = free, num_waiting
    scalars[FIRST_TAIL], scalars[NUM_TAILS], scalars[NUM_FILLERS] = first_tail, num_tails, num_fillers
    scalars[PENDING], scalars[PENDING + 1], scalars[PENDING + 2] = source, position, document
    scalars[PENDING + 3], scalars[PENDING + 4] = offset, length
    return status
