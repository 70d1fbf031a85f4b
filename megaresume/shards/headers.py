"""Headers of a tar archive one after the other: ordinary ones read here, all others by `tarfile`.

Ordinary is what nearly every member of every shard is: a file with a name that fits. Those are read ten times faster
than by `tarfile`; long names, extended headers, links and whatever is damaged are left to it.

Source of the layout: POSIX.1-2001, ustar interchange format.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from megaresume.shards.blocks import BlockFile

__all__ = ["BLOCK", "Header", "headers"]

BLOCK = tarfile.BLOCKSIZE
_POSIX, _GNU = b"ustar\x0000", b"ustar  \x00"


@dataclass(slots=True)
class Header:
    """One member."""

    name: str
    #: bytes of its content.
    size: int
    #: bytes from the start of the archive to its (first) header, to its content, and to the next header.
    offset: int
    data: int
    stop: int
    #: None for an ordinary file; otherwise what `tarfile` read.
    info: tarfile.TarInfo | None = None


def headers(file: BlockFile) -> Iterator[Header | int]:
    """Every member, in order; at last the offset at which no header stands any more.

    Raises:
        tarfile.TarError: a damaged header; a member that goes on behind the end of the file.
    """
    offset = 0
    while True:
        block = file.read_at(offset, max(min(BLOCK, file.size - offset), 0))
        header = _ordinary(block, offset)
        if header is None:
            if not any(block):
                yield offset
                return
            header = _other(file, offset)
        if header.data + header.size > file.size:
            raise tarfile.ReadError(f"{header.name} continues after the end: unexpected end of data")
        yield header
        offset = header.stop


def _ordinary(block: bytes, offset: int) -> Header | None:
    if len(block) < BLOCK or block[156:157] != tarfile.REGTYPE or block[257:265] not in (_POSIX, _GNU):
        return None
    prefix = block[345:500].partition(b"\0")[0]
    if prefix and block[257:265] == _GNU:  # other fields stand there
        return None
    try:
        size = int(block[124:136].rstrip(b"\0 "), 8)
        checksum = int(block[148:156].partition(b"\0")[0], 8)
    except ValueError:
        return None
    if sum(block) - sum(block[148:156]) + 8 * ord(" ") != checksum:
        return None
    name = block[:100].partition(b"\0")[0]
    if prefix:
        name = prefix + b"/" + name
    data = offset + BLOCK
    stop = data + -(-size // BLOCK) * BLOCK
    return Header(name.decode("utf-8", "surrogateescape"), size, offset, data, stop)


def _other(file: BlockFile, offset: int) -> Header:
    file.seek(offset)
    with tarfile.open(fileobj=file, mode="r:") as archive:
        info = archive.firstmember  # type: ignore[attr-defined]
        stop = archive.offset
    if info is None:
        raise tarfile.ReadError(f"no header of a member at byte {offset}")
    return Header(info.name, info.size, offset, info.offset_data, stop, info)
