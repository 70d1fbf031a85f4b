"""The order of the documents of one source in one epoch: a keyed bijection on ``[0, N)``, never an array of N.

A Feistel network permutes ``[0, 2**b)``, the smallest such range that holds N, and *cycle walking* (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) applies it again until the value falls below N, which
makes it a bijection on ``[0, N)`` for every N; fewer than two applications are expected. Each round mixes one half of
the bits into the other, in turn, so that the halves may differ by the odd bit (the alternating network of Schneier
and Kelsey, "Unbalanced Feistel networks", FSE 1996); halves made equal would cost up to four applications. The round
function is splitmix64, keyed by a hash of the tuple (seed, source name, epoch): never by a sum, which would make
epoch 1 of seed 7 the same as epoch 0 of seed 8.

    index i of an epoch  ->  document P(i)

Seek is O(1) in both directions. What is permuted, documents or blocks of them, is for ``block_shuffle.py`` to say.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from megaresume.stream.compiled import compiled
from megaresume.stream.documents.mixing import mix

#: Rounds (even numbers). The fewer bits a half has, the slower it mixes. Over 20,000 seeds, the square of the
#: correlation between the parities of index and document is, in units of what chance gives: 2 to 3 with four rounds
#: at any size; with six 1.23 for 128 documents, 1.13 for 512, 1.03 for 8192, and 1 beyond; with these 1 everywhere.
ROUNDS, ROUNDS_WHEN_SMALL = 6, 24
#: Bits from which `ROUNDS` are enough.
SMALL_BITS = 16


def width_bits(num_documents: int) -> tuple[int, int]:
    """Bits in the left and the right half of the network for ``num_documents`` (at least 1)."""
    bits = max((num_documents - 1).bit_length(), 2)
    return bits // 2, bits - bits // 2


def num_rounds(num_documents: int) -> int:
    """Rounds of the network for ``num_documents``."""
    return ROUNDS if sum(width_bits(num_documents)) >= SMALL_BITS else ROUNDS_WHEN_SMALL


@lru_cache(maxsize=4096)
def round_keys(seed: int, source: str, epoch: int, part: str = "") -> npt.NDArray[np.uint64]:
    """The round keys of one epoch of one source.

    Args:
        seed: the stream's seed, any integer.
        source: the source's name; renaming a source reshuffles it.
        epoch: 0-based.
        part: what of the epoch, where it is more than one permutation.

    Returns:
        uint64[ROUNDS_WHEN_SMALL], read-only; a larger source uses the first of them.
    """
    # Lengths are written out so that no two tuples share an encoding.
    text = f"megaresume.permutation.1|{seed}|{len(source.encode())}|{source}|{epoch}"
    if part:
        text += f"|{part}"
    digest = hashlib.shake_256(text.encode()).digest(8 * ROUNDS_WHEN_SMALL)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys.flags.writeable = False
    return keys


@compiled
def _permute(indices, out, num_documents, left_bits, right_bits, keys, rounds):  # type: ignore[no-untyped-def]
    # A round at a time over all values, then again over those that fell outside: loops without a branch, which the
    # compiler turns into vector instructions. Value by value it takes three times as long.
    one = np.uint64(1)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    num = out.size  # values still outside; those at `where`, with the halves `left` and `right`
    left, right, where = np.empty(num, np.uint64), np.empty(num, np.uint64), np.empty(num, np.int64)
    for i in range(num):
        x = np.uint64(indices[i])
        left[i], right[i], where[i] = x >> right_bits, x & right_mask, i
    while num:
        for r in range(0, rounds, 2):
            key, next_key = keys[r], keys[r + 1]
            for i in range(num):
                left[i] ^= mix(right[i] ^ key) & left_mask
            for i in range(num):
                right[i] ^= mix(left[i] ^ next_key) & right_mask
        outside = 0
        for i in range(num):
            x = (left[i] << right_bits) | right[i]
            out[where[i]] = np.int64(x)
            left[outside], right[outside], where[outside] = left[i], right[i], where[i]
            outside += 1 if x >= num_documents else 0
        num = outside


@compiled
def _unpermute(x, num_documents, left_bits, right_bits, keys, rounds):  # type: ignore[no-untyped-def]
    one = np.uint64(1)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    while True:
        left, right = x >> right_bits, x & right_mask
        for r in range(rounds - 2, -1, -2):
            right ^= mix(left ^ keys[r + 1]) & right_mask
            left ^= mix(right ^ keys[r]) & left_mask
        x = (left << right_bits) | right
        if x < num_documents:
            return x


@lru_cache(maxsize=4096)
def _network(num_documents: int) -> tuple[np.uint64, np.uint64, np.uint64]:
    """N and the bits of both halves, as the kernels take them."""
    left, right = width_bits(num_documents)
    return np.uint64(num_documents), np.uint64(left), np.uint64(right)


def permute(indices: npt.NDArray[np.int64], num_documents: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Documents at some indices of an epoch: int64[n] to int64[n].

    Indices must lie in ``[0, num_documents)``; use `round_keys` for the epoch's keys.
    """
    out = np.empty(len(indices), np.int64)
    _permute(indices, out, *_network(num_documents), keys, num_rounds(num_documents))
    return out


def permute_range(start: int, num: int, num_documents: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Documents at indices ``start .. start + num`` of an epoch: int64[num]."""
    return permute(np.arange(start, start + num), num_documents, keys)


def unpermute_index(value: int, num: int, keys: npt.NDArray[np.uint64]) -> int:
    """The index in ``[0, num)`` at which ``value`` comes: the inverse of `permute_range`."""
    return int(_unpermute(np.uint64(value), *_network(num), keys, num_rounds(num)))
