"""The order of the documents of one source in one epoch: a keyed bijection on ``[0, N)``, never an array of N.

A Feistel network permutes ``[0, 2**b)``, the smallest such range that holds N, and *cycle walking* (Black and
Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) applies it again until the value falls below N, which
makes it a bijection on ``[0, N)`` for every N; fewer than two applications are expected. Each round mixes one half of
the bits into the other, in turn, so that the halves may differ by the odd bit (the alternating network of Schneier
and Kelsey, "Unbalanced Feistel networks", FSE 1996); halves made equal would cost up to four applications. The round
function is splitmix64, keyed by a hash of the tuple (seed, source name, epoch): never by a sum, which would make
epoch 1 of seed 7 the same as epoch 0 of seed 8.

    position q of a source  ->  epoch q // N, document P(q mod N)

Seek is O(1) in both directions: ``unpermute`` finds the position at which a document comes.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numba
import numpy as np
import numpy.typing as npt

from megaresume.stream.mixing import mix

__all__ = ["ROUNDS", "permute_at", "permute_range", "round_keys", "unpermute", "width_bits"]

#: Four rounds leave a measurable serial correlation, six do not (tests/stream/test_permutation.py).
ROUNDS = 6


def width_bits(num_documents: int) -> tuple[int, int]:
    """Bits in the left and the right half of the network for ``num_documents`` (at least 1)."""
    bits = max((num_documents - 1).bit_length(), 2)
    return bits // 2, bits - bits // 2


@lru_cache(maxsize=4096)
def round_keys(seed: int, source: str, epoch: int) -> npt.NDArray[np.uint64]:
    """The round keys of one epoch of one source.

    Args:
        seed: the stream's seed, any integer.
        source: the source's name; renaming a source reshuffles it.
        epoch: 0-based.

    Returns:
        uint64[ROUNDS], read-only.
    """
    # Lengths are written out so that no two tuples share an encoding.
    text = f"megaresume.permutation.1|{seed}|{len(source.encode())}|{source}|{epoch}"
    digest = hashlib.blake2b(text.encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys.flags.writeable = False
    return keys


@numba.njit(cache=True, nogil=True)
def _permute_range(start, out, num_documents, left_bits, right_bits, keys):  # type: ignore[no-untyped-def]
    one = np.uint64(1)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    for i in range(out.size):
        x = start + np.uint64(i)
        while True:
            left, right = x >> right_bits, x & right_mask
            for r in range(0, ROUNDS, 2):
                left ^= mix(right ^ keys[r]) & left_mask
                right ^= mix(left ^ keys[r + 1]) & right_mask
            x = (left << right_bits) | right
            if x < num_documents:
                break
        out[i] = np.int64(x)


@numba.njit(cache=True, nogil=True)
def _unpermute(x, num_documents, left_bits, right_bits, keys):  # type: ignore[no-untyped-def]
    one = np.uint64(1)
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    while True:
        left, right = x >> right_bits, x & right_mask
        for r in range(ROUNDS - 2, -1, -2):
            right ^= mix(left ^ keys[r + 1]) & right_mask
            left ^= mix(right ^ keys[r]) & left_mask
        x = (left << right_bits) | right
        if x < num_documents:
            return x


def permute_range(start: int, num: int, num_documents: int, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Documents at positions ``start .. start + num`` of an epoch: int64[num].

    Positions must lie in ``[0, num_documents)``; use `round_keys` for the epoch's keys.
    """
    out = np.empty(num, np.int64)
    left, right = width_bits(num_documents)
    _permute_range(np.uint64(start), out, np.uint64(num_documents), np.uint64(left), np.uint64(right), keys)
    return out


def permute_at(position: int, num_documents: int, seed: int, source: str) -> tuple[int, int]:
    """Epoch and document at an absolute position of a source."""
    epoch, index = divmod(position, num_documents)
    keys = round_keys(seed, source, epoch)
    return epoch, int(permute_range(index, 1, num_documents, keys)[0])


def unpermute(document: int, num_documents: int, seed: int, source: str, epoch: int) -> int:
    """The absolute position at which ``document`` comes in ``epoch``."""
    left, right = width_bits(num_documents)
    keys = round_keys(seed, source, epoch)
    index = _unpermute(np.uint64(document), np.uint64(num_documents), np.uint64(left), np.uint64(right), keys)
    return epoch * num_documents + int(index)
