"""`Buffer`: reusable memory for the parts of uploads: allocating it for each takes as long as sending it."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any


class Buffer(mmap.mmap):
    """A body that S3's client accepts, and can rewind for another attempt.

    Args:
        size: bytes.
    """

    def __new__(cls, size: int) -> Buffer:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def fill(self, file: Any) -> int:
        """Read from an unbuffered file; returns the number of bytes, fewer at its end. Raises OSError."""
        self.seek(filled := 0)
        with memoryview(self) as view:
            while filled < len(view):
                with view[filled:] as rest:
                    count = file.readinto(rest)
                if not count:
                    break
                filled += count
        return filled

    def rest(self) -> None:
        """Allow the system to reclaim the memory until it is filled again."""
        with contextlib.suppress(OSError, AttributeError):
            self.madvise(mmap.MADV_FREE)
