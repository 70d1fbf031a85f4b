"""The compiled loop from 8-bit pixels to normalised patches: one pass over memory, without holding the GIL."""

from __future__ import annotations

from megaresume.stream.compiled import compiled

__all__ = ["fill_patches"]


@compiled
def fill_patches(values, top, left, table, merge, out):  # type: ignore[no-untyped-def]
    """Cut patches from an image, normalised.

    Args:
        values: uint8[H, W, 3].
        top, left: of the part that is cut, pixels.
        table: float32[3, 256]: the normalised value of each channel and pixel value.
        merge: patches along each axis whose places follow one another: m x m of them, row by row.
        out: float32[rows, columns, 3, T, P, P], written; all T frames are the same.
    """
    num_rows, num_columns, num_channels, num_frames, size, _ = out.shape
    flat = out.reshape(num_rows * num_columns, num_channels, num_frames, size, size)
    groups = num_columns // merge
    for k in range(num_rows * num_columns):
        group, inside = k // (merge * merge), k % (merge * merge)
        y0 = top + (group // groups * merge + inside // merge) * size
        x0 = left + (group % groups * merge + inside % merge) * size
        for channel in range(num_channels):
            for y in range(size):
                for x in range(size):
                    flat[k, channel, 0, y, x] = table[channel, values[y0 + y, x0 + x, channel]]
            for frame in range(1, num_frames):
                flat[k, channel, frame] = flat[k, channel, 0]
