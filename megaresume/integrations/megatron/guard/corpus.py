"""What identifies the documents of a corpus: their lengths, and tokens drawn here and there. Never its path."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import xxhash

from megaresume.corpora.layout import HEADER_BYTES, IndexHeader
from megaresume.integrations.megatron.guard.arrays import array_digest

__all__ = ["Corpus", "Identity"]

#: parts of the .bin that are read, and the size of each, in bytes: 1 MB in all, at any size of the corpus.
_PARTS = 64
_PART_BYTES = 16384


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Of a range of documents; None: not known."""

    lengths: str | None
    tokens: str | None


class Corpus:
    """The ``.idx`` of a corpus on a local filesystem, as a dataset class of Megatron counts it.

    ``GPTDataset`` takes every sequence for a document, ``BERTMaskedWordPieceDataset`` what the document boundaries
    enclose.
    """

    def __init__(self, path: str, dataset: Any) -> None:
        """Raises CorpusError: the .idx is damaged."""
        self.path = path
        idx = Path(path + ".idx")
        with idx.open("rb") as file:
            self.header = IndexHeader.unpack(file.read(HEADER_BYTES), idx, os.path.getsize(idx))
        header = self.header
        sequences = (header.sequences,)
        self.lengths = _map(idx, "<i4", header.lengths_at, sequences)
        self._pointers = _map(idx, "<i8", header.pointers_at, sequences)
        self._boundaries = _map(idx, "<i8", header.boundaries_at, (header.documents + 1,))
        try:
            stand_in = SimpleNamespace(sequence_lengths=self.lengths, document_indices=self._boundaries)
            self.documents = int(dataset.numel_low_level_dataset(stand_in))
        except Exception:  # noqa: BLE001  a class that wants more than the index is taken to count sequences
            self.documents = header.sequences

    @classmethod
    def at(cls, path: str | None, dataset: Any) -> Corpus | None:
        """The corpus of this path; None: generated data, or data that is not in a local .idx."""
        return cls(path, dataset) if path is not None and os.path.isfile(path + ".idx") else None

    def bounds(self, share: tuple[float, float]) -> tuple[int, int]:
        """The documents of a split, as Megatron rounds them."""
        return round(share[0] * float(self.documents)), round(share[1] * float(self.documents))

    def _sequences(self, documents: tuple[int, int]) -> tuple[int, int]:
        if self.documents == self.header.sequences:
            return documents
        first, end = documents
        return int(self._boundaries[first]), int(self._boundaries[end])

    def tokens(self, documents: tuple[int, int]) -> int:
        """Tokens of the documents [first, end)."""
        first, end = self._sequences(documents)
        return int(self.lengths[first:end].sum(dtype=np.int64))

    def is_empty(self, documents: tuple[int, int]) -> bool:
        """Whether the documents [first, end) hold no token. Looks at no more of them than it must."""
        first, end = self._sequences(documents)
        return not any(self.lengths[at : min(at + 4096, end)].any() for at in range(first, end, 4096))

    def identity(self, documents: tuple[int, int]) -> Identity:
        """Of the documents [first, end), which must be there."""
        first, end = self._sequences(documents)
        lengths = array_digest(self.lengths[first:end], f"lengths of {self.path}")
        return Identity(lengths=lengths, tokens=self._token_digest(first, end))

    def _token_digest(self, first: int, end: int) -> str | None:
        if not os.path.isfile(self.path + ".bin") or first >= end:
            return None
        start = int(self._pointers[first])
        stop = int(self._pointers[end - 1]) + int(self.lengths[end - 1]) * self.header.dtype.itemsize
        hasher = xxhash.xxh3_64(f"{self.header.dtype.str} {stop - start}".encode())
        with open(self.path + ".bin", "rb") as file:
            # int: evenly spread, the first at the start, the last at the end
            for at in np.linspace(start, max(start, stop - _PART_BYTES), _PARTS).astype(np.int64):
                file.seek(int(at))
                hasher.update(file.read(min(_PART_BYTES, stop - int(at))))
                if stop - start <= _PART_BYTES:
                    break
        return hasher.hexdigest()


def _map(idx: Path, dtype: str, offset: int, shape: tuple[int]) -> Any:
    # An empty range cannot be mapped.
    return np.memmap(idx, dtype, "r", offset, shape) if shape[0] else np.zeros(0, dtype)
