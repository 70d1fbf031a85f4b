"""``<prefix>.megaresume.<piece>.pieces``: the documents of a large corpus that are longer than a piece.

To find them takes seconds for 10^9 documents, and a resume must not wait for it; so the list is kept, and mapped into
memory, where only what is looked up is read: with the guide, a page or two for a piece. Little-endian int64:

    magic, version, .idx: size, time of change, inode; piece, k, later pieces in all
    int64[k // STRIDE] the guide: every so many of the last list
    int64[k] documents, ascending;  int64[k] later pieces up to and with each

It holds as long as the .idx is untouched, and goes to the cache directory where the corpus cannot be written to.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from pathlib import Path

import numpy as np

from megaresume.corpora import sidecar
from megaresume.stream.documents.pieces import STRIDE, LongDocuments, find_long
from megaresume.stream.progress import progress
from megaresume.stream.source import LengthSource

#: fewer are looked through at every start: some milliseconds.
MIN_DOCUMENTS = 1 << 22
MAGIC = int.from_bytes(b"mgrpiece", "little")
VERSION = 1


def kept_list(source: LengthSource, prefix: Path, idx: sidecar.FileIdentity, piece: int) -> LongDocuments:
    """The documents of a corpus that are longer than a piece, from a file that an earlier start has left.

    Args:
        source: the corpus.
        prefix: of it.
        idx: its index as it was opened.
        piece: tokens.
    """
    if len(source) < MIN_DOCUMENTS:
        return find_long(source, piece)
    header = [MAGIC, VERSION, idx.size, idx.mtime_ns, idx.inode, piece]
    suffix = f".megaresume.{piece}.pieces"
    cache = sidecar.cache_path(prefix)
    places = [prefix.with_name(prefix.name + suffix)]
    if cache is not None:
        places.append(cache.with_name(cache.stem + suffix))
    for path in places:
        if (found := _read(path, header)) is not None:
            return found
    with progress(f"long documents of {prefix.name}", len(source), "documents") as bar:
        found = find_long(source, piece, update=bar.update)
    for path in places:
        with contextlib.suppress(OSError):  # read-only, full or not ours: the next place, or without
            _write(path, header, found)
            return _read(path, header) or found  # mapped: 0.2 bytes a document of the corpus are not held
    return found


def _read(path: Path, header: list[int]) -> LongDocuments | None:
    """None: there is none, or of another corpus, or damaged."""
    begin = len(header) + 2
    try:
        with open(path, "rb") as file:
            head = np.fromfile(file, "<i8", begin)
            if len(head) < begin or head[:-2].tolist() != header:
                return None
            num, later = head[-2:].tolist()
            if os.fstat(file.fileno()).st_size != 8 * (begin + num // STRIDE + 2 * num):
                return None
            guide = np.fromfile(file, "<i8", num // STRIDE)
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError):
        return None
    if hasattr(mmap, "MADV_RANDOM"):
        data.madvise(mmap.MADV_RANDOM)  # reading on after each look-up only delays
    ids, ends = np.split(np.frombuffer(data, "<i8")[begin + len(guide) :], 2)
    return None if num and ends[-1] != later else LongDocuments(ids, ends, guide)


def _write(path: Path, header: list[int], found: LongDocuments) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    later = int(found.ends[-1]) if len(found.ends) else 0
    with sidecar.written_atomically(path) as file:
        for part in ([*header, len(found.ids), later], found.guide, found.ids, found.ends):
            np.asarray(part, "<i8").tofile(file)
