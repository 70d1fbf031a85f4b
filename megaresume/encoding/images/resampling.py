"""Compiled resizing in 8 bits with the results of Pillow and torch: three to five times as fast as Pillow.

    weights    for each row or column of the result: its first tap, the number of taps, and their integer weights
    columns    uint8[h, w, 4] -> uint8[h, W, 4]    16 rows at a time, transposed so that they are adjacent
    rows       uint8[h, W, 4] -> uint8[H, W, 4]

Both libraries compute the same weights in double precision, after Pillow's ``Resample.c``, round them to integers, and
round to 8 bits after columns and again after rows. Pillow's integers have 22 fractional bits, torch's as many as fit
into 16 bits. Everything after the weights is integer arithmetic, the same on every machine.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from megaresume.stream.compiled import compiled

#: ``resample``: the filter that images are resized with.
Resampling = Literal["bicubic", "bilinear", "lanczos"]

#: half the width of each filter, in pixels of the smaller image.
_REACH = {"bilinear": 1.0, "bicubic": 2.0, "lanczos": 3.0}
_NUMBERS = {"bilinear": 0, "bicubic": 1, "lanczos": 2}
#: fractional bits of Pillow's weights, and the most that torch uses.
_MOST_BITS = 22
#: rows that `_columns` resizes together: 64 bytes of one column.
_TOGETHER = 16
#: bytes of a row that `_rows` resizes together, so that their sums stay in the L1 cache.
_SPAN = 1024


class Weights(NamedTuple):
    """The weights that n rows (or columns) are made from."""

    #: int64[n]: the first input row that each is made from.
    first: npt.NDArray[np.int64]
    #: int64[n]: the number of input rows.
    taps: npt.NDArray[np.int64]
    #: int32[n, most taps]: their weights; they sum to about 2^bits.
    weights: npt.NDArray[np.int32]
    bits: int

    def part(self, begin: int, count: int) -> Weights:
        """The weights of only some of the rows."""
        cut = slice(begin, begin + count)
        return Weights(self.first[cut], self.taps[cut], self.weights[cut], self.bits)


@functools.lru_cache(maxsize=64)
def weights_of(size: int, new_size: int, resample: Resampling, *, narrow: bool) -> Weights:
    """The weights that resize ``size`` rows to ``new_size``.

    Args:
        size, new_size: pixels.
        resample: the filter.
        narrow: in 16 bits, as torch's; otherwise as Pillow's.
    """
    scale = size / new_size
    most = math.ceil(_REACH[resample] * max(scale, 1.0)) * 2 + 1
    first, taps = np.empty((2, new_size), np.int64)
    exact = np.zeros((new_size, most))
    _weigh(size, scale, _REACH[resample], _NUMBERS[resample], first, taps, exact)
    bits = _MOST_BITS
    if narrow:
        largest = float(exact.max())
        bits = next((b for b in range(_MOST_BITS) if int(0.5 + largest * (1 << (b + 1))) >= 1 << 15), _MOST_BITS)
    rounded = np.trunc(exact * (1 << bits) + np.where(exact < 0, -0.5, 0.5)).astype(np.int32)
    return Weights(first, taps, rounded, bits)


def resample(
    values: npt.NDArray[np.uint8], columns: Weights | None, rows: Weights | None, *, rows_first: bool
) -> npt.NDArray[np.uint8]:
    """Resize an image.

    Args:
        values: uint8[h, w, 4], C-contiguous.
        columns, rows: of the result; None: unchanged.
        rows_first: which of the two comes first: values are rounded to 8 bits in between.

    Returns:
        uint8[H, W, 4], C-contiguous.
    """
    if rows is not None and rows_first:
        values = _with_rows(values, rows)
    if columns is not None:
        made = np.empty((len(values), len(columns.first)), np.uint32)
        _columns(values.view(np.uint32)[..., 0], *columns, made)
        values = made.view(np.uint8).reshape(*made.shape, 4)
    if rows is not None and not rows_first:
        values = _with_rows(values, rows)
    return values


def _with_rows(values: npt.NDArray[np.uint8], rows: Weights) -> npt.NDArray[np.uint8]:
    out = np.empty((len(rows.first), values.shape[1] * 4), np.uint8)
    _rows(values.reshape(len(values), -1), *rows, out)
    return out.reshape(len(out), -1, 4)


@compiled
def _weigh(size, scale, reach, number, first, taps, exact):  # type: ignore[no-untyped-def]
    """Weights in double precision; each operation in Pillow's order.

    Args:
        size: number of input rows.
        scale: input rows per output row.
        reach, number: of the filter.
        first, taps: int64[n], written.
        exact: float64[n, most taps], zeros, written.
    """
    stretch = max(scale, 1.0)
    support, shrink = reach * stretch, 1.0 / stretch
    for i in range(first.size):
        center = (i + 0.5) * scale
        first[i] = max(int(center - support + 0.5), 0)
        taps[i] = min(int(center + support + 0.5), size) - first[i]
        total = 0.0
        for k in range(taps[i]):
            x = abs((k + first[i] - center + 0.5) * shrink)
            weight = 0.0
            if number == 0 and x < 1.0:
                weight = 1.0 - x
            elif number == 1 and x < 1.0:
                weight = (1.5 * x - 2.5) * x * x + 1
            elif number == 1 and x < 2.0:
                weight = (((x - 5) * x + 8) * x - 4) * -0.5
            elif number == 2 and x == 0.0:
                weight = 1.0
            elif number == 2 and x < 3.0:
                whole, third = x * math.pi, x / 3 * math.pi
                weight = math.sin(whole) / whole * (math.sin(third) / third)
            exact[i, k] = weight
            total += weight
        for k in range(taps[i]):
            if total != 0.0:
                exact[i, k] /= total


@compiled
def _columns(values, first, taps, weights, bits, out):  # type: ignore[no-untyped-def]
    """Resize each row; in groups of rows, so that one weight applies to 64 adjacent bytes.

    Args:
        values: uint32[h, w]: four bytes a pixel.
        first, taps, weights, bits: as `Weights` has them, of W columns.
        out: uint32[h, W], written.
    """
    height, width = values.shape
    turned = np.zeros((width, _TOGETHER), np.uint32)
    flat = turned.view(np.uint8).reshape(-1)
    pixels = np.empty(_TOGETHER, np.uint32)
    made = pixels.view(np.uint8)
    sums = np.empty(64, np.int32)
    half = np.int32(1 << (bits - 1))
    for top in range(0, height, _TOGETHER):
        together = min(_TOGETHER, height - top)
        for left in range(0, width, _TOGETHER):
            for y in range(together):
                row = values[top + y, left : left + _TOGETHER]
                for x in range(row.size):
                    turned[left + x, y] = row[x]
        for column in range(first.size):
            begin, num, weight = first[column] * 64, taps[column], weights[column]
            if num == 4:  # nearly all columns, if the width changes little: sums stay in registers
                part = flat[begin : begin + 256]
                w0, w1, w2, w3 = weight[0], weight[1], weight[2], weight[3]
                for j in range(64):
                    near = w0 * np.int32(part[j]) + w1 * np.int32(part[j + 64])
                    far = w2 * np.int32(part[j + 128]) + w3 * np.int32(part[j + 192])
                    made[j] = min(max(np.int32(half + near + far) >> bits, 0), 255)
            else:
                for j in range(64):
                    sums[j] = half
                for k in range(0, num - 3, 4):  # four at a time: their sums are read and written once
                    part = flat[begin + k * 64 : begin + k * 64 + 256]
                    w0, w1, w2, w3 = weight[k], weight[k + 1], weight[k + 2], weight[k + 3]
                    for j in range(64):
                        near = w0 * np.int32(part[j]) + w1 * np.int32(part[j + 64])
                        far = w2 * np.int32(part[j + 128]) + w3 * np.int32(part[j + 192])
                        sums[j] += near + far
                for k in range(num // 4 * 4, num):
                    part, w0 = flat[begin + k * 64 : begin + k * 64 + 64], weight[k]
                    for j in range(64):
                        sums[j] += w0 * np.int32(part[j])
                for j in range(64):
                    made[j] = min(max(sums[j] >> bits, 0), 255)
            for y in range(together):
                out[top + y, column] = pixels[y]


@compiled
def _rows(values, first, taps, weights, bits, out):  # type: ignore[no-untyped-def]
    """Resize each column.

    Args:
        values: uint8[h, n].
        first, taps, weights, bits: as `Weights` has them, of H rows.
        out: uint8[H, n], written.
    """
    sums = np.empty(_SPAN, np.int32)
    for row in range(first.size):
        for begin in range(0, values.shape[1], _SPAN):
            made = out[row, begin : begin + _SPAN]
            for j in range(made.size):
                sums[j] = 1 << (bits - 1)
            for k in range(taps[row]):
                weight = weights[row, k]
                part = values[first[row] + k, begin : begin + _SPAN]
                for j in range(made.size):
                    sums[j] += weight * np.int32(part[j])
            for j in range(made.size):
                made[j] = min(max(sums[j] >> bits, 0), 255)
