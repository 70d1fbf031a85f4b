"""A billion documents of which only the lengths exist: enough to plan and to resume with."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.corpora import WEIGHTS, document_lengths
from megaresume.data.sidecar import FileIdentity, kept_list
from megaresume.stream.source import LongDocuments, find_long
from megaresume.stream.state import Fingerprint

#: Lengths that are repeated until the file is full; no divisor of any size used.
TILE = (1 << 20) + 7
#: Tokens that all documents share.
TOKENS = 1 << 20


class LengthsOnDisk:
    """A source: lengths from a memory map, tokens from one small array.

    Args:
        lengths: int32[documents], memory-mapped.
        beside: prefix of the list of long documents that is kept, as a corpus keeps its own: the file of the lengths
            and one suffix more; None: the list is made anew.
    """

    def __init__(self, lengths: npt.NDArray[np.int32], beside: Path | None = None) -> None:
        self._lengths = lengths
        self._beside = beside
        self.token_view = np.ones(TOKENS, np.int32)

    def __len__(self) -> int:
        """Documents."""
        return len(self._lengths)

    def lengths(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Tokens of each document: int64[n] to int64[n]."""
        return self._lengths[ids].astype(np.int64)

    def length(self, i: int) -> int:
        """Tokens of document i."""
        return int(self._lengths[i])

    def long_documents(self, piece: int) -> LongDocuments:
        """The documents longer than a piece, from a memory map."""
        if self._beside is None:
            return find_long(self, piece)
        return kept_list(self, self._beside, FileIdentity.of(self._beside.with_suffix("").stat()), piece)

    def token_starts(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Where each document starts in ``token_view``, int64[n]."""
        return ids % (TOKENS - self.lengths(ids))

    def read(self, i: int, offset: int, length: int) -> npt.NDArray[Any]:
        """``length`` tokens."""
        return self.token_view[:length]

    def get(self, i: int) -> npt.NDArray[Any]:
        """Tokens of document i."""
        return self.read(i, 0, self.length(i))

    def fingerprint(self, *, first: int | None = None, recompute: bool = False) -> Fingerprint:
        """Made up: a corpus keeps its own beside it, and a resume reads it in no time."""
        return Fingerprint(documents=len(self), tokens=600 * len(self), lengths="0" * 32)


def write_lengths(path: Path, num_documents: int) -> Path:
    """Write int32[num_documents] in pieces."""
    tile = document_lengths(TILE, seed=7)
    with open(path, "wb") as file:
        for first in range(0, num_documents, TILE):
            tile[: num_documents - first].tofile(file)
        os.fsync(file.fileno())  # so that the benchmarks can drop it from memory, and nothing writes while they run
    return path


def open_lengths(path: Path, num_documents: int | None = None) -> list[LengthsOnDisk]:
    """The three sources over the first ``num_documents`` lengths of the file, in the order of `WEIGHTS`."""
    with open(path, "rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if hasattr(mmap, "MADV_RANDOM"):
        data.madvise(mmap.MADV_RANDOM)  # look-ups in a permuted order: reading on behind each one only delays
    lengths = np.frombuffer(data, np.int32)[:num_documents]
    ends = np.cumsum([int(len(lengths) * share) for share in WEIGHTS.values()])
    parts = np.split(lengths, ends)[: len(WEIGHTS)]
    return [LengthsOnDisk(part, path.with_name(f"{path.name}.{k}-{len(part)}")) for k, part in enumerate(parts)]
