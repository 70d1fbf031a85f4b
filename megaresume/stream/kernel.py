"""The planning loop: draw documents by the blend, pack them, emit samples. One compiled function, no allocation.

It works on ids and lengths alone and is a pure function of its arrays. ``reference.py`` says the same in plain
Python; the tests hold this loop against it, sample by sample.

Blend. Source i with integer weight ``w`` of ``W`` parts has drawn ``c`` units (tokens, or documents) of the ``T`` of
all sources since its stage began, and its next document has ``l`` units. In the ideal blend that document occupies
the units from ``c*W/w`` (its *release*) to ``(c+l)*W/w`` (its *deadline*) of all those drawn. The next document is
the one with the earliest deadline among those released (ties: lowest index). This is WF2Q (Bennett and Zhang,
"WF2Q: worst-case fair weighted fair queueing", INFOCOM 1996), for documents of one unit the quota method that solves
the chairman assignment problem (Tijdeman 1980): no source is ever a document ahead of its share or behind it,
whatever the number of sources. (Always taking the largest deficit instead is off by 1.8 documents with 100 equal
sources beside a large one.) Release and deadline are kept as exact integer quotients and remainders.

Packing. A drawn document is *pending* until it lies in a bin. ``best_fit`` puts it into the open bin that it fills
best; where it fits nowhere it opens a bin, after closing the fullest if all are in use. ``knapsack`` lets every
document wait in a bin of its own, and when all are in use it makes a sample of those that fill it best. Bins are kept
in opening order, and every tie goes to the oldest, so that the state needs no slot numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from megaresume.stream.knapsack import choose
from megaresume.stream.mixing import GOLDEN, mix

__all__ = [
    "BEST_FIT",
    "KNAPSACK",
    "NONE",
    "SPLIT",
    "Arrays",
    "Config",
    "advance",
    "hash_sample",
    "set_deadline",
    "trained_samples",
]

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

# Packing modes.
BEST_FIT, SPLIT, NONE, KNAPSACK = 0, 1, 2, 3
MODES = {"best_fit": BEST_FIT, "split": SPLIT, "none": NONE, "knapsack": KNAPSACK}

# What `advance` returns: it is done, or its caller must do something and call again.
DONE, REFILL, GROW_BINS, GROW_OUT, EXHAUSTED = 0, 1, 2, 3, 4

# Rows of `Arrays.scalars`. SAMPLES: closed, those that are left out included (see `trained_samples`).
SAMPLES, DOCUMENTS, TOKENS, STAGE_UNITS, NUM_OPEN = 0, 1, 2, 3, 4
REFILL_SOURCE, OUT_SAMPLES, OUT_SEGMENTS = 5, 6, 7
PENDING = 8  # and the four after it: a segment; its length is 0 when nothing is pending
STAGE, NEXT_CARRIED = 13, 14
LEFT_OUT = 15  # of SAMPLES: closed, and left out of the stream
NUM_SCALARS = 16

# Columns of a segment.
SOURCE, POSITION, DOCUMENT, OFFSET, LENGTH = 0, 1, 2, 3, 4
SEGMENT_WIDTH = 5

# Rows of `Arrays.sources`: one column a source.
WEIGHT, ACTIVE, NUM_DOCUMENTS = 0, 1, 2  # ACTIVE: 1 while the source is drawn
NEXT, DRAWN_DOCUMENTS, DRAWN_TOKENS, DRAWN_IN_STAGE = 3, 4, 5, 6
RELEASE, RELEASE_REST = 7, 8
NEXT_RELEASE, NEXT_RELEASE_REST, DEADLINE = 9, 10, 11
HEAD, NUM_AHEAD = 12, 13
EXHAUSTED_ROW = 14
LEFT_OUT_DOCUMENTS, LEFT_OUT_TOKENS = 15, 16  # of those drawn
NUM_SOURCE_ROWS = 17

#: Bits for the index of a bin: `config.MAX_OPEN_BINS` is below 2**INDEX_BITS.
INDEX_BITS = 11
#: Segments a bin at first; doubled when a bin needs more.
BIN_SEGMENTS = 32
#: Later than any deadline.
NEVER = np.int64(0x7FFFFFFFFFFFFFFF)

_GOLDEN = np.uint64(GOLDEN)
_S32 = np.uint64(32)


class Config(NamedTuple):
    """The constants of one stage."""

    mode: int
    seq_length: int
    open_bins: int
    max_age: int
    align: int
    by_tokens: bool


class Arrays(NamedTuple):
    """Everything that `advance` changes. K: open bins and a spare one, n: sources, C: segments a bin."""

    #: int64[NUM_SCALARS].
    scalars: Int64Array
    #: uint64[1]: rolling digest.
    digest: UInt64Array
    #: int64[NUM_SOURCE_ROWS, n].
    sources: Int64Array
    #: int64[K]: tokens left, in opening order.
    room: Int64Array
    #: int64[K]: samples closed when the bin was opened, in opening order.
    opened: Int64Array
    #: int64[K]: row of `bins` and `filled`; the open ones first in opening order, then the free ones.
    slot: Int64Array
    #: int64[K]: segments in a slot.
    filled: Int64Array
    #: int64[K, C, SEGMENT_WIDTH].
    bins: Int64Array
    #: int64[w, SEGMENT_WIDTH]: taken out of the bins of the stage before, to be placed before anything is drawn.
    carried: Int64Array


def trained_samples(arrays: Arrays) -> int:
    """The number of the next sample, counted without those that were left out."""
    return int(arrays.scalars[SAMPLES] - arrays.scalars[LEFT_OUT])


@numba.njit(cache=True, nogil=True, error_model="numpy")  # no check for a weight of 0: such a source is never drawn
def set_deadline(sources, i, total_weight, ahead, by_tokens):  # type: ignore[no-untyped-def]
    """Compute the deadline of the document at the head of source i: the release of the one after it, rounded up."""
    units = ahead[i, sources[HEAD, i], 2] if by_tokens else 1
    weight = sources[WEIGHT, i]
    total = sources[RELEASE_REST, i] + units * total_weight
    quotient = np.int64(np.uint64(total) // np.uint64(weight))  # both are positive; signed division takes longer
    rest = total - quotient * weight
    sources[NEXT_RELEASE, i] = sources[RELEASE, i] + quotient
    sources[NEXT_RELEASE_REST, i] = rest
    sources[DEADLINE, i] = sources[NEXT_RELEASE, i] + (1 if rest else 0)


@numba.njit(cache=True, nogil=True)
def _select(release, deadline, stage_units):  # type: ignore[no-untyped-def]
    """The released source with the earliest deadline, or -1. Sources that are not drawn are never released."""
    best, earliest = -1, NEVER
    for i in range(release.size):
        # No branch: which source comes next is what no processor can predict.
        better = (release[i] <= stage_units) & (deadline[i] < earliest)
        best = i if better else best
        earliest = deadline[i] if better else earliest
    return best


@numba.njit(cache=True, nogil=True)
def _best_fit(room, num_open, length):  # type: ignore[no-untyped-def]
    """The open bin that ``length`` tokens fill best (ties: the oldest), or -1."""
    # Room and index in one number: a plain minimum, which the compiler turns into vector instructions.
    best = NEVER
    for b in range(num_open):
        best = min(best, (room[b] << INDEX_BITS) | b if room[b] >= length else NEVER)
    return best & ((1 << INDEX_BITS) - 1) if best != NEVER else -1


@numba.njit(cache=True, nogil=True)
def _fullest(room, num_open):  # type: ignore[no-untyped-def]
    """The open bin with the least room (ties: the oldest)."""
    fullest = 0
    for b in range(1, num_open):
        if room[b] < room[fullest]:
            fullest = b
    return fullest


@numba.njit(cache=True, nogil=True)
def hash_sample(segments, first, stop, keys):  # type: ignore[no-untyped-def]
    """Hash of the identity of one sample: its segments, in order.

    Args:
        segments: int64[rows, SEGMENT_WIDTH], of which ``first .. stop`` are the sample's.
        keys: uint64[n], hash of each source's name.
    """
    h = np.uint64(0)
    for k in range(first, stop):
        h = mix(h ^ keys[segments[k, SOURCE]])
        h = mix(h ^ np.uint64(segments[k, DOCUMENT]) ^ (np.uint64(segments[k, POSITION]) * _GOLDEN))
        h = mix(h ^ np.uint64(segments[k, OFFSET]) ^ (np.uint64(segments[k, LENGTH]) << _S32))
    return h


@numba.njit(cache=True, nogil=True)
def _remove_bin(which, num_open, room, opened, slot, filled):  # type: ignore[no-untyped-def]
    """Take a bin out of the opening order; its slot becomes the first free one."""
    freed = slot[which]
    for b in range(which, num_open - 1):
        room[b], opened[b], slot[b] = room[b + 1], opened[b + 1], slot[b + 1]
    slot[num_open - 1] = freed
    filled[freed] = 0


@numba.njit(cache=True, nogil=True)
def advance(a, config, keys, total_weight, ahead, want, out, starts, hashes, digests):  # type: ignore[no-untyped-def]
    """Plan until ``a.scalars[OUT_SAMPLES] == want`` or until the caller must help.

    Args:
        a: `Arrays`, changed in place.
        config: `Config`.
        keys: uint64[n], hash of each source's name.
        total_weight: sum of the weights of the active sources.
        ahead: int64[n, A, 3], the next documents of each source: position, document, length (never 0).
        want: samples.
        out: int64[capacity, SEGMENT_WIDTH], segments of the samples planned.
        starts: int64[want + 1], first segment of each sample.
        hashes: uint64[want], identity of each sample.
        digests: uint64[want], rolling digest after each sample.

    Returns:
        DONE; REFILL (``ahead`` of source ``scalars[REFILL_SOURCE]`` is used up); GROW_BINS; GROW_OUT; EXHAUSTED.
    """
    scalars, sources, bins = a.scalars, a.sources, a.bins
    room, opened, slot, filled = a.room, a.opened, a.slot, a.filled
    release, deadline = sources[RELEASE], sources[DEADLINE]
    # Scalars live in registers while the loop runs.
    samples, documents, tokens = scalars[SAMPLES], scalars[DOCUMENTS], scalars[TOKENS]
    carried, next_carried = a.carried, scalars[NEXT_CARRIED]
    stage_units, num_open = scalars[STAGE_UNITS], scalars[NUM_OPEN]
    num_out, num_segments = scalars[OUT_SAMPLES], scalars[OUT_SEGMENTS]
    source, position, document = scalars[PENDING], scalars[PENDING + 1], scalars[PENDING + 2]
    offset, length = scalars[PENDING + 3], scalars[PENDING + 4]
    digest = a.digest[0]
    status = DONE
    knapsack = config.mode == KNAPSACK
    chosen = np.zeros(room.size, np.bool_)
    order, tried = np.empty(room.size, np.int64), np.empty(room.size, np.int64)
    num_sums, words = (room.size + 1, config.seq_length // config.align // 64 + 1) if knapsack else (0, 0)
    sums = np.empty((num_sums, words), np.uint64)

    while num_out < want:
        if num_segments + bins.shape[1] > out.shape[0]:
            status = GROW_OUT
            break

        close = -1  # the bin that becomes the next sample
        gather = False  # those of the bins that fill it best become the next sample
        overdue = num_open > 0 and samples - opened[0] >= config.max_age
        if overdue and not knapsack:
            close = 0
        elif length > 0:
            # A segment is pending. Where does it go?
            # (A whole sample of one document passes the open bins by, through the one spare slot.)
            b = -1
            fits_a_bin = (config.mode == BEST_FIT or knapsack) and length < config.seq_length
            if fits_a_bin and not knapsack:
                b = _best_fit(room, num_open, length)
            elif config.mode == SPLIT:
                b = num_open - 1
            if b < 0 and fits_a_bin and num_open == config.open_bins:
                gather = knapsack
                close = -1 if knapsack else _fullest(room, num_open)
            else:
                if b < 0:
                    b = num_open
                    room[b], opened[b] = config.seq_length, samples
                    num_open += 1
                row, k = slot[b], filled[slot[b]]
                if k == bins.shape[1]:
                    status = GROW_BINS
                    break
                put = min(length, room[b])
                bins[row, k, SOURCE], bins[row, k, POSITION], bins[row, k, DOCUMENT] = source, position, document
                bins[row, k, OFFSET], bins[row, k, LENGTH] = offset, put
                filled[row] = k + 1
                offset += put
                length -= put
                room[b] -= put if config.align == 1 else -(-put // config.align) * config.align
                if room[b] == 0 or config.mode == NONE:
                    close = b
        elif next_carried < carried.shape[0]:
            source, position, document = carried[next_carried, 0], carried[next_carried, 1], carried[next_carried, 2]
            offset, length = carried[next_carried, 3], carried[next_carried, 4]
            next_carried += 1
        else:
            i = _select(release, deadline, stage_units)
            if i >= 0:
                head = sources[HEAD, i]
                source, offset = i, 0
                position, document, length = ahead[i, head, 0], ahead[i, head, 1], ahead[i, head, 2]
                units = length if config.by_tokens else 1
                stage_units += units
                sources[NEXT, i] = position + 1
                sources[DRAWN_DOCUMENTS, i] += 1
                sources[DRAWN_TOKENS, i] += length
                sources[DRAWN_IN_STAGE, i] += units
                sources[RELEASE, i] = sources[NEXT_RELEASE, i]
                sources[RELEASE_REST, i] = sources[NEXT_RELEASE_REST, i]
                sources[HEAD, i] = head + 1
                if head + 1 == sources[NUM_AHEAD, i]:
                    scalars[REFILL_SOURCE] = i
                    status = REFILL
                    break
                set_deadline(sources, i, total_weight, ahead, config.by_tokens)
            elif num_open > 0:
                gather = knapsack
                close = -1 if knapsack else 0  # the stream ends: what is open goes out, oldest first
            else:
                status = EXHAUSTED
                break

        if gather:
            if num_segments + num_open > out.shape[0]:
                status = GROW_OUT
                break
            choose(room, num_open, config.seq_length, config.align, overdue, order, tried, sums, chosen)
        if close >= 0 or gather:
            first = num_segments
            for b in range(num_open):
                if b != close and not (gather and chosen[b]):
                    continue
                row = slot[b]
                for k in range(filled[row]):
                    for column in range(SEGMENT_WIDTH):
                        out[num_segments, column] = bins[row, k, column]
                    tokens += bins[row, k, LENGTH]
                    if bins[row, k, OFFSET] == 0:
                        documents += 1
                    num_segments += 1
            hashes[num_out] = hash_sample(out, first, num_segments, keys)
            digest = mix(digest ^ hashes[num_out])
            digests[num_out] = digest
            num_out += 1
            starts[num_out] = num_segments
            samples += 1
            for b in range(num_open - 1, -1, -1):
                if b == close or (gather and chosen[b]):
                    _remove_bin(b, num_open, room, opened, slot, filled)
                    num_open -= 1

    scalars[SAMPLES], scalars[DOCUMENTS], scalars[TOKENS] = samples, documents, tokens
    scalars[STAGE_UNITS], scalars[NUM_OPEN], scalars[NEXT_CARRIED] = stage_units, num_open, next_carried
    scalars[OUT_SAMPLES], scalars[OUT_SEGMENTS] = num_out, num_segments
    scalars[PENDING], scalars[PENDING + 1], scalars[PENDING + 2] = source, position, document
    scalars[PENDING + 3], scalars[PENDING + 4] = offset, length
    a.digest[0] = digest
    return status
