"""The fingerprint of any source, by asking for every length."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.stream.progress import progress
from megaresume.stream.state import Fingerprint

__all__ = ["scan_fingerprint"]

Int64Array = npt.NDArray[np.int64]

#: documents asked for at once; the hash does not depend on it.
CHUNK = 1 << 16


def scan_fingerprint(
    lengths: Callable[[Int64Array], Int64Array], documents: int, what: str, *, tokenizer: str | None = None
) -> Fingerprint:
    """xxh3_128 over the lengths of all documents as little-endian int64, in document order; with progress.

    Args:
        lengths: int64[n] document numbers to int64[n] tokens.
        documents: of the source.
        what: for the progress, a few words.
        tokenizer: its fingerprint, if known.
    """
    hasher, tokens = xxhash.xxh3_128(), 0
    with progress(what, documents, "documents") as bar:
        for first in range(0, documents, CHUNK):
            chunk = lengths(np.arange(first, min(first + CHUNK, documents), dtype=np.int64))
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            tokens += int(chunk.sum())
            bar.update(len(chunk))
    return Fingerprint(documents=documents, tokens=tokens, lengths=hasher.hexdigest(), tokenizer=tokenizer)
