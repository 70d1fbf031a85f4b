"""`Buffer`: memory for the parts of uploads, one after the other: new memory for each costs as much as to send it."""

from __future__ import annotations

import contextlib
import mmap
from typing import Any


class Buffer(mmap.mmap):
    """S3's client takes it as a body, and finds its beginning again for another attempt.

    Args:
        size: bytes.
    """

    def __new__(cls, size: int) -> Buffer:
        return super().__new__(cls, -1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def fill(self, file: Any) -> int:
        """Read from an unbuffered file; how many bytes there were, fewer at its end. Raises OSError."""
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
        """The system may have the memory back until it is filled again, if it needs some."""
        with contextlib.suppress(OSError, AttributeError):
            self.madvise(mmap.MADV_FREE)
