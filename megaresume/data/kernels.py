"""numba kernels over the arrays of an ``.idx`` and a ``.spans``. They release the GIL and allocate nothing.

Arrays straight from an ``.idx`` are read-only and unaligned (its header has 34 bytes); numba handles both. Every value
read from a file is checked before it is used as an index: a damaged file must cause an error, not a crash. In nearly
every corpus each document is one sequence, so document d is sequence d: trying that case first lets the processor fetch
both arrays at once instead of one after the other, which is twice as fast when memory is the bottleneck.
Names of axes: n looked-up documents; D documents; S sequences.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaresume.stream.compiled import compiled

Array = np.ndarray[Any, Any]


#: Documents in a block, as a power of 2. A block is plain if each document was found to be the sequence of its number.
BLOCK_SHIFT = 9
#: Documents looked up together.
TOGETHER = 256
# What is known about a block: two bits, so that the table for five million documents fits the nearest cache.
_UNKNOWN, _ASKED, _PLAIN, _NOT_PLAIN = 0, 1, 2, 3


def unknown_blocks(documents: int) -> Array:
    """A table in which every block is unknown: uint8[ceil(blocks / 4)]."""
    return np.zeros((documents >> BLOCK_SHIFT + 2) + 1, np.uint8)


@compiled
def _look_into_block(block: int, known: int, boundaries: Array, sequences: int) -> int:
    """The state of a block after another look. The first look reads nothing: a resume reads no more than it needs."""
    if known == _UNKNOWN:
        return _ASKED
    first = block << BLOCK_SHIFT
    for document in range(first, min(first + (1 << BLOCK_SHIFT) + 1, boundaries.shape[0])):
        if boundaries[document] != document or document > sequences:
            return _NOT_PLAIN
    return _PLAIN


@compiled
def _plain_lengths(ids: Array, documents: int, lengths: Array, blocks: Array, out: Array) -> bool:
    """Look up documents that are all in plain blocks. False if one is not, or a length is impossible.

    With nothing else in the loop, the processor waits for dozens of lengths at once that are in no near cache.
    """
    plain = True
    for i in range(ids.shape[0]):
        exists = 0 <= ids[i] < documents
        block = (ids[i] if exists else 0) >> BLOCK_SHIFT
        plain &= exists & ((blocks[np.uint64(block >> 2)] >> 2 * (block & 3)) & 3 == _PLAIN)
    if not plain:
        return False
    least = np.int64(0)
    for i in range(ids.shape[0]):
        length = np.int64(lengths[np.uint64(ids[i])])
        out[i] = length
        least = min(least, length)
    return bool(least >= 0)


@compiled
def document_lengths(ids: Array, boundaries: Array, lengths: Array, blocks: Array, out: Array) -> int:
    """Write the tokens of each document: ids int64[n], boundaries int64[D+1], lengths int32[S] to out int64[n].

    ``blocks`` starts as `unknown_blocks` and is updated in place: in a plain block, one random access is enough.

    Returns:
        -1, or the first position in ids whose document does not exist or has a damaged entry.
    """
    documents = boundaries.shape[0] - 1
    sequences = lengths.shape[0]
    for begin in range(0, ids.shape[0], TOGETHER):
        end = min(begin + TOGETHER, ids.shape[0])
        if _plain_lengths(ids[begin:end], documents, lengths, blocks, out[begin:end]):
            continue
        for i in range(begin, end):
            document = ids[i]
            if document < 0 or document >= documents:
                return i
            block = document >> BLOCK_SHIFT
            shift = 2 * (block & 3)
            known = (blocks[block >> 2] >> shift) & 3
            if known == _PLAIN:
                length = np.int64(lengths[document])
                if length < 0:
                    return i
                out[i] = length
                continue
            if known != _NOT_PLAIN:
                now = _look_into_block(block, known, boundaries, sequences)
                blocks[block >> 2] = (blocks[block >> 2] & ~(3 << shift)) | (now << shift)
            first = boundaries[document]
            last = boundaries[document + 1]
            if first < 0 or last < first or last > sequences:
                return i
            total = np.int64(0)
            for sequence in range(first, last):
                length = np.int64(lengths[sequence])
                if length < 0:
                    return i
                total += length
            out[i] = total
    return -1


@compiled
def document_starts(
    ids: Array, boundaries: Array, lengths: Array, pointers: Array, item_shift: int, bin_bytes: int, out: Array
) -> int:
    """Offset in tokens of each document in the .bin: ids int64[n] to out int64[n]; pointers int64[S], in bytes.

    A token has 2 ** item_shift bytes. Results are safe to copy from: start + length of the document is within the .bin.

    Returns:
        -1, or the first position in ids whose document does not exist, has a damaged entry or is not contiguous.
    """
    documents = boundaries.shape[0] - 1
    sequences = lengths.shape[0]
    mask = (1 << item_shift) - 1
    for i in range(ids.shape[0]):
        document = ids[i]
        if document < 0 or document >= documents:
            return i
        first = boundaries[document]
        last = boundaries[document + 1]
        if first < 0 or last < first or last > sequences:
            return i
        if first == last:
            out[i] = 0
            continue
        if first == document and last == document + 1:
            start = pointers[document]
            length = np.int64(lengths[document])
            if (
                start < 0
                or start > bin_bytes
                or length < 0
                or start & mask
                or start + (length << item_shift) > bin_bytes
            ):
                return i
            out[i] = start >> item_shift
            continue
        start = pointers[first]
        if start < 0 or start > bin_bytes or start & mask:
            return i
        end = start
        for sequence in range(first, last):
            length = np.int64(lengths[sequence])
            if length < 0 or pointers[sequence] != end:
                return i
            end += length << item_shift
        if end > bin_bytes:
            return i
        out[i] = start >> item_shift
    return -1


@compiled
def scan_documents(
    first: int, boundaries: Array, lengths: Array, pointers: Array, item_bytes: int, bin_bytes: int, out: Array
) -> int:
    """Check documents first to first + len(out) in order, and write their lengths to out int64[n].

    Returns:
        -1, or the number of the first document with a damaged entry.
    """
    sequences = lengths.shape[0]
    for i in range(out.shape[0]):
        begin = boundaries[first + i]
        end = boundaries[first + i + 1]
        if begin < 0 or end < begin or end > sequences:
            return first + i
        total = np.int64(0)
        for sequence in range(begin, end):
            length = np.int64(lengths[sequence])
            pointer = pointers[sequence]
            if length < 0 or pointer < 0 or pointer > bin_bytes or pointer + length * item_bytes > bin_bytes:
                return first + i
            if sequence > 0 and pointer != pointers[sequence - 1] + np.int64(lengths[sequence - 1]) * item_bytes:
                return first + i
            total += length
        out[i] = total
    return -1


@compiled
def check_spans(bounds: Array, spans: Array, lengths: Array) -> int:
    """Check the spans of n documents: bounds int64[n + 1], spans int32[S, 2], lengths int64[n].

    Returns:
        -1, or the first document whose spans are out of order, outside it, or touch. It may have one empty span inside
        it, which marks where the rejected half of a preference pair begins.
    """
    for document in range(lengths.size):
        first, stop = bounds[document], bounds[document + 1]
        if first < 0 or stop < first or stop > spans.shape[0]:
            return document
        end = np.int64(-1)
        pair = False
        for k in range(first, stop):
            halves = spans[k, 0] == spans[k, 1] and 0 < spans[k, 0] < lengths[document]
            if halves:  # the spans before and after may touch it
                if pair or spans[k, 0] < end:
                    return document
                pair, end = True, np.int64(spans[k, 1]) - 1
                continue
            if spans[k, 0] <= end or spans[k, 1] <= spans[k, 0] or spans[k, 1] > lengths[document]:
                return document
            end = np.int64(spans[k, 1])
    return -1
