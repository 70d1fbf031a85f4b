"""Finished parts to ``.bin/.idx``, in bounded memory. The .idx appears last, and only beside its own .bin."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megaresume.checkpoint.files import fsync_dir
from megaresume.corpora.layout import IndexHeader, bin_path, idx_path
from megaresume.corpora.prepare.encode import Part, PartFiles
from megaresume.corpora.sidecar import sidecar_path, write_tokenizer

#: boundaries written at once.
CHUNK = 1 << 20


def merge_parts(
    prefix: Path,
    files: PartFiles,
    parts: Sequence[Part],
    dtype: str,
    tokenizer: Mapping[str, Any],
    tick: Callable[[int], Any],
) -> None:
    """Write the corpus and put it in place of an older one, if there is one.

    Args:
        prefix: of the corpus.
        files: where the parts are.
        parts: all of them, in order.
        dtype: of the tokens.
        tokenizer: for the sidecar.
        tick: called with the bytes of tokens written.

    Raises:
        CorpusError: a part is damaged.
        OSError: the disk is full, or the like.
    """
    documents = sum(part.documents for part in parts)
    bin_new, idx_new = (path.with_name(f".{path.name}.new") for path in (bin_path(prefix), idx_path(prefix)))
    header = IndexHeader(dtype=np.dtype(dtype), sequences=documents, documents=documents)
    # The three arrays of the index are written side by side, while each part is read once.
    with open(bin_new, "wb") as tokens_file, open(idx_new, "wb") as idx:
        idx.write(header.pack())
        done = pointer = 0
        for index in range(len(parts)):
            lengths, tokens = files.read_part(index)
            tokens_file.write(tokens)
            ends = np.cumsum(lengths, dtype=np.int64) * header.dtype.itemsize
            starts = pointer + ends - lengths.astype(np.int64) * header.dtype.itemsize
            idx.seek(header.lengths_at + 4 * done)
            idx.write(lengths.data)
            idx.seek(header.pointers_at + 8 * done)
            idx.write(starts.astype("<i8").data)
            done += len(lengths)
            pointer += len(tokens)
            tick(len(tokens))
        idx.seek(header.boundaries_at)
        for boundaries in _ranges(documents + 1):
            idx.write(boundaries.data)
        for file in (tokens_file, idx):
            file.flush()
            os.fsync(file.fileno())
    # An index must never stand beside the tokens of another corpus.
    idx_path(prefix).unlink(missing_ok=True)
    sidecar_path(prefix).unlink(missing_ok=True)
    os.replace(bin_new, bin_path(prefix))
    write_tokenizer(prefix, tokenizer, idx_bytes=idx_new.stat().st_size, bin_bytes=pointer)
    os.replace(idx_new, idx_path(prefix))
    fsync_dir(prefix.parent)


def _ranges(stop: int) -> Iterator[np.ndarray[Any, Any]]:
    for first in range(0, stop, CHUNK):
        yield np.arange(first, min(first + CHUNK, stop), dtype="<i8")
