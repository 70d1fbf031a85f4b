"""A file that is read mostly forwards, through range reads of one block at a time."""

from __future__ import annotations

import io
from collections.abc import Callable

__all__ = ["BlockFile"]


class BlockFile(io.RawIOBase):
    """What `tarfile` needs of a file, and `read_at`.

    Args:
        fetch: (offset, bytes) -> exactly so many bytes of the file.
        size: of the file, in bytes.
        block: bytes fetched at once.
    """

    def __init__(self, fetch: Callable[[int, int], bytes], size: int, block: int = 4 << 20) -> None:
        self._fetch = fetch
        self.size = size
        self._block = block
        self._position = 0
        self._start = 0
        self._data = b""

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """Where the next read starts, in bytes."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move; may lie behind the end, as in any file."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size}[whence]
        self._position = base + offset
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        """Up to ``size`` bytes; fewer only at the end."""
        left = max(self.size - self._position, 0)
        data = self.read_at(self._position, left if size is None or size < 0 else min(size, left))
        self._position += len(data)
        return data

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Bytes from a place, which must lie within the file; the position stays."""
        if not nbytes:
            return b""
        start = offset - self._start
        if start >= 0 and start + nbytes <= len(self._data):
            return self._data[start : start + nbytes]
        if nbytes >= self._block:
            return self._fetch(offset, nbytes)
        self._data = self._fetch(offset, min(self._block, self.size - offset))
        self._start = offset
        return self._data[:nbytes]
