"""The order of the items of one source in one epoch: a keyed bijection on ``[0, N)``, never an array of N.

Items are what is permuted: see ``order.py``. A Feistel network permutes ``[0, 2**b)``, the smallest such range that
holds N, and *cycle walking* (Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002) applies it again
until the value falls below N, which makes it a bijection on ``[0, N)`` for every N; fewer than two applications are
expected. Each round mixes one half of the bits into the other, in turn, so that the halves may differ by the odd bit
(the alternating network of Schneier and Kelsey, "Unbalanced Feistel networks", FSE 1996); halves made equal would cost
up to four applications. The round function is splitmix64, keyed by a hash of the tuple (seed, source name, epoch):
never by a sum, which would make epoch 1 of seed 7 the same as epoch 0 of seed 8.

    index i of an epoch  ->  item P(i)

This is the order without a `ShuffleConfig`: any item may follow any other. With one, items that are close in storage
stay close, for shards on storage with slow seeks:

    items              0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13       blocks of 4, the last one shorter
    blocks permuted    8 9 10 11 | 0 1 2 3 | 12 13 | 4 5 6 7
    windows of 2       10 1 8 3 0 9 2 11 | 5 13 6 4 12 7           permuted inside a window of 2 * 4 items

At any time, items of ``window`` blocks are read (two more where a window begins in the middle of a block). Both
levels use the same permutation, so a seek is O(1) in both directions, whatever the number of items.

With a `GroupConfig`, documents of similar lengths come next to each other, so that a batch needs little padding. The
order so far is rearranged within windows, by lengths alone (`grouped`):

    order before     5 90 7 33 80 6 31 88 30 | 9 41 ...       lengths; a window of 3 batches of 3
    longest first    90 88 80   33 31 30   7 6 5              cut into batches
    batches permuted 33 31 30   7 6 5   90 88 80 | 44 ...

Windows and batches are counted from position 0 of the source, and end with an epoch or an era; a batch cut by such an
end becomes two short ones. Equal lengths keep their order. So each epoch stays a permutation, which depends only on the
order before, the lengths, and the numbers in the `GroupConfig`, which a run keeps even if its batch size changes. To
look up a position takes one window.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numba
import numpy as np
import numpy.typing as npt

from megaresume.stream.arrays import Int64Array
from megaresume.stream.compiled import compiled
from megaresume.stream.data_yaml import GroupConfig, ShuffleConfig

#: Rounds (even numbers). The fewer bits a half has, the slower it mixes. Over 20,000 seeds, the square of the
#: correlation between the parities of index and document is, in units of what chance gives: 2 to 3 with four rounds
#: at any size; with six 1.23 for 128 documents, 1.13 for 512, 1.03 for 8192, and 1 beyond; with these 1 everywhere.
ROUNDS, ROUNDS_WHEN_SMALL = 6, 24
#: Bits from which `ROUNDS` are enough.
SMALL_BITS = 16
#: 2**64 / golden ratio, made odd: the increment of splitmix64.
GOLDEN = 0x9E3779B97F4A7C15

_GOLDEN = np.uint64(GOLDEN)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


@compiled(numba.uint64(numba.uint64), inline="always")
def mix(x: np.uint64) -> np.uint64:
    """The one hash primitive of the sample order, uint64 to uint64: a bijection, the same on every machine.

    The output function of splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA
    2014), two multiplications.
    """
    x = x + _GOLDEN
    x = (x ^ (x >> _S30)) * _C1
    x = (x ^ (x >> _S27)) * _C2
    return x ^ (x >> _S31)


@lru_cache(maxsize=4096)
def round_keys(seed: int, source: str, epoch: int, part: str = "") -> npt.NDArray[np.uint64]:
    """The round keys of one epoch of one source.

    Args:
        seed: the stream's seed, any integer.
        source: the source's name; renaming a source reshuffles it.
        epoch: 0-based.
        part: distinguishes several permutations of one epoch.

    Returns:
        uint64[ROUNDS_WHEN_SMALL], read-only; a larger source uses the first of them.
    """
    # Lengths are included so that no two tuples have the same encoding.
    text = f"megaresume.permutation.1|{seed}|{len(source.encode())}|{source}|{epoch}"
    if part:
        text += f"|{part}"
    digest = hashlib.shake_256(text.encode()).digest(8 * ROUNDS_WHEN_SMALL)
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    keys.flags.writeable = False
    return keys


@compiled
def _permute(indices, out, keys, num_documents, left_bits, right_bits, rounds):  # type: ignore[no-untyped-def]
    # One round at a time over all values, then again over those still outside: branch-free loops, which the compiler
    # vectorizes. Value by value takes three times as long.
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
def _unpermute(x, keys, num_documents, left_bits, right_bits, rounds):  # type: ignore[no-untyped-def]
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
def _network(num: int) -> tuple[np.uint64, np.uint64, np.uint64, int]:
    """The network for ``num`` values (at least 1): N, the bits of its left and of its right half, and its rounds."""
    bits = max((num - 1).bit_length(), 2)
    rounds = ROUNDS if bits >= SMALL_BITS else ROUNDS_WHEN_SMALL
    return np.uint64(num), np.uint64(bits // 2), np.uint64(bits - bits // 2), rounds


def permute(indices: Int64Array, num_documents: int, keys: npt.NDArray[np.uint64]) -> Int64Array:
    """Documents at some indices of an epoch: int64[n] to int64[n].

    Indices must lie in ``[0, num_documents)``; use `round_keys` for the epoch's keys.
    """
    out = np.empty(len(indices), np.int64)
    _permute(indices, out, keys, *_network(num_documents))
    return out


def permute_range(start: int, num: int, num_documents: int, keys: npt.NDArray[np.uint64]) -> Int64Array:
    """Documents at indices ``start .. start + num`` of an epoch: int64[num]."""
    return permute(np.arange(start, start + num), num_documents, keys)


def unpermute_index(value: int, num: int, keys: npt.NDArray[np.uint64]) -> int:
    """The index in ``[0, num)`` at which ``value`` comes: the inverse of `permute_range`."""
    return int(_unpermute(np.uint64(value), keys, *_network(num)))


def items_at(
    indices: Int64Array,
    num_items: int,
    seed: int,
    source: str,
    epoch: int,
    shuffle: ShuffleConfig | None,
    part: str = "",
) -> Int64Array:
    """The items at some indices of an epoch.

    Args:
        indices: int64[n], in ``[0, num_items)``.
        num_items: in the epoch, or in the part of it.
        seed, source, epoch, part: what the order is keyed by; see `round_keys`.
        shuffle: in two levels.

    Returns:
        int64[n].
    """
    if shuffle is None:
        return permute(indices, num_items, round_keys(seed, source, epoch, part))
    blocks = _Blocks(num_items, seed, source, epoch, shuffle, part)
    windows, out = indices // blocks.window_size, np.empty(len(indices), np.int64)
    for window in np.unique(windows).tolist():
        here = windows == window
        out[here] = blocks.items(window, indices[here] - window * blocks.window_size)
    return out


def index_of(
    item: int, num_items: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig | None, part: str = ""
) -> int:
    """The index at which an item comes: the inverse of `items_at`."""
    if shuffle is None:
        return unpermute_index(item, num_items, round_keys(seed, source, epoch, part))
    return _Blocks(num_items, seed, source, epoch, shuffle, part).index(item)


class _Blocks:
    """The blocks of one epoch in their order. A *place* is an index into the items with whole blocks permuted."""

    def __init__(self, num_items: int, seed: int, source: str, epoch: int, shuffle: ShuffleConfig, part: str) -> None:
        self.num_items, self.size = num_items, shuffle.block
        self.window_size = shuffle.block * shuffle.window
        self.num = -(-num_items // shuffle.block)
        self._key = seed, source, epoch
        self._part = f"{part} " if part else ""
        self._keys = round_keys(*self._key, f"{self._part}blocks")
        #: items in the last block, and how many blocks come before it.
        self._last_size = num_items - (self.num - 1) * self.size
        self._last_at = unpermute_index(self.num - 1, self.num, self._keys)

    def items(self, window: int, indices: Int64Array) -> Int64Array:
        """Items at some indices of a window: int64[n] to int64[n]."""
        first, size, keys = self._window(window)
        places = first + permute(indices, size, keys)
        # After the shorter block, compute every place as if that block were full.
        places += np.where(places >= self._last_at * self.size + self._last_size, self.size - self._last_size, 0)
        turns, offsets = np.divmod(places, self.size)
        # turns: int64[n], of few blocks that follow each other.
        lowest = int(turns.min())
        blocks = permute_range(lowest, int(turns.max()) - lowest + 1, self.num, self._keys)
        return np.asarray(blocks[turns - lowest] * self.size + offsets, np.int64)

    def index(self, item: int) -> int:
        """The position of an item in the epoch."""
        block, offset = divmod(item, self.size)
        turn = unpermute_index(block, self.num, self._keys)
        place = turn * self.size + offset
        if turn > self._last_at:
            place -= self.size - self._last_size
        window = place // self.window_size
        first, size, keys = self._window(window)
        return first + unpermute_index(place - first, size, keys)

    def _window(self, window: int) -> tuple[int, int, npt.NDArray[np.uint64]]:
        """The first place of a window, its number of items, its keys."""
        first = window * self.window_size
        size = min(self.window_size, self.num_items - first)
        return first, size, round_keys(*self._key, f"{self._part}window {window}")


def window_of(position: int, begin: int, end: int, group: GroupConfig) -> tuple[int, int]:
    """[first, stop) positions of the window that holds a position.

    Args:
        position: of the source.
        begin, end: positions of its epoch, or of its part of one.
        group: how long a window is.
    """
    size = group.batch * group.window
    first = position // size * size
    return max(first, begin), min(first + size, end)


def grouped(lengths: Int64Array, first: int, group: GroupConfig, keys: npt.NDArray[np.uint64]) -> Int64Array:
    """The items at the places of a window.

    Args:
        lengths: int64[n], in the order before grouping.
        first: position of the first.
        group: how long a batch is.
        keys: of the permutation of the batches.

    Returns:
        int64[n]: places in the order before grouping.
    """
    cuts = np.arange(first - first % group.batch + group.batch, first + len(lengths), group.batch) - first
    begins, ends = np.concatenate([[0], cuts]), np.concatenate([cuts, [len(lengths)]])
    longest_first = np.argsort(-lengths, kind="stable")
    places, taken = np.empty(len(lengths), np.int64), 0
    for batch in permute_range(0, len(begins), len(begins), keys).tolist():
        begin, end = begins[batch], ends[batch]
        places[begin:end] = longest_first[taken : taken + end - begin]
        taken += end - begin
    return places
