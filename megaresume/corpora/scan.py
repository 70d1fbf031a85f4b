"""The fingerprint of any source, by asking for every length and a few documents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from megaresume.corpora.contents import contents_hash
from megaresume.stream.progress import progress
from megaresume.stream.state import Fingerprint

Int64Array = npt.NDArray[np.int64]

#: documents asked for at once; the hash does not depend on it.
CHUNK = 1 << 16
#: documents of an object that are read: each may be a request to a store, or a picture to decode.
PLACES = 100


def scan_fingerprint(
    lengths: Callable[[Int64Array], Int64Array],
    documents: int,
    what: str,
    *,
    read: Callable[[int, int, int], npt.NDArray[Any]] | None = None,
    tokenizer: str | None = None,
) -> Fingerprint:
    """xxh3_128 over the lengths of all documents as little-endian int64, in document order; with progress.

    Args:
        lengths: int64[n] document numbers to int64[n] tokens.
        documents: of the source.
        what: for the progress, a few words.
        read: (document, offset, count) to its tokens, for the contents; None: they are not looked at.
        tokenizer: its fingerprint, if known.
    """
    hasher, tokens = xxhash.xxh3_128(), 0
    with progress(what, documents, "documents") as bar:
        for first in range(0, documents, CHUNK):
            chunk = lengths(np.arange(first, min(first + CHUNK, documents), dtype=np.int64))
            hasher.update(np.ascontiguousarray(chunk, "<i8").data)
            tokens += int(chunk.sum())
            bar.update(len(chunk))
    return Fingerprint(
        documents=documents,
        tokens=tokens,
        lengths=hasher.hexdigest(),
        tokenizer=tokenizer,
        contents=None if read is None else contents_hash(documents, lengths, read, PLACES),
    )
