"""A compiled loop that writes rows as text from a template: a million samples in a second.

A template is a program, int64[pieces, 3] of (what, which, more):

    LITERAL i          literal i
    SAMPLE i           number i of the sample
    SEGMENT i          number i of the segment
    NAME i c           literal i + number c of the segment
    HASH               16 hex digits
    UNLESS_ZERO i n    passes over the next n pieces if number i of the segment is 0
    IF_KNOWN i n       passes over the next n pieces if number i of the segment is negative
"""

from __future__ import annotations

import numpy as np

from megaresume.stream.compiled import compiled

__all__ = ["HASH", "IF_KNOWN", "LITERAL", "NAME", "SAMPLE", "SEGMENT", "UNLESS_ZERO", "write_rows"]

LITERAL, SAMPLE, SEGMENT, NAME, HASH, UNLESS_ZERO, IF_KNOWN = 0, 1, 2, 3, 4, 5, 6


@compiled
def _put_literal(out, at, literals, bounds, which):  # type: ignore[no-untyped-def]
    for i in range(bounds[which], bounds[which + 1]):
        out[at] = literals[i]
        at += 1
    return at


@compiled
def _put_number(out, at, value):  # type: ignore[no-untyped-def]
    end = at + 1
    rest = value // 10
    while rest:
        end += 1
        rest //= 10
    for i in range(end - 1, at - 1, -1):
        out[i] = 48 + value % 10
        value //= 10
    return end


@compiled
def _put(out, at, program, literals, bounds, sample, identity, segment):  # type: ignore[no-untyped-def]
    piece = 0
    while piece < program.shape[0]:
        what, which, more = program[piece, 0], program[piece, 1], program[piece, 2]
        piece += 1
        if what == LITERAL:
            at = _put_literal(out, at, literals, bounds, which)
        elif what == SAMPLE or what == SEGMENT:  # noqa: SIM109 - compiled
            value = sample[which] if what == SAMPLE else segment[which]
            # literal 0 stands for what is not known
            at = _put_literal(out, at, literals, bounds, 0) if value < 0 else _put_number(out, at, value)
        elif what == NAME:
            value = segment[more]
            at = _put_literal(out, at, literals, bounds, 0 if value < 0 else which + value)
        elif what == HASH:
            for i in range(16):
                digit = np.int64((identity >> np.uint64(60 - 4 * i)) & np.uint64(15))
                out[at + i] = 48 + digit if digit < 10 else 87 + digit
            at += 16
        elif (what == UNLESS_ZERO and segment[which] == 0) or (what == IF_KNOWN and segment[which] < 0):
            piece += more
    return at


@compiled
def write_rows(out, head, row, between, tail, literals, bounds, samples, hashes, segments, starts):  # type: ignore[no-untyped-def]
    """Write samples: the head of each, a row for each of its segments with ``between`` between them, the tail.

    Args:
        out: uint8[enough], written.
        head, row, between, tail: programs; head and tail have no segment.
        literals, bounds: uint8[bytes], int64[literals + 1].
        samples: int64[n, k]. hashes: uint64[n]. segments: int64[s, c]. starts: int64[n + 1].

    Returns:
        Bytes written.
    """
    at = 0
    none = np.zeros(segments.shape[1], np.int64)
    for k in range(samples.shape[0]):
        at = _put(out, at, head, literals, bounds, samples[k], hashes[k], none)
        for s in range(starts[k], starts[k + 1]):
            if s > starts[k]:
                at = _put(out, at, between, literals, bounds, samples[k], hashes[k], none)
            at = _put(out, at, row, literals, bounds, samples[k], hashes[k], segments[s])
        at = _put(out, at, tail, literals, bounds, samples[k], hashes[k], none)
    return at
